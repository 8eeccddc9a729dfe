"""Takes recorded steps of a chain again, each from the state that it began in."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pyro_scale.core.layout import Layout
from pyro_scale.core.rows import Arguments
from pyro_scale.curvature.control_variates import ControlVariates
from pyro_scale.data.loaders import to_device
from pyro_scale.engine.step import Density, Target
from pyro_scale.errors import FileError
from pyro_scale.kernels import Kernel
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.posterior.serialization import device_of, layout_of
from pyro_scale.run.blame import Watched

#: Half of a dtype's digits: another machine, and a compiled step, may round differently.
_SHARED_DIGITS = 0.5


@dataclass(frozen=True)
class Rerun:
    """A step that was taken again.

    Attributes:
        number: of the step.
        lr: the largest of all sites'.
        before: the state that it began in.
        arguments: the model's.
        indices: `[B]`, for a model that subsamples by itself.
        position: where the kernel took the gradient, [D].
        gradient: of the log joint over N, there, [D]; NaN if the model raised.
        log_joint: the batch's estimate there, in nats.
        after: the next state; None if the model raised.
        error: what it raised.
        agrees: whether log joint and next state are those of the run.
    """

    number: int
    lr: float
    before: Any
    arguments: Arguments
    indices: Tensor | None
    position: Tensor
    gradient: Tensor
    log_joint: float
    after: Any
    error: Exception | None
    agrees: bool

    @property
    def is_sound(self) -> bool:
        """Whether its positions, its gradient and its log joint are finite."""
        if self.error is not None or not math.isfinite(self.log_joint):
            return False
        vectors = torch.stack([self.position, self.gradient, self.after.position])
        return bool(torch.isfinite(vectors).all())


def rerun(contents: Mapping[str, Any], log_posterior: LogPosterior) -> Iterator[Rerun]:
    """Takes the steps of a crash dump again, eagerly.

    Args:
        contents: of the file.
        log_posterior: the model, as `understood` gives it.

    Raises:
        FileError: the file's kernel is not known here.
    """
    kernel, layout = _kernel(contents["kernel"]), layout_of(contents)
    device = device_of(contents, log_posterior)
    density: Density = log_posterior
    if contents["anchor"] is not None:
        anchor, gradient = (_on(device, contents[n]) for n in ("anchor", "anchor_gradient"))
        density = ControlVariates(log_posterior, anchor, gradient)
    steps = contents["steps"]
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        arguments_before_move = (
            step["arguments"] if step["arguments"] is not None else contents["arguments"]
        )
        values = _on(device, step["values"])
        position = torch.zeros(layout.size, dtype=layout.dtype, device=device)
        before = type(kernel.init(position, values, position))(**_on(device, step["state"]))
        noise = _on(device, step["noise"])
        noise = torch.nn.functional.pad(noise, (0, layout.size - noise.shape[-1]))
        indices = _on(device, step["indices"])
        arguments = to_device(arguments_before_move, device)
        target = Target(density, layout, arguments, indices, contents["vectorized"])
        watched = Watched(target, before.position)
        after = evaluation = error = None
        try:
            after, evaluation = kernel.update(before, watched, values, noise)
        except Exception as raised:  # of whatever kind the user's model raises
            error = raised
        log_joint = math.nan if evaluation is None else float(evaluation.log_joint)
        agrees = (evaluation is None) == (step["log_joint"] is None)
        if agrees and evaluation is not None:
            agrees = _alike(log_joint, step["log_joint"], _size(evaluation), layout)
        if agrees and after is not None and following is not None:
            expected = _on(device, following["state"])
            agrees = _same(before, after, expected, contents["num_latents"], layout)
        yield Rerun(
            number=step["number"],
            lr=float(step["values"]["lr"].max()),
            before=before,
            arguments=arguments,
            indices=indices,
            position=watched.position,
            gradient=watched.gradient,
            log_joint=log_joint,
            after=after,
            error=error,
            agrees=agrees,
        )


def _kernel(name: str) -> Kernel:
    """A kernel of that name; its values come with each step.

    Raises:
        FileError: there is none.
    """
    classes, left = {}, [Kernel]
    while left:
        kind = left.pop()
        classes[kind.__name__] = kind
        left += kind.__subclasses__()
    if name not in classes:
        raise FileError(f"the file's kernel is {name}, which is not known here: import it first")
    return classes[name](lr=1.0)


def _on(device: torch.device, values: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device), values)


def _size(evaluation: Any) -> float:
    """How large a log joint's parts are, which cancel in it."""
    prior = float(evaluation.log_prior)
    return abs(prior) + abs(float(evaluation.log_joint) - prior)


def _alike(recorded: float, expected: float, size: float, layout: Layout) -> bool:
    if not math.isfinite(recorded) or not math.isfinite(expected):
        return not math.isfinite(recorded) and not math.isfinite(expected)
    return abs(recorded - expected) <= torch.finfo(layout.dtype).eps ** _SHARED_DIGITS * (1 + size)


def _same(
    before: Any, after: Any, expected: Mapping[str, Tensor], num_latents: int, layout: Layout
) -> bool:
    """Whether a step led to where it led in the run; points go with all chains."""
    tolerance = torch.finfo(layout.dtype).eps ** _SHARED_DIGITS
    for name, then in expected.items():
        old, new = getattr(before, name), getattr(after, name)
        if then.shape == (layout.size,):
            old, new, then = old[:num_latents], new[:num_latents], then[:num_latents]
        size = torch.stack([old, then]).nan_to_num().abs().amax().clamp(min=1)
        apart = (new - then).abs() > tolerance * size
        if bool((apart | (torch.isfinite(new) != torch.isfinite(then))).any()):
            return False
    return True
