"""Data by group that are no such data: each an error that says what to pass."""

import warnings

import numpy as np
import pandas
import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_scale as ps
from pyro_scale.errors import ArgumentError, DataError, PlateError, SiteError
from pyro_scale.marginal.grouped_data import open_grouped
from pyro_scale.marginal.local_sites import find_plate
from pyro_scale.marginal.summed import sum_out
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


def summed(model_, grouped):
    return sum_out(LogPosterior(model_, None), open_grouped(grouped, None), seed=0)


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
        (np.array(["a", pandas.NA] * 9, dtype=object), (), "a row has no label"),
        (np.array([1.0, np.nan] * 9), (), "a row has no label"),
        (np.array([1.0, np.inf] * 9), (), "no whole numbers, such as inf"),
        (np.array([1.0, 1.5] * 9), (), "no whole numbers, such as 1.5"),
    ],
)
def test_labels_that_are_not_comparable_or_missing(labels, groups, message):
    with pytest.raises(DataError, match=message):
        ps.Grouped((X, labels, Y), by=1, groups=groups)


def test_a_closure_with_a_value_for_every_group_where_all_groups_are_a_batch():
    def closure(x, group, y):
        model(x, group, y, U)

    with pytest.raises(PlateError, match=r"site z dim -1, 3 vs 6.*Grouped\(\.\.\., groups=\)"):
        summed(closure, ps.Grouped((X, GROUP, Y), by=1))


def test_the_column_of_the_groups_may_be_counted_from_the_end():
    assert ps.Grouped((X, GROUP, Y), by=-2).by == 1


def test_a_model_may_have_names_of_its_own():
    class Named:
        names = ("of", "columns")

        def __call__(self, x, group, y=None):
            return model(x, group, y)

    assert [site.name for site in summed(Named(), ps.Grouped((X, GROUP, Y), by=1)).anchor.latents]


def test_a_closure_whose_first_values_are_alike():
    """In a batch, the group column holds places: the first groups' values for all."""
    treated = (torch.arange(300) >= 150).float()
    group = torch.arange(300).repeat_interleave(2)

    def closure(group, y):
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        with pyro.plate("groups", 300):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(b * treated[group] + z[group], 1.0), obs=y)

    with pytest.raises(SiteError, match=r"'y': .* on other groups.* Grouped\(\.\.\., groups=\)"):
        summed(closure, ps.Grouped((group, treated[group]), by=0))


def all_in_the_plate(x, group, y=None):
    with pyro.plate("groups", GROUPS):
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        z = pyro.sample("z", dist.Normal(0.0, tau))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x + z[group], 1.0), obs=y)


def fixed_size(x, group, y=None):
    z = model(x, group)
    with pyro.plate("all rows", ROWS):
        pyro.sample("y2", dist.Normal(z, 1.0), obs=y)


@pytest.mark.parametrize(
    ("model_", "error", "message"),
    [
        (all_in_the_plate, SiteError, "site 'tau' and 'z': every latent of the model is one of"),
        (fixed_size, PlateError, r"rows of a few groups .* as in pyro.plate\('data', len\(x\)\)"),
    ],
)
def test_models_whose_plates_are_wrong(model_, error, message):
    with pytest.raises(error, match=message):
        summed(model_, ps.Grouped((X, GROUP, Y), by=1))


def test_names_are_passed_one_by_one():
    with pytest.raises(ArgumentError, match=r"pass marginalize\(model, 'z', 'w'\)"):
        ps.marginalize(model, ["z"])


@pytest.mark.parametrize("dtype", ["U1", object])
def test_labels_of_rows_to_predict_are_of_the_same_kind(dtype):
    grouped = ps.Grouped((X, np.array(["a", "b"] * 9, dtype=dtype), Y), by=1)
    assert grouped.places_of(np.array(["b", "c"], dtype=dtype)).tolist() == [1, -1]
    with pytest.raises(DataError, match="labels are like 0, and those of the run like 'a'"):
        grouped.places_of(np.array([0, 1]))


def test_values_of_groups_to_predict_are_those_of_the_run_unless_others_are_passed():
    grouped = ps.Grouped((X, GROUP, Y), by=1, groups=(U,))
    labels = np.array([0, 4])
    assert torch.equal(grouped.values_of((), labels)[0], U[[0, 4]])
    assert torch.equal(grouped.values_of((2 * U,), labels)[0], 2 * U[[0, 4]])
    with pytest.raises(DataError, match="from 0 to 5; they are 0 to 9"):
        grouped.values_of((), np.array([0, 9]))


@pytest.fixture(scope="module")
def run():
    grouped = ps.Grouped((X, GROUP, Y), by=1, groups=(U,))
    sampler = ps.BAOA(model, lr=0.1, compile=False)
    settings = {"num_samples": 4, "warmup_steps": 2, "thinning": 1, "num_chains": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a run of six steps
        return sampler.run(grouped, batch_size=2, seed=0, progress=False, **settings)


def test_values_of_groups_keep_their_place_if_y_is_left_out_of_rows_to_predict(run):
    torch.manual_seed(0)
    without = run.predict(X[:4], GROUP[:4])["y"]
    torch.manual_seed(0)
    assert torch.equal(run.predict(X[:4], GROUP[:4], None, U)["y"], without)


def test_rows_to_predict_of_other_groups_or_lengths(run):
    with pytest.raises(DataError, match="from 0 to 5; they are 0 to 9"):
        run.predict(X[:2], torch.tensor([0, 9]))
    with pytest.raises(DataError, match="first dimensions differ"):
        run.predict(X[:3], GROUP[:2])


def test_a_file_has_the_draws_and_not_the_data(run, tmp_path):
    run.save(tmp_path / "run.pt")
    loaded = ps.load(tmp_path / "run.pt", model)
    assert torch.equal(loaded.get_samples()["mean"], run.get_samples()["mean"])
    for ask in (lambda: loaded.latents("z"), lambda: loaded.predict(X[:2], GROUP[:2])):
        with pytest.raises(ArgumentError, match="the posterior is from a file"):
            ask()


@pytest.mark.parametrize("row", [1, 17])
def test_the_row_and_group_of_a_nan(row):
    y = torch.where(torch.arange(ROWS) == row, torch.nan, Y)
    labels = np.array([f"no. {group}" for group in GROUP.tolist()])
    message = (
        rf"site 'y': .* argument 2 is NaN .* in row {row} of the data, of group '{labels[row]}'"
    )
    with pytest.raises(DataError, match=message):
        summed(model, ps.Grouped((X, labels, y), by=1))
