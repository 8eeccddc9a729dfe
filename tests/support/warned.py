"""What functions return, without their warnings or with them, and what they say."""

import re
import warnings

from pyro_scale.errors import PyroScaleWarning


def quiet(function, *args, **kwargs):
    """What it returns, without its warnings of few draws and of the noise of batches."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


def told(function, *args, **kwargs):
    """(What it returns, what it warned of, without links)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function(*args, **kwargs)
    return result, [
        each.message.args[0] for each in caught if issubclass(each.category, PyroScaleWarning)
    ]


def without_replay(message):
    """An error's text but for where a run's last steps are."""
    return re.sub(r" ps\.replay.*?\. (?=[A-Z])", " ", message)
