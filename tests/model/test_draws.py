"""Draws by the distribution function, against its chances (fixed seeds; |z| < 4.4)."""

import pyro.distributions as dist
import pytest
import torch

from pyro_scale.model.draws import class_probs, draw

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
