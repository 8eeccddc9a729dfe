"""The kernel Stein discrepancy: distance of draws from the posterior, by gradients."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_scale import metrics
from pyro_scale.core.evaluation import Evaluation
from pyro_scale.core.validation import as_count
from pyro_scale.curvature.chunks import Chunk, chunks_of, chunks_with, is_row_wise
from pyro_scale.data.sources import Data
from pyro_scale.diagnostics.divergence import explosion
from pyro_scale.errors import ArgumentError, DataError
from pyro_scale.model import derivatives
from pyro_scale.model.derivatives import Params
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.posterior.predictive import resample_equally

#: Draws that are compared by default.
_COMPARED_DRAWS = 1000


def ksd(result: PosteriorDraws, data: Data, num_samples: int | None, num_rows: int | None) -> float:
    """The squared kernel Stein discrepancy between a run's draws and the posterior, after elements
    are scaled to sd 1: about 2 d / n for n independent draws of a normal posterior of d dimensions,
    and larger if draws are not those of the posterior.

    Args:
        result: draws of a run.
        data: all rows.
        num_samples: number of draws to compare; None for all, but at most 1000.
        num_rows: number of rows, drawn at random, from which to estimate gradients; None for all.

    Raises:
        ArgumentError: chains have exploded, an element is constant, or the temperature is 0 or
            differs among draws.
    """
    temperature = _temperature(result)
    if message := explosion(result):
        raise ArgumentError(f"ksd: {message}")
    if num_samples is None:
        num_samples = min(_COMPARED_DRAWS, result.positions.shape[:2].numel())
    drawn = resample_equally(result, num_samples)
    places = drawn.layout.places(drawn.log_posterior.latents)
    draws = torch.cat(list(drawn.blocks()))[:, places].double()
    sd = draws.std(0, correction=0)
    constant = torch.nonzero(draws.amax(0) == draws.amin(0))
    if len(constant):
        site = drawn.log_posterior.layout.site_at(int(constant[0]))
        raise ArgumentError(
            f"ksd: site '{site}' has elements that are the same in all {len(draws)} draws, so they "
            "have no scale: take draws that spread"
        )
    gradients = scores(drawn, data, num_rows) / temperature
    return float(metrics.ksd(draws / sd, gradients.to(draws) * sd))


def scores(
    result: PosteriorDraws, data: Data, num_rows: int | None = None, seed: int = 0
) -> Tensor:
    """The gradient of the log joint of all rows with respect to the latents, unconstrained, at
    every draw, `[chains * draws, d]`, in nats.

    Args:
        result: draws of a run.
        data: all rows.
        num_rows: number of rows, drawn at random, from which to estimate the gradient; None for
            all.
        seed: seed of the choice of rows.
    """
    places = result.layout.places(result.log_posterior.latents)
    parts = [
        torch.cat(list(result.chunks(partial(_gradient, result, part)))).double()
        for part in _parts(result.log_posterior, data, num_rows, seed)
    ]
    return torch.stack(parts).sum(0)[:, places]


class _Part(NamedTuple):
    """A part of the log joint: the log likelihood of some rows, and a fraction of the log prior.

    Attributes:
        chunk: rows in memory.
        rows: numbers, in the chunk, of the rows that count.
        scale: factor on the log likelihood of these rows.
        share: fraction of the log prior.
    """

    chunk: Chunk
    rows: slice | Tensor
    scale: float
    share: float


def _parts(
    log_posterior: LogPosterior, data: Data, num_rows: int | None, seed: int
) -> Iterator[_Part]:
    """Yields parts of the log joint that fit into memory and add up to the log joint of all rows;
    if `num_rows` is not None, to an estimate of it from so many rows, drawn at random with `seed`.
    """
    total, read = log_posterior.num_data, 0
    count = total if num_rows is None else min(as_count("num_rows", num_rows), total)
    if count == total:
        for chunk in chunks_of(log_posterior, data):
            yield _Part(chunk, chunk.keep, 1.0, chunk.num_new / total)
            read += chunk.num_new
    elif not is_row_wise(log_posterior):
        raise ArgumentError("num_rows: the model takes all rows together; leave it out")
    else:
        chosen = torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:count]
        for chunk, places in chunks_with(log_posterior, data, chosen.sort().values):
            yield _Part(chunk, places, total / count, len(places) / count)
            read += len(places)
    if read != count:
        raise DataError(f"the data do not hold N = {total} rows: pass all of them as data=")


def _gradient(result: PosteriorDraws, part: _Part, params: Params) -> Tensor:
    """The gradient of one part of the log joint with respect to all D unconstrained params, `[D]`,
    in nats.

    Args:
        result: draws of a run, with the model.
        part: rows of the part, and its fraction of the log prior.
        params: unconstrained params of one draw, by site.
    """

    def evaluate(params: Params) -> Evaluation:
        chunk = part.chunk
        evaluation = result.log_posterior(params, chunk.arguments, chunk.indices)
        log_lik = evaluation.log_lik[part.rows].sum()
        log_joint = part.share * evaluation.log_prior + part.scale * log_lik
        return evaluation._replace(log_joint=log_joint)

    try:
        gradient, _ = derivatives.gradient(evaluate, params)
    except (RuntimeError, NotImplementedError):  # functorch refuses some autograd.Functions
        gradient, _ = derivatives.plain_gradient(evaluate, params)
    return result.layout.flatten(gradient)


def _temperature(result: PosteriorDraws) -> float:
    """The temperature of the run, which must be the same for all draws.

    Raises:
        ArgumentError: the temperature is 0, or not the same for all draws.
    """
    column = result.sample_stats.get("temperature")
    if column is None:
        temperature = float(result.attrs.get("temperature", 1.0))
    else:
        temperature = float(column.flatten()[0])
        if not bool((column == temperature).all()):
            raise ArgumentError("ksd: the draws have several temperatures, and no common density")
    if temperature == 0:
        raise ArgumentError("ksd: at temperature 0 the draws have no density")
    return temperature
