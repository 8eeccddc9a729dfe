"""Newton's method in a trust region, on functions whose maxima are known."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from densities import density_of_all_rows, prepare_run
from reference import close, double, normals

from pyro_scale.curvature.newton import ascend, ascent, run_together

pytestmark = pytest.mark.usefixtures("float64")


def test_a_gaussian_takes_one_step_inside_of_the_region():
    """The mode, the log joint there, and the precision, exactly; whatever the units."""
    scales = double(1e-6, 1.0, 1e6)

    def model():
        pyro.factor("no data", torch.zeros(()))
        pyro.sample("x", dist.Normal(3 * scales, scales).to_event(1))

    found = ascend(density_of_all_rows(prepare_run(model)), double(4.0, 3.5, 3.1) * scales)
    assert found.is_mode
    assert len(found.path) <= 3
    close(found.position / scales, torch.full((3,), 3.0), 1e-9)
    close(found.precision * scales[:, None] * scales, torch.eye(3))
    assert found.value == pytest.approx(-1.5 * math.log(2 * math.pi) - float(scales.log().sum()))


def test_a_regression_in_raw_units_from_far_away():
    """Columns of years and of dollars: the least squares solution, from hundreds of sds off."""
    x = torch.stack([torch.ones(60), 1990 + normals(60, seed=0), 5e4 * normals(60, seed=1)], 1)
    y = x @ double(-3e3, 2.0, 1e-3) + 7 * normals(60, seed=2)

    def model(x, y):
        beta = pyro.sample("beta", dist.ImproperUniform(dist.constraints.real, (), (3,)))
        sigma = pyro.sample("sigma", dist.LogNormal(0.0, 10.0))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)

    density = density_of_all_rows(prepare_run(model, (x, y)))
    expected = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    for seed in range(4):
        found = ascend(density, 2 * normals(4, seed=seed).double())
        assert found.is_mode
        sds = found.precision[:3, :3].inverse().diagonal().sqrt()
        assert float(((found.position[:3] - expected) / sds).abs().max()) < 1e-2


def test_it_leaves_a_saddle():
    """Between two modes the log joint is not concave: that is a way to go."""

    def model():
        x = pyro.sample("x", dist.Normal(0.0, 3.0))
        pyro.factor("two", -((x * x - 4.0) ** 2))

    found = ascend(density_of_all_rows(prepare_run(model)), double(1e-3))
    assert found.is_mode
    assert abs(float(found.position)) == pytest.approx(1.99302, abs=1e-3)


@pytest.mark.slow
def test_a_funnel_has_no_mode():
    def model():
        pyro.factor("no data", torch.zeros(()))
        s = pyro.sample("s", dist.Normal(0.0, 3.0))
        pyro.sample("x", dist.Normal(torch.zeros(9), (s / 2).exp()).to_event(1))

    # its density does have one in s: 9 log sds fall with s, against a prior of sd 3
    found = ascend(density_of_all_rows(prepare_run(model)), torch.ones(10))
    assert found.is_mode
    assert float(found.position[0]) == pytest.approx(-40.5, abs=0.1)

    def endless():
        pyro.factor("no data", torch.zeros(()))
        s = pyro.sample("s", dist.ImproperUniform(dist.constraints.real, (), ()))
        pyro.sample("x", dist.Normal(torch.zeros(9), (s / 2).exp()).to_event(1))

    assert not ascend(density_of_all_rows(prepare_run(endless)), torch.ones(10)).is_mode


def test_a_start_that_is_not_finite_is_where_it_ends():
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.factor("positive", torch.log(x + 10.0))

    found = ascend(density_of_all_rows(prepare_run(model)), double(-11.0))
    assert not found.is_mode
    assert found.value == -math.inf


def test_a_wall_is_no_mode():
    """Up to where it is not a number there is more to gain, however short the last step was."""

    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.factor("wall", torch.where(x < 1, 30 * x, torch.nan))

    assert not ascend(density_of_all_rows(prepare_run(model)), double(0.0)).is_mode


def test_searches_that_run_together_end_as_alone():
    """From near and far, at two modes and where the log joint is not finite, in their order."""

    def model():
        x = pyro.sample("x", dist.Normal(torch.zeros(2), 3.0).to_event(1))
        pyro.factor("two", -((x[0] ** 2 - 4.0) ** 2) + 0 * (x[1] + 5.0).log())

    density = density_of_all_rows(prepare_run(model))
    starts = double([2.1, 0.0], [-30.0, 9.0], [1.0, -6.0], [1e-3, 0.5], [-2.0, 0.1])
    together = run_together(density, [ascent(start) for start in starts])
    for start, found in zip(starts, together, strict=True):
        alone = ascend(density, start)
        assert found.is_mode == alone.is_mode
        assert len(found.path) == len(alone.path)
        close(found.path, alone.path, 1e-10)
        close(found.precision, alone.precision, 1e-10)
    assert [found.is_mode for found in together] == [True, True, False, True, True]
    assert [float(found.position[0].sign()) for found in together[:2]] == [1, -1]
