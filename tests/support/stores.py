"""Stores of draws: how full their files are, and what others read in them."""

import dataclasses
import math
from unittest import mock

from pyro_scale.posterior import sinks


def buffering(**changes):
    """A block in which draws wait in memory as these fields of `sinks.Buffering` say."""
    return mock.patch.object(sinks, "BUFFERING", dataclasses.replace(sinks.BUFFERING, **changes))


def small_files():
    """A block in which files hold seven draws of a chain, so that there are many, and a last one
    that is not full."""
    return buffering(file_draws=7, wait_seconds=math.inf)


def opened(path):
    """A store as whoever does not know this package reads it."""
    import xarray

    return xarray.open_datatree(path, engine="zarr", chunks=None)
