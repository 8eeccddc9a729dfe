"""Whitening maps against matrices written out by hand."""

import pytest
import torch
from reference import close, normals

from pyro_scale.core.whitening import DenseWhitening, DiagonalWhitening, LowRankWhitening

D = 6
CENTER, SCALE = normals(D, seed=0).double(), normals(D, seed=1).double().exp()
AXES = torch.linalg.qr(normals(D, 2, seed=2).double())[0]
STRETCH = torch.tensor([3.0, 0.2], dtype=torch.float64)
FACTOR = torch.linalg.cholesky(torch.eye(D).double() + (3 * AXES) @ (3 * AXES).T)

MAPS = {
    "diagonal": (DiagonalWhitening(CENTER, SCALE), SCALE.diag()),
    "dense": (DenseWhitening(CENTER, FACTOR), FACTOR),
    "low rank": (
        LowRankWhitening(CENTER, SCALE, AXES, STRETCH),
        SCALE.diag() @ (torch.eye(D).double() + AXES @ (STRETCH - 1).diag() @ AXES.T),
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
