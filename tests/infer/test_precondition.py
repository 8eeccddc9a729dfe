"""Coordinates of Kronecker factors and of low rank, on a posterior that both know exactly."""

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
import torchopt
from models import normal, of_rows
from reference import close, double, normals
from runs import QUIET

import pyro_scale as ps
from pyro_scale import kernels
from pyro_scale.core.whitening import KroneckerWhitening, LowRankWhitening
from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.data.open import open_data
from pyro_scale.engine.step import Target
from pyro_scale.errors import ArgumentError, VerdictWarning
from pyro_scale.run.budget import Budget
from pyro_scale.run.problem import as_log_posterior, prepare
from pyro_scale.tuning.choice import Settings
from pyro_scale.tuning.geometry import whitened_by, with_geometry
from pyro_scale.tuning.windows import learn_spread

pytestmark = pytest.mark.usefixtures("float64", "compiled_early")

N = 40
X = normals(N, 3, seed=1) * torch.tensor([10.0, 1.0, 0.1])
Y = X @ normals(3, 2, seed=2) + normals(N, 2, seed=3)


def of_two_blocks(x, y=None):
    """Whose posterior is one block of Kronecker factors, and one that is independent of it."""
    w = pyro.sample("w", dist.Normal(torch.zeros(3, 2), 2.0).to_event(2))
    pyro.sample("u", dist.Normal(1.0, 3.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, 0.5).to_event(1), obs=y)


PRECISION = torch.block_diag(
    torch.kron(4 * X.mT @ X, torch.eye(2)) + torch.eye(6) / 4, torch.tensor(1 / 9)
).double()
MEAN = torch.linalg.solve(PRECISION, torch.cat([4 * (X.mT @ Y).flatten(), torch.tensor([1 / 9])]))
FITS = {
    "kron": (lambda: ps.Laplace(of_two_blocks, structure="kron"), KroneckerWhitening),
    "low rank": (lambda: ps.Laplace(of_two_blocks, structure="low_rank", rank=6), LowRankWhitening),
}


def fit_of(kind):
    return FITS[kind][0]().run((X, Y), mode={"w": MEAN[:6].reshape(3, 2), "u": MEAN[6]}, **QUIET)


def problem_of(num_chains=1):
    data, kernel = open_data((X, Y), None, None, None), kernels.BAOA(lr=0.5)
    return prepare(as_log_posterior(of_two_blocks, N), data, kernel, None, num_chains, 0)


def whitened(gaussian):
    return whitened_by(problem_of(), gaussian)


@pytest.mark.parametrize("kind", FITS)
def test_the_target_is_a_standard_normal(kind):
    """Of precision N: its gradient over N is -z, and S' times that with respect to params."""
    gaussian = fit_of(kind).fit.gaussians[0]
    close(gaussian.precision, PRECISION, 1e-7)
    problem = whitened(gaussian)
    engine = problem.engine
    assert isinstance(engine.whitening, FITS[kind][1])
    z = normals(7, seed=4)
    how = engine.density, engine.layout, problem.data.first(), None, False
    slope, _ = Target(*how, engine.whitening).grad(z)
    of_params, _ = Target(*how).grad(engine.to_params(z))
    root = torch.autograd.functional.jacobian(engine.to_params, z)
    close(slope, root.mT @ of_params, 1e-10)
    close(slope, -z, 1e-6)
    close(engine.to_params(torch.zeros(7)), MEAN, 1e-7)


@pytest.mark.slow
def test_draws_have_the_law_of_the_posterior():
    """BAOA is exact on Gaussians, at a step that only whitened coordinates stand: the elements'
    scales differ by a factor of 1,000.  Compiled steps are those of eager ones."""
    how = {"num_samples": 200, "warmup_steps": 20, "thinning": 5, "num_chains": 8, **QUIET}
    fit = fit_of("kron")

    def draws(compile, **more):
        sampler = ps.BAOA(of_two_blocks, lr=0.5, friction=1.0, precondition=fit, compile=compile)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", VerdictWarning)  # of a step size that is set
            sampler.run((X, Y), batch_size=None, **how | more)
        assert ("compiled" in sampler.posterior.draws.attrs["program"]) == compile
        found = sampler.get_samples(group_by_chain=True)
        return torch.cat([found["w"].flatten(2), found["u"][:, :, None]], 2)

    compiled = draws(True)
    close(compiled[:, :20], draws(False, num_samples=20), 1e-9)
    z = (compiled.flatten(0, 1) - MEAN) @ torch.linalg.cholesky(PRECISION)
    count = len(z) / 2  # of which each is worth half an independent one, at least
    assert float(z.mean(0).abs().max()) < 4 / math.sqrt(count)
    covariance = z.mT @ z / len(z)
    assert float((covariance - torch.eye(7)).abs().max()) < 4 * math.sqrt(2 / count)


def test_factors_are_found_at_the_mode():
    """As "dense" is: of the posterior at its temperature, and starts at twice its sds."""
    chosen = frozenset({"lr", "friction"})
    settings = Settings("BAOA", chosen, "kron", False, False, True, False)
    problem = problem_of()
    whole = FullDataDensity(problem.log_posterior, problem.data, problem.engine.layout)
    found, modes, _ = with_geometry(
        problem, settings, whole, Budget.from_arguments(None, 100, None)
    )
    close(modes.best.gaussian.mean, MEAN, 1e-6)
    root = found.engine.whitening.push_forward(torch.eye(7))
    assert isinstance(found.engine.whitening, KroneckerWhitening)
    close(root.mT @ root, N * torch.linalg.inv(PRECISION), 1e-8)


def test_draws_teach_the_scales_of_the_factors_directions():
    """Of draws that are 1.5 times as wide, in all directions, as the factors say."""
    old = whitened(fit_of("kron").fit.gaussians[0]).engine.whitening
    count = 20_000
    change, new = learn_spread(old, 1.5 * normals(1, count, 7, seed=7), double(count)[0])
    ratio = new.variance / old.variance
    assert 1.45 < change < 1.55
    close(ratio, torch.full((7,), 1.5**2), 0.1)
    close(new.bases[0][0], old.bases[0][0], 0)


@pytest.mark.parametrize("kind", FITS)
def test_the_optimizer_moves_in_the_fits_coordinates(kind):
    """SGD's step is Newton's: all of the way, or half of it."""
    fit, start = fit_of(kind), {"w": normals(1, 3, 2, seed=5), "u": normals(1, seed=6)}
    first = torch.cat([start["w"].flatten(), start["u"]])
    for lr, left in ((1.0, 0.0), (0.5, 0.5)):
        mode = ps.MAP(
            of_two_blocks, optimizer=torchopt.sgd(lr), precondition=fit, init_strategy=start
        ).run((X, Y), num_steps=1, **QUIET)
        close(mode.fit.centers[0], MEAN + left * (first - MEAN), 1e-6)


def test_the_mode_is_the_same_after_few_steps():
    """Of a softmax, where the factors are near the curvature, and features of unlike scales."""

    classes = of_rows(lambda x, w: dist.Categorical(logits=x @ w), w=normal(3, 3))

    data = X, (Y[:, 0] > 0).long() + (Y[:, 1] > 0).long()
    mode = ps.MAP(classes, structure="dense").run(data, num_steps=1, **QUIET)
    rough = {"w": torch.zeros(3, 3)}
    fit = ps.Laplace(classes, structure="kron").run(data, mode=rough, **QUIET)
    start = {"w": rough["w"][None]}
    how = {"precondition": fit, "init_strategy": start, "optimizer": torchopt.sgd(1.0)}
    whitened = ps.MAP(classes, **how).run(data, num_steps=25, **QUIET)
    away = (whitened.fit.centers - mode.fit.centers).norm() / mode.fit.centers.norm()
    assert float(away) < 1e-9


@pytest.mark.slow
def test_variational_inference_starts_where_the_factors_say():
    """At draws of the fit: whitened by it, they are standard normals."""
    fit = fit_of("kron")
    vi = ps.VI(of_two_blocks, init_strategy=fit, optimizer=torchopt.sgd(0.0))
    vi.run((X, Y), num_steps=1, num_chains=1000, **QUIET)
    z = (vi.fit.centers - MEAN) @ torch.linalg.cholesky(PRECISION)
    assert float(z.mean(0).abs().max()) < 4.5 / math.sqrt(len(z))
    assert float((z.mT @ z / len(z) - torch.eye(7)).abs().max()) < 4.5 * math.sqrt(2 / len(z))


def test_what_is_no_fit_of_the_model_is_refused():
    other = ps.Laplace(of_two_blocks, structure="kron", sites=["w"])
    with pytest.raises(
        ArgumentError, match=r"precondition=<Laplace.*not run>: pass None, or a fit"
    ):
        ps.MAP(of_two_blocks, precondition=other)
    other.run((X, Y), **QUIET)
    with pytest.raises(ArgumentError, match="a fit of all sites"):
        ps.MAP(of_two_blocks, precondition=other)
    with pytest.raises(ArgumentError, match="'kron', 'low_rank', 'diag', None, or a fit"):
        ps.BAOA(of_two_blocks, precondition="kronecker")

    def smaller(x, y=None):
        pyro.sample("u", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x, 1.0).to_event(1), obs=y)

    fit = ps.Laplace(smaller, structure="diag").run((X[:, :2], Y), **QUIET)
    with pytest.raises(ArgumentError, match="the fit has 1 elements, the model's latent sites"):
        ps.MAP(of_two_blocks, precondition=fit).run((X, Y), num_steps=1, **QUIET)


def test_a_fit_without_spread_has_no_coordinates():
    cold = ps.Laplace(of_two_blocks, structure="kron", temperature=0.0).run((X, Y), **QUIET)
    for method in (ps.MAP, ps.BAOA):
        with pytest.raises(ArgumentError, match="temperature 0 the fit has no spread"):
            method(of_two_blocks, precondition=cold)
