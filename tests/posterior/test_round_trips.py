"""Random models, through ArviZ's groups to netCDF and Zarr and back: nothing is lost."""

import shutil
import tempfile
from pathlib import Path

import arviz
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import xarray
from both_arviz import IS_1, as_own, groups_of
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as some
from reference import normals
from runs import EVERY_STEP
from stores import buffering
from warned import quiet

import pyro_scale as ps

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
ROWS = 6


def one(value, shape):
    return torch.full(shape, value, dtype=torch.float64)


#: By the shape of what comes last: a distribution with so many event dimensions.
FAMILIES = {
    "real": lambda shape: dist.Normal(one(0.0, shape), 1.0).to_event(len(shape)),
    "positive": lambda shape: dist.LogNormal(one(0.0, shape), 0.5).to_event(len(shape)),
    "half": lambda shape: dist.HalfNormal(one(1.0, shape)).to_event(len(shape)),
    "interval": lambda shape: dist.Uniform(one(-1.0, shape), 2.0).to_event(len(shape)),
    "simplex": lambda shape: dist.Dirichlet(one(1.0, (*shape, 3))).to_event(len(shape)),
    "cholesky": lambda shape: dist.LKJCholesky(2, one(1.0, ())),
    "single": lambda shape: dist.Normal(one(0.0, shape).float(), 1.0).to_event(len(shape)),
}
NAMES = some.sampled_from(
    ["w", "net.0.weight", "a b", "ß", "x_dim_0", "theta[1]", "W", "posterior"]
)


@some.composite
def models(draw):
    """(A model of x and y, its sites' names, the shape of a row that is observed)."""
    names = draw(some.lists(NAMES, min_size=1, max_size=3, unique=True))
    sites = [
        (
            name,
            draw(some.sampled_from(sorted(FAMILIES))),
            tuple(draw(some.lists(some.integers(1, 3), max_size=2))),
            draw(some.sampled_from([None, "sides", "groups of.things"])),
            draw(some.booleans()),
        )
        for name in names
    ]
    event = draw(some.sampled_from([(), (2,)]))
    counts = draw(some.booleans())

    def model(x, y=None):
        total = 0.0
        plates = {"sides": 2, "groups of.things": 3}
        used = {plate for *_, plate, _ in sites if plate is not None}
        plates = {plate: pyro.plate(plate, size) for plate, size in plates.items() if plate in used}
        for name, family, shape, plate, with_image in sites:
            fn = FAMILIES[family](shape)
            if plate is None:
                value = pyro.sample(name, fn)
            else:
                with plates[plate]:
                    value = pyro.sample(name, fn)
            if with_image:
                pyro.deterministic(f"{name} squared", value**2)
                pyro.deterministic(f"is {name} large", value.sum() > 1)
            total = total + value.double().mean()
        with pyro.plate("data", len(x)):
            if counts:
                rate = (0.1 * total + 0.1 * x[:, 0]).exp()
                observed = dist.Poisson(rate)
            elif event:
                mean = (total + x[:, 0])[:, None].expand(-1, *event)
                observed = dist.Normal(mean, 1.0).to_event(1)
            else:
                observed = dist.Normal(total + x[:, 0], 1.0)
            pyro.sample("y", observed, obs=y)

    x = normals(ROWS, 2, seed=3)
    y = (3 * x[:, 0].abs()).round() if counts else normals(ROWS, *event, seed=4)
    return model, (x, y), [name for name, *_ in sites]


def identical(actual, expected, attrs=True):
    """Groups of ArviZ's, or of xarray's tree."""
    for group in groups_of(expected):
        one, other = actual[group], expected[group]
        one = one.to_dataset() if isinstance(one, xarray.DataTree) else one
        assert set(one.variables) == set(other.variables), group
        for name, array in other.variables.items():
            assert one[name].dims == array.dims, (group, name)
            assert one[name].dtype == array.dtype, (group, name)
            np.testing.assert_array_equal(one[name].values, array.values)
            assert (name in one.coords) == (name in other.coords)
        if attrs:
            for key, value in other.attrs.items():
                assert one.attrs[key] == value, (group, key)
                assert np.asarray(one.attrs[key]).dtype.kind == np.asarray(value).dtype.kind


@given(models(), some.sampled_from(["memory", "store"]), some.integers(1, 3))
@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # each takes a second, shrinking minutes
)
@pytest.mark.long
def test_nothing_is_lost_on_the_way(case, kept, chains):
    model, data, names = case
    pyro.clear_param_store()
    directory = Path(tempfile.mkdtemp())
    try:
        fit = ps.BAOA(model, lr=0.02, compile=False)
        how = {**EVERY_STEP, "num_samples": 5, "num_chains": chains, "batch_size": 4, "seed": 0}
        with buffering(file_draws=2):
            store = directory / "draws.zarr" if kept == "store" else None
            fit.run(data, progress=False, store=store, **how)
        idata = quiet(fit.to_arviz, log_likelihood=True, posterior_predictive=True)
        groups = {"posterior", "sample_stats", "observed_data", "log_likelihood"}
        assert groups_of(idata) == groups | {"posterior_predictive"}
        samples = fit.get_samples(group_by_chain=True)
        assert set(names) <= set(samples) == set(idata.posterior.data_vars)
        for name, value in samples.items():
            np.testing.assert_array_equal(idata.posterior[name].values, value.numpy())
        np.testing.assert_array_equal(idata.observed_data.y.values, data[1].numpy())
        likelihood = fit.log_likelihood()["y"].reshape(chains, 5, ROWS)
        np.testing.assert_array_equal(idata.log_likelihood.y.values, likelihood.numpy())
        assert idata.posterior_predictive.y.shape == (chains, 5, *data[1].shape)

        idata.to_netcdf(str(directory / "idata.nc"))
        identical(arviz.from_netcdf(str(directory / "idata.nc")), idata)
        with xarray.open_datatree(directory / "idata.nc") as tree:
            identical(tree, idata)

        whole = idata if IS_1 else idata.to_datatree()
        whole.to_zarr(directory / "idata.zarr")
        tree = xarray.open_datatree(directory / "idata.zarr", engine="zarr", chunks=None)
        identical(tree, idata)
        identical(as_own(tree), idata)

        fit.save(directory / "run.ps")
        pyro.clear_param_store()
        loaded = quiet(ps.BAOA.load(directory / "run.ps", model).to_arviz, data=data)
        identical(loaded, quiet(fit.to_arviz))
    finally:
        shutil.rmtree(directory)
