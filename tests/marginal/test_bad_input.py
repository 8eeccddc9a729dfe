"""Data by group that are no such data: each an error that says what to pass."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_scale as ps
from pyro_scale.errors import ArgumentError, DataError, PlateError
from pyro_scale.marginal.local_sites import find_plate
from pyro_scale.marginal.summed import open_grouped, sum_out
from pyro_scale.marginal.units import UnitModel
from pyro_scale.model.log_posterior import LogPosterior

GROUPS, ROWS = 6, 18
X, GROUP = torch.linspace(-1, 1, ROWS), torch.arange(ROWS) % GROUPS
Y, U = X + 0.5 * GROUP, torch.linspace(0, 1, GROUPS)


def model(x, group, y=None, u=None):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("groups", GROUPS):
        z = pyro.sample("z", dist.Normal(mean if u is None else mean * u, 1.0))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(x + z[group], 1.0), obs=y)


@pytest.mark.parametrize("groups", [(), {}, {"u": U}])
def test_a_dict_of_rows_with_or_without_values_of_groups(groups):
    grouped = ps.Grouped({"x": X, "group": GROUP, "y": Y}, by="group", groups=groups)
    arguments = open_grouped(grouped, None).arguments
    assert find_plate(UnitModel(model, "group"), arguments, {GROUPS}, GROUPS) == "groups"


@pytest.mark.parametrize(
    ("rows", "by", "groups", "message"),
    [
        ((X, GROUP, Y), 1, U, r"groups= is a Tensor: pass a tuple"),
        ({"x": X, "group": GROUP}, "group", (U,), "the rows are a dict: pass dicts for both"),
        ({"x": X, "group": GROUP}, "group", {"x": U}, r"both have \['x'\]"),
    ],
)
def test_values_of_groups_that_do_not_fit_the_rows(rows, by, groups, message):
    with pytest.raises(ArgumentError, match=message):
        ps.Grouped(rows, by=by, groups=groups)


@pytest.mark.parametrize(
    ("labels", "groups", "message"),
    [
        (np.array(["a", "b"] * 9), (U,), "labels index the 6 values .* they are 'a' to 'b'"),
        (np.array([1, "b"] * 9, dtype=object), (), r"labels are of types \['int', 'str'\]"),
        (np.array(["2026-01-01", "NaT"] * 9, dtype="datetime64[D]"), (), "a row has no label"),
    ],
)
def test_labels_that_are_not_comparable_or_missing(labels, groups, message):
    with pytest.raises(DataError, match=message):
        ps.Grouped((X, labels, Y), by=1, groups=groups)


def test_a_closure_with_a_value_for_every_group_where_all_groups_are_a_batch():
    grouped = ps.Grouped((X, GROUP, Y), by=1)
    closure = LogPosterior(lambda x, group, y: model(x, group, y, U), None)
    with pytest.raises(PlateError, match=r"site z dim -1, 3 vs 6.*Grouped\(\.\.\., groups=\)"):
        sum_out(closure, open_grouped(grouped, None), seed=0)
