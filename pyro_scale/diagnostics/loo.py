"""Leave-one-out cross-validation by Pareto-smoothed importance sampling, of all rows or of some."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_scale.core.validation import as_count
from pyro_scale.core.warn import warn
from pyro_scale.curvature.chunks import chunks_of, chunks_with
from pyro_scale.data.sources import Data
from pyro_scale.diagnostics.divergence import explosion
from pyro_scale.diagnostics.own_latents import own_latents
from pyro_scale.diagnostics.policy import MIXING, WEIGHTS
from pyro_scale.errors import ApproximationWarning, ArgumentError
from pyro_scale.posterior import arviz_api
from pyro_scale.posterior.by_rank import Readers, readers_of
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.posterior.predictive import row_log_likelihood


@dataclass(frozen=True)
class Loo:
    """What the model predicts of rows that it has not seen, each left out in turn.

    Attributes:
        elpd: the sum over all rows of log p(row | all others), in nats.
        se: its standard error, were other data drawn from the same source.
        subsampling_se: its standard error as an estimate of the sum over all rows; 0 for all.
        num_data: N, the rows that it is a sum over.
        rows: the places of those that were evaluated, `[m]`.
        pointwise: of each of them, `[m]`, in nats.
        pareto_k: the shape of the tail of each one's weights, `[m]`.
        note: what makes it unreliable, where that is known.
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
        of = f"{len(self.rows)} of {self.num_data} rows"
        extra = f", {self.subsampling_se:.1f} of it for the choice of rows" if self._is_part else ""
        error = math.hypot(self.se, self.subsampling_se)
        note = f"; {self.note}" if self.note else ""
        return f"elpd {self.elpd:.1f} ± {error:.1f}{extra} (PSIS-LOO, {of}){note}"

    @property
    def _is_part(self) -> bool:
        return len(self.rows) < self.num_data


def loo(result: PosteriorDraws, data: Data, num_rows: int | None, seed: int) -> Loo:
    """PSIS-LOO (Vehtari, Gelman and Gabry 2017) of all rows, or of some drawn at random.

    Of some, the sum over all is estimated by the difference to a cheap approximation of every
    row, its log density at the mean of the draws (Magnusson et al. 2020).

    Args:
        result: of a run, its draws counting alike.
        data: all rows.
        num_rows: how many to evaluate; all of them by default.
        seed: which they are.

    Raises:
        ArgumentError: no data site, one row, too few draws.

    Warns:
        UserWarning: some rows' weights have too heavy a tail.
    """
    rules = result.log_posterior.model_info.scaling.rules
    if all(rule.dim is None for rule in rules.values()):
        joint = [n for n, rule in rules.items() if rule.whole_data and rule.role == "global"]
        why = f": site '{joint[0]}' is one joint density of all rows" if joint else ""
        raise ArgumentError(f"loo: the model has no data site with a value a row{why}")
    draws = result.positions.shape[:2].numel()
    if draws < (least := WEIGHTS.fewest_draws):
        raise ArgumentError(f"loo: {draws} draws are too few to weigh: {least} are needed")
    with readers_of(result, "loo", data, num_rows=num_rows, seed=seed) as readers:
        near = chosen = None
        if num_rows is None:
            chunks = chunks_of(result.log_posterior, data, share=readers.share)
            parts = [row_log_likelihood(result, chunk) for chunk in chunks]
        else:
            near = _at_the_mean(result, data, readers)
            total = len(near)
            count = min(as_count("num_rows", num_rows, least=2), total)
            source = torch.Generator().manual_seed(seed)
            chosen = torch.randperm(total, generator=source)[:count].sort().values
            some = chunks_with(result.log_posterior, data, chosen, readers.share)
            parts = [row_log_likelihood(result, chunk)[:, places] for chunk, places in some]
        every = torch.cat(readers.gather(_left_out(result, parts)))
        return _estimate(result, data, every, chosen, near)


def _estimate(
    result: PosteriorDraws, data: Data, every: Tensor, chosen: Tensor | None, near: Tensor | None
) -> Loo:
    """The estimate from chosen rows' log densities and tails, `[m, 2]`; of all by default."""
    pointwise, pareto_k = every.unbind(1)
    if chosen is None:
        chosen = torch.arange(len(pointwise))
    if near is None:
        near = pointwise
    total, count = len(near), len(chosen)
    if total < 2:
        raise ArgumentError("loo: there is only one row: pass two or more")
    note = _warn_of_tails(result, data, pareto_k, chosen, total)
    ratio, gap = total / count, pointwise - near[chosen]
    elpd = near.sum() + ratio * gap.sum()
    error = total**2 * (1 - 1 / ratio) * gap.var() / count
    squares = near.square().sum() + ratio * (pointwise.square() - near[chosen].square()).sum()
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


def _left_out(result: PosteriorDraws, parts: Sequence[Tensor]) -> list[Tensor]:
    """Each row's log density given the others and the shape of its weights' tail, `[rows, 2]`,
    from log likelihoods of some rows after others, `[draws, rows]`."""
    if not parts:
        return []
    log_lik = torch.cat(list(parts), 1).double().cpu()
    log_weights, pareto_k = arviz_api.psis(-log_lik.T, _relative_ess(result))
    values = torch.stack([torch.logsumexp(log_weights + log_lik.T, 1), pareto_k], 1)
    return list(values.split([part.shape[1] for part in parts]))


def _warn_of_tails(
    result: PosteriorDraws, data: Data, pareto_k: Tensor, chosen: Tensor, total: int
) -> str:
    """Warns of rows with heavy-tailed weights (Pareto k). Returns the cause as a sentence for the
    user, "" where it is not known."""
    draws = result.positions.shape[:2].numel()
    most = min(WEIGHTS.pareto_k, 1 - 1 / math.log10(max(draws, 11)))
    is_heavy = ~(pareto_k <= most)  # NaN among them
    heavy = int(is_heavy.sum())
    if not heavy:
        return ""
    exploded = explosion(result)
    if exploded:
        warn(ApproximationWarning, exploded, code="exploded")
        return ""
    note = _own_latents(result, data, chosen[is_heavy], total)
    warn(
        ApproximationWarning,
        f"LOO: the estimate may be unreliable for {heavy} of {len(pareto_k)} rows with Pareto k > "
        f"{most:.2f}: {note or 'inspect these rows, or use a likelihood with heavier tails'}",
        code="pareto-k",
    )
    return note


def _own_latents(result: PosteriorDraws, data: Data, heavy: Tensor, total: int) -> str:
    """What to do where most of some rows have a latent of their own, else nothing."""
    for name, is_own in own_latents(result, data, total).items():
        count = int(is_own[heavy].sum())
        if 2 * count > len(heavy):
            which = "each row" if is_own.all() else f"each of {int(is_own.sum())} rows"
            return (
                f"{which} has a latent of its own ('{name}'), of which the other rows say no more "
                "than its prior: sum it out of the likelihood first"
            )
    return ""


def _relative_ess(result: PosteriorDraws) -> float:
    """Draws' worth in independent ones, as a part of their number: the mean over elements."""
    chains, draws, size = result.positions.shape
    every = max(1, -(-size // MIXING.elements))
    if draws < 4 or chains * draws < 8:
        return 1.0
    import xarray

    blocks = [block[:, ::every] for block in result.blocks()]
    chosen = torch.cat(blocks).unflatten(0, (chains, draws)).double().numpy()
    draws_of = xarray.Dataset({"x": (("chain", "draw", "element"), chosen)})
    ess = arviz_api.ess(draws_of, method="mean")
    return min(1.0, float(ess["x"].mean()) / (chains * draws))


def _at_the_mean(result: PosteriorDraws, data: Data, readers: Readers) -> Tensor:
    """Each row's log likelihood at the mean of the unconstrained draws, `[N]`."""
    total = result.positions.shape[:2].numel()
    mean = torch.stack([block.sum(0) / total for block in result.blocks()]).sum(0)
    there = dataclasses.replace(result, positions=mean[None, None])
    chunks = chunks_of(result.log_posterior, data, share=readers.share)
    parts = readers.map(lambda chunk: row_log_likelihood(there, chunk)[0], chunks)
    return torch.cat([part for part, _ in parts]).double().cpu()
