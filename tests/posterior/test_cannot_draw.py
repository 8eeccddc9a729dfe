"""Counts whose totals differ by row, distributions without draws, and sites of one number."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from dtypes import default_dtype
from models import normal, of_rows
from runs import QUIET

import pyro_scale as ps
from pyro_scale.curvature import fisher
from pyro_scale.errors import ArgumentError, CannotDrawError, ModelError
from pyro_scale.model.draws import with_totals

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.filterwarnings("ignore")]
SOURCE = torch.Generator().manual_seed(0)
X = torch.randn(40, 2, generator=SOURCE, dtype=torch.float64)
DEPTH = torch.randint(5, 50, (40,), generator=SOURCE).double()
CHANCES = (X @ torch.tensor([[1.0, -1.0, 0.0], [0.5, 0.0, -0.5]], dtype=torch.float64)).softmax(-1)
COUNTS = torch.stack(
    [
        torch.bincount(
            torch.multinomial(p, int(n), replacement=True, generator=SOURCE), minlength=3
        ).double()
        for p, n in zip(CHANCES, DEPTH, strict=True)
    ]
)


def model_of(family):
    def model(x, depth, counts=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2, 3), 1.0).to_event(2))
        with pyro.plate("data", len(x)):
            pyro.sample("y", family(x @ w, depth), obs=counts)

    return model


FAMILIES = {
    "the largest total": lambda e, n: dist.Multinomial(int(DEPTH.max()), logits=e),
    "chances": lambda e, n: dist.Multinomial(int(DEPTH.max()), probs=e.softmax(-1)),
    "no total": lambda e, n: dist.Multinomial(logits=e, validate_args=False),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_multinomial_curvature_has_each_rows_total(name):
    """With a canonical link it is the Hessian, in which totals are those of the counts."""
    log_posterior = ps.LogPosterior(model_of(FAMILIES[name]), num_data=len(X))
    at, batch = {"w": torch.linspace(-1, 1, 6).reshape(2, 3)}, (X, DEPTH, COUNTS)
    found = ps.Curvature(log_posterior).dense(at, batch)

    def log_lik(w):
        return (COUNTS * (X @ w.reshape(2, 3)).log_softmax(-1)).sum()

    exact = -torch.autograd.functional.hessian(log_lik, at["w"].reshape(-1))
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)


def test_expected_counts_of_classes_have_each_rows_total():
    logits = X @ torch.linspace(-1, 1, 6).reshape(2, 3)
    fn = with_totals(dist.Multinomial(logits=logits, validate_args=False), COUNTS)
    expected = COUNTS.sum(-1, keepdim=True) * logits.softmax(-1)
    torch.testing.assert_close(fisher.class_counts(fn, ("logits",)), expected)
    matrices = fisher.information(fn, ("logits",))
    assert torch.equal(matrices.diagonal(dim1=-2, dim2=-1).sum(-1) == 0, COUNTS.sum(-1) == 0)


def test_dirichlet_multinomial_information_is_the_sum_over_all_counts():
    alpha, totals = torch.tensor([0.7, 2.0, 1.3]), torch.tensor([4.0, 6.0, 0.0])

    def model(counts):
        a = pyro.sample("a", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(counts)):
            fn = dist.DirichletMultinomial(a.exp().expand(len(counts), 3), totals)
            pyro.sample("y", fn, obs=counts)

    observed = torch.stack([totals, torch.zeros(3), torch.zeros(3)], 1)
    log_posterior = ps.LogPosterior(model, num_data=3)
    found = ps.Curvature(log_posterior).dense({"a": alpha.log()}, (observed,))
    exact = torch.zeros(3, 3)
    for total in (4, 6):
        for i in range(total + 1):
            for j in range(total + 1 - i):
                value = torch.tensor([i, j, total - i - j]).double()
                log = alpha.log().requires_grad_()
                fn = dist.DirichletMultinomial(log.exp(), total, validate_args=False)
                log_prob = fn.log_prob(value)
                (score,) = torch.autograd.grad(log_prob, log)
                exact += log_prob.exp().detach() * torch.outer(score, score)
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)


@pytest.fixture(scope="module")
def compound():
    model = model_of(lambda e, n: dist.DirichletMultinomial(e.exp(), n))
    with default_dtype(torch.float64):
        yield ps.Laplace(model, structure="dense").run((X, DEPTH, COUNTS), **QUIET)


def test_totals_by_row_are_predicted(compound):
    alpha = (X[:4] @ compound.get_samples()["w"]).exp()
    mean = compound.predict(X[:4], DEPTH[:4], reduce="mean")["y"]
    exact = (DEPTH[:4, None] * alpha / alpha.sum(-1, keepdim=True)).mean(0)
    torch.testing.assert_close(mean, exact, rtol=1e-9, atol=1e-9)
    torch.manual_seed(0)
    drawn = compound.predict(X[:4], DEPTH[:4])["y"]
    assert torch.equal(drawn.sum(-1), DEPTH[:4].expand(1000, 4))
    z = (drawn.mean(0) - exact) / (drawn.std(0) / 1000**0.5)
    assert z.abs().max() < 4.4
    linear = compound.predict(X[:4], DEPTH[:4], linearized=True, num_samples=20)["y"]
    assert torch.equal(linear.sum(-1), DEPTH[:4].expand(20, 4))
    assert compound.predict(X[:4], DEPTH[:4], interval=0.9)["y"].lower.shape == (4, 3)
    predictive = compound.to_arviz(posterior_predictive=True).posterior_predictive["y"].values
    assert (torch.from_numpy(predictive).sum(-1) == DEPTH).all()


def test_a_total_of_each_row_is_told_how_to_be_given():
    model = model_of(lambda e, n: dist.Multinomial(n, logits=e))
    with pytest.raises(ModelError, match=r"pass the largest, dist.Multinomial\(int\(total.max"):
        ps.Laplace(model).run((X, DEPTH, COUNTS), **QUIET)


class DensityAlone(dist.TorchDistribution):
    @property
    def arg_constraints(self):
        return {}

    @property
    def support(self):
        return dist.constraints.real

    def __init__(self, loc):
        self.loc = loc
        super().__init__(loc.shape, validate_args=False)

    def expand(self, shape, _instance=None):
        return DensityAlone(self.loc.expand(shape))

    def log_prob(self, value):
        return -((value - self.loc) ** 2) / 2 - 0.918938533204672741


def test_a_distribution_without_draws_says_so():
    model = of_rows(lambda x, b: DensityAlone(b * x), b=normal(sd=5.0))
    x = X[:, 0]
    curvature = ps.Curvature(ps.LogPosterior(model, num_data=len(x)))
    with pytest.raises(CannotDrawError, match=r"'y': a DensityAlone.*curvature='hessian'"):
        curvature.dense({"b": torch.tensor(1.0)}, (x, 2 * x))
    fit = ps.Laplace(model, curvature="hessian").run((x, 2 * x), **QUIET)
    with pytest.raises(ArgumentError, match=r"no mean.*give its class one, or a sample"):
        fit.predict(x, reduce="mean")
    for how in ({}, {"reduce": [0.1, 0.9]}, {"interval": 0.9}):
        with pytest.raises(CannotDrawError, match="'y': a DensityAlone cannot be drawn: give its"):
            fit.predict(x, **how)
    with pytest.raises(NotImplementedError):  # which it is as well
        fit.to_arviz(posterior_predictive=True)


@pytest.mark.parametrize("batch_size", [None, 7])
def test_a_mean_in_closed_form_needs_no_draws(batch_size):
    def model(x, y=None, z=None):
        b = pyro.sample("b", dist.Normal(0.0, 5.0))
        with pyro.plate("data", len(x)):
            fn = dist.LogNormalNegativeBinomial(3.0, b * x, torch.tensor(0.3))
            pyro.sample("y", fn, obs=y)
            pyro.sample("z", dist.Normal(b * x, 1.0), obs=z)

    x, y = X[:, 0], DEPTH
    fit = ps.MAP(model).run((x, y, x), num_steps=50, **QUIET)
    found, b = fit.predict(x, reduce="mean", batch_size=batch_size), fit.get_samples()["b"]
    exact = 3 * (b * x + 0.3**2 / 2).exp()
    torch.testing.assert_close(found["y"], exact, rtol=1e-3, atol=0)  # its own is by quadrature
    torch.testing.assert_close(found["z"], b * x, rtol=1e-9, atol=1e-9)


def numbers(x, y=None):
    b = pyro.sample("b", dist.Normal(0.0, 5.0))
    pyro.sample("known", dist.Normal(b, 3.0), obs=torch.tensor(0.0))
    pyro.sample("pair", dist.Normal(b, torch.ones(2)).to_event(1), obs=torch.zeros(2))
    with pyro.plate("data", len(x)):
        pyro.deterministic("none", torch.zeros(len(x), 0))
        pyro.sample("y", dist.Normal(b * x, 1.0), obs=y)


@pytest.mark.parametrize("batch_size", [None, 7])
def test_sites_of_one_number_have_quantiles_and_intervals(batch_size):
    fit = ps.Laplace(numbers).run((X[:, 0], 2 * X[:, 0]), **QUIET)
    b = fit.get_samples()["b"]
    torch.manual_seed(0)
    found = fit.predict(X[:, 0], reduce=[0.05, 0.95], batch_size=batch_size)
    assert {name: value.shape for name, value in found.items()} == {
        "known": (2,),
        "pair": (2, 2),
        "none": (2, 40, 0),
        "y": (2, 40),
    }
    sd = (b.var() + 9) ** 0.5
    exact = b.mean() + sd * 1.6449 * torch.tensor([-1.0, 1.0])
    assert (found["known"] - exact).abs().max() < 4.4 * 2.1 * sd / 1000**0.5
    sets = fit.predict(X[:, 0], interval=0.9, batch_size=batch_size)
    assert sets["known"].lower.shape == ()
    assert sets["pair"].upper.shape == (2,)
    assert sets["y"].lower.shape == (40,)


def test_one_draw_has_quantiles():
    fit = ps.MAP(numbers).run((X[:, 0], 2 * X[:, 0]), num_steps=50, **QUIET)
    found = fit.predict(X[:3, 0], reduce=[0.1, 0.9])
    assert found["known"].shape == (2,)
    assert torch.equal(found["known"][0], found["known"][1])
