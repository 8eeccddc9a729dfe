"""The value of a log joint density on a batch."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Evaluation(NamedTuple):
    """The log joint density estimated from one batch of B rows, in nats; totals over all N rows,
    not per datum.

    Attributes:
        log_joint: estimate of the log joint density, `log_prior + N/B * log_lik.sum()`, a scalar.
        log_prior: the part that is counted once, a scalar: priors, Jacobian, global factors and
            observed sites outside the data's plate.
        log_lik: each row's log likelihood, `[B]`, summed over observed sites, not multiplied by
            N/B.
    """

    log_joint: Tensor
    log_prior: Tensor
    log_lik: Tensor
