"""What functions return, without their warnings or with them, and what they say."""

import re
import warnings

from pyro_scale.errors import PyroScaleWarning


def quiet(function, *args, **kwargs):
    """What it returns, without its warnings of few draws and of the noise of batches."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


def told(function, *args, about="", **kwargs):
    """(What it returns, what it warned of, without links); about: words of these warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function(*args, **kwargs)
    said = [each.message.args[0] for each in caught if issubclass(each.category, PyroScaleWarning)]
    return result, [message for message in said if about in message]


def without_replay(message):
    """An error's text but for where a run's last steps are."""
    return re.sub(r" ps\.replay.*?\. (?=[A-Z])", " ", message)


def quiet_runs(data=None, **settings):
    """A function that runs a method with these settings but for its arguments, and quietly."""

    def run(method, data=data, **others):
        return quiet(method.run, data, **{**settings, **others})

    return run
