"""Crash dumps: writes the last steps of broken chains to files, and reruns them."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.core.exclusive import exclusive
from pyro_scale.core.layout import Layout
from pyro_scale.core.rows import Arguments
from pyro_scale.curvature.control_variates import ControlVariates
from pyro_scale.data.loaders import to_device
from pyro_scale.engine.draws import Draws, Failure
from pyro_scale.engine.step import Density, Target
from pyro_scale.errors import FileError
from pyro_scale.kernels import Kernel
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.posterior.collect import facts_of
from pyro_scale.posterior.serialization import device_of, layout_of, model_contents
from pyro_scale.run.blame import Watched
from pyro_scale.run.problem import Problem
from pyro_scale.storage import files

#: Most bytes of the dumps of a run: a step may contain all of the data.
_MOST_BYTES = 2**30
#: Temporary directories of this process, oldest first, and how many are kept.
_directories: deque[Path] = deque()
_MOST_DIRECTORIES = 8
#: Fraction of a dtype's digits that must agree: another machine, or a compiled step, may round
#: differently.
_SHARED_DIGITS = 0.5


def write(problem: Problem, method: str, draws: Draws, directory: Path | None) -> str:
    """Writes the last steps of broken chains to files, for `ps.replay`. Returns a sentence for the
    error message: the call that replays them, or why there are no files; empty if no steps were
    recorded.

    Steps on the features of a frozen base are not written, because the rows of data are not among
    them.

    Args:
        problem: model, data and starts of the run.
        method: name of the sampler.
        draws: draws of the run, with the recorded steps of broken chains.
        directory: directory of the run's checkpoints; None for a new temporary directory.
    """
    if problem.features is not None:
        return ""
    failures = [failure for failure in draws.failures if failure.chain in draws.last_steps]
    if not failures:
        return "" if directory is None else _find_earlier(problem, draws.failures, directory)
    paths: list[Path] = []
    reason = f"they take more than {_MOST_BYTES / 2**30:.3g} GiB"
    try:
        for path in _write_files(problem, method, failures, draws, directory):
            paths.append(path)
    except Exception as error:  # an error here must not hide why the chain broke
        reason = format(error.__cause__ or error)
    if not paths:
        return f"The last steps, which tell why, could not be written down ({reason})"
    others = f" ({paths[1].name}, ... beside it has those of others)" if len(paths) > 1 else ""
    chain = failures[0].chain
    return _how_to_replay(paths[0], chain, len(draws.last_steps[chain])) + others


def _find_earlier(problem: Problem, failures: list[Failure], directory: Path) -> str:
    """A sentence for the error message of a resumed run in which no steps were recorded: the call
    that replays the steps of a broken chain, if an earlier process wrote them into `directory`;
    otherwise empty."""
    for failure in failures:
        path = directory / f"crash-dump-{failure.chain}"
        with contextlib.suppress(FileError):
            contents = files.read(path, "crash dump")
            if (contents["step"], contents["attrs"]["seed"]) == (failure.step, problem.seed):
                return _how_to_replay(path, failure.chain, len(contents["steps"]))
    return ""


def _how_to_replay(path: Path, chain: int, count: int) -> str:
    steps = f"last {count} steps" if count > 1 else "last step"
    return f"ps.replay('{path}', model) reruns the {steps} of chain {chain} and says why it broke"


def _write_files(
    problem: Problem, method: str, failures: list[Failure], draws: Draws, directory: Path | None
) -> Iterator[Path]:
    """Writes the recorded steps of each broken chain to a file, and yields the files' paths; stops
    before all files together would exceed 1 GiB.

    Args:
        problem: model, data and starts of the run.
        method: name of the sampler.
        failures: failures of the chains whose steps were recorded.
        draws: draws of the run, with the recorded steps.
        directory: directory for the files; None for a new temporary one.
    """
    engine, density = problem.engine, problem.engine.density
    corrected = density if isinstance(density, ControlVariates) else None
    left = _MOST_BYTES
    for failure in failures:
        contents = {
            "method": method,
            "kernel": type(engine.kernel).__name__,
            "chain": failure.chain,
            "step": failure.step,
            "site": failure.site,
            "attrs": facts_of(problem.log_posterior, problem.seed),
            "num_latents": engine.num_latents,
            "vectorized": engine.vectorized,
            "anchor": corrected and corrected.anchor,
            "anchor_gradient": corrected and corrected.gradient,
            "steps": [dict(vars(step)) for step in draws.last_steps[failure.chain]],
            **model_contents(problem.log_posterior, engine.layout, problem.data.first()),
        }
        leaves = pytree.tree_leaves(contents)
        left -= sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
        if left < 0:
            return
        directory = directory or _make_directory()
        path = directory / f"crash-dump-{failure.chain}"
        files.write(path, contents, "crash dump")
        yield path


def _make_directory() -> Path:
    """A new temporary directory for crash dumps that only this user can read. If this process has
    made too many of them, the oldest is deleted."""
    with exclusive:
        while len(_directories) >= _MOST_DIRECTORIES:
            shutil.rmtree(_directories.popleft(), ignore_errors=True)
        _directories.append(Path(mkdtemp(prefix="pyro-scale-")))
        return _directories[-1]


# ------------------------------------------------------------------ taken again


@dataclass(frozen=True)
class Rerun:
    """A recorded step of a broken chain, computed again.

    Attributes:
        number: number of the step.
        lr: the largest step size of all sites.
        start: unconstrained params in which the step began, `[D]`.
        arguments: the model's arguments of that step.
        indices: indices of the batch's rows, `[B]`, for a model that subsamples by itself.
        position: unconstrained params at which the kernel took the gradient, `[D]`.
        gradient: gradient of the log joint divided by N at `position`, `[D]`; NaN if the model
            raised an error.
        log_joint: the log joint at `position`, estimated from the batch, in nats; NaN if the model
            raised an error.
        error: the exception that the model raised; None if it raised none.
        is_sound: whether position, gradient, log joint and next position are finite.
        agrees: whether log joint and next state equal those recorded in the run, up to rounding.
    """

    number: int
    lr: float
    start: Tensor
    arguments: Arguments
    indices: Tensor | None
    position: Tensor
    gradient: Tensor
    log_joint: float
    error: Exception | None
    is_sound: bool
    agrees: bool


def rerun(contents: Mapping[str, Any], log_posterior: LogPosterior) -> Iterator[Rerun]:
    """Yields the recorded steps of a crash dump, computed again in order and eagerly, each from the
    recorded state in which it began, to find the one that broke.

    Args:
        contents: contents of the crash dump's file, by name.
        log_posterior: the log posterior of the run's model, which has run once.

    Raises:
        FileError: there is no kernel of the file's name.
    """
    device, layout = device_of(contents, log_posterior), layout_of(contents)
    kernel = _find_kernel(contents["kernel"])

    def on_device(values: Any) -> Any:
        return pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device), values)

    density: Density = log_posterior
    if contents["anchor"] is not None:
        anchor, gradient = on_device((contents["anchor"], contents["anchor_gradient"]))
        density = ControlVariates(log_posterior, anchor, gradient)
    steps = contents["steps"]
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        arguments = step["arguments"] if step["arguments"] is not None else contents["arguments"]
        arguments = to_device(arguments, device)
        values, noise, indices, state = on_device(
            (step["values"], step["noise"], step["indices"], step["state"])
        )
        noise = torch.nn.functional.pad(noise, (0, layout.size - noise.shape[-1]))
        position = torch.zeros(layout.size, dtype=layout.dtype, device=device)
        before = type(kernel.init(position, values, position))(**state)
        target = Target(density, layout, arguments, indices, contents["vectorized"])
        watched = Watched(target, before.position)
        after = evaluation = error = None
        log_joint, is_sound = math.nan, False
        agrees = step["log_joint"] is None
        try:
            after, evaluation = kernel.update(before, watched, values, noise)
        except Exception as raised:  # the model may raise anything
            error = raised
        if after is not None and evaluation is not None:
            log_joint, prior = float(evaluation.log_joint), float(evaluation.log_prior)
            vectors = torch.stack([watched.position, watched.gradient, after.position])
            is_sound = math.isfinite(log_joint) and bool(torch.isfinite(vectors).all())
            size = abs(prior) + abs(log_joint - prior)  # relative to the terms, which may cancel
            agrees = not agrees and _is_close(log_joint, step["log_joint"], size, layout)
            if agrees and following is not None:
                expected = on_device(following["state"])
                agrees = _is_same_state(before, after, expected, contents["num_latents"], layout)
        yield Rerun(
            number=step["number"],
            lr=float(step["values"]["lr"].max()),
            start=before.position,
            arguments=arguments,
            indices=indices,
            position=watched.position,
            gradient=watched.gradient,
            log_joint=log_joint,
            error=error,
            is_sound=is_sound,
            agrees=agrees,
        )


def _find_kernel(name: str) -> Kernel:
    """A kernel of the sampler whose class has this name, to rerun steps with; its hyperparameters
    are placeholders, as each recorded step has its own.

    Raises:
        FileError: no class has the name.
    """
    classes: list[type[Kernel]] = [Kernel]
    for kind in classes:  # the state grows with the steps
        classes += kind.__subclasses__()
    kernel = next((kind for kind in classes if kind.__name__ == name), None)
    if kernel is None:
        raise FileError(f"the file's kernel is {name}, which is not known here: import it first")
    return kernel(lr=1.0)


def _is_close(value: float, recorded: float, size: float, layout: Layout) -> bool:
    """Whether a rerun step's log joint equals the recorded one up to rounding, or neither is
    finite.

    Args:
        value: log joint of the rerun step, in nats.
        recorded: log joint that the run recorded, in nats.
        size: magnitude of the numbers that add up to the log joint, in nats.
        layout: order and dtype of the params.
    """
    if not math.isfinite(value) or not math.isfinite(recorded):
        return math.isfinite(value) == math.isfinite(recorded)
    return abs(value - recorded) <= torch.finfo(layout.dtype).eps ** _SHARED_DIGITS * (1 + size)


def _is_same_state(
    before: Any, after: Any, expected: Mapping[str, Tensor], num_latents: int, layout: Layout
) -> bool:
    """Whether a rerun step led to the recorded next state, up to rounding. Point-estimated sites do
    not count, because all chains move them together.

    Args:
        before: state of the kernel before the step.
        after: state of the kernel after the rerun step.
        expected: recorded next state, by name of the state's field.
        num_latents: number of latent elements, which come first.
        layout: order and dtype of the params.
    """
    tolerance = torch.finfo(layout.dtype).eps ** _SHARED_DIGITS
    for name, recorded in expected.items():
        old, new = getattr(before, name), getattr(after, name)
        if recorded.shape == (layout.size,):
            old, new, recorded = old[:num_latents], new[:num_latents], recorded[:num_latents]
        size = torch.stack([old, recorded]).nan_to_num().abs().amax().clamp(min=1)
        differs = (new - recorded).abs() > tolerance * size
        if bool((differs | (torch.isfinite(new) != torch.isfinite(recorded))).any()):
            return False
    return True
