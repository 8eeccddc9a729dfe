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

from pyro_scale.core.rows import Arguments, DataLike, Model
from pyro_scale.core.thread_count import restored_threads
from pyro_scale.core.validation import as_count
from pyro_scale.core.warn import without_vmap_warnings
from pyro_scale.data.sources import Data
from pyro_scale.engine.draws import Draws
from pyro_scale.errors import ArgumentError, FileError, NotRunError
from pyro_scale.kernels import Hyperparameters
from pyro_scale.marginal.grouped_data import open_rows
from pyro_scale.marginal.summed import check_not_summed
from pyro_scale.model.call_errors import check_model
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.results.call_checks import OF_METHOD, check_calls, missing_attribute
from pyro_scale.results.files import check_contents, posterior_of, read
from pyro_scale.results.posterior import Posterior
from pyro_scale.run.initialize import ChainStarts
from pyro_scale.run.problem import Problem, as_log_posterior, module_device, prepare
from pyro_scale.run.run import RunPlan
from pyro_scale.run.single_step import Stepping, batch_as_data
from pyro_scale.run.understood import Understood
from pyro_scale.storage import files

P = ParamSpec("P")
T = TypeVar("T")


def asks(question: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Makes a method for inference classes that answers by calling the method of the same name on
    the instance's posterior.

    Args:
        question: a method of a posterior class, whose name, signature and docstring the result has.

    Returns:
        The method.  It raises NotRunError if there is no posterior yet.
    """

    @functools.wraps(question)
    def answer(method: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return cast(T, getattr(method.posterior, question.__name__)(*args, **kwargs))

    return check_calls(answer)


@dataclass(frozen=True)
class NotRun:
    """Stands in for a posterior in a method that has none: its `posterior` raises an error that
    says why.

    Attributes:
        name: name of the inference class, such as "BAOA".
        reason: why there is no posterior, as the end of a sentence that begins with the name.
    """

    name: str
    reason: str

    @property
    def posterior(self) -> Never:
        """Never returns: raises an error that says why there is no posterior.

        Raises:
            NotRunError: always.
        """
        raise NotRunError(f"{self.name} {self.reason}")


class Finished(NamedTuple):
    """The state of an inference method after a run.

    Attributes:
        posterior: result of the run.
        plan: plan of the run, from which its steps can be taken again (for `step_size_bias`); None
            if the method does not support this.
    """

    posterior: Posterior
    plan: RunPlan | None = None


class Chain(Protocol):
    """What `Stepwise.begin` returns: a sampler's chain, an optimizer or a filter that the caller
    moves step by step in a loop of their own."""

    def step(self, *args: Any, **kwargs: Any) -> float:
        """Takes one step on a batch, given as the model's own arguments; returns the batch's
        estimate of the objective before the step, in nats (see `Stepwise.step`)."""
        ...

    @property
    def posterior(self) -> Posterior:
        """The posterior made of the state after the latest step: a single draw for a sampler, all
        particles for `SVGD`, a Gaussian for an approximation."""
        ...


@runtime_checkable
class Starts(Protocol):
    """A fit or run from which the chains of another run can start; users pass it as
    `init_strategy`."""

    def starts(self, num_chains: int, seed: int) -> dict[str, Tensor]:
        """Starting points for the chains of another run: constrained tensors `[num_chains, ...]` by
        latent site.

        Args:
            num_chains: number of chains.
            seed: seed of the draws from which chains start.
        """
        ...


#: What users pass as `init_strategy`: where chains start, or a fit from which starts are drawn.
InitStrategy = ChainStarts | Starts


class Method:
    """An inference method on a model: `run` it on data, then read the results.

    Args:
        model: a Pyro model, a `PyroModule` or a `LogPosterior`.
        init_strategy: where chains start: one of Pyro's strategies (`init_to_median`, ...), a dict
            of constrained tensors `[num_chains, ...]`, or a fit, from which starts are drawn.
        num_data: number of rows in all, N; None takes it from the data.

    Raises:
        ArgumentError: the model is not callable, the init strategy is unknown, or N is below 1.
    """

    #: Arguments that other libraries or methods have -> what to use instead.
    elsewhere: ClassVar[Mapping[str, str]] = {}
    #: Part of the model's analysis that the next run can reuse.
    _understood: Understood | None = None
    #: Why there is no posterior before the first run.
    _not_run: ClassVar[str] = "has no draws yet: call run(data, ...) first"
    #: The state after the last call: no posterior, a finished run, or a chain.
    _last: NotRun | Finished | Chain

    def __init__(
        self, model: Model, *, init_strategy: InitStrategy = None, num_data: int | None = None
    ):
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
        self._init_strategy: Any = init_strategy
        self._num_data = None if num_data is None else as_count("num_data", num_data)
        self._forget()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in ("__init__", "run", "update"):
            if inspect.isfunction(function := vars(cls).get(name)):
                base = getattr(super(cls, cls), name, None)
                function = restored_threads()(function) if name == "run" else function
                setattr(cls, name, check_calls(function, base))

    def __getattr__(self, name: str) -> Any:
        """Never returns: raises an AttributeError for an unknown attribute, which names this
        library's counterpart if the attribute is one of another library."""
        raise missing_attribute(self, name, OF_METHOD)

    def __repr__(self) -> str:
        posterior = None
        with contextlib.suppress(NotRunError):
            posterior = self.posterior
        settings = self._settings_in_words({} if posterior is None else posterior.attrs)
        size = "not run" if posterior is None else posterior.size
        return f"<{type(self).__name__}({settings}), {size}>"

    def _settings_in_words(self, facts: Mapping[str, Any]) -> str:
        """The `structure` of an approximation (such as "dense") and the hyperparameters that are
        numbers or words, as a text "name=value, ..." for `repr`; schedules and tensors are left
        out.

        Args:
            facts: the posterior's `attrs`, whose values have precedence over those that the user
                passed, since `"auto"` is resolved there; empty before a run.
        """
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
        """The posterior of the last run or step.  Later runs and steps make new posteriors and do
        not change this one.

        Raises:
            NotRunError: nothing has been run, or the run ended without draws.
        """
        return self._last.posterior

    get_samples = asks(Posterior.get_samples)
    latents = asks(Posterior.latents)
    moments = asks(Posterior.moments)
    summary = asks(Posterior.summary)
    diagnostics = asks(Posterior.diagnostics)
    report = asks(Posterior.report)
    log_likelihood = asks(Posterior.log_likelihood)
    loo = asks(Posterior.loo)
    ksd = asks(Posterior.ksd)
    predict = asks(Posterior.predict)
    to_arviz = asks(Posterior.to_arviz)
    write_params = asks(Posterior.write_params)
    save = asks(Posterior.save)

    @property
    def params(self) -> dict[str, Tensor]:
        """Point-estimated params after the last step, by name: constrained values of `pyro.param`
        sites and of weights that are not latents but are trained."""
        return self.posterior.params

    @classmethod
    def load(cls, path: files.FilePath, model: Model) -> Self:
        """An instance with the posterior that `save` wrote, bit for bit.  It cannot be run or
        stepped.

        Methods that read the run's data (`log_likelihood`, most groups of `to_arviz`) need `data=`.

        Args:
            path: path of the file.
            model: the model of the run, as for the constructor.  The model is run on the file's
                batch, and must have the same sites, and at two points the same log prior and log
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
        Method.__init__(loaded, model)  # the class's own __init__ creates what only a run needs
        loaded._last = Finished(posterior_of(path, contents, model))
        return cast(Self, loaded)

    # ------------------------------------------------------------------ inside

    def _forget(self) -> None:
        """Drops the posterior and the chain of earlier runs and steps, at the start of a run, so
        that old results cannot be read if the run fails."""
        self._last = NotRun(type(self).__name__, self._not_run)

    def _open(self, data: DataLike, batch_size: int | None) -> Data:
        """The data that the user passed to `run`, opened on the model's device.

        Args:
            data: a loader, or the model's own arguments.
            batch_size: number of rows in a batch, for tensors; None for all rows.
        """
        return open_rows(data, batch_size, self._num_data, module_device(self.model))

    def _target(self, log_posterior: LogPosterior) -> LogPosterior:
        """The density that the method samples or maximizes, from the model's: by default the same,
        the posterior in unconstrained space; `MAP` returns one without the Jacobians of transforms.
        """
        return log_posterior

    def _analyze(
        self,
        data: Data,
        num_data: int | None,
        kernel: Hyperparameters,
        num_chains: int,
        seed: int,
        must_be_usable: bool = True,
    ) -> Problem:
        """The analyzed model on the data, with chains at their starts, as every run needs it.  If
        possible, the analysis of the last run is reused.

        Args:
            data: data of the run.
            num_data: number of rows in all, N; None if the model's plate says it.
            kernel: sampler's or optimizer's kernel, with its hyperparameters; `Hyperparameters()`
                if nothing is moved step by step.
            num_chains: number of chains.
            seed: seed of the run.
            must_be_usable: whether the starts have to be finite, as for `prepare`.
        """
        log_posterior = self._target(as_log_posterior(self.model, num_data))
        starts, earlier = self._starts(num_chains, seed), self._understood
        problem = prepare(
            log_posterior, data, kernel, starts, num_chains, seed, must_be_usable, earlier
        )
        new = problem.understood or Understood.from_preflight(problem.log_posterior, data)
        self._understood = new
        return problem

    def _starts(self, num_chains: int, seed: int) -> ChainStarts:
        """Where chains start, for `prepare`: constrained tensors `[num_chains, ...]` by site, drawn
        from the fit if the user's init strategy is one; otherwise the init strategy as the user
        passed it."""
        if isinstance(self._init_strategy, Starts):
            return self._init_strategy.starts(num_chains, seed)
        return self._init_strategy


class Stepwise(Method):
    """Base class of methods that can be moved step by step, by `begin` or `step`, and not only by
    `run`."""

    def begin(self, *args: Any, **kwargs: Any) -> Chain:
        """A chain at its start, for your own loops: `chain.step(*batch)` moves it, and
        `chain.posterior` is the state after the latest step.

        `num_data` is needed, unless the model's plate says it.  The seed is drawn from torch's
        generator.

        Args:
            *args: a batch, as the model's own arguments, on which the model is analyzed.
            **kwargs: the batch's arguments that are passed by name.

        Raises:
            ArgumentError: an option needs all data.
            ModelError, SiteError, PlateError: the model cannot be run.
        """
        raise NotImplementedError

    def step(self, *args: Any, **kwargs: Any) -> float:
        """Takes one step on a batch, given as the model's own arguments.  The first call makes a
        chain as `begin` does.

        Returns:
            Estimate of the objective from the batch, in nats, before the step: for samplers and
            `MAP` the log joint (for `SVGD` its mean over particles), for `VI` and `IVON` the ELBO,
            for `EKF` the batch's log likelihood.

        Raises:
            ArgumentError: an option needs all data.
            NonFiniteError: the state became NaN or infinite.
        """
        last = self._last
        chain = self.begin(*args, **kwargs) if isinstance(last, NotRun | Finished) else last
        value = chain.step(*args, **kwargs)
        self._last = chain
        return value

    def _open_batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Data:
        """The batch that the user passed to `step` or `begin`, as data.

        Args:
            args, kwargs: the batch, as the model's own arguments.
        """
        check_not_summed(self.model, None, "step")
        return batch_as_data(self.model, self._num_data, args, kwargs)


class SteppedChain:
    """A chain, or particles, that a sampler's or optimizer's kernel moves step by step.

    In the two functions, `draws` has the states after one step, and `values` is a dict of the
    step's hyperparameters (such as `lr`) by name.

    Args:
        problem: the analyzed model, with the start.
        kernel: kernel that moves the chain, with its schedules.
        check: function (problem, draws, values, batch) -> None that is called after each step;
            raises the error if the step broke the chain.
        posterior_of: function (problem, draws, values, first batch) -> the posterior of one step's
            draws.
    """

    def __init__(
        self,
        problem: Problem,
        kernel: Hyperparameters,
        check: Callable[[Problem, Draws, Mapping[str, Tensor], Arguments], None],
        posterior_of: Callable[[Problem, Draws, Mapping[str, Tensor], Arguments], Posterior],
    ):
        self._stepping = Stepping(problem, kernel)
        self._check, self._posterior_of = check, posterior_of
        self._last: tuple[Draws, Mapping[str, Tensor]] | None = None
        self._posterior: Posterior | None = None

    def step(self, *args: Any, **kwargs: Any) -> float:
        """Takes one step on a batch, given as the model's own arguments; returns the batch's
        estimate of the objective before the step (the log joint, or the ELBO of VI and IVON), in
        nats, averaged over particles."""
        problem = self._stepping.problem
        with without_vmap_warnings():
            draws, values, arguments = self._stepping.step(args, kwargs)
        self._check(problem, draws, values, arguments)
        self._last, self._posterior = (draws, values), None
        return float(draws.log_joint.mean())

    @property
    def posterior(self) -> Posterior:
        """The posterior of the state after the latest step: a single draw of a sampler, all
        particles, or a fit.

        Raises:
            NotRunError: no step has been taken.
        """
        if self._last is None:
            raise NotRunError("the chain has taken no step yet: call step(*batch) first")
        if self._posterior is None:
            problem = self._stepping.problem
            self._posterior = self._posterior_of(problem, *self._last, problem.data.first())
        return self._posterior


class Loaded:
    """Base class of what `Method.load` returns, in front of the method's own class: it has the
    results of a run from a file, and its `run` raises an error."""

    def run(self, *args: Any, **kwargs: Any) -> Never:
        """Raises an error: the file has no hyperparameters to run with.

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
    """Yields a class and all its subclasses, depth first, except the classes of objects that `load`
    made; `load` looks a class up by name among these."""
    yield kind
    subclass: type
    for subclass in kind.__subclasses__():
        if not issubclass(subclass, Loaded):
            yield from _family(subclass)
