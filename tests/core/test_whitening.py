"""Whitening maps against matrices written out by hand."""

import pytest
import torch
from curvatures import kronecker_block
from reference import close, normals

from pyro_scale.core.gaussian import Dense, Diagonal, Kronecker, LowRank
from pyro_scale.core.whitening import (
    DenseWhitening,
    DiagonalWhitening,
    KroneckerWhitening,
    LowRankWhitening,
    whiten,
)

D = 6
CENTER, SCALE = normals(D, seed=0).double(), normals(D, seed=1).double().exp()
AXES = torch.linalg.qr(normals(D, 2, seed=2).double())[0]
STRETCH = torch.tensor([3.0, 0.2], dtype=torch.float64)
FACTOR = torch.linalg.cholesky(torch.eye(D).double() + (3 * AXES) @ (3 * AXES).T)

TURNS = [torch.linalg.qr(normals(n, n, seed=3 + n).double())[0] for n in (2, 1, 3)]
#: Of elements [5, 0], [2, 4] as a matrix, a bias [3], and 1 by itself.
ORDER = torch.tensor([5, 0, 2, 4, 3, 1])
BASES = ((TURNS[0], TURNS[0]), (TURNS[1], TURNS[1]))
TURN = torch.zeros(D, D).double()
TURN[ORDER[:4, None], ORDER[:4]] = torch.kron(*BASES[0])
TURN[3, 3] = TURN[1, 1] = 1


MAPS = {
    "diagonal": (DiagonalWhitening(CENTER, SCALE), SCALE.diag()),
    "dense": (DenseWhitening(CENTER, FACTOR), FACTOR),
    "low rank": (
        LowRankWhitening(CENTER, SCALE, AXES, STRETCH),
        SCALE.diag() @ (torch.eye(D).double() + AXES @ (STRETCH - 1).diag() @ AXES.T),
    ),
    "kron": (
        KroneckerWhitening(CENTER, SCALE, ORDER, ORDER.argsort(), BASES),
        TURN @ SCALE.diag(),
    ),
}


@pytest.mark.parametrize("kind", MAPS)
def test_a_map_is_its_matrix(kind):
    whitening, matrix = MAPS[kind]
    z, g = normals(4, 3, D, seed=4).double(), normals(D, seed=5).double()
    close(whitening.to_params(z), CENTER + z @ matrix.T, 1e-12)
    close(whitening.to_params(z[0, 0]), CENTER + matrix @ z[0, 0], 1e-12)
    close(whitening.to_whitened(whitening.to_params(z)), z, 1e-11)
    close(whitening.pull_back(g), matrix.T @ g, 1e-12)
    close(whitening.push_forward(z), z @ matrix.T, 1e-12)
    close(whitening.variance, (matrix @ matrix.T).diagonal(), 1e-11)


@pytest.mark.parametrize("kind", MAPS)
def test_a_map_is_made_anew_of_its_tensors(kind):
    whitening, _ = MAPS[kind]
    doubled = whitening.with_tensors([2 * tensor for tensor in whitening.tensors])
    assert type(doubled) is type(whitening)
    close(doubled.tensors[0], 2 * CENTER)
    assert [each.dtype for each in whitening.double().tensors] == [
        each.dtype for each in whitening.tensors
    ]


def gaussians():
    places = torch.tensor([[6, 0], [2, 5], [1, 7]])
    left, right, bias = (x @ x.T for x in (normals(n, 5, seed=n).double() for n in (3, 2, 2)))
    blocks = (
        kronecker_block(places, left, right, torch.tensor(0.5)),
        kronecker_block(torch.tensor([[4, 3]]), left[:1, :1], bias, torch.tensor(2.0)),
    )
    mean, sd = normals(9, seed=6).double(), normals(9, seed=7).double().exp()
    rows = normals(9, 3, seed=8).double()
    return {
        "diagonal": Diagonal(mean, sd),
        "dense": Dense.from_precision(mean, torch.eye(9).double() + rows @ rows.T),
        "low rank": LowRank.from_precision(mean, sd, rows),
        "kron": Kronecker(mean, blocks, torch.tensor([8]), torch.tensor([0.3]).double()),
    }


@pytest.mark.parametrize("kind", gaussians())
def test_a_gaussian_is_isotropic_in_its_coordinates(kind):
    """S S' = N times its covariance, and its mean is at 0."""
    gaussian, num_data = gaussians()[kind], 50
    whitening = whiten(gaussian, num_data, gaussian.mean)
    matrix = whitening.push_forward(torch.eye(9).double()).T
    covariance = gaussian.covariance_times(torch.eye(9).double())
    close(matrix @ matrix.T, num_data * covariance, 1e-12)
    close(whitening.variance, num_data * gaussian.variance, 1e-12)
    close(whitening.to_whitened(gaussian.mean), torch.zeros(9), 1e-12)
    x = normals(4, 9, seed=9).double()
    close(whitening.to_params(whitening.to_whitened(x)), x, 1e-11)
    _, pulled = torch.func.vjp(whitening.to_params, x[0])
    close(whitening.pull_back(x[1]), pulled(x[1])[0], 1e-12)
