"""Stationary covariances of a position and a momentum, against exact arithmetic."""

from fractions import Fraction

import pytest
import torch
from reference import close, double, normals

from pyro_scale import kernels
from pyro_scale.kernels.gaussian import GaussianChain

pytestmark = pytest.mark.usefixtures("float64")

VALUES = {"friction": double(0.7), "mass": double(1.0), "temperature": double(1.0)}


def exactly(transition, start):
    """S = A S A' + Q in fractions, by elimination."""
    a, q = ([[Fraction(x) for x in row] for row in each.tolist()] for each in (transition, start))
    pairs = [(0, 0), (0, 1), (1, 0), (1, 1)]
    rows = [
        [int(one == other) - a[one[0]][other[0]] * a[one[1]][other[1]] for other in pairs]
        + [q[one[0]][one[1]]]
        for one in pairs
    ]
    for i in range(4):
        rows[i] = [x / rows[i][i] for x in rows[i]]
        for j in range(4):
            if j != i:
                rows[j] = [x - rows[j][i] * y for x, y in zip(rows[j], rows[i], strict=True)]
    return torch.tensor([float(row[-1]) for row in rows]).view(2, 2)


@pytest.mark.parametrize("lr", [0.5, 0.1, 1e-3])
def test_of_any_linear_chain(lr):
    """Short steps on flat modes cost no digits, which a general solver loses."""
    slope, noise = double(1.0, 0.3, 1e-2, 1e-4), normals(4, 2, 2, seed=1)
    kick, rest = -lr * slope, torch.full((4,), 1 - 0.4 * lr)
    first = torch.stack([1 + 0.5 * lr * kick, torch.full((4,), lr)], -1)
    chain = GaussianChain(
        torch.stack([first, torch.stack([kick, rest], -1)], -2), noise @ noise.mT, noise[..., 0]
    )
    assert bool(chain.stable.all())
    found = chain.covariance(torch.zeros(4))
    for place in range(4):
        expected = exactly(chain.transition[place], chain.injected[place])
        close(found[place], expected, 1e-13 * float(expected.abs().max()))


def test_of_sghmc():
    """Stable while D = 4 - 2 lr friction - lr^2 L > 0; variance 4 / D of momenta and
    (4 - 2 lr friction) / (L D) of positions."""
    precision, lr = double(1e-4, 0.5, 2.0, 2.4, 2.7), 1.2
    chain = GaussianChain.from_kernel(kernels.SGHMC(lr=lr), {**VALUES, "lr": double(lr)}, precision)
    margin = 4 - 2 * lr * 0.7 - lr**2 * precision
    assert chain.stable.tolist() == (margin > 0).tolist() == [True, True, False, False, False]
    found, stable = chain.covariance(torch.zeros(5)), chain.stable
    close(found[stable, 1, 1], (4 / margin)[stable], 1e-11)
    positions = (4 - 2 * lr * 0.7) / (precision * margin)
    close(found[stable, 0, 0] * precision[stable], (positions * precision)[stable], 1e-11)


def test_there_is_no_sum_where_nothing_moves():
    still = GaussianChain(torch.eye(2)[None], torch.eye(2)[None], torch.ones(1, 2))
    assert not bool(still.stable)
    assert bool(still.covariance(torch.zeros(1)).isnan().all())
