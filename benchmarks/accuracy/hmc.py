"""Hamiltonian Monte Carlo on many chains at once, for references.

Pyro's NUTS takes a millisecond a gradient and chain; here one evaluation, vmapped, moves all
chains.  Trajectories have random lengths, and a Metropolis test makes each step exact.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: The acceptance rate that the step size is tuned for.
ACCEPTANCE = 0.85


class Layout:
    """A dict of tensors <-> one flat vector."""

    def __init__(self, like: dict[str, Tensor]):
        self._shapes = {name: value.shape for name, value in like.items()}

    def flatten(self, values: dict[str, Tensor]) -> Tensor:
        """`[D]`, in the order of the dict that the layout is of."""
        return torch.cat([values[name].reshape(-1) for name in self._shapes])

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """The inverse of `flatten`."""
        parts = vector.split([shape.numel() for shape in self._shapes.values()])
        return {
            name: part.reshape(shape)
            for (name, shape), part in zip(self._shapes.items(), parts, strict=True)
        }


def mode(potential: Callable[[Tensor], Tensor], starts: Tensor) -> Tensor:
    """The lowest of the minima `[D]` that L-BFGS finds from `[starts, D]`."""
    found = []
    for start in starts:
        position = start.clone().requires_grad_()
        optimizer = torch.optim.LBFGS(
            [position], max_iter=2000, tolerance_change=1e-14, line_search_fn="strong_wolfe"
        )

        def closure(optimizer: torch.optim.LBFGS = optimizer, at: Tensor = position) -> Tensor:
            optimizer.zero_grad()
            value = potential(at)
            value.backward()
            return value

        optimizer.step(closure)
        value = potential(position.detach())
        if torch.isfinite(value):
            found.append((float(value), position.detach()))
    return min(found, key=lambda pair: pair[0])[1]


class Chains:
    """Chains `[C, D]` with one step size and one dense mass matrix, both adapted on request.

    Args:
        potential: minus the log density of one position `[D]`, in nats.
        center: where chains start around.
        covariance: of the start, roughly the posterior's.
        chains: C.
        length: of a trajectory, on average, in standard deviations of the posterior.
    """

    def __init__(
        self,
        potential: Callable[[Tensor], Tensor],
        center: Tensor,
        covariance: Tensor,
        chains: int,
        length: float,
    ):
        self._evaluate = torch.func.vmap(torch.func.grad_and_value(potential))
        self._set_covariance(covariance)
        # Close together: where a long tail of the posterior is stiff, chains would be stuck.
        self.position = center + 0.5 * torch.randn(chains, len(center)) @ self._factor.T
        self._gradient, self._energy = self._evaluate(self.position)
        while not torch.isfinite(self._energy).all():
            broken = ~torch.isfinite(self._energy)
            self.position[broken] = (self.position[broken] + center) / 2
            self._gradient, self._energy = self._evaluate(self.position)
        self._step, self._length = 0.3, length
        self.accepted = 0.0

    def run(self, steps: int, adapt: bool = False) -> Tensor:
        """Positions after each step, `[C, steps, D]`."""
        kept = []
        for count in range(steps):
            self._move()
            if adapt:
                self._step *= float(torch.exp(torch.tensor(self.accepted - ACCEPTANCE))) ** (
                    1 / (1 + count) ** 0.5
                )
            kept.append(self.position)
        return torch.stack(kept, 1)

    def learn(self, draws: Tensor) -> None:
        """Takes the mass matrix from draws `[C, steps, D]`."""
        self._set_covariance(torch.cov(draws.flatten(0, 1).T))

    def _set_covariance(self, covariance: Tensor) -> None:
        self._factor = torch.linalg.cholesky(covariance)

    def _move(self) -> None:
        # In coordinates of unit variance: position = factor @ q, mass 1.
        # Short steps, now and then, free chains from where the usual one is unstable.
        step = self._step * (0.1 + 0.9 * float(torch.rand(())))
        steps = int(torch.randint(1, 2 + int(2 * self._length / self._step), ()))
        momentum = torch.randn_like(self.position)
        start = self._energy + momentum.square().sum(-1) / 2
        position, gradient, energy = self.position, self._gradient, self._energy
        half = step / 2
        for _ in range(steps):
            momentum = momentum - half * gradient @ self._factor
            position = position + step * momentum @ self._factor.T
            gradient, energy = self._evaluate(position)
            momentum = momentum - half * gradient @ self._factor
        end = energy + momentum.square().sum(-1) / 2
        chance = (start - end).nan_to_num(nan=-torch.inf).clamp(max=0).exp()
        accept = torch.rand(len(chance)) < chance
        self.position = torch.where(accept[:, None], position, self.position)
        self._gradient = torch.where(accept[:, None], gradient, self._gradient)
        self._energy = torch.where(accept, energy, self._energy)
        self.accepted = float(chance.mean())
