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
from torch.distributions import transform_to

from pyro_scale.core import rows
from pyro_scale.core.exclusive import exclusive, own_generator
from pyro_scale.core.gaussian import Gaussian
from pyro_scale.core.layout import Layout
from pyro_scale.core.rows import Arguments
from pyro_scale.core.validation import as_count
from pyro_scale.core.warn import without_vmap_warnings
from pyro_scale.errors import ArgumentError, CallError, NotRunError, PyroScaleError
from pyro_scale.model import derivatives, failed_call
from pyro_scale.model.checks import NotFiniteStartError, check_starts
from pyro_scale.model.function import function_model
from pyro_scale.model.init_strategies import init_to_module, init_to_reset, uniform
from pyro_scale.model.model_info import ModelInfo
from pyro_scale.model.module_trace import trace_modules
from pyro_scale.model.networks import check_model
from pyro_scale.model.partial import Kept
from pyro_scale.model.preflight import (
    InitFunction,
    attempt_first,
    draw_latents,
    understand,
    understand_function,
)
from pyro_scale.model.program import Program
from pyro_scale.model.recorder import Recorder, Simulator
from pyro_scale.model.scaling import Evaluation, Prior
from pyro_scale.model.sites import Site, points_of_store
from pyro_scale.model.terms import terms_of
from pyro_scale.model.transforms import is_real
from pyro_scale.model.unobserved import observe_draws
from pyro_scale.model.write_guard import forbid_writes
from pyro_scale.rng.seeds import Purpose, derived_seed

#: How many starts of a chain are tried: of a model that half of all starts break, 20 fail once in
#: a million.
MOST_STARTS = 20

Params = Mapping[str, Tensor]
F = TypeVar("F", bound=Callable[..., Any])


def _explaining(method: F) -> F:
    """A method of a log posterior, of params and a batch, that says what is wrong with a batch."""

    @functools.wraps(method)
    def call(self: LogPosterior, params: Params, batch: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, params, batch, *args, **kwargs)
        except Exception as error:
            if (told := self._explain(batch, error)) is None:
                raise
            raise told from error

    return call  # type: ignore[return-value]


class LogPosterior:
    """The log joint density of a Pyro model, estimated from a batch, in unconstrained space.

    `log_posterior(params, batch)` is `log_prior + N/B * log_lik.sum()` in nats, a total over the
    data whatever the batch's size B: unbiased for the full-data log joint over batches drawn
    uniformly.  Sites are understood on the first batch that it sees (by `init`, `prepare` or a
    call), which must not be inside of `torch.vmap`; everything after that is a pure function
    that goes through `torch.func`.

    Args:
        model: a Pyro model or a `PyroModule`.
        num_data: N, the rows of the whole data set; may be left out where a plate says it.

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
        self._preflight = understand
        self._model_info: ModelInfo | None = None
        self._prior: Prior | None = None
        #: What has taken the place of the prior, if that is a Gaussian.
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
            params: unconstrained tensors, where every chain starts unless it is told otherwise.
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
        log_posterior._preflight = understand_function
        return log_posterior

    # ------------------------------------------------------------------ the density

    @_explaining
    def __call__(self, params: Params, batch: Any, indices: Tensor | None = None) -> Evaluation:
        """The log joint at unconstrained params, estimated from a batch.

        Args:
            params: unconstrained tensors by site; `pyro.param` sites may be among them, and keep
                their value where they are not.
            batch: the model's arguments, a tuple by position or a dict by name.
            indices: the rows `[B]` to take, for a model that subsamples by itself; drawn from
                torch's generator if left out.
        """
        arguments = rows.as_arguments(batch)
        self.prepare(arguments)
        run = self.run(params, arguments, indices)
        return self.evaluate(run.sites, self.batch_size(arguments))

    def evaluate(self, sites: Mapping[str, Site], batch_size: int) -> Evaluation:
        """The log joint of one run, by its sites."""
        scaling = self.model_info.scaling
        return scaling.evaluate(sites, terms_of(sites), batch_size, self._prior)

    def grad(
        self, params: Params, batch: Any, indices: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Evaluation]:
        """(Gradient of the log joint by site, the evaluation), as for a call."""
        self.prepare(rows.as_arguments(batch))
        return derivatives.gradient(lambda p: self(p, batch, indices), params)

    def plain_grad(
        self, params: Params, batch: Any, indices: Tensor | None = None
    ) -> tuple[dict[str, Tensor], Evaluation]:
        """As `grad`, by `torch.autograd` instead of `torch.func`: it takes models with an
        `autograd.Function` that functorch refuses, and does not go through `torch.vmap`."""
        self.prepare(rows.as_arguments(batch))
        return derivatives.plain_gradient(lambda p: self(p, batch, indices), params)

    def row_gradients(
        self, params: Params, batch: Any, indices: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The gradient of each row's log likelihood by site, `[B, ...]`: without N/B."""
        return derivatives.row_gradients(lambda p: self(p, batch, indices).log_lik, params)

    @_explaining
    def log_likelihood(
        self, params: Params, batch: Any, indices: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Each data site's log likelihood a row, `[B]`: without N/B, the user's scale in it.  Where
        rows depend on each other, each is given the others."""
        arguments = rows.as_arguments(batch)
        sites = self.run(params, arguments, indices).sites
        return self.model_info.scaling.log_likelihood(sites, self.batch_size(arguments))

    def simulate(
        self,
        params: Params,
        arguments: Arguments,
        indices: Tensor | None = None,
        drawn: Params | None = None,
    ) -> Recorder:
        """Runs the model at unconstrained params, its observations drawn anew, or as they were
        drawn in an earlier run."""
        return self.run(params, arguments, indices, partial(Simulator, drawn=drawn))

    # ------------------------------------------------------------------ parameters

    def init(self, seed: int, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Unconstrained params, each uniform in (-2, 2), for a batch given as the model's own
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
            attempt: which draw, if the ones before it were of no use.
        """
        init = init or self.default_init(chain)
        if values:
            init = init_to_value(values=dict(values), fallback=init)
        with own_generator(derived_seed(seed, chain, Purpose.INIT, attempt)):
            sites = draw_latents(self._program, arguments, init, self._kept).sites
        check_starts(sites, chain)
        return unconstrained_values(sites)

    def prior_draws(self, arguments: Arguments, count: int, seed: int) -> dict[str, Tensor]:
        """Unconstrained draws of the latents from their priors, `[count, ...]`."""
        self.prepare(arguments)

        def draw(_: Tensor) -> dict[str, Tensor]:
            sites = draw_latents(self._program, arguments, init_to_sample, self._kept).sites
            values = {name: sites[name].unconstrained for name in self.latents}
            return {name: value for name, value in values.items() if value is not None}

        places = torch.arange(count)
        with own_generator(derived_seed(seed, 0, Purpose.INIT)), without_vmap_warnings():
            try:
                return torch.vmap(draw, randomness="different")(places)
            except (RuntimeError, NotImplementedError):  # a model that vmap refuses
                drawn = [draw(place) for place in places]
        return {name: torch.stack([each[name] for each in drawn]) for name in self.latents}

    def constrain(self, params: Params) -> dict[str, Tensor]:
        """Unconstrained params -> the sites' own values (and those of params among them)."""
        run = self.run(params, self.model_info.example, self.first_indices())
        latents = {s.name: s.value for s in run.sites.values() if s.kind == "latent"}
        points = {
            name: transform_to(point.constraint)(params[name])
            for name, point in self.points.items()
            if name in params
        }
        return latents | points

    def unconstrain(self, values: Params) -> dict[str, Tensor]:
        """The sites' own values, all of them, -> unconstrained params."""
        for name in self.latents:
            if name not in values:
                raise ArgumentError(f"unconstrain: no value for site '{name}'")
        if self.is_unconstrained:
            known = self.model_info.sites
            sites = {n: replace(known[n], unconstrained=values[n]) for n in self.latents}
            check_starts(sites)
            params = unconstrained_values(sites)
        else:  # a support may depend on another site's value
            params = self.start(self.model_info.example, seed=0, values=values)
        for name, point in self.points.items():
            if name in values:
                params[name] = transform_to(point.constraint).inv(values[name])
        return params

    @property
    def values(self) -> dict[str, Tensor]:
        """The sites' own values where the model was first run, and those of params."""
        sites = self.model_info.sites
        points = {n: transform_to(p.constraint)(p.unconstrained) for n, p in self.points.items()}
        return {name: sites[name].value for name in self.latents} | points

    def deterministics(self, params: Params) -> dict[str, Tensor]:
        """`pyro.deterministic` sites outside the data's plate."""
        run = self.run(params, self.model_info.example, self.first_indices())
        return {name: run.sites[name].value for name in self.model_info.steady}

    def first_indices(self) -> Tensor | None:
        """The first rows' indices, for a model that subsamples by itself."""
        info = self.model_info
        return None if info.own_plate is None else torch.arange(info.batch_size)

    def broken_site(self, params: Params, arguments: Arguments) -> str:
        """The first site whose log density is NaN or infinite at unconstrained params."""
        terms = terms_of(self.run(params, arguments, self.first_indices()).sites)
        broken = (n for n, t in terms.items() if not bool(torch.isfinite(t.log_prob).all()))
        return next(broken, "?")

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """The model's arguments as given by position and name, in one of the two forms.

        Raises:
            CallError: the model takes no such arguments, or takes them one by one.
        """
        signature = inspect.signature(getattr(self.model, "forward", self.model))
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise CallError(f"the model, which takes {signature}: {error}") from None
        by_name = dict(bound.arguments) if args else kwargs
        arguments = rows.tables_as_tensors(by_name if kwargs else args)
        values = arguments.values() if isinstance(arguments, dict) else arguments
        if self._model_info is not None and any(map(failed_call.holds_rows, values)):
            known = self._model_info.example
            taken = known.values() if isinstance(known, dict) else known
            if not any(map(failed_call.holds_rows, taken)):
                raise failed_call.nested_error()
        return arguments

    def write_points(self, values: Params) -> None:
        """Puts constrained values of points into Pyro's param store, or into their modules."""
        for name, value in values.items():
            point = self.points[name]
            if name in self._program.owned:
                module, path = self._program.owned[name]
                with torch.no_grad():
                    module.get_parameter(path).copy_(transform_to(point.constraint).inv(value))
            else:
                with exclusive:  # runs put another one in its place
                    store = pyro.get_param_store()
                    store.setdefault(name, value, constraint=point.constraint)
                    store[name] = value

    # ------------------------------------------------------------------ what is known of it

    def prepare(
        self, arguments: Arguments, init: InitFunction | None = None, seed: int = 0
    ) -> Params | None:
        """Understands the model on a first batch; does nothing the second time.

        A start where the log density is not finite is drawn again, as Pyro does.

        Returns:
            What `start` would give for chain 0, where it has just been drawn.
        """
        init = init or self.default_init(0)
        for attempt in range(MOST_STARTS):
            if self._model_info is not None:
                return None
            last = attempt == MOST_STARTS - 1
            with (
                own_generator(derived_seed(seed, 0, Purpose.INIT, attempt)),
                contextlib.nullcontext() if last else contextlib.suppress(NotFiniteStartError),
            ):
                if self._model_info is None:  # of another thread
                    info = self._understand(arguments, init)
                    self._model_info = info
                    return None if attempt else unconstrained_values(info.sites)
        return None

    def _understand(self, arguments: Arguments, init: InitFunction) -> ModelInfo:
        """The preflight, which says what is wrong with the call if that is why it fails."""
        try:
            return self._preflight(self._program, arguments, init, self._num_data)
        except NotFiniteStartError:
            raise
        except Exception as error:
            attempt = partial(attempt_first, init)
            if (told := failed_call.explain(self.model, arguments, error, attempt)) is None:
                raise
            raise told from error

    def _explain(self, batch: Any, error: Exception) -> PyroScaleError | None:
        """What is wrong with a batch, where the error is about the call."""
        if self._model_info is None or isinstance(error, PyroScaleError):
            return None
        attempt = partial(attempt_first, init_to_value(values=self.values))
        known = self._model_info.example
        return failed_call.explain_later(
            self.model, rows.as_arguments(batch), known, error, attempt
        )

    def renew(self, num_data: int | None) -> LogPosterior:
        """The same, before it has seen a batch; `num_data` counts where it has none itself."""
        other = copy.copy(self)
        other._num_data = self._num_data or num_data
        other._program, other._model_info = Program(self.model), None
        return other

    def is_of_same_model(self, other: LogPosterior) -> bool:
        """Whether another one is of the same callable, with the same prior."""
        own, others = (self.model, self._prior), (other.model, other._prior)
        return all(one is another for one, another in zip(own, others, strict=True))

    def with_drawn_observations(
        self, arguments: Arguments, seed: int
    ) -> tuple[LogPosterior, Arguments]:
        """(The same, before it has seen a batch; a batch for it), of a model and rows that have not
        been observed yet: their observations are draws from the prior."""
        other = self.renew(self._num_data)
        with own_generator(derived_seed(seed, 0, Purpose.INIT)):
            other._program, arguments = observe_draws(self._program, arguments)
        return other, arguments

    def with_prior(self, prior: Prior) -> LogPosterior:
        """The same with another log prior, a function of a run's sites and of its own."""
        other = copy.copy(self)
        other._prior = prior
        return other

    def with_gaussian_prior(self, gaussian: Gaussian) -> LogPosterior:
        """The same with a Gaussian over all latents, in their order, for its prior."""

        other = self.with_prior(partial(_gaussian_log_prior, gaussian))
        other.gaussian_prior = gaussian
        return other

    def without_jacobian(self) -> LogPosterior:
        """The density of the sites' own values, as a function of unconstrained params: its mode
        does not depend on how the values are transformed."""

        return self.with_prior(partial(_without_log_dets, self._prior))

    def with_jacobian(self) -> LogPosterior:
        """The density of unconstrained params: what `without_jacobian` was made from."""
        prior = self._prior
        if not (isinstance(prior, partial) and prior.func is _without_log_dets):
            return self
        other = copy.copy(self)
        (other._prior,) = prior.args
        return other

    def default_init(self, chain: int) -> InitFunction:
        """Where a chain starts unless it is told otherwise."""
        if chain == 0:
            return init_to_module
        return init_to_reset(fallback=uniform)

    @property
    def model_info(self) -> ModelInfo:
        """What the preflight found.

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
    def is_unconstrained(self) -> bool:
        """Whether every latent's support is all reals, so that params are the sites' values."""
        if self.model_info.kept:
            return False
        sites = self.model_info.sites.values()
        return all(is_real(site.fn.support) for site in sites if site.kind == "latent")

    @property
    def layout(self) -> Layout:
        """Where the latents lie in one unconstrained vector."""
        sites = self.model_info.sites.values()
        values = {site.name: site.unconstrained for site in sites if site.kind == "latent"}
        return Layout.from_tensors(
            {name: value for name, value in values.items() if value is not None}
        )

    @property
    def points(self) -> Mapping[str, Any]:
        """`pyro.param` sites and unfrozen weights: point-estimated."""
        return self.model_info.points

    # ------------------------------------------------------------------ inside

    @_explaining
    def run(
        self,
        params: Params,
        arguments: Arguments,
        indices: Tensor | None = None,
        recorder: Callable[..., Recorder] = Recorder,
        validate: bool = False,
    ) -> Recorder:
        """Runs the model at unconstrained params and records its sites."""
        info = self.model_info
        points = {
            name: replace(point, unconstrained=params.get(name, point.unconstrained))
            for name, point in info.points.items()
        }
        chosen = {}
        if info.own_plate is not None:
            if indices is None:
                with exclusive:
                    indices = torch.randperm(self.num_data)[: info.batch_size]
            chosen = {info.own_plate: indices}
        enum_dim = info.enum_dim
        return self._program.run(
            arguments,
            recorder(
                latents=params,
                points=points,
                indices=chosen,
                enum_dim=enum_dim,
                kept=info.kept,
            ),
            validate,
        )

    def run_as_first(self, arguments: Arguments) -> Recorder:
        """Runs the model at the latent values of its first run, as the preflight does: on copies,
        its modules checked, with params as they are now.

        Raises:
            ModelError: a module is not fit, or the model writes to what it is given.
        """
        info = self.model_info
        values = {site.name: site.unconstrained for site in info.sites.values()}
        latents = {name: value for name, value in values.items() if value is not None}
        with (
            own_generator(),
            torch.no_grad(),
            trace_modules(),
            forbid_writes(self.model, arguments) as copies,
        ):
            store = points_of_store()
            recorder = Recorder(
                latents=latents, enum_dim=info.enum_dim, store=store, kept=info.kept
            )
            return self._program.run(copies, recorder)

    def batch_size(self, arguments: Arguments) -> int:
        """How many rows a batch has."""
        info = self.model_info
        if info.own_plate is not None:
            return info.batch_size
        count = rows.count(arguments)
        return self.num_data if count is None else count


def unconstrained_values(sites: Mapping[str, Site]) -> dict[str, Tensor]:
    """The latents' unconstrained values in a run, as tensors of their own."""
    return {
        site.name: site.unconstrained.detach().clone()
        for site in sites.values()
        if site.unconstrained is not None
    }


def _gaussian_log_prior(gaussian: Gaussian, sites: Mapping[str, Site], log_prior: Tensor) -> Tensor:
    values = [site.unconstrained for site in sites.values() if site.kind == "latent"]
    flat = [value.reshape(-1) for value in values if value is not None]
    return gaussian.log_prob(torch.cat(flat).to(log_prior))


def _without_log_dets(prior: Prior | None, sites: Mapping[str, Site], log_prior: Tensor) -> Tensor:
    log_dets = [site.log_det for site in sites.values() if site.log_det is not None]
    own = log_prior if prior is None else prior(sites, log_prior)
    return own - torch.stack(log_dets).sum()
