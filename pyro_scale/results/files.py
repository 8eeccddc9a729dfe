"""Reads posteriors from files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyro_scale.core.rows import Model
from pyro_scale.errors import FileError
from pyro_scale.model.call_errors import check_model
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.posterior.serialization import draws_of, prepare_model
from pyro_scale.results.call_checks import check_calls
from pyro_scale.results.gaussian import GaussianPosterior
from pyro_scale.results.particles import ParticlePosterior
from pyro_scale.results.posterior import Posterior
from pyro_scale.storage import files


@check_calls
def load(path: files.FilePath, model: Model) -> Posterior:
    """Reads the posterior that `save` wrote, bit for bit.

    Methods that read the run's data (`log_likelihood`, most groups of `to_arviz`) need `data=`.

    Args:
        path: path of the file.
        model: the model of the run: a Pyro model, a `PyroModule` or a `LogPosterior`.  The model is
            run on the file's batch, and must have the same sites, log prior and log likelihood at
            two points.

    Returns:
        A `Posterior`; a `GaussianPosterior` for approximations, a `ParticlePosterior` for SVGD.

    Raises:
        ArgumentError: `path` is no path, or `model` is not callable.
        FileError: the file cannot be read, is damaged, or is of another model.

    Examples:
        >>> import pyro, pyro.distributions as dist, pyro_scale as ps, tempfile, torch
        >>> def model(y):
        ...     mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Normal(mu, 1.0), obs=y)
        >>> fit = ps.Laplace(model).run(torch.linspace(-1, 2, 30), seed=0, progress=False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fit.save(f"{folder}/fit.ps")
        ...     again = ps.load(f"{folder}/fit.ps", model)
        >>> bool((again.get_samples()["mu"] == fit.get_samples()["mu"]).all())
        True
    """
    if not isinstance(model, LogPosterior):
        check_model(model)
    return posterior_of(path, read(path), model)


def read(path: files.FilePath) -> dict[str, Any]:
    """The contents of a file that `save` wrote: tensors and plain values, by name. If the draws are
    in a store that has been moved together with the file, the store's path in the contents is the
    new one.

    Args:
        path: path of the file.

    Raises:
        FileError: the file cannot be read, or is damaged.
    """
    contents = files.read(path)
    with check_contents(path):
        if contents.get("store"):
            contents["store"]["path"] = _find_store(contents["store"]["path"], files.as_path(path))
    return contents


def posterior_of(path: files.FilePath, contents: Mapping[str, Any], model: Model) -> Posterior:
    """The posterior in a file's contents: a `GaussianPosterior` for approximations, a
    `ParticlePosterior` for SVGD, a `Posterior` for others.

    Args:
        path: path of the file, for messages.
        contents: contents of the file, as `read` returns them.
        model: the model of the run.

    Raises:
        FileError: the contents are not those of a posterior, or of another model's.
    """
    with check_contents(path):
        draws, batch = draws_of(contents, prepare_model(contents, model)), contents["arguments"]
        posterior: Posterior
        if "gaussians" in contents:
            posterior = GaussianPosterior.from_contents(contents, draws)
        elif "trace" in contents:
            posterior = ParticlePosterior(draws, contents["trace"], batch)
        else:
            posterior = Posterior(draws, batch)
        posterior._file = contents
        return posterior


@contextmanager
def check_contents(path: files.FilePath) -> Iterator[None]:
    """A context in which errors because of wrong contents of the file `path` are raised as
    FileErrors.

    Raises:
        FileError: the block raised a KeyError, TypeError, ValueError or the like.
    """
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise FileError(
            f"'{path}' does not hold results as Pyro Scale writes them "
            f"({type(error).__name__}: {error}): save them again"
        ) from error


def _find_store(store: str, file: Path) -> str:
    """The path of the store of draws: where it was when the file was written, or, if it is not
    there any more, next to the file, with which it may have been moved.

    Args:
        store: path of the store, as the file has it.
        file: path of the file.
    """
    moved = file.parent / Path(store).name
    return str(moved) if moved.exists() and not Path(store).exists() else store
