"""Runs a model again, on other rows, at the latent values of its first run or at shifted ones."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.exclusive import raise_if_from_handler
from pyro_scale.core.rows import Arguments
from pyro_scale.errors import PlateError, PyroScaleError, SiteError
from pyro_scale.model.classify import Probe
from pyro_scale.model.masked_latents import Kept, element_mask
from pyro_scale.model.program import Program
from pyro_scale.model.recorder import LatentShapeChanged, Recorder
from pyro_scale.model.site_checks import check_terms, first_differing_term, local_message
from pyro_scale.model.sites import free_dim
from pyro_scale.model.terms import terms_of

#: Distance of the second latent values from the first ones, in unconstrained space.
_SHIFT = 0.71
#: Distances from the first latent values at which masks of latents are compared.
_MASK_SHIFTS = 0.0, _SHIFT, -2.0, 2.0


class Rerun:
    """Runs a model again on other rows, at the latent values of its first run or at shifted ones,
    to find what depends on the rows.

    Args:
        program: the model.
        first: recorder of the model's first run.
        kept: for latents with elements that masks leave out, the elements that are params.
        shift: distance that is added to every unconstrained element.
    """

    def __init__(
        self, program: Program, first: Recorder, kept: Mapping[str, Kept], shift: float = 0.0
    ):
        self._program, self._first, self._kept, self._shift = program, first, kept, shift
        self.enum_dim = free_dim(first.sites)

    def shifted(self) -> Rerun:
        """A rerun of the same model whose latent values lie 0.71 further in unconstrained space: a
        dependence on the rows may be invisible at the first values.
        """
        return Rerun(self._program, self._first, self._kept, _SHIFT)

    def run(
        self,
        arguments: Arguments,
        indices: Mapping[str, Tensor] | None = None,
        validate: bool = False,
        moved: Mapping[str, Tensor] | None = None,
    ) -> Recorder:
        """Runs the model on a batch and returns the recorder of the run.

        Args:
            arguments: a batch, as the model's arguments.
            indices: indices of the rows to use, by the name of the plate that the model subsamples
                by itself.
            validate: whether Pyro's validation is on.
            moved: mask by latent of the elements that are moved by 1/3 in unconstrained space; None
                to move none.
        """
        latents = {
            site.name: site.unconstrained + self._shift
            for site in self._first.sites.values()
            if site.unconstrained is not None
        }
        for name, mask in (moved or {}).items():
            mask = mask.reshape(mask.shape + (1,) * (latents[name].dim() - mask.dim()))
            latents[name] = latents[name] + mask.to(latents[name]) / 3
        recorder = Recorder(
            latents=latents,
            points=self._first.points,
            indices=indices,
            enum_dim=self.enum_dim,
            kept=self._kept,
        )
        return self._program.run(arguments, recorder, validate)

    def probe_indices(
        self, arguments: Arguments, plate: str, size: int, num_data: int
    ) -> list[Probe]:
        """A list of runs on other rows, for a model that subsamples by itself: on its B rows in
        reverse order, and on half of them together with other rows. They show whether a row's log
        density depends on the other rows.

        Args:
            arguments: the whole data, as the model's arguments.
            plate: name of the plate that the model subsamples.
            size: B, rows of the subsample.
            num_data: N, rows of the whole data.
        """
        order, half = torch.arange(size), size // 2
        orders = [order.flip(0), torch.cat([order[:half], (order[half:] + size) % num_data])]
        runs = [self.run(arguments, {plate: indices}) for indices in orders]
        return [
            Probe.from_sites(run.sites, torch.where(indices < size, indices, -1))
            for run, indices in zip(runs, orders, strict=True)
        ]

    def probe_rows(self, arguments: Arguments, size: int, num_data: int | None) -> list[Probe]:
        """A list of runs of the model on parts of a batch: on its two halves (a batch of a single
        row: on the row twice), and on the batch in reverse order, which finds rows that depend on
        their place, such as `arange(len(x)) % 12`. Empty if the model runs on the whole data only
        and the batch may be that.

        Args:
            arguments: the batch, as the model's arguments.
            size: B, rows of the batch.
            num_data: N, or None if it is not known.

        Raises:
            PlateError, SiteError: the model does not run on a part of the batch.
        """
        order = torch.arange(size)
        parts = [order[: size // 2], order[size // 2 :]] if size > 1 else [order.repeat(2)]
        probes = []
        for part in parts:
            try:
                run = self.run(rows.take(arguments, _as_slice(part)))
                probes.append(Probe.from_sites(run.sites, part))
            except Exception as error:
                raise_if_from_handler(error)
                if num_data in (None, size):  # the whole data: the factor is 1 anyway
                    return []
                if isinstance(error, LatentShapeChanged):
                    raise _local_latent_error(error, size) from None
                if isinstance(error, PyroScaleError):
                    raise
                raise PlateError(
                    f"the model runs on {size} rows but not on {len(part)} of them "
                    f"({type(error).__name__}: {error}). "
                    + self._advice(arguments, part, size, num_data)
                ) from error
        if size > 1:
            backwards = order.flip(0)
            run = self.run(rows.take(arguments, backwards))
            probes.append(Probe.from_sites(run.sites, backwards))
        return probes

    def _advice(self, arguments: Arguments, part: Tensor, size: int, num_data: int | None) -> str:
        """Advice, as a sentence, for a model that fails on a part of a batch. Two more runs find
        the reason: one on copies of the part's rows that fill a whole batch, one on the batch
        twice.

        Args:
            arguments: the batch, as the model's arguments.
            part: indices in the batch of the part's rows, `[b]`.
            size: B, rows of the batch.
            num_data: N, or None if it is not known.
        """

        def runs_on(places: Tensor) -> bool:
            with contextlib.suppress(Exception):
                terms_of(self.run(rows.take(arguments, _as_slice(places))).sites)
                return True
            return False

        if len(part) < size and not runs_on(part.repeat(size // len(part) + 1)[:size]):
            return (
                f"It also fails on {size} copies of those rows, so it needs values of other rows, "
                "which a batch may not contain: compute what the model takes from the data once, "
                "from all rows, outside of the model"
            )
        if runs_on(torch.arange(size).repeat(2)):
            return (
                f"It runs on {2 * size}: write it for any number of rows, down to one, or pass the "
                "whole data (batch_size=None)"
            )
        return f"Take sizes from the batch: plate('data', {num_data}, subsample_size=len(x))"


def probe_shifted(
    rerun: Rerun, arguments: Arguments, size: int, num_data: int | None
) -> list[Probe]:
    """A list of runs of the model at a second set of latent values: on the whole batch, then on its
    parts, as `Rerun.probe_rows`. Empty if the model cannot be evaluated at these values.

    Args:
        rerun: runs the model at the first latent values.
        arguments: the batch, as the model's arguments.
        size: B, rows of the batch.
        num_data: N, or None if it is not known.
    """
    try:
        sites = rerun.shifted().run(arguments).sites
        probes = rerun.shifted().probe_rows(arguments, size, num_data)
        full = Probe.from_sites(sites, torch.arange(size))
        check_terms(full.terms)
    except Exception as error:  # the values may be impossible: then the comparison is skipped
        raise_if_from_handler(error)
        return []
    if any(probe.terms.keys() != full.terms.keys() for probe in probes):
        return []
    return [full, *probes]


def find_kept(program: Program, first: Recorder, arguments: Arguments) -> dict[str, Kept]:
    """A dict from each latent with elements that a mask leaves out to its other elements, which
    alone are params. A latent is left out of the dict if something depends on its masked elements,
    at one of several latent values.

    Args:
        program: runs the model.
        first: recorder of its first run.
        arguments: the batch of that run.

    Raises:
        SiteError: a mask depends on a latent.
    """
    latents = [site for site in first.sites.values() if site.kind == "latent"]
    element_masks = {site.name: element_mask(site) for site in latents}
    masks = {name: mask for name, mask in element_masks.items() if mask is not None}
    unused = {name: mask for name, mask in masks.items() if not bool(mask.all())}
    for shift in _MASK_SHIFTS if masks else ():
        rerun = Rerun(program, first, {}, shift)
        try:
            sites = rerun.run(arguments).sites
            terms = terms_of(sites)
        except PyroScaleError:
            raise
        except Exception:  # the values may be impossible
            continue
        for name, mask in masks.items():
            now = element_mask(sites[name])
            if now is None or now.shape != mask.shape or not torch.equal(now, mask):
                raise SiteError(
                    f"site '{name}': its mask depends on another latent, so elements come and go "
                    "with its value: sum a mixture out by hand, or keep all elements"
                )
            moved = rerun.run(arguments, moved={name: ~mask})
            if name in unused and first_differing_term(terms, terms_of(moved.sites)) is not None:
                del unused[name]
    return {name: Kept.from_mask(mask) for name, mask in unused.items()}


def _local_latent_error(error: LatentShapeChanged, size: int) -> SiteError:
    """The error to raise for a latent whose shape has changed with the batch, returned and not
    raised. If just one dimension has changed and its size was that of the batch, the error says
    that the latent has one value for every row; otherwise it is `error` itself.
    """
    pairs = zip(error.value_shape, error.site_shape, strict=False)
    follows = [n for n, m in pairs if n != m]
    if len(error.value_shape) == len(error.site_shape) and follows == [size]:
        return SiteError(local_message(error.name, "of the batch's size"), code="local-latent")
    return error


def _as_slice(part: Tensor) -> Any:
    """A slice that selects the same rows as the indices `part`, so that tensors are not copied, if
    no index is repeated (indices must be contiguous then); the indices themselves if some are
    repeated.
    """
    if len(set(part.tolist())) < len(part):
        return part
    return slice(int(part[0]), int(part[-1]) + 1)
