"""Suggestions for arguments that people know from Pyro, NumPyro and ArviZ."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, get_args, get_type_hints

from pyro_scale.errors import CallError

F = TypeVar("F", bound=Callable[..., Any])

#: What a method without checkpoints has.
_KEPT = (
    "save(path), which keeps the results; another run starts from them by the constructor's "
    "init_strategy=load(path, model)"
)

#: An argument elsewhere -> what there is here.
ELSEWHERE = {
    "num_warmup": "warmup_steps=, in steps of the sampler",
    "warmup": "warmup_steps=, in steps of the sampler",
    "burnin": "warmup_steps=, in steps of the sampler",
    "thin": "thinning=",
    "step_size": "lr=",
    "learning_rate": "lr=",
    "optim": "optimizer=, such as torchopt.adam(1e-2)",
    "optimiser": "optimizer=, such as torchopt.adam(1e-2)",
    "lr": "optimizer=torchopt.adam(lr)",
    "loss": "nothing: the ELBO is what VI raises",
    "guide": "structure='diag' or 'dense': VI makes its own guide, which fit.guide() gives",
    "num_steps": "num_samples=, warmup_steps= and thinning=: steps are warmup_steps + "
    "num_samples * thinning",
    "num_epochs": "num_samples=, warmup_steps= and thinning=, in steps",
    "checkpoint": _KEPT,
    "resume": _KEPT,
    "prob": "arviz.summary(fit.to_arviz(), ...), whose interval it is",
    "hdi_prob": "arviz.summary(fit.to_arviz(), ...), whose interval it is",
    "ci_prob": "arviz.summary(fit.to_arviz(), ...), whose interval it is",
    "rng_key": "seed=",
    "progress_bar": "progress=",
    "disable_progbar": "progress=False",
}

#: An attribute that other libraries look for -> what to call instead.
ATTRIBUTES = {
    "setup": "{name} is no kernel of pyro.infer.MCMC but runs by itself: "
    "ps.{name}(model, ...).run(data, num_samples=..., num_chains=...)",
    "report": "{name} chooses nothing to report: summary() has what it found",
    "step": "{name} takes no steps of its own: call run(data, ...)",
    "psis": "{name} gives draws and no density, so there are no importance weights: psis() is of "
    "VI, IVON, Laplace and EKF",
    "step_size_bias": "{name} takes no steps whose size is felt in the draws",
    "num_chains": "arviz.from_pyro takes pyro.infer.MCMC: here call .to_arviz(), which has more",
}


def check_calls(function: F) -> F:
    """A method whose calls are compared with its signature first."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            signature.bind(self, *args, **kwargs)
        except TypeError as error:
            raise CallError(_explain(self, function, args, kwargs, str(error))) from None
        return function(self, *args, **kwargs)

    return call  # type: ignore[return-value]


def unknown_argument(method: Any, name: str, names: Iterable[str]) -> str:
    """What to write for an argument that a method's constructor or function does not have."""
    names = [each for each in names if each != "self"]
    for other, place in ((type(method).run, "run()"), (type(method), "the constructor")):
        its = inspect.signature(other).parameters.get(name)
        if its is not None and its.kind not in (its.VAR_POSITIONAL, its.VAR_KEYWORD):
            return f"pass it to {place}"
    if name in (elsewhere := ELSEWHERE | method.elsewhere):
        return f"here it is {elsewhere[name]}"
    near = difflib.get_close_matches(name, names, 1)
    return f"did you mean {near[0]}=?" if near else f"it takes {', '.join(names)}"


def _explain(
    self: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    error: str,
) -> str:
    parameters = inspect.signature(function).parameters
    own = function.__name__ == "__init__"
    title = type(self).__name__ + ("" if own else f".{function.__name__}")
    options = _options_of(function)
    kind = "hyperparameter" if options else "argument"
    for name in kwargs:
        if options is not None and name not in (*parameters, *options):
            hint = unknown_argument(self, name, parameters)
            return f"{title} has no {kind} '{name}': {hint}"
    places = [p for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(args) + 1 > len(places):
        if function.__name__ == "run":
            hint = "pass the model's arguments as one tuple or dict, run((x, y), ...)"
        elif own and "structure" in parameters:
            hint = "all but the model are passed by name; a guide is made by structure="
        elif own:
            hint = "all but the model are passed by name, such as lr="
        else:
            hint = "pass the others by name"
        return f"{title} takes {len(places) - 1} positional argument(s), not {len(args)}: {hint}"
    return f"{title}: {error}"


def _options_of(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """The names that `**options: Unpack[...]` stands for; None where any name will do."""
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            kinds = get_args(get_type_hints(function).get(parameter.name))
            return tuple(kinds[0].__annotations__) if kinds else None
    return ()
