"""The converter: a Pyro model as a function of unconstrained parameters and a batch."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import pyro
import torch
from pyro.infer.autoguide.initialization import init_to_sample, init_to_value
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.exclusive import exclusive, own_generator
from pyro_scale.core.gaussian import Gaussian
from pyro_scale.core.layout import Layout
from pyro_scale.core.rows import Arguments
from pyro_scale.core.validation import as_count
from pyro_scale.core.warn import without_vmap_warnings
from pyro_scale.errors import ArgumentError, CallError, NotRunError, PyroScaleError
from pyro_scale.model import derivatives
from pyro_scale.model.call_errors import (
    any_holds_rows,
    check_model,
    explain_first_call,
    explain_later_call,
    nested_error,
)
from pyro_scale.model.guards import forbid_writes, trace_modules
from pyro_scale.model.init_strategies import (
    InitFunction,
    init_to_module,
    init_to_reset,
    uniform,
)
from pyro_scale.model.masked_latents import Kept
from pyro_scale.model.model_info import ModelInfo
from pyro_scale.model.preflight import examine_function, examine_model
from pyro_scale.model.program import Program, function_model, observe_draws
from pyro_scale.model.recorder import Recorder, Simulator
from pyro_scale.model.scaling import Evaluation, Prior
from pyro_scale.model.site_checks import NotFiniteStartError, check_starts
from pyro_scale.model.sites import Point, Site, points_of_store
from pyro_scale.model.transforms import is_real
from pyro_scale.rng.seeds import Purpose, derived_seed

#: How many starts of a chain are tried. If half of all starts break a model, all 20 break it once
#: in a million times.
MOST_STARTS = 20

Params = Mapping[str, Tensor]
F = TypeVar("F", bound=Callable[..., Any])


def _explains_errors(method: F) -> F:
    """Decorates a method that takes params and a batch. If the method fails because the batch does
    not fit the model, the error says so."""

    @functools.wraps(method)
    def call(self: LogPosterior, params: Params, batch: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, params, batch, *args, **kwargs)
        except Exception as error:
            if (explained := self._explain(batch, error)) is None:
                raise
            raise explained from error

    return call  # type: ignore[return-value]


class LogPosterior:
    """The log joint density of a Pyro model, estimated from a batch, in unconstrained space.

    `log_posterior(params, batch)` is `log_prior + N/B * log_lik.sum()` in nats, a total over the
    data whatever the batch's size B. It is an unbiased estimate of the full-data log joint over
    batches drawn uniformly. The model is examined on the first batch (of `init`, `prepare` or a
    call), which must not be inside of `torch.vmap`; everything after that is a pure function
    that goes through `torch.func`.

    Args:
        model: a Pyro model or a `PyroModule`.
        num_data: N, the rows of the whole data set; not needed if a plate declares it.

    Attributes:
        gaussian_prior: the Gaussian that `with_gaussian_prior` has put in place of the prior;
            otherwise None.

    Raises:
        ModelError, SiteError, PlateError: on the first batch, what is wrong with the model.
        ArgumentError: N is unknown, or less than the rows of a batch.

    Examples:
        >>> import torch, pyro, pyro.distributions as dist
        >>> import pyro_scale as ps
        >>> def model(x, y):
        ...     w = pyro.sample("w", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("y", dist.Normal(w * x, 1.0), obs=y)
        >>> log_posterior = ps.LogPosterior(model, num_data=1000)
        >>> batch = (torch.ones(4), torch.ones(4))
        >>> value = log_posterior({"w": torch.tensor(1.0)}, batch)
        >>> value.log_lik.shape, round(float(value.log_joint - value.log_prior), 1)
        (torch.Size([4]), -918.9)
    """

    def __init__(self, model: Callable[..., Any], num_data: int | None = None):
        check_model(model)
        self.model = model
        self._num_data = None if num_data is None else as_count("num_data", num_data)
        self._program = Program(model)
        self._examine = examine_model
        self._model_info: ModelInfo | None = None
        self._prior: Prior | None = None
        self.gaussian_prior: Gaussian | None = None

    @staticmethod
    def from_function(
        fn: Callable[[dict[str, Tensor], Any], Tensor], params: Params, num_data: int
    ) -> LogPosterior:
        """A log posterior without Pyro, from a function in the manner of the paper's Figure 3.

        Args:
            fn: `fn(params, batch)`, the log posterior per datum (mean log likelihood plus log
                prior over N), a scalar; it is multiplied by N.
                The batch is a tuple by position or a dict by name, as for a model's arguments.
            params: unconstrained tensors, where every chain starts by default.
            num_data: N.

        Examples:
            >>> import torch, pyro_scale as ps
            >>> lp = ps.LogPosterior.from_function(
            ...     lambda params, batch: -0.5 * (params["w"] ** 2).sum(),
            ...     {"w": torch.ones(2)}, num_data=10)
            >>> float(lp({"w": torch.ones(2)}, ()).log_joint)
            -10.0
        """
        log_posterior = LogPosterior(function_model(fn, params, num_data), num_data)
        log_posterior._examine = examine_function
        return log_posterior

    # ------------------------------------------------------------------ the density

    @_explains_errors
    def __call__(self, params: Params, batch: Any, indices: Tensor | None = None) -> Evaluation:
        """The log joint at unconstrained params, estimated from a batch.

        Args:
            params: unconstrained tensors by site; may include `pyro.param` sites; those left out
                keep their value.
            batch: the model's arguments, a tuple by position or a dict by name.
            indices: the rows `[B]` to take, for a model that subsamples by itself; drawn from
                torch's generator if left out.
        """
        arguments = rows.as_arguments(batch)
        self.prepare(arguments)
        run = self.run(params, arguments, indices)
        return self.evaluate(run.sites, self.batch_size(arguments))

    def evaluate(self, sites: Mapping[str, Site], batch_size: int) -> Evaluation:
        """The log joint from the sites of a run on a batch of this size."""
        return self.model_info.scaling.evaluate(sites, batch_size, self._prior)

    def grad(
        self, params: Params, batch: Any, indices: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Evaluation]:
        """(Gradient of the log joint by site, the evaluation), as for a call."""
        self.prepare(rows.as_arguments(batch))
        return derivatives.gradient(lambda p: self(p, batch, indices), params)

    def plain_grad(
        self, params: Params, batch: Any, indices: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Evaluation]:
        """As `grad`, by `torch.autograd` instead of `torch.func`: for models with an
        `autograd.Function` that functorch does not support. It does not work under `torch.vmap`."""
        self.prepare(rows.as_arguments(batch))
        return derivatives.plain_gradient(lambda p: self(p, batch, indices), params)

    def row_gradients(
        self, params: Params, batch: Any, indices: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The gradient of each row's log likelihood by site, `[B, ...]`: without N/B."""
        return derivatives.row_gradients(lambda p: self(p, batch, indices).log_lik, params)

    @_explains_errors
    def log_likelihood(
        self, params: Params, batch: Any, indices: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Each row's log likelihood by data site, `[B]`: without N/B, with the user's scale. If
        rows depend on each other, a row's log likelihood is conditional on the others."""
        arguments = rows.as_arguments(batch)
        sites = self.run(params, arguments, indices).sites
        return self.model_info.scaling.log_likelihood(sites, self.batch_size(arguments))

    # ------------------------------------------------------------------ runs of the model

    @_explains_errors
    def run(
        self,
        params: Params,
        arguments: Arguments,
        indices: Tensor | None = None,
        recorder: Callable[..., Recorder] = Recorder,
        validate: bool = False,
    ) -> Recorder:
        """Runs the model at unconstrained params and records its sites.

        Args:
            params: as for a call.
            arguments: a batch.
            indices: as for a call.
            recorder: the class of the recorder, or a function that makes one.
            validate: whether with Pyro's validation.
        """
        info = self.model_info
        points = {
            name: replace(point, unconstrained=params.get(name, point.unconstrained))
            for name, point in info.points.items()
        }
        plate_indices = {}
        if info.own_plate is not None:
            if indices is None:
                with exclusive:
                    indices = torch.randperm(self.num_data)[: info.batch_size]
            plate_indices = {info.own_plate: indices}
        return self._program.run(
            arguments,
            recorder(
                latents=params,
                points=points,
                indices=plate_indices,
                enum_dim=info.enum_dim,
                kept=info.kept,
            ),
            validate,
        )

    def simulate(
        self,
        params: Params,
        arguments: Arguments,
        indices: Tensor | None = None,
        drawn: Params | None = None,
    ) -> Recorder:
        """Runs the model at unconstrained params and draws its observations, or takes them from
        `drawn`, the values of an earlier run."""
        return self.run(params, arguments, indices, partial(Simulator, drawn=drawn))

    def run_as_first(self, arguments: Arguments) -> Recorder:
        """Runs the model at the latent values of its first run and the current params, with the
        preflight's guards: arguments are copied, modules are checked.

        Raises:
            ModelError: a module cannot be used, or the model writes to its arguments.
        """
        info = self.model_info
        with (
            own_generator(),
            torch.no_grad(),
            trace_modules(),
            forbid_writes(self.model, arguments) as copies,
        ):
            recorder = Recorder(
                latents=_unconstrained(info.sites),
                enum_dim=info.enum_dim,
                store=points_of_store(),
                kept=info.kept,
            )
            return self._program.run(copies, recorder)

    def batch_size(self, arguments: Arguments) -> int:
        """How many rows a batch has."""
        info = self.model_info
        if info.own_plate is not None:
            return info.batch_size
        count = rows.count(arguments)
        return self.num_data if count is None else count

    def first_indices(self) -> Tensor | None:
        """The first rows' indices, for a model that subsamples by itself; None for others."""
        info = self.model_info
        return None if info.own_plate is None else torch.arange(info.batch_size)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The model's arguments: a tuple if all are passed by position, otherwise a dict by name.

        Raises:
            CallError: the arguments do not match the model's signature; or rows are wrapped in a
                tuple, list or dict, unlike in the first batch.
        """
        signature = inspect.signature(getattr(self.model, "forward", self.model))
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise CallError(f"the model, which takes {signature}: {error}") from None
        by_name = dict(bound.arguments) if args else kwargs
        arguments = rows.tables_as_tensors(by_name if kwargs else args)
        info = self._model_info
        if info is not None and any_holds_rows(arguments) and not any_holds_rows(info.example):
            raise nested_error()
        return arguments

    # ------------------------------------------------------------------ parameters

    def init(self, seed: int, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Unconstrained params, each uniform in (-2, 2), for a batch passed as the model's own
        arguments.

        The same seed gives the same params, and torch's generator is left as it was.
        """
        arguments = self.bind(args, kwargs)
        self.prepare(arguments)
        return self.start(arguments, seed)

    def start(
        self,
        arguments: Arguments,
        seed: int,
        chain: int = 0,
        init: InitFunction | None = None,
        values: Params | None = None,
        attempt: int = 0,
    ) -> dict[str, Tensor]:
        """Unconstrained params from an initialization in Pyro's manner, for one chain.

        Args:
            arguments: a batch.
            seed: of the run; the draw is a function of (seed, chain, attempt).
            chain: which chain.
            init: site -> constrained value; uniform in (-2, 2), unconstrained, by default, and
                for weights of bayesianized modules the module's values (chain 0) or
                `reset_parameters()`.
            values: constrained values that go before the initialization.
            attempt: number of the draw, if earlier draws were unusable.
        """
        init = init or self.default_init(chain)
        if values:
            init = init_to_value(values=dict(values), fallback=init)
        with own_generator(derived_seed(seed, chain, Purpose.INIT, attempt)):
            sites = self._program.draw_latents(arguments, init, self._kept).sites
        check_starts(sites, chain)
        return unconstrained_values(sites)

    def default_init(self, chain: int) -> InitFunction:
        """The initialization of a chain unless the user passes one."""
        if chain == 0:
            return init_to_module
        return init_to_reset(fallback=uniform)

    def prior_draws(self, arguments: Arguments, count: int, seed: int) -> dict[str, Tensor]:
        """Unconstrained draws of the latents from their priors, `[count, ...]`."""
        self.prepare(arguments)

        def draw(_: Tensor) -> dict[str, Tensor]:
            sites = self._program.draw_latents(arguments, init_to_sample, self._kept).sites
            values = _unconstrained(sites)
            return {name: values[name] for name in self.latents}

        places = torch.arange(count)
        with own_generator(derived_seed(seed, 0, Purpose.INIT)), without_vmap_warnings():
            try:
                return torch.vmap(draw, randomness="different")(places)
            except (RuntimeError, NotImplementedError):  # a model that vmap does not support
                drawn = [draw(place) for place in places]
        return {name: torch.stack([values[name] for values in drawn]) for name in self.latents}

    def constrain(self, params: Params) -> dict[str, Tensor]:
        """Maps unconstrained params to the sites' constrained values, `pyro.param` sites included
        if passed."""
        run = self.run(params, self.model_info.example, self.first_indices())
        latents = {s.name: s.value for s in run.sites.values() if s.kind == "latent"}
        points = {n: p.constrain(params[n]) for n, p in self.points.items() if n in params}
        return latents | points

    def unconstrain(self, values: Params) -> dict[str, Tensor]:
        """Maps the constrained values of all latent sites to unconstrained params."""
        for name in self.latents:
            if name not in values:
                raise ArgumentError(f"unconstrain: no value for site '{name}'")
        if self.is_unconstrained:
            sites = self.model_info.sites
            sites = {n: replace(sites[n], unconstrained=values[n]) for n in self.latents}
            check_starts(sites)
            params = unconstrained_values(sites)
        else:  # a support may depend on another site's value
            params = self.start(self.model_info.example, seed=0, values=values)
        for name, point in self.points.items():
            if name in values:
                params[name] = point.unconstrain(values[name])
        return params

    def deterministics(self, params: Params) -> dict[str, Tensor]:
        """`pyro.deterministic` sites outside the data's plate."""
        run = self.run(params, self.model_info.example, self.first_indices())
        return {name: run.sites[name].value for name in self.model_info.steady}

    def write_points(self, values: Params) -> None:
        """Puts constrained values of points into Pyro's param store, or into their modules."""
        for name, value in values.items():
            point = self.points[name]
            if name in self._program.owners:
                module, path = self._program.owners[name]
                with torch.no_grad():
                    module.get_parameter(path).copy_(point.unconstrain(value))
            else:
                with exclusive:  # runs replace it by another tensor
                    store = pyro.get_param_store()
                    store.setdefault(name, value, constraint=point.constraint)
                    store[name] = value

    # ------------------------------------------------------------------ the preflight

    def prepare(
        self, arguments: Arguments, init: InitFunction | None = None, seed: int = 0
    ) -> Params | None:
        """Examines the model on a first batch; does nothing on a later one.

        A start where the log density is not finite is drawn again, as Pyro does.

        Returns:
            The start of chain 0 if the model has just been examined; None on later batches.
        """
        init = init or self.default_init(0)
        for attempt in range(MOST_STARTS):
            if self._model_info is not None:
                return None
            is_last = attempt == MOST_STARTS - 1
            with (
                own_generator(derived_seed(seed, 0, Purpose.INIT, attempt)),
                contextlib.nullcontext() if is_last else contextlib.suppress(NotFiniteStartError),
            ):
                if self._model_info is None:  # by another thread
                    info = self._examine_or_explain(arguments, init)
                    self._model_info = info
                    return None if attempt else unconstrained_values(info.sites)
        return None

    def _examine_or_explain(self, arguments: Arguments, init: InitFunction) -> ModelInfo:
        """The preflight's result. If the preflight fails because of the call, the error explains
        the call."""
        try:
            return self._examine(self._program, arguments, init, self._num_data)
        except NotFiniteStartError:
            raise
        except Exception as error:
            explained = explain_first_call(self.model, arguments, error, init)
            if explained is None:
                raise
            raise explained from error

    def _explain(self, batch: Any, error: Exception) -> PyroScaleError | None:
        """The error for a call that failed because of its batch; None if the batch is not the
        cause."""
        if self._model_info is None or isinstance(error, PyroScaleError):
            return None
        init = init_to_value(values=self.values)
        example = self._model_info.example
        return explain_later_call(self.model, rows.as_arguments(batch), example, error, init)

    @property
    def model_info(self) -> ModelInfo:
        """The result of the preflight.

        Raises:
            NotRunError: no batch has been seen yet.
        """
        if self._model_info is None:
            raise NotRunError("the model has not seen a batch yet: call init(seed, *batch) first")
        return self._model_info

    @property
    def _kept(self) -> Mapping[str, Kept]:
        return {} if self._model_info is None else self._model_info.kept

    @property
    def given_num_data(self) -> int | None:
        """N as it was passed, None where it was left out."""
        return self._num_data

    @property
    def num_data(self) -> int:
        """N."""
        return self.model_info.scaling.num_data

    @property
    def latents(self) -> tuple[str, ...]:
        """The latent sites' names, in the model's order."""
        return tuple(s.name for s in self.model_info.sites.values() if s.kind == "latent")

    @property
    def points(self) -> Mapping[str, Point]:
        """`pyro.param` sites and unfrozen weights: point-estimated."""
        return self.model_info.points

    @property
    def values(self) -> dict[str, Tensor]:
        """The values of latents (constrained) and of points in the first run."""
        sites = self.model_info.sites
        points = {n: p.constrain(p.unconstrained) for n, p in self.points.items()}
        return {name: sites[name].value for name in self.latents} | points

    @property
    def layout(self) -> Layout:
        """Where the latents are in one unconstrained vector."""
        return Layout.from_tensors(_unconstrained(self.model_info.sites))

    @property
    def is_unconstrained(self) -> bool:
        """Whether every latent's support is all reals, so that params are the sites' values."""
        info = self.model_info
        return not info.kept and all(is_real(info.sites[n].fn.support) for n in self.latents)

    # ------------------------------------------------------------------ variants

    def renew(self, num_data: int | None) -> LogPosterior:
        """A copy that has not been examined. `num_data` is used only if this log posterior has
        none."""
        other = copy.copy(self)
        other._num_data = self._num_data or num_data
        other._program, other._model_info = Program(self.model), None
        return other

    def is_of_same_model(self, other: LogPosterior) -> bool:
        """Whether another log posterior has the same callable and the same prior."""
        return self.model is other.model and self._prior is other._prior

    def with_drawn_observations(
        self, arguments: Arguments, seed: int
    ) -> tuple[LogPosterior, Arguments]:
        """A copy for rows that are not observed yet, whose observations are draws from the prior.

        Returns:
            (The copy, which has not seen a batch; a batch for it).
        """
        other = self.renew(self._num_data)
        with own_generator(derived_seed(seed, 0, Purpose.INIT)):
            other._program, arguments = observe_draws(self._program, arguments)
        return other, arguments

    def with_gaussian_prior(self, gaussian: Gaussian) -> LogPosterior:
        """A copy whose prior is a Gaussian over all latents, in their order."""
        other = self._with_prior(partial(_gaussian_log_prior, gaussian))
        other.gaussian_prior = gaussian
        return other

    def without_jacobian(self) -> LogPosterior:
        """A copy without the Jacobians: the density of the constrained values, as a function of
        unconstrained params. Its mode does not depend on the transforms."""
        return self._with_prior(partial(_without_log_dets, self._prior))

    def with_jacobian(self) -> LogPosterior:
        """A copy with the Jacobians: the density of unconstrained params. The inverse of
        `without_jacobian`."""
        prior = self._prior
        if not (isinstance(prior, partial) and prior.func is _without_log_dets):
            return self
        return self._with_prior(prior.args[0])

    def _with_prior(self, prior: Prior | None) -> LogPosterior:
        other = copy.copy(self)
        other._prior = prior
        return other


def unconstrained_values(sites: Mapping[str, Site]) -> dict[str, Tensor]:
    """Copies of the latents' unconstrained values in a run."""
    return {name: value.detach().clone() for name, value in _unconstrained(sites).items()}


def _unconstrained(sites: Mapping[str, Site]) -> dict[str, Tensor]:
    return {s.name: s.unconstrained for s in sites.values() if s.unconstrained is not None}


def _gaussian_log_prior(gaussian: Gaussian, sites: Mapping[str, Site], log_prior: Tensor) -> Tensor:
    values = [site.unconstrained for site in sites.values() if site.kind == "latent"]
    flat = [value.reshape(-1) for value in values if value is not None]
    return gaussian.log_prob(torch.cat(flat).to(log_prior))


def _without_log_dets(prior: Prior | None, sites: Mapping[str, Site], log_prior: Tensor) -> Tensor:
    log_dets = [site.log_det for site in sites.values() if site.log_det is not None]
    own_prior = log_prior if prior is None else prior(sites, log_prior)
    return own_prior - torch.stack(log_dets).sum()
