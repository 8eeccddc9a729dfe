"""Control variates: minibatch gradients corrected by the full-data gradient at an anchor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.evaluation import Evaluation
from pyro_scale.core.layout import Layout
from pyro_scale.core.rows import Arguments
from pyro_scale.curvature.observations import Exact
from pyro_scale.model import derivatives
from pyro_scale.model.log_posterior import LogPosterior

Params = dict[str, Tensor]


@dataclass(frozen=True)
class AnchorCurvature:
    """The generalized Gauss-Newton matrix of the likelihood at an anchor (a fixed vector of params,
    usually near the mode).

    Attributes:
        total: the matrix, summed over all N rows, in nats, `[D, D]`.
        observed: the observed sites that the matrix is computed from, to compute the matrix of a
            batch.
    """

    total: Tensor
    observed: tuple[Exact, ...]


@dataclass(frozen=True)
class ControlVariates:
    """A log posterior whose gradient is the full-data gradient at an anchor a, plus the difference
    of the batch's gradients (Baker et al. 2019; Nagapetyan et al. 2017):

        g(theta) = G(a) + g_batch(theta) - g_batch(a)

    It is unbiased, like the batch's gradient.  Where chains stay within a distance of order N^-1/2
    of the anchor, its variance is smaller by a factor of order N.  It costs two gradients of a
    batch.  The log joint is the batch's estimate, without correction.

    With a curvature C of the likelihood, the batch's curvature is exchanged for that of all rows:

        g(theta) = G(a) + g_batch(theta) - g_batch(a) + (N/B C_batch - C) (theta - a)

    This is unbiased, too, for any C that is a sum over rows.  The noise that remains is of second
    order in theta - a.  That matters where few rows inform an element, such as a group of a
    hierarchy.  It costs four gradients of a batch.

    Attributes:
        log_posterior: the log posterior whose gradient is estimated.
        anchor: the anchor a: unconstrained values of all latent sites.
        gradient: G(a), the gradient of the log joint of all rows at the anchor, by site.
        curvature: the likelihood's curvature C at the anchor; None for the first formula.
    """

    log_posterior: LogPosterior
    anchor: Params
    gradient: Params
    curvature: AnchorCurvature | None = None

    @property
    def num_data(self) -> int:
        """N, the number of rows in the data."""
        return self.log_posterior.num_data

    @property
    def order(self) -> int:
        """The power of the distance to the anchor with which the gradient's remaining minibatch
        noise (its sd) grows: 1 without the curvature, 2 with it."""
        return 1 if self.curvature is None else 2

    @property
    def gradients_a_row(self) -> int:
        """The cost of one call of `grad`, as a number of gradients of the log posterior on the same
        batch: 2, or 4 with the curvature.
        """
        return 2 * self.order

    def grad(
        self, params: Mapping[str, Tensor], batch: Arguments, indices: Tensor | None = None
    ) -> tuple[Params, Evaluation]:
        """(The corrected gradient of the log joint, a dict by site, in nats and not divided by N;
        the model's evaluation on the batch: log likelihoods of its rows and the log prior).

        Args:
            params: unconstrained values of all latent sites.
            batch: the model's arguments.
            indices: numbers of the rows to take, for a model that subsamples by itself.
        """
        return self._correct(self.log_posterior.grad, params, batch, indices)

    def plain_grad(
        self, params: Mapping[str, Tensor], batch: Arguments, indices: Tensor | None = None
    ) -> tuple[Params, Evaluation]:
        """The corrected gradient of the log joint and the model's evaluation, as `grad` returns
        them; computed by `torch.autograd`, for models that `torch.func` does not support.

        Args:
            params: unconstrained values of all latent sites.
            batch: the model's arguments.
            indices: numbers of the rows to take, for a model that subsamples by itself.
        """
        return self._correct(self.log_posterior.plain_grad, params, batch, indices)

    def _correct(
        self, grad: Any, params: Mapping[str, Tensor], batch: Arguments, indices: Tensor | None
    ) -> tuple[Params, Evaluation]:
        slope, evaluation = grad(params, batch, indices)
        at_anchor, _ = grad(self.anchor, batch, indices)
        corrected = {n: slope[n] - at_anchor[n] + self.gradient[n] for n in slope}
        if self.curvature is None:
            return corrected, evaluation
        layout = Layout.from_tensors(self.anchor)
        away = {name: params[name] - self.anchor[name] for name in self.anchor}
        moved, pull_back = self._linearize(away, batch, indices)
        of_batch = pull_back(moved)[0]
        of_all = layout.unflatten(self.curvature.total @ layout.flatten(away))
        scale = self.num_data / self.log_posterior.batch_size(rows.as_arguments(batch))
        return {n: corrected[n] + scale * of_batch[n] - of_all[n] for n in slope}, evaluation

    def row_gradients(
        self, params: Mapping[str, Tensor], batch: Arguments, indices: Tensor | None = None
    ) -> Params:
        """The gradient of each row's log likelihood minus the row's control variate (its gradient
        at the anchor, and with `curvature` also the linear term): a dict by site, `[B, *shape]`.
        Arguments as for `grad`.

        The variance of these over rows determines the minibatch noise of `grad`.
        """
        slopes = self.log_posterior.row_gradients(params, batch, indices)
        at_anchor = self.log_posterior.row_gradients(self.anchor, batch, indices)
        left = {name: slopes[name] - at_anchor[name] for name in slopes}
        if self.curvature is None:
            return left
        away = {name: params[name] - self.anchor[name] for name in self.anchor}
        moved, _ = self._linearize(away, batch, indices)

        def along(params: Mapping[str, Tensor]) -> Tensor:
            outputs, _ = self._outputs(params, batch, indices)
            return sum(
                ((o * m).sum(1) for o, m in zip(outputs, moved, strict=True)), torch.zeros(())
            )

        of_rows = derivatives.row_gradients(along, self.anchor)
        return {name: left[name] + of_rows[name] for name in left}

    def _linearize(
        self, away: Params, batch: Arguments, indices: Tensor | None
    ) -> tuple[list[Tensor], Any]:
        """Products with the Jacobian J of a batch's outputs at the anchor.

        Args:
            away: a step v from the anchor, by site.
            batch: the model's arguments.
            indices: numbers of the rows to take, for a model that subsamples by itself.

        Returns:
            (F J v with the Fisher information F, `[B, K]` for each observed site; the function
            u -> (J' u by site,)).
        """
        assert self.curvature is not None

        def outputs(params: Params) -> tuple[list[Tensor], list[Tensor]]:
            return self._outputs(params, batch, indices)

        with torch.no_grad():
            forwards: Any = torch.func.jvp(outputs, (self.anchor,), (away,), has_aux=True)
            backwards: Any = torch.func.vjp(outputs, self.anchor, has_aux=True)
            _, moved, information = forwards
            observed = zip(self.curvature.observed, moved, information, strict=True)
            return [o.times(m[..., None], f)[..., 0] for o, m, f in observed], backwards[1]

    def _outputs(
        self, params: Mapping[str, Tensor], batch: Arguments, indices: Tensor | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """(A list with the outputs of each observed site, `[B, K]` for B rows of the batch: the K
        numbers through which the site's likelihood depends on the params; a list with the numbers
        from which the Fisher information in these outputs is computed, `[B, ...]`).
        """
        assert self.curvature is not None
        sites = self.log_posterior.run(params, rows.as_arguments(batch), indices).sites
        observed = [obs.of_rows(sites) for obs in self.curvature.observed]
        outputs = [obs.outputs(sites, obs.row_values) for obs in observed]
        return outputs, [obs.row_values.detach() for obs in observed]
