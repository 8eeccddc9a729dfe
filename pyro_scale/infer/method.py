"""What every inference method has in common."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import (
    Any,
    ClassVar,
    Concatenate,
    NamedTuple,
    Never,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    cast,
    runtime_checkable,
)

from torch import Tensor

from pyro_scale.core.validation import as_count
from pyro_scale.data.sources import Data
from pyro_scale.errors import ArgumentError, FileError, NotRunError
from pyro_scale.kernels import Hyperparameters
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.model.networks import check_model
from pyro_scale.results.call_checks import ATTRIBUTES, check_calls
from pyro_scale.results.files import check_contents, posterior_of, read
from pyro_scale.results.posterior import Posterior
from pyro_scale.run.problem import Problem, prepare
from pyro_scale.run.run import RunPlan
from pyro_scale.run.understood import Understood
from pyro_scale.storage import files

P = ParamSpec("P")
T = TypeVar("T")


def asks(question: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """The same question, asked of the posterior of a method's last run."""

    @functools.wraps(question)
    def answer(method: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return cast(T, getattr(method.posterior, question.__name__)(*args, **kwargs))

    return check_calls(answer)


@dataclass(frozen=True)
class NotRun:
    """A method without a posterior.

    Attributes:
        name: of the method.
        reason: why there is none.
    """

    name: str
    reason: str

    @property
    def posterior(self) -> Never:
        """Refuses.

        Raises:
            NotRunError: always.
        """
        raise NotRunError(f"{self.name} {self.reason}")


class Finished(NamedTuple):
    """What a run leaves.

    Attributes:
        posterior: as a value.
        plan: how the run was run, where the method can take its steps again.
    """

    posterior: Posterior
    plan: RunPlan | None = None


class Chain(Protocol):
    """A chain that is moved step by step, as `begin` returns it."""

    def step(self, *args: Any, **kwargs: Any) -> float:
        """Takes one step on a batch, given as the model's own arguments."""
        ...

    @property
    def posterior(self) -> Posterior:
        """The state after the latest step."""
        ...


@runtime_checkable
class Starts(Protocol):
    """What chains can start from."""

    def starts(self, num_chains: int, seed: int) -> dict[str, Tensor]:
        """Constrained values of latent sites, `[num_chains, ...]`."""
        ...


class Method:
    """An inference method on a model: `run` it on data, then read the results.

    Args:
        model: a Pyro model, a `PyroModule` or a `LogPosterior`.
        init_strategy: where chains start: one of Pyro's (`init_to_median`, ...), a dict of
            constrained tensors `[num_chains, ...]`, or a fit, from which they are drawn.
        num_data: N, which overrides what the data say.

    Raises:
        ArgumentError: a model that is not callable, an unknown init strategy, an N below 1.
    """

    #: Arguments that others have and this method has not -> what there is here.
    elsewhere: ClassVar[Mapping[str, str]] = {}
    #: What the last run understood of the model, for the next one.
    _understood: Understood | None = None
    #: Why there is no posterior before the first run.
    _not_run: ClassVar[str] = "has no draws yet: call run(data, ...) first"
    #: What the last call left: nothing, a run or a chain.
    _last: NotRun | Finished | Chain

    def __init__(self, model: Any, *, init_strategy: Any = None, num_data: int | None = None):
        if not isinstance(model, LogPosterior):
            check_model(model)
        has_its_own = isinstance(model, LogPosterior) and model.given_num_data is not None
        if has_its_own and num_data is not None:
            raise ArgumentError("num_data: a LogPosterior has its own; leave it out")
        is_strategy = (
            init_strategy is None or isinstance(init_strategy, dict) or callable(init_strategy)
        )
        is_class = isinstance(init_strategy, type)
        if is_class or not (is_strategy or isinstance(init_strategy, Starts)):
            raise ArgumentError(
                f"init_strategy={init_strategy!r} is unknown: pass one of Pyro's, such as "
                "pyro.infer.autoguide.init_to_median, a dict of tensors [num_chains, ...], or a fit"
            )
        self.model = model
        self._init_strategy = init_strategy
        self._num_data = None if num_data is None else as_count("num_data", num_data)
        self._forget()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in ("__init__", "run", "update"):
            if inspect.isfunction(vars(cls).get(name)):
                own, base = vars(cls)[name], getattr(super(cls, cls), name, None)
                setattr(cls, name, check_calls(own, base))

    def __getattr__(self, name: str) -> Any:
        """Says what to call instead of what other libraries look for."""
        own = type(self).__name__
        missing = f"'{own}' object has no attribute '{name}'"
        raise AttributeError(ATTRIBUTES.get(name, missing).format(name=own))

    def __repr__(self) -> str:
        own, posterior = type(self).__name__, None
        with contextlib.suppress(NotRunError):
            posterior = self.posterior
        settings = self._settings_in_words({} if posterior is None else posterior.attrs)
        return f"<{own}({settings}), {'not run' if posterior is None else posterior.size}>"

    def _settings_in_words(self, facts: Mapping[str, Any]) -> str:
        """Numbers and words among the hyperparameters, as asked for, or as the run chose them."""
        values = self.kernel.hyperparameters() if hasattr(self, "kernel") else {}
        if hasattr(self, "structure"):
            values = {"structure": self.structure, **values}
        values = {
            name: facts.get(name, value)
            for name, value in values.items()
            if isinstance(value, int | float | str)
        }
        return ", ".join(
            f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in values.items()
        )

    # ------------------------------------------------------------------ after a run

    @property
    def posterior(self) -> Posterior:
        """What the last run, or the last step, left: a value, which later runs do not change.

        Raises:
            NotRunError: nothing has been run, or the run ended without draws.
        """
        return self._last.posterior

    get_samples = asks(Posterior.get_samples)
    moments = asks(Posterior.moments)
    summary = asks(Posterior.summary)
    diagnostics = asks(Posterior.diagnostics)
    log_likelihood = asks(Posterior.log_likelihood)
    loo = asks(Posterior.loo)
    ksd = asks(Posterior.ksd)
    predict = asks(Posterior.predict)
    to_arviz = asks(Posterior.to_arviz)
    write_params = asks(Posterior.write_params)
    save = asks(Posterior.save)

    @property
    def params(self) -> dict[str, Tensor]:
        """`pyro.param` sites and unfrozen weights, as the last step left them."""
        return self.posterior.params

    @classmethod
    def load(cls, path: files.FilePath, model: Any) -> Self:
        """A method that holds the posterior that `save` wrote, bit for bit; only `run` and `step`
        are refused.

        What reads the run's data (`log_likelihood`, most groups of `to_arviz`) needs `data=`.

        Args:
            path: the file.
            model: what was run, as for the constructor.  It is run on the file's batch, and
                must have the sites that it had, and at two points their log prior and log
                likelihood.

        Raises:
            ArgumentError: `path` is no path, or `model` is not callable.
            FileError: the file cannot be read, is damaged, or is of another method or model.
        """
        contents = read(path)
        with check_contents(path):
            name = contents["method"]
        kind = next((kind for kind in _family(cls) if kind.__name__ == name), None)
        if kind is None:
            raise FileError(
                f"'{path}' holds the results of {name}, not of {cls.__name__}: call "
                f"{name}.load(path, model)"
            )
        namespace = {"__doc__": kind.__doc__, "__module__": kind.__module__}
        loaded: Any = object.__new__(type(name, (Loaded, kind), namespace))
        Method.__init__(loaded, model)  # a method's own makes what only a run needs
        loaded._last = Finished(posterior_of(path, contents, model))
        return cast(Self, loaded)

    # ------------------------------------------------------------------ inside

    def _forget(self) -> None:
        """Drops what earlier runs and steps left, at the start of a run."""
        self._last = NotRun(type(self).__name__, self._not_run)

    def _understand(
        self,
        log_posterior: LogPosterior,
        data: Data,
        kernel: Hyperparameters,
        starts: Any,
        num_chains: int,
        seed: int,
        must_be_usable: bool = True,
    ) -> Problem:
        """The model on the data, after the preflight or with what the last run knows of it;
        arguments as for `prepare`."""
        how = kernel, starts, num_chains, seed, must_be_usable
        problem = prepare(log_posterior, data, *how, earlier=self._understood)
        new = problem.understood or Understood.from_preflight(problem.log_posterior, data)
        self._understood = new
        return problem

    def _starts(self, num_chains: int, seed: int) -> Any:
        """The init strategy, a fit's draws among them."""
        if isinstance(self._init_strategy, Starts):
            return self._init_strategy.starts(num_chains, seed)
        return self._init_strategy


class Loaded:
    """What comes before a method's own class in an object that `load` gives."""

    def run(self, *args: Any, **kwargs: Any) -> Never:
        """Refuses: the file has no hyperparameters to run with.

        Raises:
            NotRunError: always.
        """
        name = type(self).__name__
        raise NotRunError(
            f"this {name} was loaded from a file, which holds results only, so it cannot be run: "
            f"make a new one, {name}(model, ...). To start from a loaded fit, pass it as "
            "init_strategy, or its as_prior() as the model"
        )

    step = begin = update = step_size_bias = run


def _family(kind: type) -> Iterator[type]:
    """A class and all below it."""
    yield kind
    below: type
    for below in kind.__subclasses__():
        if not issubclass(below, Loaded):
            yield from _family(below)
