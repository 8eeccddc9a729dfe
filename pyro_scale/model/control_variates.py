"""Control variates: less noise in minibatch gradients, by the gradient of all rows at an anchor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.layout import Layout
from pyro_scale.model import derivatives
from pyro_scale.model.curvature.observations import Exact
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.model.scaling import Evaluation

Params = dict[str, Tensor]


@dataclass(frozen=True)
class AnchorCurvature:
    """The generalized Gauss-Newton matrix of the likelihood at an anchor.

    Attributes:
        total: the sum over all rows, in nats, `[D, D]`.
        observed: the sites whose Fisher information it consists of, row by row.
    """

    total: Tensor
    observed: tuple[Exact, ...]


@dataclass(frozen=True)
class ControlVariates:
    """A log posterior whose gradient is that of all rows at an anchor a, plus the batch's
    difference from there (Baker et al. 2019; Nagapetyan et al. 2017):

        g(theta) = G(a) + g_batch(theta) - g_batch(a)

    It is unbiased, like the batch's gradient. Where chains stay near the anchor, at a distance of
    order N^-1/2, its variance is smaller by a factor of order N. It takes two gradients of a
    batch. The log joint is the batch's estimate, as without control variates.

    With a curvature C of the likelihood, the batch's part of C is replaced by all of C:

        g(theta) = G(a) + g_batch(theta) - g_batch(a) + (N/B C_batch - C) (theta - a)

    This is unbiased for every C that is the sum of its rows' parts. The remaining noise is of
    second order in theta - a. That matters where few rows depend on an element, such as those of
    one group of a hierarchy. It takes as long as four gradients of a batch.

    Attributes:
        log_posterior: the target.
        anchor: unconstrained params.
        gradient: of the log joint of all rows at the anchor.
        curvature: of the likelihood at the anchor; None for the first form.
    """

    log_posterior: LogPosterior
    anchor: Params
    gradient: Params
    curvature: AnchorCurvature | None = None

    @property
    def num_data(self) -> int:
        """N."""
        return self.log_posterior.num_data

    @property
    def order(self) -> int:
        """The power of the distance to the anchor with which the remaining noise grows: 1 or 2."""
        return 1 if self.curvature is None else 2

    @property
    def gradients_a_row(self) -> int:
        """The number of gradients that each row of a batch takes."""
        return 2 * self.order

    def grad(
        self, params: Mapping[str, Tensor], batch: Any, indices: Tensor | None = None
    ) -> tuple[Params, Evaluation]:
        """(The gradient by site, the batch's evaluation), as `LogPosterior.grad`."""
        return self._correct(self.log_posterior.grad, params, batch, indices)

    def plain_grad(
        self, params: Mapping[str, Tensor], batch: Any, indices: Tensor | None = None
    ) -> tuple[Params, Evaluation]:
        """As `grad`, by `torch.autograd`, like `LogPosterior.plain_grad`."""
        return self._correct(self.log_posterior.plain_grad, params, batch, indices)

    def _correct(
        self, grad: Any, params: Mapping[str, Tensor], batch: Any, indices: Tensor | None
    ) -> tuple[Params, Evaluation]:
        by_site, evaluation = grad(params, batch, indices)
        at_anchor, _ = grad(self.anchor, batch, indices)
        corrected = {n: by_site[n] - at_anchor[n] + self.gradient[n] for n in by_site}
        if self.curvature is None:
            return corrected, evaluation
        layout = Layout.of(self.anchor)
        offset = {name: params[name] - self.anchor[name] for name in self.anchor}
        products, pull_back = self._linearize(offset, batch, indices)
        of_batch = pull_back(products)[0]
        of_all = layout.unflatten(self.curvature.total @ layout.flatten(offset))
        scale = self.num_data / self.log_posterior.batch_size(rows.as_arguments(batch))
        return {n: corrected[n] + scale * of_batch[n] - of_all[n] for n in by_site}, evaluation

    def row_gradients(
        self, params: Mapping[str, Tensor], batch: Any, indices: Tensor | None = None
    ) -> Params:
        """Each row's gradient minus its control variate, by site, `[B, ...]`: the noise of a batch
        is that of these."""
        by_site = self.log_posterior.row_gradients(params, batch, indices)
        at_anchor = self.log_posterior.row_gradients(self.anchor, batch, indices)
        differences = {name: by_site[name] - at_anchor[name] for name in by_site}
        if self.curvature is None:
            return differences
        offset = {name: params[name] - self.anchor[name] for name in self.anchor}
        products, _ = self._linearize(offset, batch, indices)

        def weighted_outputs(params: Mapping[str, Tensor]) -> Tensor:
            outputs, _ = self._outputs(params, batch, indices)
            pairs = zip(outputs, products, strict=True)
            return sum(((output * w).sum(1) for output, w in pairs), torch.zeros(()))

        of_rows = derivatives.row_gradients(weighted_outputs, self.anchor)
        return {name: differences[name] + of_rows[name] for name in differences}

    def _linearize(
        self, offset: Params, batch: Any, indices: Tensor | None
    ) -> tuple[list[Tensor], Any]:
        """(F J v of each site's rows, for the offset v from the anchor; the map w -> J' w)."""
        assert self.curvature is not None

        def outputs(params: Params) -> tuple[list[Tensor], list[Tensor]]:
            return self._outputs(params, batch, indices)

        with torch.no_grad():
            forwards: Any = torch.func.jvp(outputs, (self.anchor,), (offset,), has_aux=True)
            backwards: Any = torch.func.vjp(outputs, self.anchor, has_aux=True)
            _, changes, information = forwards
            sites = zip(self.curvature.observed, changes, information, strict=True)
            return [o.times(v[..., None], f)[..., 0] for o, v, f in sites], backwards[1]

    def _outputs(
        self, params: Mapping[str, Tensor], batch: Any, indices: Tensor | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """(The outputs of each site's rows `[B, K]`, their Fisher information)."""
        assert self.curvature is not None
        sites = self.log_posterior.run(params, rows.as_arguments(batch), indices).sites
        observed = [site.of_rows(sites) for site in self.curvature.observed]
        outputs = [site.outputs(sites, site.known) for site in observed]
        return outputs, [site.known.detach() for site in observed]
