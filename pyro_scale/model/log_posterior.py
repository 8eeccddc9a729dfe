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
from torch.distributions import Transform

from pyro_scale.core import rows
from pyro_scale.core.evaluation import Evaluation
from pyro_scale.core.exclusive import exclusive, own_generator
from pyro_scale.core.gaussian import Gaussian
from pyro_scale.core.layout import Layout
from pyro_scale.core.rows import Arguments, Model
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
from pyro_scale.model.scaling import Prior
from pyro_scale.model.site_checks import NotFiniteStartError, check_starts
from pyro_scale.model.sites import Point, Site, points_of_store
from pyro_scale.model.transforms import bijection_of_elements, is_real
from pyro_scale.rng.seeds import Purpose, derived_seed

#: How many starts of a chain are tried. If half of all starts break a model, all 20 break it once
#: in a million times.
MOST_STARTS = 20

Params = Mapping[str, Tensor]
F = TypeVar("F", bound=Callable[..., Any])


def _explains_errors(method: F) -> F:
    """Decorates a method of `LogPosterior` that takes params and a batch: if the method fails
    because the batch does not fit the model, a `PyroScaleError` that says so is raised instead."""

    @functools.wraps(method)
    def call(
        self: LogPosterior, params: Params, batch: Arguments, *args: Any, **kwargs: Any
    ) -> Any:
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
        num_data: N, the number of rows of the whole data set; None if a plate of the model declares
            it.

    Attributes:
        gaussian_prior: the Gaussian over all latents that `with_gaussian_prior` has put in place of
            the prior; None in other cases.

    Raises:
        ModelError, SiteError, PlateError: on the first batch, what is wrong with the model.
        ArgumentError: N is unknown, or less than the number of rows of a batch.

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

    def __init__(self, model: Model, num_data: int | None = None):
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
            fn: `fn(params, batch)`, the log posterior per datum: the mean log likelihood of the
                batch's rows plus the log prior divided by N, a scalar in nats.
                The batch is a tuple by position or a dict by name, as for a model's arguments.
            params: unconstrained tensors, where every chain starts by default.
            num_data: N, the number of rows of the whole data set.

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
    def __call__(
        self, params: Params, batch: Arguments, indices: Tensor | None = None
    ) -> Evaluation:
        """The log joint density at unconstrained params, in nats, estimated from a batch: (log
        joint, log prior, each row's log likelihood `[B]`).

        Args:
            params: unconstrained tensors by site; may include `pyro.param` sites, which keep their
                first value if left out.
            batch: the model's arguments, a tuple by position or a dict by name.
            indices: indices `[B]` of the rows to use, for a model that subsamples by itself; if
                None, such a model's rows are drawn from torch's generator.
        """
        arguments = rows.as_arguments(batch)
        self.prepare(arguments)
        run = self.run(params, arguments, indices)
        return self.evaluate(run.sites, self.batch_size(arguments))

    def evaluate(self, sites: Mapping[str, Site], batch_size: int) -> Evaluation:
        """The log joint density, in nats, computed from the recorded sites of a run on a batch of B
        rows, without another run."""
        return self.model_info.scaling.evaluate(sites, batch_size, self._prior)

    def grad(
        self, params: Params, batch: Arguments, indices: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Evaluation]:
        """Gradient of the estimated log joint density with respect to unconstrained params, by
        `torch.func`: it works under `torch.vmap`. Arguments are those of a call of the log
        posterior: unconstrained params by site, a batch, indices of rows.

        Returns:
            (The gradient, a tensor of each site's shape by site, in nats per unit; the evaluation).
        """
        self.prepare(rows.as_arguments(batch))
        return derivatives.gradient(lambda p: self(p, batch, indices), params)

    def plain_grad(
        self, params: Params, batch: Arguments, indices: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Evaluation]:
        """Gradient of the estimated log joint density with respect to unconstrained params, and the
        evaluation, as `grad` returns them; computed by `torch.autograd` instead of `torch.func`,
        for models with an `autograd.Function` that functorch does not support. This method does not
        work under `torch.vmap`.
        """
        self.prepare(rows.as_arguments(batch))
        return derivatives.plain_gradient(lambda p: self(p, batch, indices), params)

    def row_gradients(
        self, params: Params, batch: Arguments, indices: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The gradient of each row's log likelihood with respect to the params, `[B, *shape]` by
        site, not scaled up from the batch to the data (by N/B). Arguments as for a call."""
        return derivatives.row_gradients(lambda p: self(p, batch, indices).log_lik, params)

    @_explains_errors
    def log_likelihood(
        self, params: Params, batch: Arguments, indices: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Each row's log likelihood in nats, `[B]` by observed site: not scaled up from the batch
        to the data (by N/B), but multiplied by the user's `poutine.scale`. If rows depend on each
        other, a row's log likelihood is conditional on the other rows. Arguments as for a call."""
        arguments = rows.as_arguments(batch)
        self.prepare(arguments)
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
        """Runs the model once at unconstrained params and returns the recorder, which holds every
        site of the run. Nothing is scaled up from the batch to the data.

        Args:
            params: unconstrained tensors by site; point-estimated sites keep their first value if
                left out.
            arguments: a batch, as the model's arguments.
            indices: indices `[B]` of the rows, for a model that subsamples by itself; random if
                None.
            recorder: the recorder's class, or a function that makes one from the same arguments.
            validate: whether Pyro's validation is on during the run.
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
        """Runs the model at unconstrained params with its observations replaced by draws from the
        likelihood, and returns the recorder of the run.

        Args:
            params: unconstrained tensors by site.
            arguments: a batch, as the model's arguments.
            indices: indices `[B]` of the rows, for a model that subsamples by itself; random if
                None.
            drawn: values by site of an earlier simulation, which are used instead of new draws;
                None for new draws of all sites.
        """
        return self.run(params, arguments, indices, partial(Simulator, drawn=drawn))

    def run_as_first(self, arguments: Arguments) -> Recorder:
        """Runs the model at the latent values of its first run and at the current values of
        `pyro.param` sites, on copies of the arguments, with the preflight's checks of modules.
        Returns the recorder of the run.

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
        """The number of rows of data in a batch: the size of the subsample for a model that
        subsamples by itself, and N for a model without arguments that hold rows."""
        info = self.model_info
        if info.own_plate is not None:
            return info.batch_size
        count = rows.count(arguments)
        return self.num_data if count is None else count

    def first_indices(self) -> Tensor | None:
        """Indices 0, ..., B - 1 of the first rows, `[B]`, for a model that subsamples by itself, to
        run it on any B rows; None for other models, which need no indices.
        """
        info = self.model_info
        return None if info.own_plate is None else torch.arange(info.batch_size)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The model's arguments as one batch: a tuple if all are passed by position, otherwise a
        dict by name.

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
        """Starting values of the unconstrained params, a tensor by site, for a batch passed as the
        model's own arguments: uniform in (-2, 2), and the network's values for weights of
        bayesianized modules.

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
        """Starting values of the unconstrained params for one chain, a tensor by site, from an
        initialization strategy of Pyro's kind.

        Args:
            arguments: a batch, as the model's arguments.
            seed: seed of the run; the draw is a function of (seed, chain, attempt).
            chain: the chain's number.
            init: function from a Pyro site to its constrained starting value. If None, uniform in
                (-2, 2) in unconstrained space; for weights of bayesianized modules, the module's
                values (chain 0) or `reset_parameters()` (other chains).
            values: constrained values by site that replace those of `init`; None for no such
                values.
            attempt: number of the draw, above 0 if the log density was not finite at earlier draws.

        Raises:
            SiteError: a site starts outside its support, or on its edge.
        """
        init = init or self.default_init(chain)
        if values:
            init = init_to_value(values=dict(values), fallback=init)
        with own_generator(derived_seed(seed, chain, Purpose.INIT, attempt)):
            sites = self._program.draw_latents(arguments, init, self._kept).sites
        check_starts(sites, chain)
        return unconstrained_values(sites)

    def default_init(self, chain: int) -> InitFunction:
        """The initialization strategy of a chain if the user passes none: uniform in (-2, 2) in
        unconstrained space; for weights of bayesianized modules, the module's values (chain 0) or
        `reset_parameters()` (other chains)."""
        if chain == 0:
            return init_to_module
        return init_to_reset(fallback=uniform)

    def prior_draws(self, arguments: Arguments, count: int, seed: int) -> dict[str, Tensor]:
        """Draws of all latents from their priors, in unconstrained space: a dict by site, `[count,
        *shape]`.

        Args:
            arguments: a batch, as the model's arguments.
            count: number of draws.
            seed: seed of the draws.
        """
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
        """The constrained values of all latents, by site, at unconstrained params; and those of the
        `pyro.param` sites that are among the params."""
        run = self.run(params, self.model_info.example, self.first_indices())
        latents = {s.name: s.value for s in run.sites.values() if s.kind == "latent"}
        points = {n: p.constrain(params[n]) for n, p in self.points.items() if n in params}
        return latents | points

    def elementwise_bijections(self, params: Params) -> dict[str, Transform]:
        """The bijections from unconstrained space to supports, by site, of those latents whose
        elements they map one by one. Latents that are all reals are left out, and those whose
        support depends on another site, as a comparison with the model at `params` shows."""
        values, transforms = self.constrain(params), dict[str, Transform]()
        for name in self.latents:
            if values[name].shape != params[name].shape:
                continue
            transform = bijection_of_elements(self.model_info.sites[name].fn.support)
            if transform is not None and torch.allclose(transform(params[name]), values[name]):
                transforms[name] = transform
        return transforms

    def unconstrain(self, values: Params) -> dict[str, Tensor]:
        """The unconstrained params, by site, from constrained values of all latents and, if passed,
        of `pyro.param` sites. The inverse of `constrain`.

        Raises:
            ArgumentError: a latent has no value.
            SiteError: a value is outside its support.
        """
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
        """The values of the `pyro.deterministic` sites that do not depend on the rows of the batch,
        by site, at unconstrained params."""
        run = self.run(params, self.model_info.example, self.first_indices())
        return {name: run.sites[name].value for name in self.model_info.steady}

    def write_points(self, values: Params) -> None:
        """Writes constrained values of `pyro.param` sites and of unfrozen weights, by site, into
        Pyro's param store, or into the modules that own them."""
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
        """Examines the model on a first batch; does nothing on later batches.

        Where the log density at the start is not finite, another start is drawn, up to 20 times, as
        Pyro does.

        Args:
            arguments: a batch, as the model's arguments.
            init: initialization strategy of the latents; None for that of chain 0.
            seed: seed of the starts.

        Returns:
            The unconstrained start of chain 0 if the model has just been examined at its first
            start; None on later batches or if further starts were needed.
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
        """The preflight's result on a first batch. If the preflight fails because the arguments do
        not fit the model, the error that is raised explains which."""
        try:
            return self._examine(self._program, arguments, init, self._num_data)
        except NotFiniteStartError:
            raise
        except Exception as error:
            explained = explain_first_call(self.model, arguments, error, init)
            if explained is None:
                raise
            raise explained from error

    def _explain(self, batch: Arguments, error: Exception) -> PyroScaleError | None:
        """The error that explains how a later batch does not fit the model; None if the model has
        seen no batch, the error is the library's own, or the batch is not the cause."""
        if self._model_info is None or isinstance(error, PyroScaleError):
            return None
        init = init_to_value(values=self.values)
        example = self._model_info.example
        return explain_later_call(self.model, rows.as_arguments(batch), example, error, init)

    @property
    def model_info(self) -> ModelInfo:
        """What the preflight found out about the model: sites, scaling rules, B and N.

        Raises:
            NotRunError: the model has not seen a batch yet.
        """
        if self._model_info is None:
            raise NotRunError("the model has not seen a batch yet: call init(seed, *batch) first")
        return self._model_info

    @property
    def _kept(self) -> Mapping[str, Kept]:
        return {} if self._model_info is None else self._model_info.kept

    @property
    def given_num_data(self) -> int | None:
        """N, the number of rows of the data, as the user passed it to the constructor; None if it
        was left out, so that a plate of the model has to declare N.
        """
        return self._num_data

    @property
    def num_data(self) -> int:
        """N, the number of rows of the whole data set."""
        return self.model_info.scaling.num_data

    @property
    def latents(self) -> tuple[str, ...]:
        """The names of the latent sites, in the model's order."""
        return tuple(s.name for s in self.model_info.sites.values() if s.kind == "latent")

    @property
    def points(self) -> Mapping[str, Point]:
        """The sites that are point-estimated, by name: `pyro.param` sites and unfrozen weights of
        modules."""
        return self.model_info.points

    @property
    def values(self) -> dict[str, Tensor]:
        """The constrained values of all latents and of the point-estimated sites in the model's
        first run (on the first batch), by site: examples of their shapes and dtypes.
        """
        sites = self.model_info.sites
        points = {n: p.constrain(p.unconstrained) for n, p in self.points.items()}
        return {name: sites[name].value for name in self.latents} | points

    @property
    def layout(self) -> Layout:
        """A `Layout`: the indices of each latent's elements in one vector of all D unconstrained
        parameters, with shapes and dtypes.
        """
        return Layout.from_tensors(_unconstrained(self.model_info.sites))

    @property
    def is_unconstrained(self) -> bool:
        """Whether no latent needs a transform: every latent's support is all reals, so that
        unconstrained params are the sites' values.
        """
        info = self.model_info
        return not info.kept and all(is_real(info.sites[n].fn.support) for n in self.latents)

    # ------------------------------------------------------------------ variants

    def renew(self, num_data: int | None) -> LogPosterior:
        """A copy for other data: it is examined anew on its next batch, which may be of another
        size.

        Args:
            num_data: N of the copy, used only if this log posterior was made without N.
        """
        other = copy.copy(self)
        other._num_data = self._num_data or num_data
        other._program, other._model_info = Program(self.model), None
        return other

    def of_model(
        self, model: Model, num_data: int | None, examine: Callable[..., ModelInfo]
    ) -> LogPosterior:
        """A log posterior of another model, before any batch, with the same change of the prior
        (`without_jacobian`).

        Args:
            model: the other model.
            num_data: N.
            examine: its preflight, as `preflight.examine_model`.
        """
        other = LogPosterior(model, num_data)._with_prior(self._prior)
        other._examine = examine
        return other

    def is_of_same_model(self, other: LogPosterior) -> bool:
        """Whether another log posterior was made from the same model object and has the same prior:
        the model's own for both, or the same replacement of it. What is known of one (its mode,
        say) then holds for the other.
        """
        return self.model is other.model and self._prior is other._prior

    def with_drawn_observations(
        self, arguments: Arguments, seed: int
    ) -> tuple[LogPosterior, Arguments]:
        """A copy for rows that are not observed yet: its observations are draws from the prior
        predictive distribution.

        Args:
            arguments: rows without observations, as the model's arguments.
            seed: seed of the draws.

        Returns:
            (The copy, which has not seen a batch; its first batch: the arguments and the drawn
            observations).
        """
        other = self.renew(self._num_data)
        with own_generator(derived_seed(seed, 0, Purpose.INIT)):
            other._program, arguments = observe_draws(self._program, arguments)
        return other, arguments

    def with_gaussian_prior(self, gaussian: Gaussian) -> LogPosterior:
        """A copy whose prior is a Gaussian in place of the model's own, with the same likelihood.

        Args:
            gaussian: Gaussian over all D unconstrained parameters, in the order of the latents.
        """
        other = self._with_prior(partial(_gaussian_log_prior, gaussian))
        other.gaussian_prior = gaussian
        return other

    def without_jacobian(self) -> LogPosterior:
        """A copy whose log prior lacks the log determinants of the transforms to unconstrained
        space: it is the density of the constrained values, as a function of unconstrained params.
        Use it for a mode (MAP) that does not depend on the transforms.
        """
        return self._with_prior(partial(_without_log_dets, self._prior))

    def with_jacobian(self) -> LogPosterior:
        """A copy whose log prior has the log determinants of the transforms, so that it is the
        density of unconstrained params. The inverse of `without_jacobian`; other log posteriors are
        returned as they are."""
        prior = self._prior
        if not (isinstance(prior, partial) and prior.func is _without_log_dets):
            return self
        return self._with_prior(prior.args[0])

    def _with_prior(self, prior: Prior | None) -> LogPosterior:
        other = copy.copy(self)
        other._prior = prior
        return other


def unconstrained_values(sites: Mapping[str, Site]) -> dict[str, Tensor]:
    """The latents' unconstrained values in a run, by site, detached from the run's graph.

    Args:
        sites: the run's sites by name; those that are no latents are ignored.
    """
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
