"""Finds out why a chain became NaN or infinite, by rerunning its last steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.layout import Layout, dtype_name
from pyro_scale.core.rows import Arguments, Model
from pyro_scale.diagnostics.crash_dump import Rerun, rerun
from pyro_scale.model.diagnose import error_in_short, find_broken_site, nan_or_infinite
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.posterior.serialization import layout_of, prepare_model
from pyro_scale.storage import files

if TYPE_CHECKING:
    import pandas

#: Factors of a chain that runs away: growth of its gradient within the last steps, and distance
#: from 0 relative to that of the start.
_GROWTH, _FAR_FROM_START = 100.0, 1e6


@dataclass(frozen=True)
class Replay:
    """The last steps of a chain that broke.

    Attributes:
        chain: number of the chain.
        step: number of the step after which its state was not finite.
        site: the site whose value, log density or gradient is to blame.
        reason: why it broke, in words.
        steps: DataFrame with a row for each step: its number, the largest lr, the batch's estimate
            of the log joint in nats, and for each site the norm of its unconstrained value before
            the step and of the gradient of the log joint divided by N, where the step took it.
        params: unconstrained tensors by site at which the first number that is not finite came up:
            `LogPosterior(model, N)(params, batch)` evaluates it again.
        batch: the model's arguments of that step.
        indices: `[B]`, for a model that subsamples by itself: the third argument of that call.
    """

    chain: int
    step: int
    site: str
    reason: str
    steps: pandas.DataFrame
    params: dict[str, Tensor]
    batch: Arguments
    indices: Tensor | None

    def __str__(self) -> str:
        table = self.steps.to_string(index=False)
        return f"chain {self.chain}, step {self.step}: {self.reason}\n{table}"


def replay(path: files.FilePath, model: Model) -> Replay:
    """Reruns the last steps of a chain that became NaN or infinite, and says why it broke.

    The `run` of a sampler writes up to 16 steps, as many as fit into 64 MiB, of each of the first
    four chains that break.  Its NonFiniteError names the file.  `replay` reruns the steps one by
    one, eagerly, each from the state in which it began, and evaluates the one that breaks with
    Pyro's and torch's validation on.  There is no file for single steps (`step`), approximations,
    steps on the features of a frozen base, batches with objects other than tensors and plain
    values, and dumps beyond 1 GiB.

    Args:
        path: the file.
        model: the model of the run, as for the method's constructor.

    Returns:
        The site, the reason, a table of the steps, and params and batch for your own evaluations.

    Raises:
        ArgumentError: `path` is no path, or `model` is not callable.
        FileError: the file cannot be read, is damaged, or is of another model.

    Examples:
        >>> import contextlib, tempfile, torch, pyro, pyro.distributions as dist
        >>> import pyro_scale as ps
        >>> def model():
        ...     w = pyro.sample("w", dist.Normal(0.0, 1.0))
        ...     pyro.sample("y", dist.Normal(w, 0.1), obs=torch.tensor(0.5))
        >>> sampler = ps.SGLD(model, lr=1.0)
        >>> steps = {"num_samples": 100, "warmup_steps": 0, "thinning": 1, "progress": False}
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     with contextlib.suppress(ps.errors.NonFiniteError):
        ...         _ = sampler.run(None, **steps, seed=0, checkpoint=directory)
        ...     found = ps.replay(f"{directory}/crash-dump-0", model)
        >>> found.site, found.reason.partition(": ")[2]
        ('w', 'the step size is above the stable range')
    """
    contents = files.read(path, "crash dump")
    log_posterior, layout = prepare_model(contents, model), layout_of(contents)
    steps = list(rerun(contents, log_posterior))
    broken = next((step for step in steps if not step.is_sound), steps[-1])
    site, reason = _diagnose(contents, log_posterior, layout, steps, broken)
    differing = next((step.number for step in steps if not step.agrees), None)
    if differing is not None:
        reason += (
            f"; but step {differing} is not what it was in the run: something in the model is "
            "another one, or not deterministic"
        )
    return Replay(
        chain=contents["chain"],
        step=contents["step"],
        site=site,
        reason=reason,
        steps=_table(steps, layout),
        params=layout.unflatten(broken.position),
        batch=broken.arguments,
        indices=broken.indices,
    )


def _diagnose(
    contents: Mapping[str, Any],
    log_posterior: LogPosterior,
    layout: Layout,
    steps: Sequence[Rerun],
    broken: Rerun,
) -> tuple[str, str]:
    """(Name of the site that is to blame for a chain's break; the reason in words), from the first
    rerun step that is not finite.

    Args:
        contents: contents of the crash dump.
        log_posterior: the model.
        layout: order of the sites' elements in the params.
        steps: the recorded steps, rerun.
        broken: the first of them that is not sound; the last one if all are.
    """
    at, failed = f"at step {broken.number}", contents["site"]
    if broken.is_sound:
        return failed, "the steps are finite when they are rerun"
    has_gradient = broken.error is None and bool(torch.isfinite(broken.gradient).all())
    is_evaluated = has_gradient and math.isfinite(broken.log_joint)
    blamed, finding, validated = None, "", ""
    if not is_evaluated:
        blamed, finding, validated = _examine(log_posterior, layout, broken)
        bad = _bad_argument(broken.arguments)
        if bad is not None:
            reason = f"the batch holds NaN or infinite numbers in argument {bad} {at}"
            return blamed or failed, reason + validated
    until_broken = [step for step in steps if step.number <= broken.number]
    if (runaway := _find_runaway(contents, layout, until_broken)) is not None:
        return runaway
    if not bool(torch.isfinite(broken.position).all()):
        site = _first_not_finite(layout, broken.position)
        return site, f"site '{site}': its value is not finite {at}, before its gradient is taken"
    on = "on finite unconstrained values and a finite batch"
    if broken.error is not None:
        site = blamed or failed
        return site, f"site '{site}': the model raises {error_in_short(broken.error)} {at}, {on}"
    if blamed is not None:
        return blamed, f"site '{blamed}': its log density is {finding} {at}, {on}{validated}"
    if is_evaluated:
        return failed, (
            f"site '{failed}': its value is not finite after step {broken.number}, which begins "
            "with a finite gradient: the step size is above the stable range, or the state before "
            "it is far out"
        )
    if has_gradient:
        return failed, (
            f"the log joint is not finite {at}, {on}, though every site's log density is: their "
            f"sum leaves what {dtype_name(layout.dtype)} holds, so scale the data"
        )
    site = _first_not_finite(layout, broken.gradient)
    value = nan_or_infinite(broken.gradient[layout.slices()[site]])
    return site, f"site '{site}': its gradient of the log joint is {value} {at}, {on}{validated}"


def _examine(
    log_posterior: LogPosterior, layout: Layout, step: Rerun
) -> tuple[str | None, str, str]:
    """(Name of the first site whose log density is not finite at a step's params, None if there is
    none; what its log density is, in words; the end of a sentence on another error that Pyro's
    validation raises, empty if it raises none).

    Args:
        log_posterior: the model.
        layout: order of the sites' elements in the params.
        step: the step that broke, rerun.
    """
    params = layout.unflatten(step.position)
    site, finding = find_broken_site(log_posterior, params, step.arguments, step.indices)
    raising, raised = find_broken_site(
        log_posterior, params, step.arguments, step.indices, validate=True
    )
    if raising is None or raised == finding:
        return site, finding, ""
    return site, finding, f"; with validation on, site '{raising}' raises {raised}"


def _find_runaway(
    contents: Mapping[str, Any], layout: Layout, steps: Sequence[Rerun]
) -> tuple[str, str] | None:
    """(Name of the site to blame; the reason in words) if a step size above the stable range
    explains why the chain broke: gradients grow from step to step, or the chain is far out. None if
    it does not, or fewer than two gradients are finite. The site is that of the run's error, unless
    the gradients of other sites grow and its own does not.

    Args:
        contents: contents of the crash dump, by name.
        layout: order of the sites' elements in the params.
        steps: the rerun steps up to the one that broke.
    """
    finite = [step for step in steps if bool(torch.isfinite(step.gradient).all())]
    if len(finite) < 2:
        return None
    growth = {}
    for name, place in layout.slices().items():
        sizes = [float(step.gradient[place].double().abs().amax()) for step in finite]
        # above the largest of the first half: a gradient that passes zero grows as much by chance
        before = max(sizes[: len(finite) // 2])
        growth[name] = sizes[-1] / before if before > 0 else 0.0
    start = max(float(value.abs().max()) for value in contents["start"].values())
    is_far = float(finite[-1].position.double().abs().amax()) > _FAR_FROM_START * (1 + start)
    grown = [name for name, factor in growth.items() if factor > _GROWTH]
    if not grown and not is_far:
        return None
    site = contents["site"]
    if grown and site not in grown:
        site = max(growth, key=lambda name: growth[name])
    return site, (
        f"the gradient of '{site}' grew {growth[site]:.1e} times over the last {len(finite)} "
        "steps: the step size is above the stable range"
    )


def _bad_argument(arguments: Arguments) -> str | None:
    """The name of the first of the model's arguments with NaN or infinite numbers; None if all are
    finite."""
    named = rows.named_leaves(arguments)
    bad = (n for n, leaf in named if rows.is_rows(leaf) and not bool(leaf.isfinite().all()))
    return next(bad, None)


def _first_not_finite(layout: Layout, vector: Tensor) -> str:
    """The name of the site to which the first NaN or infinite element of `vector` belongs.

    Args:
        layout: order of the sites' elements in the vector.
        vector: an element for each unconstrained param, `[D]`, not all of them finite.
    """
    return layout.site_at(int(torch.nonzero(~torch.isfinite(vector))[0]))


def _norm(values: Tensor) -> float:
    """The Euclidean norm of a vector, also where the squares of its elements overflow."""
    largest = values.abs().amax()
    return float(largest * torch.linalg.vector_norm(values / largest)) if largest > 0 else 0.0


def _table(steps: Sequence[Rerun], layout: Layout) -> pandas.DataFrame:
    """A DataFrame with a row for each step: its number, the largest lr, the log joint, and for each
    site the norms of its unconstrained value and of its gradient (`Replay.steps`)."""
    import pandas

    table = []
    for step in steps:
        row = {"step": step.number, "lr": step.lr, "log_joint": step.log_joint}
        gradients = layout.unflatten(step.gradient.double())
        for name, value in layout.unflatten(step.start.double()).items():
            row |= {f"{name} value": _norm(value), f"{name} gradient": _norm(gradients[name])}
        table.append(row)
    return pandas.DataFrame(table)
