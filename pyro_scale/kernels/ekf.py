"""The extended Kalman filter in information form: a mean and a precision that absorb batches."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class EKFState(NamedTuple):
    """The Gaussian's mean [D], and its precision, [D, D] or the diagonal [D]."""

    mean: Tensor
    precision: Tensor


def predict(state: EKFState, transition_sd: float) -> EKFState:
    """The state before the next batch, where the params walk at random between batches:

    precision' = (precision^-1 + q I)^-1 = L (I + q L^T L)^-1 L^T,    precision = L L^T

    with q = transition_sd^2; the last form loses nothing where q is large.
    """
    if transition_sd == 0:
        return state
    precision, noise = state.precision, transition_sd**2
    if precision.dim() == 1:
        return EKFState(state.mean, precision / (1 + noise * precision))
    eye = torch.eye(len(precision)).to(precision)
    factor = torch.linalg.cholesky(precision)
    inner = torch.linalg.cholesky(eye + noise * factor.mT @ factor)
    half = torch.linalg.solve_triangular(inner, factor.mT, upper=False)
    return EKFState(state.mean, half.mT @ half)


def absorb(state: EKFState, gradient: Tensor, curvature: Tensor, lr: float) -> EKFState:
    """The state after a batch, whose log likelihood, a sum over its rows, has this gradient [D]
    and curvature at the mean:

    precision' = precision + lr C,    mean' = mean + lr precision'^-1 g

    With lr = 1 that is Bayes' rule where the likelihood is Gaussian and linear (Kalman 1960;
    Ollivier 2018).
    """
    precision = state.precision + lr * curvature
    if precision.dim() == 1:
        return EKFState(state.mean + lr * gradient / precision, precision)
    factor = torch.linalg.cholesky(precision)
    step = torch.cholesky_solve(gradient[:, None], factor)[:, 0]
    return EKFState(state.mean + lr * step, precision)
