"""Runs Pyro models; makes models of functions and of unobserved rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import pyro
import pyro.poutine as poutine
import torch
from pyro.distributions import ImproperUniform, constraints
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.poutine.runtime import _DIM_ALLOCATOR, _PYRO_STACK
from torch import Tensor, nn

from pyro_scale.core import rows
from pyro_scale.core.exclusive import exclusive
from pyro_scale.core.rows import Arguments, Model
from pyro_scale.errors import ModelError
from pyro_scale.model.init_strategies import WEIGHT, InitFunction
from pyro_scale.model.masked_latents import Kept
from pyro_scale.model.recorder import Recorder, Simulator
from pyro_scale.model.sites import Point, points_of_store


class Program:
    """Runs a Pyro model under a recorder, without changing any setting of Pyro or torch.

    Attributes:
        model: the user's model.
        owners: for params that are weights of modules, (module, name of the weight in it) by param
            site.
    """

    def __init__(self, model: Model):
        self.model = model
        self.owners: dict[str, tuple[nn.Module, str]] = {}

    def run(self, arguments: Arguments, recorder: Recorder, validate: bool = False) -> Recorder:
        """Runs the model on a batch and returns the recorder, which then has its sites.

        Args:
            arguments: the model's arguments.
            recorder: records the run; provides latents, params and indices of rows.
            validate: whether Pyro's validation is on.
        """
        swapped = {
            name: point.unconstrained
            for name, point in recorder.given_points.items()
            # the recorder handles PyroParams; only plain weights bypass it
            if name in self.owners and not self.owners[name][1].endswith("_unconstrained")
        }
        with (
            exclusive,
            _restored_if_interrupted(),
            _hidden_from_other_recorders(),
            pyro.validation_enabled(validate),
            pyro.get_param_store().scope(),
            _without_fused_attention(),
            recorder,
        ):
            if swapped:
                self._run_swapped(arguments, swapped)
            else:
                rows.call(self.model, arguments)
        return recorder

    def draw_latents(
        self, arguments: Arguments, init: InitFunction, kept: Mapping[str, Kept]
    ) -> Recorder:
        """Runs the model with its latents from an initialization strategy, and returns the recorder
        of the run.

        Args:
            arguments: a batch, as the model's arguments.
            init: initialization strategy: function from a site to its constrained value.
            kept: for latents with elements that masks leave out, the elements that are params.
        """
        with exclusive, torch.no_grad(), InitMessenger(init):
            return self.run(arguments, Recorder(store=points_of_store(), kept=kept))

    def find_owners(self, points: Mapping[str, Point], modules: list[nn.Module]) -> None:
        """Finds the module that owns each point-estimated site that is a module's weight, and
        stores it in `owners`, so that later runs can replace the weight.

        Args:
            points: the point-estimated sites by name.
            modules: the modules that ran in the model's first run.
        """
        for point in points.values():
            for module in modules if point.parameter is not None else ():
                named = module.named_parameters()
                path = next((path for path, w in named if w is point.parameter), None)
                if path is not None:
                    self.owners[point.name] = module, path
                    break

    def _run_swapped(self, arguments: Arguments, weights: Mapping[str, Tensor]) -> None:
        modules = list({id(module): module for module, _ in self.owners.values()}.values())
        places = {id(module): f"modules_.{i}" for i, module in enumerate(modules)}
        values = {}
        for name, value in weights.items():
            module, path = self.owners[name]
            values[f"{places[id(module)]}.{path}"] = value
        # a warning of pyro.module about tensors that are no parameters
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*was not registered in the param store")
            call_with(_Root(self.model, modules), values, (arguments,))


class _Root(nn.Module):
    """A module whose children are all modules that a model calls, and whose forward calls the
    model: `torch.func.functional_call` on it replaces weights of any of these modules.
    """

    def __init__(self, model: Model, modules: list[nn.Module]):
        super().__init__()
        self._model = [model]  # in a list, so that a module does not become a child twice
        self.modules_ = nn.ModuleList(modules)

    def forward(self, arguments: Arguments) -> Any:
        return rows.call(self._model[0], arguments)


@contextmanager
def _restored_if_interrupted() -> Iterator[None]:
    """Context that restores Pyro's stacks after an exception: a handler that Ctrl-C interrupts
    while it opens or closes leaves entries there, which every later run would meet."""
    handlers, dims = list(_PYRO_STACK), list(_DIM_ALLOCATOR._stack)
    try:
        yield
    except BaseException:
        _PYRO_STACK[:], _DIM_ALLOCATOR._stack[:] = handlers, dims
        raise


@contextmanager
def _hidden_from_other_recorders() -> Iterator[None]:
    """Context that hides a run from the recorder of an outer run, for models that evaluate another
    log posterior: the inner sites only affect the value that is returned, and are not sites of the
    outer model."""
    handlers, dims = list(_PYRO_STACK), list(_DIM_ALLOCATOR._stack)
    is_nested = any(isinstance(handler, Recorder) for handler in handlers)
    if is_nested:  # the last handler may be this run's initialization
        init = [handler for handler in handlers[-1:] if isinstance(handler, InitMessenger)]
        _PYRO_STACK[:], _DIM_ALLOCATOR._stack[:] = init, []
    try:
        yield
    finally:
        if is_nested:
            _PYRO_STACK[:], _DIM_ALLOCATOR._stack[:] = handlers, dims


@contextmanager
def _without_fused_attention() -> Iterator[None]:
    """Context without the fast path of torch's Transformer layers, which has no derivative and
    branches on the values of padding masks."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def call_with(
    module: nn.Module,
    weights: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """The output of a module called with other weights; like `torch.func.functional_call`, with
    tied weights tied. The module itself is not changed.

    If a network has one module under two names, `functional_call` replaces its weight twice, takes
    the first new weight for the old one, and leaves it in the module after the call.

    Args:
        module: the module.
        weights: new weights and buffers by name; others keep theirs.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call; None for none.
    """
    ids = dict(_named_ids(module, every_path=True))
    names_of: dict[int, list[str]] = {}
    for name, weight in _named_ids(module, every_path=False):
        names_of.setdefault(weight, []).append(name)
    tied = {
        other: value
        for name, value in weights.items()
        for other in (names_of[ids[name]] if name in ids else [name])
    }
    return torch.func.functional_call(module, tied, args, kwargs, tie_weights=False)


def _named_ids(module: nn.Module, *, every_path: bool) -> Iterator[tuple[str, int]]:
    """Yields (name, `id`) of every weight and buffer of a module, without reading a `PyroModule`'s
    attributes, which would draw.

    A weight that several modules share is yielded once for each module. A module with several names
    in the network is yielded once, or, with `every_path`, once for each name.
    """
    for path, part in module.named_modules(remove_duplicate=not every_path):
        for name, value in [*part._parameters.items(), *part._buffers.items()]:
            if value is not None:
                yield f"{path}.{name}" if path else name, id(value)


class _FixedStart:
    """The starting values of the params of a model made from a function, the same for all chains;
    has the methods `weights` and `reset_weights` of a bayesianized network, which initialization
    strategies call.
    """

    def __init__(self, values: Mapping[str, Tensor]):
        self._values = {name: torch.as_tensor(value).detach() for name, value in values.items()}

    def weights(self) -> dict[str, Tensor]:
        return self._values

    reset_weights = weights


def function_model(
    fn: Callable[[dict[str, Tensor], Any], Tensor], params: Mapping[str, Tensor], num_data: int
) -> Callable[..., None]:
    """The Pyro model of a function that returns the log posterior per datum: flat priors, and one
    factor of N times the function. The model's arguments are the function's batch.

    Args:
        fn: function of (params, batch) that returns a scalar tensor.
        params: starting values of the unconstrained params by name, the same for all chains.
        num_data: N.
    """
    start = _FixedStart(params)

    def model(*args: Any, **kwargs: Any) -> None:
        values = {
            name: pyro.sample(
                name,
                ImproperUniform(constraints.real, (), value.shape),
                infer=cast(Any, {WEIGHT: (start, name)}),
            )
            for name, value in start.weights().items()
        }
        density = fn(values, kwargs or args)
        if not isinstance(density, Tensor) or density.dim() or not density.is_floating_point():
            result = (
                f"shape {list(density.shape)}" if isinstance(density, Tensor) else repr(density)
            )
            raise ModelError(
                f"the function returned {result}: it must return the log posterior per datum, a "
                "scalar tensor (the mean over the batch's rows of the log likelihood, plus the "
                "log prior over N)"
            )
        pyro.factor("log_posterior", num_data * density)

    return model


def observe_draws(program: Program, arguments: Arguments) -> tuple[Program, Arguments]:
    """A model for rows without observations, whose observations are drawn from the prior predictive
    distribution by torch's generator.

    Args:
        program: runs the model.
        arguments: rows without observations, as the model's arguments.

    Returns:
        (A model that takes the arguments and the observations by site; these arguments with the
        drawn observations). The observations are those sites whose shapes follow the rows.
    """
    count = rows.count(arguments) or 0
    half = torch.arange(count // 2) if count > 1 else torch.zeros(2 * count, dtype=torch.int64)
    with exclusive, torch.no_grad():
        full, part = (
            program.run(batch, Simulator(store=points_of_store())).sites
            for batch in (arguments, rows.take(arguments, half))
        )
    axes, drawn = {}, {}
    for name, site in full.items():
        if site.kind == "observed" and name in part:
            sizes = zip(site.value.shape, part[name].value.shape, strict=True)
            for axis in [axis for axis, (size, other) in enumerate(sizes) if size != other][:1]:
                axes[name], drawn[name] = axis, site.value.movedim(axis, 0).detach()

    def model(arguments: Arguments, observed: Mapping[str, Tensor]) -> Any:
        values = {name: value.movedim(0, axes[name]) for name, value in observed.items()}
        with poutine.condition(data=values):
            return rows.call(program.model, arguments)

    return Program(model), (arguments, drawn)
