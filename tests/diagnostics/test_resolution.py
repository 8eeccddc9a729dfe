"""Draws that are rounded to the steps of their dtype, and draws that are one number."""

import dataclasses
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import of_rows
from reference import normals

import pyro_scale as ps
from pyro_scale.core.mixing import mixing_of
from pyro_scale.diagnostics.convergence import mixing
from pyro_scale.diagnostics.resolution import resolution, spacing
from pyro_scale.errors import ConvergenceWarning
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.run.measurements import Measurements

CHAINS, DRAWS = 4, 1000


def some_constant(y):
    mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
    pyro.sample("L", dist.LKJCholesky(3, 1.0))  # whose first row is (1, 0, 0)
    pyro.deterministic("three", torch.tensor(3.0))
    pyro.deterministic("is_above", (mu > -1e9).to(mu))
    pyro.deterministic("far", mu + 1e9)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y)


far_mean = of_rows(lambda mu: dist.Normal(mu, 1.0), mu=lambda: dist.Normal(0.0, 1e9))


def short_run(model):
    steps = {"num_samples": 10, "warmup_steps": 0, "thinning": 1, "num_chains": CHAINS}
    sampler = ps.BAOA(model, lr=0.1, friction=1.0, compile=False)
    return sampler.run(torch.zeros(3), seed=0, progress=False, **steps)


def with_draws(sampler, positions, thinning=1, whitened=True):
    """The sampler with other draws `[chains, draws, D]`."""
    result, shape = sampler.posterior.draws, positions.shape[:2]
    stats = {
        name: values[:, :1].expand(shape).clone() for name, values in result.sample_stats.items()
    }
    stats["step"] = (torch.arange(shape[1]) * thinning).expand(shape)
    attrs = {**result.attrs, "whitened": whitened}
    return dataclasses.replace(
        result, positions=positions, sample_stats=stats, attrs=attrs, measurements=Measurements()
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_steps_are_those_to_the_next_number(dtype):
    values = torch.tensor([1.0, 1.5, -3.0, 2.0, 1e-20, 1e7, -2e6]).to(dtype)
    bits = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}
    after = (values.abs().view(bits[dtype]) + 1).view(dtype)
    assert torch.equal(spacing(values, dtype), after.double() - values.double().abs())


@pytest.mark.parametrize("width", [0.25, 1.0, 1.25, 2.5, 10.0])
def test_what_rounding_makes_of_sds_decides(width):
    """Steps of float32 are 1/8 from 2^20 on: the verdict is no where sds come out 5% too large."""
    sd = 0.125 / width
    exact = 1.5e6 + sd * normals(CHAINS, DRAWS, 1)
    result = with_draws(short_run(far_mean), exact.float())
    inflation = float(exact.float().double().std() / sd)
    findings = resolution(result)
    assert [finding.verdict for finding in findings] == (["no"] if width > 1.1 else [])
    if width <= 1.25:  # as the bound has it: (1 + width^2 / 12)^0.5, but for chance
        assert inflation == pytest.approx((1 + width**2 / 12) ** 0.5, rel=4 * (2 * 4000) ** -0.5)
    in_float64 = dataclasses.replace(
        result,
        positions=exact,
        layout=dataclasses.replace(result.layout, dtypes=(torch.float64,)),
    )
    assert not resolution(in_float64)


@pytest.mark.parametrize(
    ("move", "whitened", "verdict"),
    [(0.3, False, "unknown"), (0.8, False, "unknown"), (1.2, False, None), (0.3, True, None)],
)
def test_moves_as_short_as_the_steps_of_the_state(move, whitened, verdict):
    """Steps of sd `move` / 8, 20 of them straight on from one draw to the next, in a wide site."""
    rises = (normals(CHAINS, DRAWS, 1) * 20 * move / 8).cumsum(1)
    result = with_draws(short_run(far_mean), (1.5e6 + rises).float(), 20, whitened)
    findings = resolution(result)
    assert [finding.verdict for finding in findings] == ([] if verdict is None else [verdict])


def test_constants_that_no_latent_has_an_influence_on_are_right():
    result = with_draws(short_run(some_constant), normals(CHAINS, DRAWS, 4).float())
    (finding,) = resolution(result)
    assert (finding.site, finding.verdict) == ("far", "no")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_constant_but_for_rounding_is_right(dtype):
    """The ones of a correlation matrix, beside numbers of which rounding has left nothing."""

    def correlated(y, far):
        factor = pyro.sample("L", dist.LKJCholesky(4, torch.ones((), dtype=dtype)))
        pyro.deterministic("correlations", factor @ factor.T)
        pyro.deterministic("shifted", factor[1, 0] + far)
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(factor[1, 0], y.new_ones(())), obs=y)

    steps = {"num_samples": 10, "warmup_steps": 0, "thinning": 1, "num_chains": CHAINS}
    sampler = ps.BAOA(correlated, lr=0.1, friction=1.0, compile=False)
    data = torch.zeros(3, dtype=dtype), 4 / torch.finfo(dtype).eps
    sampler.run(data, seed=0, progress=False, **steps)
    result = with_draws(sampler, 0.5 * normals(CHAINS, DRAWS, 6).to(dtype))
    ones = ps.Posterior(result).get_samples()["correlations"].diagonal(dim1=-2, dim2=-1)
    assert 0 < (ones - 1).abs().max() < 8 * torch.finfo(dtype).eps
    (finding,) = resolution(result)
    assert (finding.site, finding.verdict) == ("shifted", "no")


def test_a_chain_that_does_not_move_is_no():
    draws = normals(CHAINS, DRAWS, 4).float()
    draws[2, :, 1] = 0.3
    frozen = resolution(with_draws(short_run(some_constant), draws))
    assert {finding.site: finding.verdict for finding in frozen} == {"L": "no", "far": "no"}


def test_a_coordinate_that_does_not_move_is_found_where_all_values_do():
    def shares():
        pyro.sample("p", dist.Dirichlet(torch.ones(4)))
        pyro.factor("no data", torch.zeros(()))

    steps = {"num_samples": 10, "warmup_steps": 0, "thinning": 1, "num_chains": CHAINS}
    sampler = ps.BAOA(shares, lr=0.1, friction=1.0, compile=False)
    sampler.run(None, seed=0, progress=False, **steps)
    draws = normals(CHAINS, DRAWS, 3).float()
    assert not resolution(with_draws(sampler, draws.clone()))
    draws[..., 2] = 0.3
    (finding,) = resolution(with_draws(sampler, draws))
    assert (finding.site, finding.verdict) == ("p", "no")


def test_draws_of_one_number_have_neither_r_hat_nor_effective_draws():
    draws = normals(CHAINS, 100, 2)
    draws[..., 1] = 7.0
    of_normals, of_constant = zip(*(each.tolist() for each in mixing_of(draws)), strict=True)
    assert all(map(math.isfinite, of_normals))
    assert all(map(math.isnan, of_constant))
    table = mixing({"moves": draws[..., :1], "constant": draws[..., 1:]})
    assert table.loc["moves"].notna().all()
    assert table.loc["constant"].isna().all()

    posterior = ps.Posterior(with_draws(short_run(far_mean), torch.full((CHAINS, DRAWS, 1), 1e7)))
    with pytest.warns(ConvergenceWarning, match="'mu': an element is the same number"):
        table = posterior.diagnostics()
    assert table.loc["mu", ["r_hat", "ess_bulk", "ess_tail"]].isna().all()
    summary = posterior.summary()
    assert summary.loc["mu", ["r_hat", "ess_bulk", "ess_tail"]].isna().all()


def test_constants_of_a_site_do_not_hide_how_its_other_elements_mix():
    posterior = ps.Posterior(
        with_draws(short_run(some_constant), normals(CHAINS, DRAWS, 4).float())
    )
    table = posterior.diagnostics()
    assert 0.99 < table.r_hat["L"] < 1.02
    summary = posterior.summary(["L", "three", "mu"])
    assert summary.r_hat.isna().sum() == 4 + 1  # (1, 0, 0) and a 0 of the second row; 3
    assert summary.ess_bulk.min() > 3000


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_sampler_whose_state_cannot_move_has_no_yes():
    """Steps of 0.005 where those of float32 are 1/16: the state stays where it began."""
    y = (1e6 + normals(100)).float()
    start = {"mu": torch.full((4,), 1e6)}
    sampler = ps.BAOA(far_mean, lr=0.05, friction=1.0, init_strategy=start, compile=False)
    sampler.run(y, num_samples=200, warmup_steps=20, thinning=5, seed=0, progress=False)
    assert len(sampler.get_samples()["mu"].unique()) == 1
    verdicts = {f.check: f.verdict for f in sampler.report().findings}
    assert verdicts["resolution"] == "no"
    assert "mixing" not in verdicts


def test_too_few_draws_say_nothing():
    result = short_run(far_mean).posterior.draws
    assert isinstance(result, PosteriorDraws)
    assert not resolution(dataclasses.replace(result, positions=result.positions[:, :5]))
