"""The log joint of all rows as a function of one float64 vector, in C where that can be."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pyro.infer.autoguide.initialization import init_to_value
from torch import Tensor, nn

from pyro_scale.core import rows
from pyro_scale.core.exclusive import exclusive
from pyro_scale.core.layout import Layout
from pyro_scale.core.rows import Arguments
from pyro_scale.core.warn import warn
from pyro_scale.engine.compile.compiled import compile_value_and_gradient
from pyro_scale.engine.compile.cpp_function import NativeFunction
from pyro_scale.engine.compile.trace import trace
from pyro_scale.errors import PyroScaleWarning
from pyro_scale.model.log_posterior import LogPosterior, Params


class EagerFunction:
    """A value and its gradient by the model's Python.

    Attributes:
        not_finite_at: as of machine code.
    """

    def __init__(self, function: Callable[..., Any], leaves: Sequence[Tensor], layout: Layout):
        self._function, self._leaves = function, leaves
        self._in_float64 = layout.dtype == torch.float64
        self.not_finite_at = torch.full((layout.size,), torch.nan, dtype=torch.float64)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(The value, 0-d; the gradient)."""
        try:
            with _float64_by_default() if self._in_float64 else contextlib.nullcontext():
                value, gradient = self._function(x, *self._leaves)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            # compiled code gives NaN too
            value, gradient = x.new_tensor(torch.nan), torch.full_like(x, torch.nan)
        if not bool(value.isfinite() & gradient.isfinite().all()):
            self.not_finite_at.copy_(x)
        return value, gradient


@dataclass(frozen=True)
class LogDensity:
    """The log joint of all rows over a temperature, of the latents alone.

    Attributes:
        function: x [D], in float64 -> (log joint in nats, 0-d; its gradient, [D]); machine code
            if it could be compiled.
        layout: of a position.
        program: how it is evaluated, in words.
    """

    function: NativeFunction | EagerFunction
    layout: Layout
    program: str

    @property
    def native(self) -> NativeFunction | None:
        """The machine code, if it is some."""
        return self.function if isinstance(self.function, NativeFunction) else None


def log_density(
    log_posterior: LogPosterior,
    arguments: Arguments,
    start: Params,
    temperature: float,
    compiled: bool,
) -> LogDensity:
    """The log joint of all rows, in float64 where the model runs in it.

    Data are converted, and so is a copy of a model that is a module; numbers that the model makes
    when it runs are float64 too.  A model that cannot be converted, such as a function around a
    float32 network, is evaluated as it is.

    Args:
        log_posterior: the model after its preflight.
        arguments: all rows.
        start: unconstrained tensors where the log joint is finite.
        temperature: what the log joint is divided by.
        compiled: whether to compile it.

    Warns:
        PyroScaleWarning: the model does not run in float64.
    """
    wide = rows.map_rows(_widen, arguments)
    latents = {n: value for n, value in start.items() if n not in log_posterior.points}
    wide_start = {name: value.double() for name, value in latents.items()}
    try:
        with _float64_by_default():
            double = _in_float64(log_posterior)
            values = {n: v.double() for n, v in log_posterior.constrain(start).items()}
            double.prepare(wide, init_to_value(values=values))
            return _log_density(double, wide, wide_start, temperature, compiled)
    except Exception as error:  # of whatever kind the model raises
        first = str(error).splitlines()[0]
        own = next(iter(latents.values())).dtype
    warn(
        PyroScaleWarning,
        f"NUTS: the model does not run in float64 ({first}), so its log density has the digits of "
        f"{own}: convert what the model holds (net.double()) and the data",
    )
    return _log_density(log_posterior, arguments, latents, temperature, compiled)


def _log_density(
    log_posterior: LogPosterior,
    arguments: Arguments,
    start: Params,
    temperature: float,
    compiled: bool,
) -> LogDensity:
    points = {name: point.unconstrained for name, point in log_posterior.points.items()}
    layout, leaves = Layout.of(start), rows.leaves(arguments)
    dtype = layout.dtype

    def function(position: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        remaining = iter(tensors)
        batch = rows.map_rows(lambda _: next(remaining), arguments)
        params = layout.unflatten(position.to(dtype)) | points
        gradient, evaluation = log_posterior.plain_grad(
            params, batch, log_posterior.first_indices()
        )
        slope = layout.flatten({name: gradient[name] for name in layout.names})
        return evaluation.log_joint.double() / temperature, slope.double() / temperature

    eager, reason = EagerFunction(function, leaves, layout), "as asked"
    if compiled:
        examples = [layout.flatten(start).double(), *leaves]
        native, reason = _try_compile(function, examples, torch.finfo(dtype).eps ** 0.5)
        if native is not None:
            return LogDensity(native, layout, "compiled log density")
    return LogDensity(eager, layout, f"eager log density ({reason})")


def _try_compile(
    function: Callable[..., Any], examples: Sequence[Tensor], tolerance: float
) -> tuple[NativeFunction | None, str]:
    """(Machine code, "") or (None, why there is none)."""
    try:
        native = compile_value_and_gradient(trace(function, examples))
    except Exception as error:  # of whatever kind the model, Inductor or the compiler raise
        return None, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    at = examples[0] + 0.1  # elsewhere than where it was traced
    for ours, theirs in zip(native(at), function(at, *examples[1:]), strict=True):
        if not torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True):
            return None, "what was traced differs from the model"
    return native, ""


def _in_float64(log_posterior: LogPosterior) -> LogPosterior:
    """The model before its preflight, with modules in float64."""
    double = log_posterior.renew(log_posterior.num_data)
    if isinstance(double.model, nn.Module):
        double.model = copy.deepcopy(double.model).double()
        double = double.renew(log_posterior.num_data)
    return double


def _widen(tensor: Tensor) -> Tensor:
    """In float64, and tables by column."""
    wide = (tensor.double() if tensor.is_floating_point() else tensor).detach()
    return rows.by_column(wide) if wide.dim() == 2 else wide.contiguous()


@contextlib.contextmanager
def _float64_by_default() -> Iterator[None]:
    """Literals of the model are float64 while it runs; the default is put back."""
    with exclusive:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
