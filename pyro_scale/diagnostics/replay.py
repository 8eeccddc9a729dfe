"""Why a chain became NaN or infinite: its last steps are taken again and examined."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.layout import Layout, dtype_name
from pyro_scale.core.rows import Arguments
from pyro_scale.diagnostics.replay_steps import Rerun, rerun
from pyro_scale.model.diagnose import error_in_short, find_broken_site, nan_or_infinite
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.posterior.serialization import layout_of, prepare_model
from pyro_scale.storage import files

if TYPE_CHECKING:
    import pandas

#: By how much a gradient grows within the last steps of a chain that runs away, and how much
#: farther out than the start such a chain is.
_GROWTH, _FAR_FROM_START = 100.0, 1e6


@dataclass(frozen=True)
class Replay:
    """The last steps of a chain that broke.

    Attributes:
        chain: which chain.
        step: the step after which its state was not finite.
        site: whose value, log density or gradient is to blame.
        reason: why, in words.
        steps: one row a step: its number, the largest lr, the batch's estimate of the log joint
            in nats, and for each site the norm of its unconstrained value before the step and of
            the gradient of the log joint over N, where the step took it.
        params: unconstrained tensors by site, where the first number that is not finite came
            from: `LogPosterior(model, N)(params, batch)` evaluates it again.
        batch: the model's arguments there.
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


def replay(path: files.FilePath, model: Any) -> Replay:
    """Takes the last steps of a chain that became NaN or infinite again, and says why it did.

    A sampler's `run` writes up to 16 of them, as many as fit into 64 MiB, for the first four
    chains that break, and its NonFiniteError names the file.  They are taken one by one,
    eagerly, each from the state that it began in, and the one that breaks is evaluated with
    Pyro's and torch's validation on.  Not written are single steps (`step`), approximations,
    steps on the features of a frozen base, batches with what is neither tensor nor plain value,
    and more than 1 GiB.

    Args:
        path: the file.
        model: what was run, as for the constructor.

    Returns:
        The site, the reason, a table of the steps, and params and batch to go on by hand with.

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
    site, reason = _diagnosis(contents, log_posterior, layout, steps, broken)
    off = next((step.number for step in steps if not step.agrees), None)
    if off is not None:
        reason += (
            f"; but step {off} is not what it was in the run: something in the model is another "
            "one, or not deterministic"
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


def _diagnosis(
    contents: Mapping[str, Any],
    log_posterior: LogPosterior,
    layout: Layout,
    steps: Sequence[Rerun],
    broken: Rerun,
) -> tuple[str, str]:
    """(The site that is to blame, why) for the first step that is not sound."""
    at, failed = f"at step {broken.number}", contents["site"]
    if broken.is_sound:
        return failed, "the steps are finite when they are taken again"
    has_gradient = broken.error is None and bool(torch.isfinite(broken.gradient).all())
    evaluated = has_gradient and math.isfinite(broken.log_joint)
    here, what = (None, "") if evaluated else _examine(log_posterior, layout, broken)
    told = "" if evaluated else _validate(log_posterior, layout, broken)
    bad = _bad_argument(broken.arguments)
    if bad is not None and not evaluated:
        reason = f"the batch holds NaN or infinite numbers in argument {bad} {at}"
        return here or failed, reason + told
    ran_away = _ran_away(contents, layout, [s for s in steps if s.number <= broken.number])
    if ran_away is not None:
        return ran_away
    if not bool(torch.isfinite(broken.position).all()):
        site = _first(layout, broken.position)
        return site, f"site '{site}': its value is not finite {at}, before its gradient is taken"
    on = "on finite unconstrained values and a finite batch"
    if broken.error is not None:
        raised = error_in_short(broken.error)
        return here or failed, f"site '{here or failed}': the model raises {raised} {at}, {on}"
    if here is not None:
        return here, f"site '{here}': its log density is {what} {at}, {on}{told}"
    if has_gradient and not evaluated:
        return failed, (
            f"the log joint is not finite {at}, {on}, though every site's log density is: their "
            f"sum leaves what {dtype_name(layout.dtype)} holds, so scale the data"
        )
    if not evaluated:
        site = _first(layout, broken.gradient)
        value = nan_or_infinite(broken.gradient[layout.slices()[site]])
        return site, f"site '{site}': its gradient of the log joint is {value} {at}, {on}{told}"
    return failed, (
        f"site '{failed}': its value is not finite after step {broken.number}, which begins with "
        "a finite gradient: the step size is above the stable range, or the state before it is "
        "far out"
    )


def _examine(
    log_posterior: LogPosterior, layout: Layout, step: Rerun, validate: bool = False
) -> tuple[str | None, str]:
    params = layout.unflatten(step.position)
    return find_broken_site(log_posterior, params, step.arguments, step.indices, validate)


def _validate(log_posterior: LogPosterior, layout: Layout, step: Rerun) -> str:
    """What validation says that comes without it as a number, if anything."""
    _, without = _examine(log_posterior, layout, step)
    site, finding = _examine(log_posterior, layout, step, validate=True)
    if site is None or finding == without:
        return ""
    return f"; with validation on, site '{site}' raises {finding}"


def _ran_away(
    contents: Mapping[str, Any], layout: Layout, steps: Sequence[Rerun]
) -> tuple[str, str] | None:
    """(The site, why), where the step size is above the stable range: gradients grow from step to
    step, or the chain is far out."""
    finite = [step for step in steps if bool(torch.isfinite(step.gradient).all())]
    if len(finite) < 2:
        return None
    growth, earlier = {}, finite[: len(finite) // 2]
    for name, place in layout.slices().items():
        sizes = [float(step.gradient[place].double().abs().amax()) for step in finite]
        # above all of the first half: a gradient that passes zero grows as much by chance
        before = max(sizes[: len(earlier)])
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
    """The first argument that holds NaN or an infinite number."""
    named = rows.named_leaves(arguments)
    bad = (n for n, leaf in named if rows.is_rows(leaf) and not bool(leaf.isfinite().all()))
    return next(bad, None)


def _first(layout: Layout, vector: Tensor) -> str:
    """The site of the first element that is not finite."""
    return layout.site_at(int(torch.nonzero(~torch.isfinite(vector))[0]))


def _norm(values: Tensor) -> float:
    """The Euclidean norm, of values too large to be squared as well."""
    largest = values.abs().amax()
    return float(largest * torch.linalg.vector_norm(values / largest)) if largest > 0 else 0.0


def _table(steps: Sequence[Rerun], layout: Layout) -> pandas.DataFrame:
    """One row a step."""
    import pandas

    def norms(vector: Tensor) -> dict[str, float]:
        parts = layout.unflatten(vector.double())
        return {name: _norm(part) for name, part in parts.items()}

    table = []
    for step in steps:
        row = {"step": step.number, "lr": step.lr, "log_joint": step.log_joint}
        gradients = norms(step.gradient)
        for name, value in norms(step.before.position).items():
            row |= {f"{name} value": value, f"{name} gradient": gradients[name]}
        table.append(row)
    return pandas.DataFrame(table)
