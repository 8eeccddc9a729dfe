"""The extended Kalman filter."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, Self, TypeAlias, get_args

import torch
from torch import Tensor

from pyro_scale.core.gaussian import Gaussian, as_structure
from pyro_scale.core.layout import Layout
from pyro_scale.core.memory import check_fits
from pyro_scale.core.rows import Arguments, DataLike, Model
from pyro_scale.core.warn import without_vmap_warnings
from pyro_scale.curvature.chunks import num_rows_in
from pyro_scale.curvature.gaussian_prior import gaussian_prior
from pyro_scale.curvature.ggn import RowKind
from pyro_scale.data.sources import Data, IndexedData, TensorData
from pyro_scale.diagnostics.approximation import check_fit
from pyro_scale.engine.compile_step import check_compile
from pyro_scale.engine.progress import Progress
from pyro_scale.errors import ArgumentError, DataError, ModelError, NotRunError
from pyro_scale.infer.approximation import Approximation, Structure, fit_of
from pyro_scale.infer.ekf_filter import PATH_NUMBERS, Filter, LastProgram, Rates, Step
from pyro_scale.infer.method import InitStrategy, NotRun, Starts, Stepwise
from pyro_scale.marginal.summed import check_not_summed
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.results.gaussian import GaussianPosterior
from pyro_scale.rng.seeds import choose_seed
from pyro_scale.run.initialize import check_sites, init_of
from pyro_scale.run.problem import as_log_posterior

#: One sd for all params, or one a site: a number, or a tensor of the site's unconstrained shape.
TransitionSd: TypeAlias = float | Mapping[str, float | Tensor]
#: Batches from which compiling repays the few seconds that it takes.
_REPAID_AFTER = 1000
#: Matrices that a dense filter holds at once: precisions before and after, curvature, factors.
_MATRICES = 8


class Filtered(NamedTuple):
    """The filter's Gaussian after each step, in unconstrained space (for sites with real support,
    the sites' values).

    Attributes:
        mean: posterior means after each step, `[steps, ...]` by site.
        sd: posterior sds after each step, `[steps, ...]` by site.
        log_lik: log likelihood of each batch at the mean before the step, in nats, `[steps]`.  It
            is not averaged over the params' uncertainty.
    """

    mean: dict[str, Tensor]
    sd: dict[str, Tensor]
    log_lik: Tensor


class EKF(Stepwise, Approximation):
    """The extended Kalman filter over the params, for online learning: a Gaussian that absorbs the
    data batch by batch, once and in their order (the paper's A.4; Ollivier 2018).

        precision' = (precision^-1 + diag(transition_sd^2))^-1 + lr C
        mean'      = mean + lr precision'^-1 g

    Here g and C are the gradient and curvature of the batch's log likelihood at the mean, sums over
    its rows.  The filter starts from the prior's mean and covariance in unconstrained space.  They
    are exact for Gaussian sites and estimated from prior draws for others; `explain` lists both.
    On a linear model with Gaussian noise a dense filter is exact, in any order of the data; a
    diagonal one depends on the order.  Params of `pyro.param` stay as they are.  `predict` before
    the first step uses the prior's Gaussian, and needs no observations.

    Args:
        model: a Pyro model, a `PyroModule` or a `LogPosterior`.
        structure: `"diag"` or `"dense"`.
        curvature: `"ggn"`, `"monte_carlo"` or `"empirical_fisher"`, as for `Laplace`.
        lr: power of the likelihood; 1 is Bayes' rule.
        transition_sd: sd of each param's random walk before each batch, in unconstrained units, for
            true values that change over time, or to forget old data.  A number, or a dict from
            sites to numbers or tensors of the sites' unconstrained shapes; sites that the dict
            leaves out do not walk.
        init_strategy: a fit, whose Gaussian replaces the prior's; or a start of the mean: one of
            Pyro's strategies or a dict of constrained tensors `[1, ...]`, with the prior's
            covariance.  A network whose weights all have prior mean 0 needs one, such as
            `ps.init_to_module`: at 0 its hidden units are all alike, and stay so.
        num_data: N, needed only where the data do not say how many rows they have.
        compile: whether steps become one compiled program.  `"auto"` compiles runs of at least
            1,000 batches, which repay the seconds that compilation takes.  The result is the same
            to rounding.  Batches of another size than the first (such as the last one), steps on a
            GPU, models that subsample by themselves and curvature from draws (`"monte_carlo"`)
            run eagerly.  `step` continues with the run's program; without a run, True compiles
            its first batch.

    Raises:
        ArgumentError: an argument is unknown or out of range.

    Examples:
        >>> import torch, pyro, pyro.distributions as dist
        >>> import pyro_scale as ps
        >>> def model(y=None):
        ...     mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Normal(mu, 1.0), obs=y)
        >>> ekf = ps.EKF(model, structure="dense")
        >>> ekf = ekf.run((torch.tensor([1.0, 2.0, 3.0]),), batch_size=1, progress=False)
        >>> ekf.filtered.mean["mu"]  # after each observation
        tensor([0.9901, 1.4925, 1.9934])
        >>> ekf.filtered.sd["mu"]
        tensor([0.9950, 0.7053, 0.5764])
    """

    def __init__(
        self,
        model: Model,
        *,
        structure: Structure = "diag",
        curvature: RowKind = "ggn",
        lr: float = 1.0,
        transition_sd: TransitionSd = 0.0,
        init_strategy: InitStrategy = None,
        num_data: int | None = None,
        compile: bool | Literal["auto"] = "auto",
    ):
        super().__init__(model, structure=structure, init_strategy=init_strategy, num_data=num_data)
        if curvature not in get_args(RowKind):
            raise ArgumentError(f"curvature={curvature!r}: pass one of {get_args(RowKind)}")
        if not isinstance(lr, int | float) or not 0 < lr < math.inf:
            raise ArgumentError(f"lr={lr!r}: pass a number > 0")
        _check_transition_sd(transition_sd)
        check_compile(compile)
        self.curvature, self.lr, self.transition_sd = curvature, float(lr), transition_sd
        self._compile, self._programs = compile, LastProgram()

    @without_vmap_warnings()
    def run(
        self,
        data: DataLike,
        *,
        num_epochs: int = 1,
        batch_size: int | None = None,
        num_chains: int = 1,
        seed: int | None = None,
        progress: bool = True,
    ) -> Self:
        """Absorbs all rows once, in their order, starting from the prior.

        Args:
            data: a `DataLoader`, or the model's own arguments, as for samplers.
            num_epochs: 1, since rows that are read again would count again.
            batch_size: rows a step, for tensors; all of them by default.
            num_chains: 1, since nothing is random.
            seed: seed of draws from the fit, and of the prior draws that estimate moments.
            progress: whether to show a progress bar.

        Returns:
            The filter itself.

        Raises:
            ArgumentError, DataError: before the model is run.
            ModelError, SiteError, PlateError: before any step.
            NonFiniteError: the state became NaN or infinite.
        """
        if num_epochs != 1:
            raise ArgumentError(
                f"num_epochs={num_epochs}: a filter absorbs every row once; rows that are read "
                "again would count again"
            )
        if num_chains != 1:
            raise ArgumentError(f"num_chains={num_chains}: a filter has one start, the prior")
        if isinstance(data, Iterator):
            raise DataError(
                "data is an iterator, which can be read only once, but the first batch is read "
                "twice: pass a DataLoader or the tensors, or call step() with each batch"
            )
        opened = self._open(data, batch_size)
        check_not_summed(self.model, opened, "EKF")
        self._forget()
        log_posterior = as_log_posterior(self.model, opened.num_data)
        ekf_filter = self._filter(log_posterior, opened, opened.first(), choose_seed(seed))
        count = log_posterior.num_data
        # the rows in the data, whatever num_data is
        if isinstance(opened, TensorData | IndexedData):
            count = num_rows_in(opened) or count
        total = -(-count // (opened.batch_size or count))
        if self._compile is True or (self._compile == "auto" and total >= _REPAID_AFTER):
            ekf_filter.programs = self._programs
        begun = time.perf_counter()
        with Progress(total, type(self).__name__, progress, "log likelihood") as bar:
            for log_lik in ekf_filter.absorb_all(opened):
                bar.update(len(log_lik), float(log_lik[-1]))
        compiling = ekf_filter.compile_seconds
        seconds = time.perf_counter() - begun - compiling
        fit = ekf_filter.finish({"fitting_time": seconds, "compile_time": compiling})
        self._last = ekf_filter
        check_fit(fit, 3 * count)
        return self

    def begin(self, *args: Any, **kwargs: Any) -> Filter:
        """A filter before its first batch, for your own loops: `step(*batch)` absorbs a batch,
        `posterior` is the Gaussian after the latest one; see `Stepwise.begin`.  A batch may have
        any number of rows; without rows, only the random walk of `transition_sd` is applied."""
        data = self._open_batch(args, kwargs)
        log_posterior = as_log_posterior(self.model, data.num_data)
        ekf_filter = self._filter(log_posterior, data, data.first(), choose_seed(None))
        if self._compile is True:
            ekf_filter.programs = self._programs
        return ekf_filter

    @functools.wraps(GaussianPosterior.predict)
    def predict(  # type: ignore[override]  # of a wrapped function
        self, *args: Any, calibrate: DataLike = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Predictions as by `GaussianPosterior.predict`; before the first step, predictions from
        the prior's Gaussian, for which no observations are needed."""
        if isinstance(self._last, NotRun):
            if calibrate is not None:
                raise NotRunError("calibrate: EKF has no fit yet: run it first")
            names = inspect.signature(GaussianPosterior.predict).parameters
            options = {name: kwargs.pop(name) for name in list(kwargs) if name in names}
            prior, arguments = self._prior(args, kwargs)
            by_place, by_name = ((), arguments) if isinstance(arguments, dict) else (arguments, {})
            return prior.predict(*by_place, **options, **by_name)
        return self.posterior.predict(*args, calibrate=calibrate, **kwargs)

    @property
    def filtered(self) -> Filtered:
        """Means and sds in unconstrained space after each step of the last `run`, and log
        likelihoods of the batches.

        Raises:
            NotRunError: nothing has been run.
            ArgumentError: the path was too long to keep, or the filter was loaded from a file.
        """
        self.posterior  # noqa: B018  (which raises)
        if not isinstance(self._last, Filter) or (path := self._last.path) is None:
            raise ArgumentError(
                f"filtered: the path of a filter is kept up to {PATH_NUMBERS:,} numbers; this one "
                "was longer, or comes from a file: take steps with step(), and read fit after each"
            )
        layout, (mean, sd) = self._last.layout, path
        return Filtered(layout.unflatten(mean), layout.unflatten(sd), self._last.log_lik)

    def _prior(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[GaussianPosterior, Arguments]:
        """Two things for a prediction before the first step: (a posterior whose Gaussian is the
        prior's, in unconstrained space; the model's arguments to predict at, that is the user's
        own, completed by observations drawn from the prior where the model needs some).

        Args:
            args, kwargs: rows to predict, as the model's own arguments, without observations.
        """
        data, seed = self._open_batch(args, kwargs), choose_seed(None)
        log_posterior = as_log_posterior(self.model, data.num_data)
        observed, arguments = log_posterior.with_drawn_observations(data.first(), seed)
        prior = self._filter(observed, data, arguments, seed).fit({}).replaced(data=None)
        return GaussianPosterior(prior.replaced(other_target="")), arguments

    def _filter(
        self, log_posterior: LogPosterior, data: Data, arguments: Arguments, seed: int
    ) -> Filter:
        """A filter before its first batch, with the prior's Gaussian or the user's start. The model
        is analyzed here.

        Args:
            log_posterior: the density, which is analyzed here.
            data: the data, for the fit and its posterior.
            arguments: the batch on which the model is analyzed, as the model's arguments.
            seed: seed of prior draws and of the curvature's draws.
        """
        log_posterior.prepare(arguments, None, seed)
        dense, layout = self.structure == "dense", log_posterior.layout
        start = _start(log_posterior, arguments, self._init_strategy, dense, seed)
        drift = _drift(self.transition_sd, layout).to(start.mean)
        drifts, starts_from_fit = bool(drift.any()), isinstance(self._init_strategy, Starts)
        other_target = ""
        if self.lr != 1 or drifts or starts_from_fit:
            other_target = (
                "with lr, transition_sd or a fit for its prior, a filter is not meant to be the "
                "model's posterior"
            )
        facts = {
            "structure": self.structure,
            "curvature": self.curvature,
            "lr": self.lr,
            "transition_sd": _in_numbers(self.transition_sd),
        }
        step = Step(log_posterior, layout, self.curvature, drifts)
        rates = Rates(start.mean.new_tensor(self.lr), drift)
        return Filter(step, data, start, rates, seed, facts, other_target)


def _start(
    log_posterior: LogPosterior,
    arguments: Arguments,
    init_strategy: InitStrategy,
    dense: bool,
    seed: int,
) -> Gaussian:
    """The Gaussian in unconstrained space before the first batch.

    Args:
        log_posterior: the analyzed model.
        arguments: a batch, as the model's arguments.
        init_strategy: a fit, whose Gaussian is used; otherwise the prior's Gaussian is used, with
            its mean moved to the start that a Pyro strategy or a dict of constrained tensors gives;
            None keeps the prior's mean.
        dense: whether the Gaussian has a full covariance rather than a diagonal one.
        seed: seed of the prior draws that estimate moments.

    Raises:
        ModelError: the likelihood is a joint density of all rows.
        ArgumentError: dense matrices do not fit into memory, or `init_strategy` is a fit without
            Gaussian or of a model with other sites.
    """
    if any(rule.whole_data for rule in log_posterior.model_info.scaling.rules.values()):
        raise ModelError(
            "the likelihood is a joint density of all rows, so a filter cannot absorb them "
            "batch by batch: use Laplace or VI"
        )
    layout = log_posterior.layout
    if dense:
        device = log_posterior.model_info.sites[layout.names[0]].value.device
        check_fits(layout.size, layout.dtype, device, _MATRICES, "EKF")
    if isinstance(init_strategy, Starts):
        return _gaussian_of(init_strategy, layout, dense)
    prior = gaussian_prior(log_posterior, arguments, dense, seed)
    if init_strategy is None:
        return prior
    if isinstance(init_strategy, Mapping):
        check_sites(log_posterior, init_strategy)
    init = init_of(log_posterior, init_strategy, 0, 1)
    start = log_posterior.start(arguments, seed, 0, init)
    return dataclasses.replace(prior, mean=layout.flatten(start))


def _gaussian_of(fitted: Starts, layout: Layout, dense: bool) -> Gaussian:
    """The Gaussian (the first, at temperature 1) of a fit or of its posterior, over the latents of
    `layout`, for a filter to start from.

    Args:
        fitted: a Laplace, VI or EKF that has been run, or its posterior.
        layout: order and shapes of the model's latents.
        dense: whether the result has a full covariance rather than a diagonal one.

    Raises:
        ArgumentError: there is no Gaussian, or its sites or shapes are not those of `layout`.
    """
    fit = fit_of(fitted)
    if fit is None or not fit.gaussians:
        raise ArgumentError("init_strategy: it has no Gaussian: pass a Laplace, VI or EKF")
    shapes = dict(zip(fit.layout.names, fit.layout.shapes, strict=True))
    shapes_of_fit = [shapes.get(name) for name in fit.sites]
    if fit.sites != layout.names or shapes_of_fit != list(layout.shapes):
        raise ArgumentError(
            f"init_strategy: it has a Gaussian over {fit.sites} of shapes "
            f"{[list(shapes[name]) for name in fit.sites]}, the model has the sites "
            f"{layout.names} of shapes {[list(shape) for shape in layout.shapes]}: fit those"
        )
    return as_structure(fit.at_temperature_1(0), dense)


def _check_transition_sd(transition_sd: Any) -> None:
    """Raises unless `transition_sd` is a number >= 0, or a dict from sites to such numbers or
    tensors of them.

    Raises:
        ArgumentError: a value is negative, not finite, or of another type.
    """
    by_site = transition_sd if isinstance(transition_sd, Mapping) else {None: transition_sd}
    for site, value in by_site.items():
        argument = "transition_sd" if site is None else f"transition_sd['{site}']"
        kinds = "a number" if site is None else "a number or a tensor of them"
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_tensor = site is not None and isinstance(value, Tensor) and value.dtype != torch.bool
        sd = torch.as_tensor(value if is_number or is_tensor else torch.nan)
        if not bool((torch.isfinite(sd) & (sd >= 0)).all()):
            raise ArgumentError(f"{argument}={value!r}: pass {kinds} >= 0")


def _drift(transition_sd: TransitionSd, layout: Layout) -> Tensor:
    """The variance that the random walk adds to each of the D unconstrained elements before a
    batch, `[D]`: `transition_sd` squared, and 0 for sites that a dict leaves out.

    Raises:
        ArgumentError: the model has no site of that name, or a tensor has another shape than its
            site.
    """
    if not isinstance(transition_sd, Mapping):
        return torch.full((layout.size,), transition_sd, dtype=layout.dtype).square()
    if unknown := sorted(transition_sd.keys() - set(layout.names)):
        raise ArgumentError(
            f"transition_sd: {unknown} are not latent sites of the model, which has "
            f"{list(layout.names)}"
        )
    sds = {}
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        sd = torch.as_tensor(transition_sd.get(name, 0.0), dtype=layout.dtype)
        if sd.shape not in (shape, torch.Size()):
            raise ArgumentError(
                f"transition_sd['{name}'] has the shape {list(sd.shape)}, the site "
                f"{list(shape)} in unconstrained space: pass a number or a tensor of that shape"
            )
        sds[name] = sd.expand(shape)
    return layout.flatten(sds).square()


def _in_numbers(transition_sd: TransitionSd) -> float | dict[str, object]:
    """`transition_sd` with tensors as nested lists and a number as float, for `Fit.attrs`, which
    are saved."""
    if not isinstance(transition_sd, Mapping):
        return float(transition_sd)
    return {name: torch.as_tensor(value).tolist() for name, value in transition_sd.items()}
