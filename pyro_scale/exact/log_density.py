"""The log joint of all rows of data as a function of one float64 vector, compiled to C if
possible."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from pyro.infer.autoguide.initialization import init_to_value
from torch import Tensor, nn

from pyro_scale.compile.compiled import compile_value_and_gradient, section_on, why_not
from pyro_scale.compile.cpp_function import NativeFunction
from pyro_scale.compile.trace import Graph, trace
from pyro_scale.core import rows
from pyro_scale.core.exclusive import exclusive, raise_if_from_handler
from pyro_scale.core.layout import Layout
from pyro_scale.core.rows import Arguments
from pyro_scale.core.warn import warn
from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.engine.reuse import mark
from pyro_scale.errors import CompileWarning, PyroScaleWarning
from pyro_scale.model.log_posterior import LogPosterior, Params

#: Distance, in every dimension, from the start to the position at which machine code is compared
#: with the model.
_ELSEWHERE = 0.1
#: Largest relative difference between an earlier run's machine code and the model.
_ROUNDING = 1e-10
#: Number of bytes of data above which machine code is not kept for the next run.
_LARGE = 2**26


class EagerFunction:
    """The log joint of all rows of data, divided by the temperature, and its gradient; evaluated by
    the model's Python code.

    Args:
        log_posterior: log posterior of the model, after its checks.
        arguments: all rows of data, as the model's arguments.
        start: unconstrained tensors of the latents, by site, at which the log joint is finite.
        temperature: number that divides the log joint.

    Attributes:
        layout: sites, shapes and offsets of a vector `[D]` of all unconstrained latents.
        device: device of the model; vectors of latents are on the CPU.
        examples: arguments of `function`: the latents at the start, `[D]`, and the tensors of rows.
        not_finite_at: the latest latents `[D]` at which the log joint or its gradient was not
            finite; NaN if there were none. Compiled code has the same attribute.
    """

    def __init__(
        self, log_posterior: LogPosterior, arguments: Arguments, start: Params, temperature: float
    ):
        self._log_posterior, self._arguments = log_posterior, arguments
        self._temperature = temperature
        self._points = {n: point.unconstrained for n, point in log_posterior.points.items()}
        self.layout = Layout.from_tensors(start)
        first = self.layout.flatten(start)
        self.device = first.device
        self.examples = [first.to("cpu", torch.float64), *rows.leaves(arguments)]
        self.not_finite_at = torch.full((self.layout.size,), torch.nan, dtype=torch.float64)

    def function(self, position: Tensor, *leaves: Tensor) -> tuple[Tensor, Tensor]:
        """(The log joint divided by the temperature, 0-d; its gradient, `[D]`), in nats and
        float64, as a function of tensors only, which can be traced.  Call it inside of the context
        `literals`.

        Args:
            position: unconstrained latents, float64 `[D]`.
            leaves: tensors of rows, in the order of the model's arguments.
        """
        remaining = iter(leaves)
        batch = rows.map_rows(lambda _: next(remaining), self._arguments)
        params = self.layout.unflatten(position.to(self.device, self.layout.dtype)) | self._points
        gradient, evaluation = self._log_posterior.plain_grad(
            params, batch, self._log_posterior.first_indices()
        )
        slope = self.layout.flatten({name: gradient[name] for name in self.layout.names})
        value = evaluation.log_joint.to("cpu", torch.float64)
        slope = slope.to("cpu", torch.float64)
        return value / self._temperature, slope / self._temperature

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(The log joint divided by the temperature, 0-d; its gradient, `[D]`), in nats, at
        unconstrained latents `[D]`; both NaN where a matrix cannot be factorized."""
        try:
            with self.literals():
                value, gradient = self.function(x, *self.examples[1:])
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            # compiled code gives NaN too
            value, gradient = x.new_tensor(torch.nan), torch.full_like(x, torch.nan)
        if not bool(value.isfinite() & gradient.isfinite().all()):
            self.not_finite_at.copy_(x)
        return value, gradient

    def on(self, arguments: Arguments) -> EagerFunction:
        """A copy that evaluates the same model on other rows of data, in the same dtype."""
        other = copy.copy(self)
        in_float64 = self.layout.dtype == torch.float64
        other._arguments = rows.map_rows(_widen, arguments) if in_float64 else arguments
        other.examples = [self.examples[0], *rows.leaves(other._arguments)]
        other.not_finite_at = torch.full_like(self.not_finite_at, torch.nan)
        return other

    def literals(self) -> contextlib.AbstractContextManager[None]:
        """Context in which to call `function`: tensors that the model creates from Python numbers
        have the dtype of the latents, and not torch's default.
        """
        in_float64 = self.layout.dtype == torch.float64
        return _float64_by_default() if in_float64 else contextlib.nullcontext()

    def agrees_with(self, native: NativeFunction, tolerance: float) -> bool:
        """Whether machine code gives the same log joint and gradient as the model's Python, to a
        relative tolerance.  The two are compared at a distance of 0.1, in every latent, from the
        start, or at the start if the log joint is not finite there.

        Args:
            native: machine code of the same function.
            tolerance: largest relative, and absolute, difference.
        """
        at = self.examples[0] + _ELSEWHERE
        expected = self(at)
        if not bool(expected[0].isfinite()):
            at = self.examples[0]
            expected = self(at)
        return all(
            torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance)
            for ours, theirs in zip(native(at), expected, strict=True)
        )


@dataclass(frozen=True, kw_only=True)
class TemperedDensity(FullDataDensity):
    """The log joint of all rows of data, divided by a temperature, by the compiled function of
    NUTS: for searches that take the gradients of NUTS, and no others. Positions are latents, in
    float64; further params are ignored.

    Attributes:
        function: function from latents `[D]` to (log joint divided by the temperature; gradient).
        differences: differences of latents from whose gradients a Hessian is computed, `[D]`.
    """

    function: NativeFunction | EagerFunction
    differences: Tensor

    def of_some_rows(self, most: int, seed: int) -> TemperedDensity:
        """The density itself: compiled code takes all rows."""
        return self

    def grad(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """(The tempered log joint at latents `[D]`; its gradient `[D]`), both divided by N."""
        value, slope = self.function(position[: len(self.differences)].double().cpu())
        return value / self.log_posterior.num_data, slope / self.log_posterior.num_data

    def derivatives_at(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(The tempered log joint at each of P positions `[P, D]`, `[P]`; its gradients `[P, D]`;
        its Hessians, by differences of gradients, `[P, D, D]`), all divided by N."""
        values, slopes = (
            torch.stack(each) for each in zip(*map(self.grad, positions), strict=True)
        )
        return values, slopes, torch.stack([self._hessian(position) for position in positions])

    def _hessian(self, position: Tensor) -> Tensor:
        steps = self.differences.diag()
        slopes = [self.grad(position + h)[1] - self.grad(position - h)[1] for h in steps]
        hessian = torch.stack(slopes) / (2 * self.differences[:, None])
        return (hessian + hessian.mT) / 2

    def values(self, positions: Tensor) -> Tensor:
        """The tempered log joint divided by N at each of P positions: `[P]`."""
        return torch.stack([self.grad(position)[0] for position in positions])


class EarlierFunction:
    """Keeps the latest machine code that a `NUTS` object compiled, so that further runs need not
    compile.

    The code is used again for the very same data tensors, unless they have been written to, and
    only if it agrees with the model as it is now.
    """

    def __init__(self) -> None:
        self._native: NativeFunction | None = None
        self._facts: Any = None

    def __reduce__(self) -> Any:
        return EarlierFunction, ()  # a copy compiles its own

    def keep(self, native: NativeFunction, eager: EagerFunction, arguments: Arguments) -> None:
        """Keeps the machine code that a run has compiled, if the run's data are small.  (For large
        data, tracing costs little beside sampling.)

        Args:
            native: machine code.
            eager: the same function in Python.
            arguments: rows of data that the code was compiled for.
        """
        if sum(tensor.nbytes for tensor in eager.examples) <= _LARGE:
            self._native, self._facts = native, _facts(eager, arguments)

    def again(self, eager: EagerFunction, arguments: Arguments) -> NativeFunction | None:
        """The machine code that an earlier run has compiled, if it computes this log density on
        this run's rows of data; None if not, and the function has to be compiled.

        Args:
            eager: the log density in Python.
            arguments: rows of data of this run.
        """
        native = self._native if self._facts == _facts(eager, arguments) else None
        return native if native and eager.agrees_with(native, _ROUNDING) else None


def _facts(eager: EagerFunction, arguments: Arguments) -> Any:
    """(The layout of the latents: sites, shapes and offsets; the identity and version of each data
    tensor): machine code is used again only if these are equal."""
    return eager.layout, [mark(tensor) for tensor in rows.leaves(arguments)]


@dataclass(frozen=True)
class LogDensity:
    """The log joint of all rows of data, divided by a temperature, as a function of the latents
    alone.

    Attributes:
        function: function from x `[D]`, in float64, to (log joint divided by the temperature, in
            nats, 0-d; its gradient, `[D]`); machine code if it could be compiled.
        layout: sites, shapes and offsets of x.
        program: phrase for progress bars and `attrs` that says whether the function is compiled.
    """

    function: NativeFunction | EagerFunction
    layout: Layout
    program: str

    def on(self, arguments: Arguments) -> LogDensity:
        """The same density on other rows of data, of the same number, shapes and dtypes; code that
        has been compiled is used again.
        """
        if isinstance(self.function, EagerFunction):
            return replace(self, function=self.function.on(arguments))
        leaves = rows.leaves(rows.map_rows(_widen, arguments))
        return replace(self, function=self.function.reading(leaves))

    @property
    def native(self) -> NativeFunction | None:
        """The machine code that evaluates the density; None if it is evaluated by the model's
        Python code.
        """
        return self.function if isinstance(self.function, NativeFunction) else None


def log_density(
    log_posterior: LogPosterior,
    arguments: Arguments,
    start: Params,
    temperature: float,
    compiled: bool,
    earlier: EarlierFunction,
) -> LogDensity:
    """The log joint of all rows of data, divided by the temperature; in float64 if the model runs
    in it.

    The data are converted, and so is a copy of a model that is a module; numbers that the model
    makes when it runs are float64 too.  A model that cannot be converted, such as a function around
    a float32 network, is evaluated as it is.

    Args:
        log_posterior: log posterior of the model, after its checks.
        arguments: all rows of data, as the model's arguments.
        start: unconstrained tensors by site, at which the log joint is finite.
        temperature: number that divides the log joint.
        compiled: whether to compile the function.
        earlier: keeps machine code from one run of a `NUTS` object to the next.

    Warns:
        PyroScaleWarning: the model does not run in float64, or computes in fewer digits in places.
        CompileWarning: the function cannot be compiled.
    """
    wide = rows.map_rows(_widen, arguments)
    latents = {n: value for n, value in start.items() if n not in log_posterior.points}
    wide_start = {name: value.double() for name, value in latents.items()}
    try:
        with _float64_by_default():
            double = _in_float64(log_posterior)
            values = {n: v.double() for n, v in log_posterior.constrain(start).items()}
            double.prepare(wide, init_to_value(values=values))
            eager = EagerFunction(double, wide, wide_start, temperature)
    except Exception as error:  # whatever the model raises
        raise_if_from_handler(error)
        dtype = next(iter(latents.values())).dtype
        warn(
            PyroScaleWarning,
            f"NUTS: the model does not run in float64 ({why_not(error)}), so its log density is "
            f"only as precise as {dtype}: convert what the model holds (net.double()) and the data",
        )
        eager = EagerFunction(log_posterior, arguments, latents, temperature)
    return _fastest(eager, compiled, earlier, arguments)


def _fastest(
    eager: EagerFunction, compiled: bool, earlier: EarlierFunction, arguments: Arguments
) -> LogDensity:
    """The log density as machine code, if `compiled` is True, the model is on the CPU and the code
    agrees with the model; otherwise in Python. Warns if compilation was tried and failed.

    Args:
        eager: the log density in Python.
        compiled: whether to compile it.
        earlier: keeps machine code from one run to the next.
        arguments: rows of data, as the user passed them.
    """
    if not compiled or eager.device.type != "cpu":
        reason = f"on {eager.device.type}" if compiled else "as asked"
        return LogDensity(eager, eager.layout, f"eager log density ({reason})")
    native, coarsest = earlier.again(eager, arguments), eager.layout.dtype
    try:
        if native is None:
            with eager.literals():
                graph = trace(eager.function, eager.examples)
            native, coarsest = compile_value_and_gradient(graph), _coarsest_dtype(graph)
        is_right = eager.agrees_with(native, torch.finfo(coarsest).eps ** 0.5)
        reason = "" if is_right else "what was traced differs from the model"
    except Exception as error:  # whatever the model, Inductor or the compiler raise
        raise_if_from_handler(error)
        reason = why_not(error)
    if native is None or reason:
        warn(
            CompileWarning,
            f"NUTS: the log density could not be compiled ({reason}; torch {torch.__version__}), "
            "so every gradient runs the model's Python, some hundred times slower; compile=False "
            "silences this",
            code=section_on(reason),
        )
        return LogDensity(eager, eager.layout, f"eager log density ({reason})")
    if coarsest is not eager.layout.dtype:
        warn(
            PyroScaleWarning,
            f"NUTS: the model computes in {coarsest} in places (by .float(), or with data and "
            f"modules that it holds itself), so its log density is only as precise as {coarsest}: "
            "convert them to float64",
        )
    earlier.keep(native, eager, arguments)
    return LogDensity(native, eager.layout, "compiled log density")


def _coarsest_dtype(graph: Graph) -> torch.dtype:
    """The floating-point dtype with the fewest digits among the results of a graph's operations;
    float64 if there are none."""
    values = (node.meta.get("val") for node in graph.module.graph.nodes if node.op != "placeholder")
    dtypes = {value.dtype for value in values if isinstance(value, Tensor)}
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    return max(floating, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)


def _in_float64(log_posterior: LogPosterior) -> LogPosterior:
    """A copy of the log posterior that computes in float64 if its model is a module: the module is
    copied and converted. The copy has not been examined on a batch.
    """
    double = log_posterior.renew(log_posterior.num_data)
    module = getattr(double.model, "__self__", double.model)  # the model of a GP is a method
    if isinstance(module, nn.Module):
        copied = copy.deepcopy(module).double()
        is_whole = module is double.model
        double.model = copied if is_whole else getattr(copied, double.model.__name__)
        double = double.renew(log_posterior.num_data)
    return double


def _widen(tensor: Tensor) -> Tensor:
    """The tensor detached, in float64 if its numbers are floating-point, and contiguous; a table is
    stored column by column."""
    wide = (tensor.double() if tensor.is_floating_point() else tensor).detach()
    return rows.by_column(wide) if wide.dim() == 2 else wide.contiguous()


@contextlib.contextmanager
def _float64_by_default() -> Iterator[None]:
    """Context in which torch's default dtype is float64, so that a model's tensors from Python
    numbers are float64."""
    with exclusive:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
