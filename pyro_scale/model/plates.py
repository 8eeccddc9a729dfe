"""What plates say about N: which plate subsamples by itself, and how many rows the data have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pyro_scale.errors import PlateError
from pyro_scale.model.sites import Site


def find_own_plate(sites: Mapping[str, Site], count: int | None) -> str | None:
    """The name of the plate that the model subsamples by itself: all rows are passed in, and the
    plate uses some of them. None if there is no such plate.

    Args:
        sites: sites of a run.
        count: number of rows passed in; None for a model without arguments that hold rows.

    Raises:
        PlateError: there are two such plates, or a plate's sizes do not match the rows.
    """
    own_plate = None
    for site in sites.values():
        if site.kind != "subsample" or site.fn.subsample_size in (None, site.fn.size):
            continue
        if count is None or count == site.fn.size:
            if own_plate is not None:
                raise PlateError(
                    f"plates '{own_plate}' and '{site.name}' both subsample by themselves; only "
                    "the data's plate may"
                )
            own_plate = site.name
        elif count != site.fn.subsample_size:
            raise PlateError(
                f"plate '{site.name}' takes {site.fn.subsample_size} of {site.fn.size} rows, but "
                f"{count} are passed in: pass all {site.fn.size} rows and let the model "
                f"subsample, or pass the batch and write plate('{site.name}', {site.fn.size}, "
                "subsample_size=len(x))"
            )
    return own_plate


def agreed_size(num_data: int | None, plate: Site) -> int:
    """N, the number of rows of the data, for a model that subsamples by itself: the full size of
    its plate, checked against the user's `num_data`.

    Args:
        num_data: N as the user passed it; None if it was left out.
        plate: the plate's site.

    Raises:
        PlateError: `num_data` is another number.
    """
    size = int(plate.fn.size)
    if num_data not in (None, size):
        raise PlateError(
            f"plate '{plate.name}' has {size} rows in all, but num_data is {num_data}: leave "
            "num_data out, or correct the plate"
        )
    return size


def data_plate_size(sites: Mapping[str, Site]) -> int:
    """N of a model without arguments: the size of the plate around its observations; 1 if there is
    none."""
    latent = {f.name for s in sites.values() if s.kind == "latent" for f in s.plates}
    observed = [s for s in sites.values() if s.kind in ("observed", "factor")]
    frames = [f for site in observed for f in site.plates if f.dim is not None]
    frames.sort(key=lambda frame: frame.name in latent)
    return int(frames[0].size) if frames else 1


def declared_size(runs: Iterable[Mapping[str, Site]]) -> int | None:
    """N as declared by a plate around the batch (full size above subsample size), in the first of
    these runs that has one; None if no plate declares N."""
    for sites in runs:
        for site in sites.values():
            for frame in site.plates:
                if frame.full_size not in (None, frame.size):
                    return int(frame.full_size)
    return None


def check_subsampling(sites: Mapping[str, Site], own_plate: str | None, batch_size: int) -> None:
    """Raises if a plate other than the data's subsamples.

    Args:
        sites: sites of a run.
        own_plate: the plate that the model subsamples by itself; None if there is none.
        batch_size: B, the allowed size of a subsample.

    Raises:
        PlateError: there is such a plate.
    """
    for site in sites.values():
        if site.kind != "subsample" or site.name == own_plate:
            continue
        num_rows = site.fn.subsample_size
        if num_rows not in (None, site.fn.size, batch_size):
            raise PlateError(
                f"plate '{site.name}' takes {num_rows} of {site.fn.size} at random; only the "
                "data's plate may subsample"
            )


def check_plate_size(
    sites: Mapping[str, Site], count: int | None, num_data: int | None, error: Exception
) -> None:
    """Raises a `PlateError` if a run failed because a plate has another size than the batch;
    returns None if that is not the cause of the failure.

    Args:
        sites: sites of the run, up to the error.
        count: number of rows of the batch; None if it has none.
        num_data: N as the user passed it; None if it was left out.
        error: the exception that the run raised.
    """
    for site in sites.values():
        if site.kind != "subsample" or site.fn.subsample_size not in (None, site.fn.size):
            continue
        size = site.fn.size
        if count is not None and size != count and num_data in (None, size):
            raise PlateError(
                f"plate '{site.name}' has the fixed size {size} but the batch has {count} rows: "
                f"write plate('{site.name}', {size}, subsample_size=len(x)) ({error})"
            ) from error
        if f"plate('{site.name}')" in str(error) and f"{size} vs {count}" in str(error):
            raise PlateError(
                f"plate '{site.name}' has the fixed size {size}, but the data have {num_data} "
                f"rows: write plate('{site.name}', len(x)) ({error})"
            ) from error
