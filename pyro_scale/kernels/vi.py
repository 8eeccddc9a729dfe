"""Gaussian variational inference by reparameterized gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pyro_scale.core.evaluation import Evaluation
from pyro_scale.kernels.hyperparameters import Hyper, Values
from pyro_scale.kernels.kernel import Target
from pyro_scale.kernels.optimizer import Optimizing, ascend, init_optimizer


class VIState(NamedTuple):
    """State of Gaussian variational inference.

    Attributes:
        position: mean of the Gaussian, `[D]`.
        spread: for `MeanField`, the logs of the Gaussian's sds, `[D]`; for `FullRank`, a lower
            Cholesky factor of its covariance, `[D, D]`, with the logs of the diagonal on the
            diagonal.
        optimizer: state of the optimizer.
    """

    position: Tensor
    spread: Tensor
    optimizer: Any


@dataclass(frozen=True, kw_only=True)
class VI(Optimizing):
    """Base of Gaussian variational inference: ascends the evidence lower bound of q = N(mu, S) (the
    paper's equation 8), divided by N, the number of rows of the data:

        E_q[log joint] / N + T H[q],        theta = mu + S^1/2 eps,    eps standard normal

    with T the temperature divided by N and H the entropy, by gradients through theta (Rezende et
    al. 2014). The entropy's gradient is exact. "Sticking the landing" (Roeder et al. 2017) replaces
    it by -T d log q(theta) / d theta, through theta, which has the same mean, and no variance if q
    is the posterior.

    Args:
        optimizer: optimizer that minimizes the negative bound divided by N.
        temperature: 1 approximates the posterior; below 1, q is narrower.
        num_particles: number of draws of q per step.
        sticking_the_landing: whether to use that estimator of the entropy's gradient.
        init_scale: sd of q at the start, for every unconstrained element.
    """

    temperature: Hyper = 1.0
    num_particles: int = 1
    sticking_the_landing: bool = False
    init_scale: float = 0.1

    settings: ClassVar[tuple[str, ...]] = (
        "optimizer",
        "num_particles",
        "sticking_the_landing",
        "init_scale",
    )

    @property
    def normals(self) -> int:
        """Number of standard-normal vectors `[D]` that one step uses: one for each draw of q."""
        return self.num_particles

    def init(self, position: Tensor, values: Values, noise: Tensor) -> VIState:
        spread = self.init_spread(position)
        optimizer_state = init_optimizer(self.optimizer_at(values), [position, spread])
        return VIState(position, spread, optimizer_state)

    def update(
        self, state: VIState, target: Target, values: Values, noise: Tensor
    ) -> tuple[VIState, Evaluation]:
        mean, spread, optimizer_state = state
        is_random = torch.as_tensor(values["temperature"] > 0, device=mean.device)  # not points
        slope, widening = torch.zeros_like(mean), torch.zeros_like(spread)
        log_joint: Tensor | float = 0.0
        for eps in noise:
            gradient, evaluation = target.grad(mean + is_random * self.displace(spread, eps))
            if self.sticking_the_landing:
                gradient = gradient + values["temperature"] * self.score(spread, eps)
            slope = slope + gradient
            widening = widening + self.pull_back(spread, is_random * gradient, eps)
            log_joint = log_joint + evaluation.log_joint
        slope, widening = slope / len(noise), widening / len(noise)
        temperature = values["temperature"].to(mean.dtype).expand_as(mean)
        if not self.sticking_the_landing:
            widening = widening + self.from_log_sds(temperature, spread)
        bound = entropies(values["temperature"], self.log_sds(spread)).sum() * target.num_data
        bound = bound + log_joint / len(noise)
        (mean, spread), optimizer_state = ascend(
            self.optimizer_at(values), [slope, widening], optimizer_state, [mean, spread]
        )
        return VIState(mean, spread, optimizer_state), evaluation._replace(log_joint=bound)

    def init_spread(self, position: Tensor) -> Tensor:
        """The spread of the Gaussian (see `VIState`) at the start, with the sd `init_scale` for
        every element: log sds `[D]`, or the covariance's Cholesky factor `[D, D]` with the logs of
        its diagonal on the diagonal.

        Args:
            position: mean of the Gaussian, `[D]`.
        """
        raise NotImplementedError

    def displace(self, spread: Tensor, eps: Tensor) -> Tensor:
        """A draw of the Gaussian q minus its mean, theta - mu, `[D]`: S^1/2 eps, with S the
        covariance.

        Args:
            spread: logs of the sds `[D]`, or the covariance's Cholesky factor `[D, D]` with the
                logs of its diagonal on the diagonal.
            eps: standard normal numbers, `[D]`.
        """
        raise NotImplementedError

    def score(self, spread: Tensor, eps: Tensor) -> Tensor:
        """Minus the gradient with respect to theta of the Gaussian's log density, -d log q / d
        theta, `[D]`, at the draw theta that `eps` gives.

        Args:
            spread: logs of the sds `[D]`, or the covariance's Cholesky factor `[D, D]` with the
                logs of its diagonal on the diagonal.
            eps: standard normal numbers, `[D]`.
        """
        raise NotImplementedError

    def pull_back(self, spread: Tensor, gradient: Tensor, eps: Tensor) -> Tensor:
        """The gradient with respect to the Gaussian's spread, a tensor of the spread's shape, from
        the gradient with respect to a draw theta: the chain rule through theta = mu + S^1/2 eps.

        Args:
            spread: logs of the sds `[D]`, or the covariance's Cholesky factor `[D, D]` with the
                logs of its diagonal on the diagonal.
            gradient: gradient with respect to the draw theta, `[D]`.
            eps: standard normal numbers that theta was drawn from, `[D]`.
        """
        raise NotImplementedError

    def from_log_sds(self, values: Tensor, spread: Tensor) -> Tensor:
        """The gradient with respect to the Gaussian's spread, a tensor of the spread's shape, of a
        function of `log_sds(spread)`, from the gradient with respect to these. For the entropy,
        which depends on the log sds alone.

        Args:
            values: gradient with respect to the log sds (see `log_sds`), `[D]`.
            spread: logs of the sds `[D]`, or the covariance's Cholesky factor `[D, D]` with the
                logs of its diagonal on the diagonal.
        """
        raise NotImplementedError

    def log_sds(self, spread: Tensor) -> Tensor:
        """The logs of the sds for `MeanField`, of the diagonal of the covariance's Cholesky factor
        for `FullRank`, `[D]`: their sum is the Gaussian's entropy up to a constant.
        """
        raise NotImplementedError


def entropies(temperature: Tensor, log_sds: Tensor) -> Tensor:
    """The terms of T H[q] for each element, in nats, `[D]`, whose sum is the temperature T times
    the entropy of the Gaussian q; 0 for elements at temperature 0.

    Args:
        temperature: T, the temperature divided by N, the number of rows of the data, 0-d or `[D]`.
        log_sds: logs of the diagonal of a factor of q's covariance, `[D]`.
    """
    entropy = torch.where(temperature > 0, log_sds, 0) + (1 + math.log(2 * math.pi)) / 2
    return temperature * entropy


class MeanField(VI):
    """Variational inference by a Gaussian with independent elements: theta = mu + sd eps, with eps
    standard normal."""

    def init_spread(self, position: Tensor) -> Tensor:
        return torch.full_like(position, math.log(self.init_scale))

    def displace(self, spread: Tensor, eps: Tensor) -> Tensor:
        return torch.exp(spread) * eps

    def score(self, spread: Tensor, eps: Tensor) -> Tensor:
        return eps * torch.exp(-spread)

    def pull_back(self, spread: Tensor, gradient: Tensor, eps: Tensor) -> Tensor:
        return gradient * eps * torch.exp(spread)

    def from_log_sds(self, values: Tensor, spread: Tensor) -> Tensor:
        return values

    def log_sds(self, spread: Tensor) -> Tensor:
        return spread


class FullRank(VI):
    """Variational inference by a Gaussian with correlated elements: theta = mu + L eps, with L
    lower triangular and eps standard normal."""

    def init_spread(self, position: Tensor) -> Tensor:
        return torch.diag(torch.full_like(position, math.log(self.init_scale)))

    def displace(self, spread: Tensor, eps: Tensor) -> Tensor:
        return self.factor(spread) @ eps

    def score(self, spread: Tensor, eps: Tensor) -> Tensor:
        factor = self.factor(spread)
        return torch.linalg.solve_triangular(factor.mT, eps[:, None], upper=True)[:, 0]

    def pull_back(self, spread: Tensor, gradient: Tensor, eps: Tensor) -> Tensor:
        diagonal = gradient * eps * torch.exp(spread.diagonal())
        return torch.outer(gradient, eps).tril(-1) + torch.diag(diagonal)

    def from_log_sds(self, values: Tensor, spread: Tensor) -> Tensor:
        return torch.diag(values)

    def log_sds(self, spread: Tensor) -> Tensor:
        return spread.diagonal()

    @staticmethod
    def factor(spread: Tensor) -> Tensor:
        """The lower triangular factor L of the covariance, `[D, D]`, from the spread, which has the
        logs of L's diagonal on its diagonal."""
        return spread.tril(-1) + torch.diag(torch.exp(spread.diagonal()))
