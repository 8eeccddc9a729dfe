"""Modes of many data sets, whose searches take unlike numbers of steps."""

import pytest
import torch
from reference import double

from pyro_scale.calibration.modes import find_modes

pytestmark = pytest.mark.usefixtures("float64")

CENTERS = double([0.0, 0.0], [0.3, -0.2], [3.0, 0.1], [-9.0, 14.0])
SCALES = double([1.0, 2.0], [0.1, 30.0], [5.0, 5.0], [0.02, 1.0])


class Hanging:
    """A log joint of -sum(scale cosh(x - center)) for each data set: it has its mode at the center
    and the precision diag(scale) there, and is so steep far out that steps are refused."""

    def __init__(self, numbers):
        self.numbers = numbers
        self.num_chains = len(numbers)

    def select(self, chains):
        return Hanging(self.numbers[chains])

    def map(self, function):
        return torch.vmap(function)(torch.arange(self.num_chains))

    def log_joint(self, position, number):
        which = self.numbers.index_select(0, number[None])
        center, scale = CENTERS.index_select(0, which)[0], SCALES.index_select(0, which)[0]
        return -(scale * torch.cosh(position - center)).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_has_its_own_however_long_its_search(dtype):
    starts = torch.zeros(4, 2, dtype=dtype)
    found = find_modes(Hanging(torch.arange(4)), starts)
    assert found.is_mode.all()
    assert not starts.any()  # which are the caller's
    away = (found.mean - CENTERS).abs() * SCALES.sqrt()  # in sds
    assert away.max() < 0.015  # a search ends where a step would gain 1e-4 nats
    torch.testing.assert_close(found.precision, SCALES.diag_embed(), rtol=2e-4, atol=1e-3)
    torch.testing.assert_close(found.value, -SCALES.sum(1), rtol=1e-4, atol=1e-4)


def test_a_search_does_not_depend_on_the_others():
    together = find_modes(Hanging(torch.arange(4)), torch.zeros(4, 2))
    for number in range(4):
        alone = find_modes(Hanging(torch.tensor([number])), torch.zeros(1, 2))
        for found, expected in zip(alone, together, strict=True):
            assert torch.equal(found[0], expected[number])
