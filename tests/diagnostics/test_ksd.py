"""The kernel Stein discrepancy against the kernel's own derivatives and exact posteriors.

Seeds are fixed; were they drawn anew, a z beyond 4 would come once in 16,000 comparisons.
"""

import functools

import pyro
import pyro.distributions as dist
import pytest
import torch
from linear import PRIOR_MEAN, SD, D, linear_data, linear_posterior, regression
from reference import Doubled, close, normals
from repetitions import long_but
from runs import QUIET
from torch.utils.data import DataLoader, TensorDataset
from warned import quiet_runs

import pyro_scale as ps
from pyro_scale.diagnostics.ksd import scores
from pyro_scale.errors import ArgumentError, DataError
from pyro_scale.metrics import ksd

N = 200
X, Y = linear_data(N)


def kernel(x, y):
    return (1 + (x - y).square().sum()).rsqrt()


def stein(x, y, score_x, score_y):
    """k_p(x, y), its four terms by autograd."""
    grad_x, grad_y = torch.func.grad(kernel, 0), torch.func.grad(kernel, 1)
    mixed = torch.func.jacrev(grad_x, 1)(x, y)
    return (
        score_x @ score_y * kernel(x, y)
        + score_x @ grad_y(x, y)
        + score_y @ grad_x(x, y)
        + mixed.trace()
    )


# ------------------------------------------------------------------ the metric


def test_one_draw_by_hand():
    s = torch.tensor([[3.0, -4.0]]).double()
    close(ksd(normals(1, 2), s), 25.0 + 2)


def test_two_draws_by_hand():
    # r = 1: k = 2^-1/2; pairs: (s t) 2^-1/2 + ((s - t) r + 1) 2^-3/2 - 3 2^-5/2
    x, s = torch.tensor([[1.0], [0.0]]).double(), torch.tensor([[0.5], [-2.0]]).double()
    apart = -(2**-0.5) + (2.5 + 1) * 2**-1.5 - 3 * 2**-2.5
    close(ksd(x, s), (0.25 + 1 + 4 + 1 + 2 * apart) / 4)


@pytest.mark.parametrize("far", [0.0, 1e3])
@pytest.mark.parametrize(("n", "d"), [(7, 1), (6, 3)])
def test_all_terms_are_the_kernels_derivatives(n, d, far):
    x, s = 1.3 * normals(n, d) + far, normals(n, d, seed=1)
    pairs = [stein(x[i], x[j], s[i], s[j]) for i in range(n) for j in range(n)]
    close(ksd(x, s), torch.stack(pairs).mean(), 1e-10)


def test_blocks_change_nothing():
    """More than 2^11 draws are compared in blocks; draws that are all repeated change no mean."""
    x, s = normals(50, 2), normals(50, 2, seed=1)
    close(ksd(x.repeat(42, 1), s.repeat(42, 1)), ksd(x, s), 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("d", [1, 4])
def test_its_mean_of_exact_draws(d):
    n = 40
    found = torch.stack([ksd(x, -x) for x in normals(2000, n, d)])
    gap = found.mean() - 2 * d / n
    assert abs(gap) < 4 * found.std() / len(found) ** 0.5


@pytest.mark.parametrize("change", [lambda s: s + 0.3, lambda s: 1.4 * s, lambda s: 0.7 * s])
def test_another_density_is_further_away(change):
    x = normals(1000, 2)
    assert ksd(x, change(-x)) > 3 * 2 * 2 / 1000 > 1.5 * ksd(x, -x)


def test_dtype_stays():
    x = normals(300, 3)
    found = ksd(x.float(), -x.float())
    assert found.dtype == torch.float32
    close(found.double(), ksd(x, -x), 1e-5)


@pytest.mark.parametrize(
    ("draws", "scores", "message"),
    [
        (torch.zeros(3), torch.zeros(3), r"draws has shape \[3\].*pass \[n, d\]"),
        (torch.zeros(3, 2), torch.zeros(3, 1), r"scores \[3, 1\]"),
        (torch.zeros(0, 2), torch.zeros(0, 2), "draws is empty"),
        (torch.zeros(3, 2), torch.full((3, 2), torch.nan), "scores has NaN"),
        (torch.zeros(3, 2).long(), torch.zeros(3, 2), "draws is torch.int64"),
        ([[0.0]], torch.zeros(1, 1), "draws is a list"),
    ],
)
def test_what_it_refuses(draws, scores, message):
    with pytest.raises(ArgumentError, match=message):
        ksd(draws, scores)


# ------------------------------------------------------------------ of a method


pytestmark = pytest.mark.usefixtures("float64", "compiled_early")


run = quiet_runs((X, Y), num_samples=300, num_chains=1, warmup_steps=300, thinning=3, **QUIET)


@functools.cache
def baoa_run(temperature=1.0):
    return run(ps.BAOA(regression(), lr=0.3, temperature=temperature), num_chains=2)


def exact_ksd(fit, temperature=1.0):
    """The squared discrepancy from the closed form of the posterior."""
    mean, precision = linear_posterior(1.0, X, Y)
    draws = fit.get_samples()["w"]
    sd = draws.std(0, correction=0)
    return ksd(draws / sd, -(draws - mean) @ precision / temperature * sd)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", long_but([1.0, 0.25], 0.25))
def test_it_is_that_of_the_posterior(temperature):
    fit = baoa_run(temperature)
    assert fit.ksd() == pytest.approx(float(exact_ksd(fit, temperature)), rel=1e-9)
    assert fit.ksd() < 0.1  # the posterior's sds are whitened: 600 correlated draws


@pytest.mark.slow
def test_a_loader_and_pieces_are_the_same(monkeypatch):
    loader = DataLoader(TensorDataset(X, Y), batch_size=32)
    fit = run(ps.SGLD(regression(), lr=0.1), loader)
    monkeypatch.setattr("pyro_scale.curvature.chunks.CHUNK_ROWS", 30)
    expected = float(exact_ksd(fit))
    assert fit.ksd() == pytest.approx(expected, rel=1e-9)
    assert fit.ksd((X, Y)) == pytest.approx(expected, rel=1e-9)


def sampled_scale(y=None):
    """A scale, whose unconstrained log has a standard normal prior, Jacobian and all."""
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    offset = pyro.param("offset", torch.tensor(0.3))
    with pyro.plate("data", N, subsample_size=50) as i:
        pyro.sample("y", dist.Normal(offset, scale), obs=y[i])


@pytest.mark.slow
@pytest.mark.parametrize("num_samples", long_but([None, 50], 50))
def test_the_jacobian_is_part_of_it_and_points_are_not(num_samples, store):
    fit = run(ps.BAOA(sampled_scale, lr=0.02), Y)
    chosen = torch.arange(300) if num_samples is None else torch.linspace(0, 299, 50).round().long()
    u, offset = fit.posterior.draws.positions[0, chosen].T  # latents first
    slope = -u + ((Y - offset[:, None]) / u.exp()[:, None]).square().sum(1) - N
    sd = u.std(0, correction=0)
    expected = ksd((u / sd)[:, None], (slope * sd)[:, None])
    assert fit.ksd(num_samples=num_samples) == pytest.approx(float(expected), rel=1e-9)


def test_too_long_steps_and_wrong_gaussians_are_further_away():
    dense = ps.Laplace(regression(), structure="dense").run((X, Y), **QUIET)
    diagonal = ps.Laplace(regression(), structure="diag").run((X, Y), **QUIET)
    fair = 2 * D / 1000
    assert dense.ksd() < 2 * fair
    assert diagonal.ksd() > 5 * fair


@pytest.mark.slow
def test_some_rows_are_unbiased_and_an_upper_bound():
    fit = ps.Laplace(regression(), structure="dense").run((X, Y), **QUIET)
    result = fit.fit.draws(fit.fit.noise(40, torch.Generator().manual_seed(0)))
    data = fit.fit.data
    some = torch.stack([scores(result, data, 20, seed) for seed in range(400)])
    z = (some.mean(0) - scores(result, data)) / (some.std(0) / len(some) ** 0.5)
    assert z.abs().max() < 4.5
    # of rows without replacement: the scores' exact variance
    w = result.samples["w"][0]
    of_rows = (Y - w @ X.T)[..., None] * X / SD**2
    variance = N**2 / 20 * of_rows.var(1) * (1 - 20 / N)
    assert (some.var(0) / variance).mean() == pytest.approx(1, abs=0.1)
    assert fit.ksd(num_rows=20) > fit.ksd(num_rows=N) == fit.ksd()


@pytest.mark.slow
def test_a_saved_run_takes_its_data_again(tmp_path):
    fit = baoa_run()
    fit.save(tmp_path / "run.ps")
    again = ps.BAOA.load(tmp_path / "run.ps", regression())
    assert again.ksd((X, Y)) == fit.ksd()
    with pytest.raises(DataError, match="do not hold N = 200 rows"):
        again.ksd((X[:50], Y[:50]))


@pytest.mark.slow
def test_models_that_functorch_refuses():
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(PRIOR_MEAN, 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(Doubled.apply(x @ w / 2), SD), obs=y)

    fit = run(ps.BAOA(model, lr=0.3), num_samples=30)
    assert fit.ksd() == pytest.approx(float(exact_ksd(fit)), rel=1e-9)


def undivided(x, y=None):
    w = pyro.sample("w", dist.Normal(PRIOR_MEAN, 1.0).to_event(1))
    pyro.sample("y", dist.MultivariateNormal(x @ w, SD**2 * torch.eye(len(x))), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fit", "how", "message"),
    [
        (lambda: baoa_run(0.0), {}, "temperature 0"),
        (
            lambda: run(ps.SGLD(regression(), lr=0.1, temperature=lambda k: 1 + k / 1000)),
            {},
            "several temperatures",
        ),
        (lambda: ps.MAP(regression()).run((X, Y), num_steps=5, **QUIET), {}, "site 'w' has"),
        (baoa_run, {"num_samples": 601}, "num_samples=601"),
        (baoa_run, {"num_rows": 0}, "num_rows=0"),
        (
            lambda: run(ps.BAOA(undivided, lr=0.3), num_samples=30),
            {"num_rows": 20},
            "all rows togeth",
        ),
    ],
)
def test_what_the_method_refuses(fit, how, message):
    with pytest.raises(ArgumentError, match=message):
        fit().ksd(**how)


@pytest.mark.slow
def test_a_joint_density_of_all_rows():
    fit = run(ps.BAOA(undivided, lr=0.3), num_samples=30)
    assert fit.ksd() == pytest.approx(float(exact_ksd(fit)), rel=1e-9)
