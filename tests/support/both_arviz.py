"""What ArviZ 0.23 and 1.x call by different names."""

import arviz
import xarray

IS_1 = not arviz.__version__.startswith("0.")


def groups_of(idata):
    """The names of the groups of an InferenceData or a DataTree."""
    groups = idata.groups() if callable(idata.groups) else idata.groups
    return {name.strip("/") for name in groups} - {""}


def elpd_of(loo):
    """The sum of what `arviz.loo` found, in nats."""
    return float(loo.elpd if IS_1 else loo.elpd_loo)


def elpd_of_rows(loo):
    """Each row's part of it."""
    return (loo.elpd_i if IS_1 else loo.loo_i).values


def as_own(tree):
    """A DataTree as ArviZ's functions take it."""
    return tree if IS_1 else arviz.InferenceData.from_datatree(tree)


def compared(idatas):
    """`arviz.compare` with all digits."""
    return arviz.compare(idatas, round_to="none") if IS_1 else arviz.compare(idatas)


def dataset_of(group):
    """A group as a Dataset."""
    return group.to_dataset() if isinstance(group, xarray.DataTree) else group


def identical(one, other):
    """Whether two groups hold the same."""
    return dataset_of(one).equals(dataset_of(other))
