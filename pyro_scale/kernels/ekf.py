"""The extended Kalman filter in information form: batches update a mean and a precision."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_scale.core.gaussian import Dense, Diagonal, Gaussian


class EKFState(NamedTuple):
    """State of an extended Kalman filter: the Gaussian approximation of the posterior after the
    data so far.

    Attributes:
        mean: mean of the Gaussian, `[D]`.
        sd: standard deviations of its elements, `[D]`.
        precision: its precision, a matrix `[D, D]` or the diagonal `[D]`.
    """

    mean: Tensor
    sd: Tensor
    precision: Tensor

    @classmethod
    def from_gaussian(cls, gaussian: Gaussian) -> EKFState:
        """The state of a filter that starts from a Gaussian, such as the prior: its mean, sds and
        precision (a diagonal for `Diagonal`, otherwise a matrix).
        """
        return cls(gaussian.mean, gaussian.variance.sqrt(), gaussian.precision)

    @property
    def gaussian(self) -> Gaussian:
        """The Gaussian with the state's mean and precision: `Diagonal` if the precision is `[D]`,
        otherwise `Dense`.
        """
        kind = Diagonal if self.precision.dim() == 1 else Dense
        return kind.from_precision(self.mean, self.precision)


def predict(state: EKFState, drift: Tensor) -> EKFState:
    """The filter's state before the next batch, if the parameters have taken a step of a random
    walk since the last batch:

    precision' = (precision^-1 + Q)^-1 = L (I + L^T Q L)^-1 L^T,    precision = L L^T

    with Q diagonal.  The last form is also accurate for large precisions.

    Args:
        state: state after the last batch.
        drift: variances of the random walk's step, the diagonal of Q, `[D]`.
    """
    precision, sd = state.precision, (state.sd.square() + drift).sqrt()
    if precision.dim() == 1:
        return EKFState(state.mean, sd, precision / (1 + drift * precision))
    eye = torch.eye(len(precision), dtype=precision.dtype, device=precision.device)
    factor = torch.linalg.cholesky(precision)
    inner = torch.linalg.cholesky(eye + factor.mT @ (drift[:, None] * factor))
    half = torch.linalg.solve_triangular(inner, factor.mT, upper=False)
    return EKFState(state.mean, sd, half.mT @ half)


def absorb(state: EKFState, gradient: Tensor, curvature: Tensor, lr: Tensor) -> EKFState:
    """The filter's state after a batch of data:

    precision' = precision + lr C,    mean' = mean + lr precision'^-1 g

    With lr = 1 this is Bayes' rule where the likelihood is Gaussian and linear (Kalman 1960;
    Ollivier 2018).

    Args:
        state: state before the batch.
        gradient: g, the gradient of the batch's log likelihood (a sum over its rows of data) at the
            mean, `[D]`.
        curvature: C, minus the Hessian of that log likelihood or an approximation, `[D, D]`, or its
            diagonal `[D]`.
        lr: factor on what the batch adds; 1 for Bayes' rule.
    """
    precision = state.precision + lr * curvature
    gaussian = state._replace(precision=precision).gaussian
    mean = state.mean + lr * gaussian.covariance_times(gradient)
    return EKFState(mean, gaussian.variance.sqrt(), precision)
