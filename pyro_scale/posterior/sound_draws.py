"""Constrained values of draws, among which chains may have broken."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from pyro_scale.posterior.draws import PosteriorDraws


def samples_of(starts: PosteriorDraws, positions: Tensor) -> dict[str, Tensor]:
    """Constrained values by site of draws `[chains, n, D]`; NaN (0 of whole numbers) of chains that
    broke, from the state on at which the model cannot be evaluated."""
    sound = torch.isfinite(positions).all(-1)

    def of_sound_ones(chains: slice, draws: slice) -> Mapping[str, Tensor]:
        here = sound[chains, draws, None]
        held = positions[chains, draws].where(here, starts.positions[0, 0])
        return dataclasses.replace(starts, positions=held).samples

    every = slice(None), slice(None)
    try:
        samples = of_sound_ones(*every)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        # at the last state of a chain that broke, or is about to: it went no further
        for chain in torch.nonzero(sound[:, 0])[:, 0].tolist():
            last = int(sound[chain].sum()) - 1
            try:
                of_sound_ones(slice(chain, chain + 1), slice(last, last + 1))
            except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
                sound[chain, last] = False
        samples = of_sound_ones(*every)
    if bool(sound.all()):
        return dict(samples)
    return {
        name: value.masked_fill(
            ~sound.reshape(*sound.shape, *(1 for _ in value.shape[2:])),
            torch.nan if value.is_floating_point() else 0,
        )
        for name, value in samples.items()
    }
