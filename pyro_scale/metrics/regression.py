"""Scores of predictive densities and means: log predictive density and RMSE."""

from __future__ import annotations

import math

from torch import Tensor

from pyro_scale.errors import ArgumentError
from pyro_scale.metrics import checks


def log_predictive_density(log_lik: Tensor) -> Tensor:
    """The log predictive density of each row: the log of its mean likelihood over draws.

    On the data of the fit it is too high: pass held-out rows, or use `loo()`.

    Args:
        log_lik: log likelihoods of rows at draws, `[draws, rows]`, in nats, as `log_likelihood`
            returns them.

    Returns:
        Log densities `[rows]`, in nats; the mean is the usual score of held-out rows.

    Raises:
        ArgumentError: no draws.

    Examples:
        >>> import torch, pyro_scale as ps
        >>> ps.metrics.log_predictive_density(torch.tensor([[0.2, 1.0], [0.4, 1.0]]).log()).exp()
        tensor([0.3000, 1.0000])
    """
    checks.floating(log_lik=log_lik)
    if log_lik.dim() == 0 or len(log_lik) == 0:
        raise ArgumentError(
            f"log_lik has shape {checks.shape(log_lik)}: pass [draws, rows], of at least one draw"
        )
    return log_lik.logsumexp(0) - math.log(len(log_lik))


def rmse(mean: Tensor, y: Tensor) -> Tensor:
    """The root mean squared error of predictions.

    Args:
        mean: posterior predictive mean, `[rows]` or with more dimensions.
        y: observations, of the same shape.

    Returns:
        A scalar, in the units of y.

    Raises:
        ArgumentError: different shapes, or no rows.

    Examples:
        >>> import torch, pyro_scale as ps
        >>> ps.metrics.rmse(torch.tensor([1.0, 2.0]), torch.tensor([4.0, 6.0]))
        tensor(3.5355)
    """
    checks.floating(mean=mean, y=y)
    # [rows, 1] and [rows] would broadcast to all pairs of rows
    if mean.shape != y.shape or y.numel() == 0:
        raise ArgumentError(
            f"mean has shape {checks.shape(mean)} and y {checks.shape(y)}: pass the same for both, "
            "of at least one row, draws.mean(0) of draws"
        )
    return (mean - y).square().mean().sqrt()
