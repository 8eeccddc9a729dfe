"""Areas and places: BYM2 and ICAR on grids, Gaussian processes, in a basis and exact."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import torch
from entry import Tensors
from torch import Tensor

from jobs.job import job


def neighbors(side: int) -> tuple[Tensor, Tensor]:
    """The edges of a square grid."""
    number = torch.arange(side * side).reshape(side, side)
    across, down = (number[:, :-1], number[:, 1:]), (number[:-1], number[1:])
    return tuple(torch.cat([a.flatten(), d.flatten()]) for a, d in zip(across, down, strict=True))


def field(side: int) -> Tensor:
    """A smooth field on the grid, of mean 0 and sd 1."""
    row, column = torch.meshgrid(*2 * [torch.linspace(0, 1, side)], indexing="ij")
    value = torch.sin(3 * row + 1) + torch.cos(4 * column * row) + 0.5 * column
    return ((value - value.mean()) / value.std()).flatten()


def scaling(side: int) -> float:
    """The geometric mean of the ICAR's variances."""
    first, second = neighbors(side)
    laplacian = torch.zeros(side**2, side**2, dtype=torch.float64)
    laplacian[first, second] = laplacian[second, first] = -1
    laplacian -= torch.diag(laplacian.sum(1))
    return float(torch.linalg.pinv(laplacian).diagonal().log().mean().exp())


FIRST, SECOND = neighbors(8)
SCALING = scaling(8)


def bym2(expected: Tensor, x: Tensor, y: Tensor) -> None:
    """Cases of a disease in 64 areas."""
    b = pyro.sample("b", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    rho = pyro.sample("rho", dist.Beta(0.5, 0.5))
    theta = pyro.sample("theta", dist.Normal(torch.zeros(64), 1.0).to_event(1))
    phi = pyro.sample("phi", dist.Normal(torch.zeros(64), 10.0).to_event(1))
    pyro.factor("icar", -0.5 * (phi[FIRST] - phi[SECOND]).square().sum())
    pyro.sample("sum", dist.Normal(phi.sum(), 0.001 * 64), obs=torch.zeros(()))
    mixed = (1 - rho).sqrt() * theta + (rho / SCALING).sqrt() * phi
    effect = pyro.deterministic("effect", sigma * mixed)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson(expected * torch.exp(b[0] + b[1] * x + effect)), obs=y)


def bym2_data() -> Tensors:
    """5 to 30 cases expected."""
    expected, x = 5 + 25 * torch.rand(64), torch.randn(64)
    log_risk = 0.1 + 0.2 * x + 0.35 * field(8) + 0.15 * torch.randn(64)
    return expected, x, torch.poisson(expected * log_risk.exp())


ICAR_FIRST, ICAR_SECOND = neighbors(6)


def icar(trials: Tensor, y: Tensor) -> None:
    """Prevalence in 36 areas, by differences of neighbors."""
    mu = pyro.sample("mu", dist.Normal(-1.0, 1.0))
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    phi = pyro.sample("phi", dist.Normal(torch.zeros(36), 10.0).to_event(1))
    pyro.factor("icar", -0.5 * (phi[ICAR_FIRST] - phi[ICAR_SECOND]).square().sum())
    pyro.sample("sum", dist.Normal(phi.sum(), 0.036), obs=torch.zeros(()))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Binomial(trials, logits=mu + tau * phi), obs=y)


def icar_data() -> Tensors:
    """40 persons an area."""
    trials = torch.full((36,), 40.0)
    rate = torch.sigmoid(-1 + 0.6 * field(6))
    return trials, torch.distributions.Binomial(trials, rate).sample()


def sines(x: Tensor, count: int, half: float) -> tuple[Tensor, Tensor]:
    """(Eigenfunctions `[N, count]` on [-half, half], square roots of the eigenvalues)."""
    root = torch.arange(1, count + 1, dtype=x.dtype) * math.pi / (2 * half)
    return torch.sin(root * (x[:, None] + half)) / math.sqrt(half), root


def hsgp(x: Tensor, y: Tensor) -> None:
    """A curve: a Gaussian process in 20 basis functions."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    alpha = pyro.sample("alpha", dist.HalfNormal(1.0))
    rho = pyro.sample("rho", dist.InverseGamma(5.0, 2.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
    z = pyro.sample("z", dist.Normal(torch.zeros(20), 1.0).to_event(1))
    basis, root = sines(x, 20, 2.0)
    spectrum = alpha * (math.sqrt(2 * math.pi) * rho).sqrt() * torch.exp(-((rho * root) ** 2) / 4)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mu + basis @ (spectrum * z), sigma), obs=y)


def hsgp_data() -> Tensors:
    """150 points of a wave."""
    x = 2 * torch.rand(150) - 1
    return x, 0.5 + torch.sin(5 * x) * (1 - x / 2) + 0.4 * torch.randn(150)


def surface(place: Tensor, y: Tensor) -> None:
    """Counts in the plane: a Gaussian process in 8 by 8 basis functions."""
    mu = pyro.sample("mu", dist.Normal(1.0, 1.0))
    alpha = pyro.sample("alpha", dist.HalfNormal(1.0))
    rho = pyro.sample("rho", dist.LogNormal(-0.7, 0.4))
    z = pyro.sample("z", dist.Normal(torch.zeros(64), 1.0).to_event(1))
    (across, root), (down, _) = (sines(place[:, k], 8, 1.5) for k in (0, 1))
    basis = (across[:, :, None] * down[:, None, :]).flatten(1)
    square = (root[:, None].square() + root.square()).flatten()
    spectrum = alpha * math.sqrt(2 * math.pi) * rho * torch.exp(-rho.square() * square / 4)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson(torch.exp(mu + basis @ (spectrum * z))), obs=y)


def surface_data() -> Tensors:
    """200 places."""
    place = 2 * torch.rand(200, 2) - 1
    rate = torch.exp(1 + 0.7 * torch.sin(3 * place[:, 0]) * torch.cos(2 * place[:, 1]))
    return place, torch.poisson(rate)


def kriging(place: Tensor, y: Tensor) -> None:
    """Measurements at 40 places: an exponential covariance, integrated out."""
    mu = pyro.sample("mu", dist.Normal(0.0, 2.0))
    alpha = pyro.sample("alpha", dist.HalfNormal(1.0))
    rho = pyro.sample("rho", dist.Gamma(3.0, 2.0))
    sigma = pyro.sample("sigma", dist.HalfNormal(0.5))
    square = (place[:, None] - place).square().sum(-1) + 1e-12
    noise = (sigma.square() + 1e-6) * torch.eye(len(y), dtype=place.dtype)
    covariance = alpha.square() * torch.exp(-square.sqrt() / rho) + noise
    pyro.sample("y", dist.MultivariateNormal(mu.expand(len(y)), covariance), obs=y)


def kriging_data() -> Tensors:
    """Smooth, with noise of sd .3."""
    place = 2 * torch.rand(40, 2) - 1
    return place, 1 + torch.sin(2 * place[:, 0]) + place[:, 1] + 0.3 * torch.randn(40)


SPATIAL = (
    job("bym2", "64 areas of a grid", bym2, bym2_data, ("b", "sigma", "rho", "effect", "phi")),
    job("icar", "36 areas of a grid", icar, icar_data, ("mu", "tau", "phi")),
    job("hsgp", "a curve", hsgp, hsgp_data, ("mu", "alpha", "rho", "sigma", "z"), True),
    job("surface", "counts in the plane", surface, surface_data, ("mu", "alpha", "rho", "z"), True),
    job("kriging", "40 places", kriging, kriging_data, ("mu", "alpha", "rho", "sigma")),
)
