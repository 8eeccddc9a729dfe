"""A sampler's exact behavior on a Gaussian target, without sampling.

Along an eigenvector of a Gaussian of precision L a step is linear:

    x' = A x + b zeta + c n,    x = position [, momentum], zeta standard normal, n the noise of
                                the minibatch gradient

A, b and c are determined by calling the sampler's update on unit vectors; everything else follows
from them.  The leading dimension "modes" runs over eigenvectors and over step sizes to compare; k
is the number of a state's variables: 1, or 2 with a momentum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_scale.kernels.hyperparameters import Values
from pyro_scale.kernels.kernel import Kernel

#: Number of phases of an epoch, at most, at which the noise of shuffled batches is evaluated.
_PHASES = 16


@dataclass(frozen=True)
class _Linear:
    """A one-dimensional Gaussian log posterior for a sampler's step, with gradient -slope *
    position + push.

    Attributes:
        slope: precision of the Gaussian.
        push: error that is added to the gradient, the same at all positions.
        num_data: number of rows of the data; 1, so that gradients are not divided by that number.
    """

    slope: Tensor
    push: Tensor
    num_data: int = 1

    def grad(self, position: Tensor) -> tuple[Tensor, Any]:
        return self.push - self.slope * position, None


@dataclass(frozen=True)
class GaussianChain:
    """The linear maps of a sampler's step on independent one-dimensional Gaussians ("modes"), from
    which stationary covariance, autocorrelation and transients follow exactly. k is the number of
    variables of a state: 1, or 2 with a momentum.

    Attributes:
        transition: A, by which a step multiplies the state, `[modes, k, k]`.
        injected: b b', the covariance that the sampler's own normal numbers add in a step, `[modes,
            k, k]`.
        pushed: c, the change of the state caused by an error of 1 in the gradient, `[modes, k]`.
    """

    transition: Tensor
    injected: Tensor
    pushed: Tensor

    @classmethod
    def from_kernel(cls, kernel: Kernel, values: Values, precision: Tensor) -> GaussianChain:
        """A `GaussianChain` with the linear maps by which one step of a sampler moves a chain on
        one-dimensional Gaussians.

        Args:
            kernel: sampler whose step is linear in its state.
            values: hyperparameters of the step by name, the temperature divided by N, the number of
                rows of the data; 0-d or `[modes]`.
            precision: precisions of the Gaussians divided by N, `[modes]`.
        """
        zero = torch.zeros_like(precision)
        one = torch.ones_like(precision)
        origin: Any = kernel.init(zero, values, zero)
        no_noise = torch.stack([zero] * kernel.normals)

        def move(state: Any, noise: Tensor, target: _Linear) -> Tensor:
            return torch.stack(list(kernel.update(state, target, values, noise)[0]))

        no_push = _Linear(precision, zero)
        places = range(len(origin))
        units = [type(origin)(*(one if i == j else zero for j in places)) for i in places]
        columns = [move(unit, no_noise, no_push) for unit in units]
        normals = range(kernel.normals)
        kicks = [
            move(origin, torch.stack([one if i == j else zero for j in normals]), no_push)
            for i in normals
        ]
        injected = [kick[:, None] * kick for kick in kicks]
        pushed = move(origin, no_noise, _Linear(precision, one))
        # modes come last in memory, so that an entry of all modes is one vector
        maps = torch.stack(columns, 1), sum(injected[1:], start=injected[0]), pushed
        return cls(*(entries.movedim(-1, 0) for entries in maps))

    @property
    def stable(self) -> Tensor:
        """Mask `[modes]` of the Gaussians on which chains stay bounded, so that there is a
        stationary distribution: False where the step is too long.
        """
        if self.transition.shape[-1] == 2:  # Jury's conditions
            (a, b), (c, d) = _entries(self.transition)
            det = a * d - b * c
            return (det.abs() < 1) & ((a + d).abs() < 1 + det)
        finite_rows = self.transition.isfinite().all(-1).all(-1)
        # MKL may write out of bounds for NaN
        finite = torch.where(finite_rows[:, None, None], self.transition, 0)
        return finite_rows & (torch.linalg.eigvals(finite).abs().amax(-1) < 1)

    def covariance(self, gradient_noise: Tensor, epoch: int | None = None) -> Tensor:
        """The stationary covariance of the states, `[modes, k, k]`; the position's variance is
        entry [0, 0].

        Args:
            gradient_noise: variance of the minibatch gradient of the log joint divided by N, the
                number of rows of the data, `[modes]`.
            epoch: number of batches of an epoch that visits every row of data once, in which the
                errors of the gradients sum to zero; None for batches that are drawn independently.
        """
        noise = gradient_noise[:, None, None] * self.pushed[..., None] * self.pushed[:, None]
        if epoch is None:
            return _sum(self.transition, self.injected + noise)
        return _sum(self.transition, self.injected) + self._shuffled(noise, epoch)

    def _shuffled(self, noise: Tensor, epoch: int) -> Tensor:
        """The covariance that the noise of shuffled batches adds, averaged over phases of an epoch,
        `[modes, k, k]`.

        The errors n_t of an epoch's m batches have covariance V m/(m - 1) (1[s = t] - 1/m).

        Args:
            noise: covariance that an independent batch's error adds in a step, c V c', `[modes, k,
                k]`.
            epoch: m, the number of batches of an epoch.
        """
        if epoch == 1:
            return torch.zeros_like(noise)
        variance = noise * epoch / (epoch - 1)
        over_epoch, added = self._over(epoch, variance, epoch)
        start = _sum(over_epoch, added)
        phases = [int((i + 0.5) * epoch / _PHASES) for i in range(_PHASES)]
        if epoch <= _PHASES:
            phases = list(range(epoch))
        total = torch.zeros_like(noise)
        for phase in phases:
            power, added = self._over(phase, variance, epoch)
            total = total + power @ start @ power.mT + added
        return total / len(phases)

    def _over(self, steps: int, variance: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
        """(A^steps; the covariance that the errors of the first `steps` batches of an epoch have
        added by then, from a start without errors), both `[modes, k, k]`.

        Args:
            steps: number of steps since the epoch began.
            variance: covariance c V c' m/(m - 1) of one batch's error, `[modes, k, k]`.
            epoch: m, the number of batches of an epoch.
        """
        power = torch.linalg.matrix_power(self.transition, steps)
        eye = torch.eye(power.shape[-1], dtype=power.dtype)
        drift = torch.linalg.solve(eye - self.transition, eye - power)  # sum of A^j
        total = _sum(self.transition, variance)
        total = total - power @ total @ power.mT  # sum of A^j Q A^j'
        return power, total - drift @ variance @ drift.mT / epoch

    def autocorrelation_times(self, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """(Integrated autocorrelation time of the position; that of the squared position) of a
        stationary chain, in steps per independent draw, each `[modes]`: for means and for
        variances.

        Args:
            covariance: stationary covariance of the states, `[modes, k, k]`, as `covariance`
                returns it.
        """
        start = covariance[..., 0] / covariance[:, :1, 0]  # cov(x_0, position_0), over its variance
        eye = torch.eye(start.shape[-1], dtype=start.dtype)
        total = torch.linalg.solve(eye - self.transition, start)[:, 0]
        squares = _sum(self.transition, start[..., None] * start[:, None])[:, 0, 0]
        return 2 * total - 1, 2 * squares - 1

    def forgetting(self, warmup: int, steps: int) -> tuple[Tensor, Tensor]:
        """How much of its start a chain still remembers after a warm-up, without noise: (mean of
        the position, mean of the squared position), averaged over `steps` steps after `warmup`
        steps, for a start at distance 1 from the mode; each `[modes]`. A warm-up is long enough if
        both are small.
        """
        late = torch.linalg.matrix_power(self.transition, warmup)
        later = torch.linalg.matrix_power(self.transition, steps)
        eye = torch.eye(late.shape[-1], dtype=late.dtype)
        path = torch.linalg.solve(eye - self.transition, (eye - later) @ late)[:, 0, 0] / steps
        first, last = late[..., 0], (later @ late)[..., 0]
        outer = first[..., None] * first[:, None] - last[..., None] * last[:, None]
        return path, _sum(self.transition, outer)[:, 0, 0] / steps


def _sum(transition: Tensor, start: Tensor) -> Tensor:
    """The sum over t >= 0 of A^t Q A^t', `[modes, k, k]`, which solves S = A S A' + Q; NaN where
    there is no solution. A is `transition`, Q is `start`."""
    size = transition.shape[-1]
    if size == 2:
        return _sum_of_pairs(transition, start)
    eye = torch.eye(size * size, dtype=transition.dtype)
    solution, failed = torch.linalg.solve_ex(eye - _kron(transition), start.flatten(1))
    solved = (failed == 0)[:, None]  # there is no sum for a step so short that it rounds to 0
    return torch.where(solved, solution, torch.nan).view_as(start)


def _sum_of_pairs(transition: Tensor, start: Tensor) -> Tensor:
    """The sum over t >= 0 of A^t Q A^t', `[modes, 2, 2]`, for states of a position and a momentum,
    in closed form: large networks have hundreds of thousands of modes. NaN where there is no
    solution.

    By Cayley and Hamilton the sum is a combination of Q, B Q + Q B' and B Q B', with B = 1 - A.
    The formula is accurate for short steps, where B is small.

    Args:
        transition: A, `[modes, 2, 2]`.
        start: Q, symmetric, `[modes, 2, 2]`.
    """
    (a, b), (c, d) = _entries(torch.eye(2, dtype=transition.dtype) - transition)
    (p, q), (r, s) = _entries(start)
    det_b = a * d - b * c
    lost = a + d - det_b  # 1 - det A
    det = 1 - lost
    scale = lost * det_b * (2 * (1 + det) - det_b)
    start_weight = (1 + det) * lost.square() + det_b * 2 * det + scale
    side_weight = lost * (1 + det) + det * det_b
    t, u, v, w = a * p + b * r, a * q + b * s, c * p + d * r, c * q + d * s  # B Q
    sides = (2 * t, u + p * c + q * d, v + r * a + s * b, 2 * w)  # of a symmetric Q
    both = (t * a + u * b, t * c + u * d, v * a + w * b, v * c + w * d)
    terms = zip((p, q, r, s), sides, both, strict=True)
    sums = [start_weight * x - side_weight * y + (1 + det) * z for x, y, z in terms]
    total = torch.stack(sums, -1).unflatten(-1, (2, 2))
    return torch.where(scale[:, None, None] != 0, total / scale[:, None, None], torch.nan)


def _entries(matrix: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The four entries ((a, b), (c, d)) of matrices `[modes, 2, 2]`, each `[modes]`."""
    first, second = matrix.unbind(-2)
    a, b = first.unbind(-1)
    c, d = second.unbind(-1)
    return (a, b), (c, d)


def _kron(matrix: Tensor) -> Tensor:
    """The Kronecker product of each matrix `[modes, k, k]` with itself, `[modes, k^2, k^2]`."""
    size = matrix.shape[-1] ** 2
    return torch.einsum("mij,mkl->mikjl", matrix, matrix).reshape(-1, size, size)
