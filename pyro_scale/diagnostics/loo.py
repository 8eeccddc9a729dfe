"""Leave-one-out cross-validation by Pareto-smoothed importance sampling, of all rows or of some."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_scale.core.mixing import effective_draws
from pyro_scale.core.validation import as_count
from pyro_scale.core.warn import warn
from pyro_scale.curvature.chunks import chunks_of, chunks_with
from pyro_scale.data.sources import Data
from pyro_scale.diagnostics.divergence import explosion
from pyro_scale.diagnostics.policy import MIXING, WEIGHTS
from pyro_scale.errors import ApproximationWarning, ArgumentError
from pyro_scale.posterior import arviz_api, local_latents
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.posterior.predictive import (
    log_likelihood,
    log_likelihood_of_rows,
    row_log_likelihood,
)
from pyro_scale.posterior.readers import Readers, readers_of

#: Relative difference up to which sums over rows are equal: rounding of float32, and less than the
#: weights of two rows differ.
_TOL = 1e-5


@dataclass(frozen=True)
class Loo:
    """How well the model predicts rows that it has not seen, each left out in turn (PSIS-LOO).

    Attributes:
        elpd: sum over all rows of log p(row | all others), in nats.
        se: standard error of `elpd` over data sets from the same source.
        subsampling_se: standard error of `elpd` due to the choice of rows; 0 if all were evaluated.
        num_data: N, the number of rows that `elpd` sums over.
        rows: numbers of the evaluated rows among all N, `[m]`.
        pointwise: log p(row | all others) of the evaluated rows, `[m]`, in nats.
        pareto_k: shape of the tail of each row's importance weights, `[m]`; high is unreliable.
        note: a sentence on why the estimate is unreliable; empty if no cause is known.
    """

    elpd: float
    se: float
    subsampling_se: float
    num_data: int
    rows: Tensor
    pointwise: Tensor
    pareto_k: Tensor
    note: str = ""

    def __str__(self) -> str:
        extra = ""
        if len(self.rows) < self.num_data:
            extra = f", {self.subsampling_se:.1f} of it for the choice of rows"
        error = math.hypot(self.se, self.subsampling_se)
        note = f"; {self.note}" if self.note else ""
        return (
            f"elpd {self.elpd:.1f} ± {error:.1f}{extra} (PSIS-LOO, {len(self.rows)} of "
            f"{self.num_data} rows){note}"
        )


def loo(result: PosteriorDraws, data: Data, num_rows: int | None, seed: int) -> Loo:
    """PSIS-LOO (Vehtari, Gelman and Gabry 2017) of all rows, or of some drawn at random.

    With some rows, the sum over all is estimated by differences to an approximation that is cheap
    for every row, its log likelihood at the mean of the draws (Magnusson et al. 2020).

    Args:
        result: draws of a run, with equal weights.
        data: all rows.
        num_rows: rows to evaluate; None for all.
        seed: seed of the choice of rows.

    Raises:
        ArgumentError: there is no data site with a value a row, fewer than two rows, or too few
            draws.

    Warns:
        ApproximationWarning: weights of some rows have too heavy a tail.
    """
    rules = result.log_posterior.model_info.scaling.rules
    if all(rule.dim is None for rule in rules.values()):
        joint = [n for n, rule in rules.items() if rule.whole_data and rule.role == "global"]
        reason = f": site '{joint[0]}' is one joint density of all rows" if joint else ""
        raise ArgumentError(f"loo: the model has no data site with a value a row{reason}")
    draws = result.positions.shape[:2].numel()
    if draws < (least := WEIGHTS.fewest_draws):
        raise ArgumentError(f"loo: {draws} draws are too few to weigh: {least} are needed")
    if local_latents.sharing_groups(data) is not None:
        if num_rows is not None:
            raise ArgumentError(
                "num_rows: units of several groups, of unlike lengths, are not drawn: leave it out"
            )
        of_groups = list(log_likelihood(result, data).values())
        return _estimate(result, data, torch.cat(_leave_out(result, of_groups)), None, None)
    with readers_of(result, "loo", data, num_rows=num_rows, seed=seed) as readers:
        at_mean = chosen = None
        if num_rows is None:
            chunks = chunks_of(result.log_posterior, data, share=readers.share)
            parts = [row_log_likelihood(result, chunk) for chunk in chunks]
        else:
            at_mean = _log_lik_at_mean(result, data, readers)
            total = len(at_mean)
            count = min(as_count("num_rows", num_rows, least=2), total)
            source = torch.Generator().manual_seed(seed)
            chosen = torch.randperm(total, generator=source)[:count].sort().values
            pairs = chunks_with(result.log_posterior, data, chosen, readers.share)
            parts = [row_log_likelihood(result, chunk)[:, places] for chunk, places in pairs]
        left_out = torch.cat(readers.gather(_leave_out(result, parts)))
        return _estimate(result, data, left_out, chosen, at_mean)


def _log_lik_at_mean(result: PosteriorDraws, data: Data, readers: Readers) -> Tensor:
    """The log likelihood of each row at the mean of the unconstrained draws, `[N]`, in nats; rows
    are shared out among the readers."""
    total = result.positions.shape[:2].numel()
    mean = torch.stack([block.sum(0) / total for block in result.blocks()]).sum(0)
    at_mean = dataclasses.replace(result, positions=mean[None, None])
    chunks = chunks_of(result.log_posterior, data, share=readers.share)
    parts = readers.map(lambda chunk: row_log_likelihood(at_mean, chunk)[0], chunks)
    return torch.cat([part for part, _ in parts]).double().cpu()


def _leave_out(result: PosteriorDraws, parts: Sequence[Tensor]) -> list[Tensor]:
    """For each chunk of rows, a tensor `[rows, 2]`: log p(row | all other rows), in nats, and
    Pareto k of the row's importance weights.

    Args:
        result: draws of a run.
        parts: log likelihoods of the rows of each chunk, `[draws, rows]`.
    """
    if not parts:
        return []
    log_lik = torch.cat(list(parts), 1).double().cpu()
    log_weights, pareto_k = arviz_api.psis(-log_lik.T, _relative_ess(result))
    values = torch.stack([torch.logsumexp(log_weights + log_lik.T, 1), pareto_k], 1)
    return list(values.split([part.shape[1] for part in parts]))


def _relative_ess(result: PosteriorDraws) -> float:
    """The fraction of the draws that are effective, effective sample size over number of draws, at
    most 1, averaged over evenly spread elements; 1 with very few draws. Pareto smoothing needs it.
    """
    chains, draws, size = result.positions.shape
    if draws < 4 or chains * draws < 8:
        return 1.0
    every = max(1, -(-size // MIXING.elements))
    blocks = [block[:, ::every] for block in result.blocks()]
    effective = effective_draws(torch.cat(blocks).unflatten(0, (chains, draws)))
    return min(1.0, float(effective.nanmean()) / (chains * draws))


def _estimate(
    result: PosteriorDraws,
    data: Data,
    left_out: Tensor,
    chosen: Tensor | None,
    at_mean: Tensor | None,
) -> Loo:
    """The `Loo` result, with the sum over all rows estimated from the evaluated rows; warns if
    importance weights have heavy tails.

    Args:
        result: draws of a run.
        data: all rows.
        left_out: log density given the others and Pareto k of each evaluated row, `[m, 2]`.
        chosen: numbers of the evaluated rows, `[m]`; None for all.
        at_mean: log likelihood of every row at the draws' mean, `[N]`; None if all are evaluated.
    """
    pointwise, pareto_k = left_out.unbind(1)
    if chosen is None or at_mean is None:
        chosen, at_mean = torch.arange(len(pointwise)), pointwise
    total, count = len(at_mean), len(chosen)
    if total < 2:
        raise ArgumentError("loo: there is only one row: pass two or more")
    note = _warn_of_tails(result, data, pareto_k, chosen, total)
    ratio, gap = total / count, pointwise - at_mean[chosen]
    elpd = at_mean.sum() + ratio * gap.sum()
    error = total**2 * (1 - 1 / ratio) * gap.var() / count
    squares = at_mean.square().sum() + ratio * (pointwise.square() - at_mean[chosen].square()).sum()
    spread = (squares - (elpd.square() - error) / total).clamp(min=0)
    return Loo(
        elpd=float(elpd),
        se=float(spread.sqrt()),
        subsampling_se=float(error.clamp(min=0).sqrt()),
        num_data=total,
        rows=chosen,
        pointwise=pointwise,
        pareto_k=pareto_k,
        note=note,
    )


def _warn_of_tails(
    result: PosteriorDraws, data: Data, pareto_k: Tensor, chosen: Tensor, total: int
) -> str:
    """Warns if rows have importance weights with heavy tails, and returns the cause as a sentence
    for users; empty without such rows, or if the cause is not known.

    Args:
        result: draws of a run.
        data: all rows.
        pareto_k: Pareto k of each evaluated row, `[m]`.
        chosen: numbers of the evaluated rows, `[m]`.
        total: N, the number of all rows.
    """
    draws = result.positions.shape[:2].numel()
    limit = min(WEIGHTS.pareto_k, 1 - 1 / math.log10(max(draws, 11)))
    is_heavy = ~(pareto_k <= limit)  # NaN among them
    heavy = int(is_heavy.sum())
    if not heavy:
        return ""
    if exploded := explosion(result):
        warn(ApproximationWarning, exploded, code="exploded")
        return ""
    note = _explain_by_latents(result, data, chosen[is_heavy], total)
    warn(
        ApproximationWarning,
        f"LOO: the estimate may be unreliable for {heavy} of {len(pareto_k)} rows with Pareto k > "
        f"{limit:.2f}: {note or 'inspect these rows, or use a likelihood with heavier tails'}",
        code="pareto-k",
    )
    return note


def _explain_by_latents(result: PosteriorDraws, data: Data, heavy: Tensor, total: int) -> str:
    """A sentence on the cause and what to do, if most rows with heavy tails have a latent of their
    own; otherwise empty.

    Args:
        result: draws of a run.
        data: all rows.
        heavy: numbers of the rows whose weights have heavy tails.
        total: N, the number of all rows.
    """
    for name, owners in _rows_with_own_latent(result, data, total).items():
        if 2 * int(owners[heavy].sum()) > len(heavy):
            which = "each row" if owners.all() else f"each of {int(owners.sum())} rows"
            return (
                f"{which} has a latent of its own ('{name}'), of which the other rows say no more "
                "than its prior: sum it out of the likelihood first"
            )
    return ""


def _rows_with_own_latent(result: PosteriorDraws, data: Data, num_rows: int) -> dict[str, Tensor]:
    """A dict from latent sites to booleans `[N]`: whether a row of the data is the only one whose
    log likelihood depends on some element of the site, such as a row with a latent of its own.
    Sites without such rows are left out.

    Each row has a different weight w. With g the gradient of its log likelihood in an element, the
    sums over rows obey (sum of w g)^2 = (sum of g) (sum of w^2 g) if a single row has a gradient.
    Its weight is (sum of w g) / (sum of g).

    Args:
        result: draws of a run, the first of which is used.
        data: all rows.
        num_rows: N.
    """
    position = result.positions[0, 0].detach().clone().requires_grad_()
    sums = torch.zeros(3, len(position), dtype=torch.float64)
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0))
    weights = 1 + order / num_rows
    for chunk in chunks_of(result.log_posterior, data):
        with torch.enable_grad():
            log_lik = log_likelihood_of_rows(result, result.layout.unflatten(position), chunk)
        of_chunk, weights = weights[: len(log_lik)].to(log_lik), weights[len(log_lik) :]
        for power in range(3 if log_lik.requires_grad else 0):
            total = log_lik @ of_chunk**power
            (gradient,) = torch.autograd.grad(total, position, retain_graph=True)
            sums[power] += gradient.double().cpu()
    plain, first, second = sums
    is_single = (plain != 0) & ((plain * second - first**2).abs() <= _TOL * first**2)
    ranks = ((first / plain - 1) * num_rows).round().nan_to_num(0).long().clamp(0, num_rows - 1)
    rows = order.argsort()[ranks]
    owners = {}
    for name in result.log_posterior.latents:
        places = result.layout.places([name])
        of_site = torch.zeros(num_rows, dtype=torch.bool)
        of_site[rows[places][is_single[places]]] = True
        if of_site.any():
            owners[name] = of_site
    return owners
