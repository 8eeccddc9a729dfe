"""Log densities of Gaussians at many places, beside torch's."""

import pytest
import torch
from reference import close, double, normals

from pyro_scale.core.gaussian import Dense, Diagonal

pytestmark = pytest.mark.usefixtures("float64")

MEAN = double(1.0, -2.0, 0.5)


def test_log_densities_at_many_places_are_those_of_torch():
    tril = double([2.0, 0.0, 0.0], [0.3, 0.5, 0.0], [-1.0, 0.2, 3.0])
    normal = torch.distributions.MultivariateNormal(MEAN, scale_tril=tril)
    independent = torch.distributions.Normal(MEAN, tril.diagonal())
    x = 3 * normals(7, 3, seed=0).double()
    for gaussian, expected in (
        (Dense(MEAN, tril), normal.log_prob(x)),
        (Diagonal(MEAN, tril.diagonal()), independent.log_prob(x).sum(1)),
    ):
        close(gaussian.log_probs(x), expected, 1e-12)
        close(torch.stack([gaussian.log_prob(place) for place in x]), expected, 1e-12)
