"""Draws by the distribution function, against its chances (fixed seeds; |z| < 4.4)."""

import pyro.distributions as dist
import pytest
import torch

from pyro_scale.model.draws import class_probs, draw, draws

CHANCES = torch.tensor([0.0, 0.5, 0.25, 0.0, 0.2, 0.05, 0.0])
MANY = 200_000


@pytest.mark.parametrize("kind", ["probs", "logits", "to_event", "mask"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_classes_have_their_chances_and_those_of_none_never_come(kind, dtype):
    torch.manual_seed(0)
    chances = CHANCES.to(dtype)
    fn = dist.Categorical(chances) if kind == "probs" else dist.Categorical(logits=chances.log())
    exact = class_probs(fn).double()
    fn = fn.expand([MANY])
    fn = {"to_event": lambda f: f.to_event(1), "mask": lambda f: f.mask(True)}.get(
        kind, lambda f: f
    )(fn)
    drawn = draw(fn)
    assert drawn.shape == (MANY,)
    assert drawn.dtype == torch.int64
    counts = torch.bincount(drawn, minlength=7).double()
    assert (counts[CHANCES == 0] == 0).all()
    exact = exact / exact.sum()
    z = (counts - MANY * exact)[CHANCES > 0] / (MANY * exact * (1 - exact))[CHANCES > 0].sqrt()
    assert z.abs().max() < 4.4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_coins_fall_as_often_as_they_should(dtype):
    torch.manual_seed(0)
    chances = torch.tensor([0.0, 0.01, 0.5, 0.9, 1.0]).to(dtype)
    drawn = draw(dist.Bernoulli(chances.expand(MANY, 5)).to_event(1))
    assert drawn.dtype == dtype
    exact = chances.double()
    mean = drawn.double().mean(0)
    assert mean[0] == 0
    assert mean[-1] == 1
    z = (mean - exact)[1:-1] / (exact * (1 - exact) / MANY)[1:-1].sqrt()
    assert z.abs().max() < 4.4


def test_others_are_left_to_torch():
    class Own(dist.Bernoulli):
        def sample(self, sample_shape=()):
            return torch.ones(())

    assert draw(dist.Normal(0.0, 1.0)) is None
    assert draw(Own(0.5)) is None


def moments_agree(drawn, mean, variance):
    count = len(drawn)
    z = (drawn.mean(0) - mean) / (variance / count).sqrt()
    assert z[variance > 0].abs().max() < 4.4
    assert torch.equal(drawn.mean(0)[variance == 0], mean[variance == 0])
    fourth = ((drawn - mean) ** 4).mean(0)
    z = (drawn.var(0) - variance) / ((fourth - variance**2) / count).sqrt()
    assert z[variance > 0].abs().max() < 4.4


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: f.to_event(1), lambda f: f.mask(True)])
def test_counts_have_the_totals_of_their_rows(wrap):
    torch.manual_seed(0)
    totals = torch.tensor([5.0, 40.0, 0.0], dtype=torch.float64)
    alpha = torch.tensor([0.5, 2.0, 1.0, 3.0], dtype=torch.float64).expand(3, 4)
    fn = dist.DirichletMultinomial(alpha, totals)
    drawn = draws(wrap(fn), 50_000)
    assert torch.equal(drawn.sum(-1), totals.expand(50_000, 3))
    moments_agree(drawn, fn.mean, fn.variance)
    assert draw(wrap(fn)).shape == (3, 4)


def test_observed_counts_say_the_totals_where_the_density_takes_them_from_there():
    torch.manual_seed(0)
    probs = torch.tensor([0.0, 0.2, 0.3, 0.5], dtype=torch.float64)
    fn = dist.Multinomial(40, probs.expand(3, 4))
    observed = torch.tensor([[1.0, 2, 3, 4], [0, 0, 0, 0], [10, 10, 10, 10]], dtype=torch.float64)
    totals = observed.sum(-1, keepdim=True)
    drawn = draws(fn, 50_000, observed)
    assert torch.equal(drawn.sum(-1, keepdim=True), totals.expand(50_000, 3, 1))
    moments_agree(drawn, totals * probs, totals * probs * (1 - probs))


@pytest.mark.parametrize("family", [dist.Multinomial, dist.DirichletMultinomial])
def test_missing_counts_are_drawn_with_the_total_of_their_distribution(family):
    """Of NaN, torch's binomial draws without an end."""
    weights = torch.tensor([0.2, 0.3, 0.5]).expand(2, 3)
    fn = family(7, weights) if family is dist.Multinomial else family(weights, torch.tensor(7.0))
    observed = torch.tensor([[1.0, 2, 1], [torch.nan] * 3])
    drawn = draws(fn.mask(torch.tensor([True, False])), 50, observed)
    assert torch.equal(drawn.sum(-1), torch.tensor([4.0, 7.0]).expand(50, 2))


def test_counts_are_drawn_under_vmap():
    totals = torch.tensor([5.0, 40.0])

    def one(log):
        return draw(dist.DirichletMultinomial(log.exp().expand(2, 3), totals))

    drawn = torch.vmap(one, randomness="different")(torch.zeros(4))
    assert torch.equal(drawn.sum(-1), totals.expand(4, 2))
