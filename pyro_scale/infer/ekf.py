"""The extended Kalman filter."""

from __future__ import annotations

import functools
import inspect
import math
import time
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, Self, get_args

from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.rows import Arguments
from pyro_scale.core.warn import without_vmap_warnings
from pyro_scale.data.open import open_data
from pyro_scale.data.sources import Data, IndexedData, TensorData
from pyro_scale.diagnostics.check_fit import check_fit
from pyro_scale.engine.compile_step import check_compile
from pyro_scale.engine.progress import Progress
from pyro_scale.errors import ArgumentError, DataError, ModelError, NotRunError
from pyro_scale.fullbatch.chunks import num_rows_in, split
from pyro_scale.infer.approximation import Approximation, Structure
from pyro_scale.infer.ekf_filter import PATH_NUMBERS, Filter, Settings
from pyro_scale.infer.ekf_program import LastProgram
from pyro_scale.infer.ekf_start import (
    TransitionSd,
    as_plain,
    check_transition_sd,
    does_walk,
    drift_of,
    start_of,
)
from pyro_scale.infer.method import NotRun, Starts
from pyro_scale.infer.stepwise import Stepwise
from pyro_scale.kernels.ekf import EKFState
from pyro_scale.model.curvature.ggn import RowKind
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.posterior.gaussians import Fit
from pyro_scale.results.gaussian import GaussianPosterior
from pyro_scale.rng.seeds import choose_seed
from pyro_scale.run.problem import as_log_posterior, module_device
from pyro_scale.run.single_step import batch_as_data, check_rows

#: Batches from which compiling repays the few seconds that it takes.
_REPAID_AFTER = 1000


class Filtered(NamedTuple):
    """What the filter knew after each step, in unconstrained space, which for real sites is their
    own.

    Attributes:
        mean: by site, `[steps, ...]`.
        sd: by site, `[steps, ...]`.
        log_lik: each batch's log likelihood at the mean before it, without what the params'
            uncertainty adds, in nats, `[steps]`.
    """

    mean: dict[str, Tensor]
    sd: dict[str, Tensor]
    log_lik: Tensor


class EKF(Stepwise, Approximation):
    """The extended Kalman filter over the params: a Gaussian that absorbs the data batch by batch,
    once and in their order (the paper's A.4; Ollivier 2018), for online learning.

        precision' = (precision^-1 + diag(transition_sd^2))^-1 + lr C
        mean'      = mean + lr precision'^-1 g

    with g and C the gradient and curvature of the batch's log likelihood at the mean, sums over
    its rows.  It starts from the prior's mean and covariance in unconstrained space: exact for
    Gaussian sites, else of prior draws; `explain` says which.  On a linear model with Gaussian
    noise a dense filter is exact, in any order of the data; a diagonal one depends on the order.
    Params of `pyro.param` stay as they are.  `predict` before the first step is from the prior's
    Gaussian, and needs no observations.

    Args:
        model: a Pyro model, a `PyroModule` or a `LogPosterior`.
        structure: `"diag"` or `"dense"`.
        curvature: `"ggn"`, `"monte_carlo"` or `"empirical_fisher"`, as for `Laplace`.
        lr: the power of the likelihood; 1 is Bayes' rule.
        transition_sd: how far each param walks at random before each batch, in unconstrained
            units: for a truth that changes, and to forget.  A number, or a dict of sites -> numbers
            or tensors of the sites' unconstrained shapes; sites that are not named stay.
        init_strategy: a fit whose Gaussian takes the prior's place; or where the mean starts, one
            of Pyro's or a dict of constrained tensors `[1, ...]`, the covariance being the prior's.
            A network whose weights all have prior mean 0 needs one, such as `ps.init_to_module`:
            at 0 its hidden units are all alike, and stay so.
        num_data: N, which a filter needs only where the data do not tell how many they are.
        compile: whether steps become one compiled program: `"auto"` compiles runs of at least 1,000
            batches, which repay the seconds that it takes; the result is the same to rounding.
            Batches of another size than the first (the last one), steps on a GPU, models that
            subsample by themselves and curvature from draws (`"monte_carlo"`) stay eager.  `step`
            goes on with the run's program; without a run, True compiles its first batch.

    Raises:
        ArgumentError: an argument that is unknown or out of range.

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
        model: Any,
        *,
        structure: Structure = "diag",
        curvature: RowKind = "ggn",
        lr: float = 1.0,
        transition_sd: TransitionSd = 0.0,
        init_strategy: Any = None,
        num_data: int | None = None,
        compile: bool | Literal["auto"] = "auto",
    ):
        super().__init__(model, structure=structure, init_strategy=init_strategy, num_data=num_data)
        if curvature not in get_args(RowKind):
            raise ArgumentError(f"curvature={curvature!r}: pass one of {get_args(RowKind)}")
        if not isinstance(lr, int | float) or not 0 < lr < math.inf:
            raise ArgumentError(f"lr={lr!r}: pass a number > 0")
        check_transition_sd(transition_sd)
        check_compile(compile)
        self.curvature, self.lr, self.transition_sd = curvature, float(lr), transition_sd
        self._compile, self._last_program = compile, LastProgram()

    @without_vmap_warnings()
    def run(
        self,
        data: Any,
        *,
        num_epochs: int = 1,
        batch_size: int | None = None,
        num_chains: int = 1,
        seed: int | None = None,
        progress: bool = True,
    ) -> Self:
        """Absorbs all rows once, in their order, from the prior on.

        Args:
            data: as for samplers: a `DataLoader`, or the model's own arguments.
            num_epochs: 1, since rows that are seen again would count again.
            batch_size: rows a step, for tensors; all of them by default.
            num_chains: 1, since there is nothing at random.
            seed: of the draws, and of prior moments.
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
                f"num_epochs={num_epochs}: a filter absorbs every row once; seen again, rows would "
                "count again"
            )
        if num_chains != 1:
            raise ArgumentError(f"num_chains={num_chains}: a filter has one start, the prior")
        if isinstance(data, Iterator):
            raise DataError(
                "data is an iterator, which can be read once, but the first batch is looked at "
                "before: pass a DataLoader or the tensors, or call step() with each batch"
            )
        opened = open_data(data, batch_size, self._num_data, module_device(self.model))
        self._forget()
        ekf_filter = self._begin(opened, opened.first(), choose_seed(seed))
        count = ekf_filter.log_posterior.num_data
        if isinstance(opened, TensorData | IndexedData):  # whatever N they are to stand for
            count = num_rows_in(opened) or count
        total = -(-count // (opened.batch_size or count))
        compiles = self._compile is True or (self._compile == "auto" and total >= _REPAID_AFTER)
        begun = time.perf_counter()
        with Progress(total, type(self).__name__, progress, "log likelihood") as bar:
            for log_lik in ekf_filter.absorb_all(opened, self._last_program if compiles else None):
                bar.update(len(log_lik), float(log_lik[-1]))
        compiling = ekf_filter.compile_seconds
        times = {"fitting_time": time.perf_counter() - begun - compiling, "compile_time": compiling}
        fit = self._fit_of(ekf_filter, times)
        self._last = FilterChain(self, ekf_filter, GaussianPosterior(fit))
        check_fit(fit, 3 * count)
        return self

    def begin(self, *args: Any, **kwargs: Any) -> FilterChain:
        """A filter before its first batch, for loops of your own; see `Stepwise.begin`.  A batch is
        of any size; one without rows brings the params' walk alone."""
        opened = batch_as_data(self.model, self._num_data, args, kwargs)
        return FilterChain(self, self._begin(opened, opened.first(), choose_seed(None)))

    @functools.wraps(GaussianPosterior.predict)
    def predict(  # type: ignore[override]  # of a wrapped function
        self, *args: Any, calibrate: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """As `GaussianPosterior.predict`; before the first step, from the prior's Gaussian."""
        if isinstance(self._last, NotRun):
            if calibrate is not None:
                raise NotRunError("calibrate: EKF has no fit yet: run it first")
            names = inspect.signature(GaussianPosterior.predict).parameters
            options = {name: kwargs.pop(name) for name in list(kwargs) if name in names}
            posterior, arguments = self._prior(args, kwargs)
            by_place, by_name = ((), arguments) if isinstance(arguments, dict) else (arguments, {})
            return posterior.predict(*by_place, **options, **by_name)
        return self.posterior.predict(*args, calibrate=calibrate, **kwargs)

    @property
    def filtered(self) -> Filtered:
        """Means and sds after each step.

        Raises:
            NotRunError: nothing has been run.
            ArgumentError: there were too many to keep.
        """
        self.posterior  # noqa: B018  (which raises)
        chain = self._last
        if not isinstance(chain, FilterChain) or chain.filter.path is None:
            raise ArgumentError(
                f"the path of a filter is kept up to {PATH_NUMBERS:,} numbers, and this one was "
                "longer, or comes from a file: run it in parts with step(), and read fit after each"
            )
        layout = chain.filter.layout
        mean, sd = chain.filter.path
        return Filtered(layout.unflatten(mean), layout.unflatten(sd), chain.filter.log_lik)

    def _begin(self, data: Data, arguments: Arguments, seed: int) -> Filter:
        return self._filter_of(as_log_posterior(self.model, data.num_data), data, arguments, seed)

    def _prior(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[GaussianPosterior, Arguments]:
        """(The prior's Gaussian; the rows to predict, with observations drawn from the prior)."""
        data, seed = batch_as_data(self.model, self._num_data, args, kwargs), choose_seed(None)
        log_posterior = as_log_posterior(self.model, data.num_data)
        observed, arguments = log_posterior.with_drawn_observations(data.first(), seed)
        start = self._filter_of(observed, data, arguments, seed)
        return GaussianPosterior(start.fit({}).replaced(data=None)), arguments

    def _fit_of(self, ekf_filter: Filter, times: dict[str, Any]) -> Fit:
        """What a filter knows now."""
        fit = ekf_filter.fit(times)
        starts_from_fit = isinstance(self._init_strategy, Starts)
        if self.lr == 1 and not does_walk(self.transition_sd) and not starts_from_fit:
            return fit
        return fit.replaced(
            other_target="with lr, transition_sd or a fit for its prior, a filter is not meant to "
            "be the model's posterior"
        )

    def _filter_of(
        self, log_posterior: LogPosterior, data: Data, arguments: Arguments, seed: int
    ) -> Filter:
        log_posterior.prepare(arguments, None, seed)
        dense, layout = self.structure == "dense", log_posterior.layout
        start = start_of(log_posterior, arguments, self._init_strategy, dense, seed)
        drift = drift_of(self.transition_sd, layout).to(start.mean)
        sds = as_plain(self.transition_sd)
        settings = Settings(self.structure, self.curvature, self.lr, sds)
        return Filter(
            settings, log_posterior, data, layout, EKFState.from_gaussian(start), drift, seed
        )


class FilterChain:
    """A filter that absorbs batch after batch.

    Args:
        method: whose filter it is.
        ekf_filter: what it knows.
        posterior: the same as a value, if it has been made.
    """

    def __init__(self, method: EKF, ekf_filter: Filter, posterior: GaussianPosterior | None = None):
        self.filter, self._method, self._posterior = ekf_filter, method, posterior

    def step(self, *args: Any, **kwargs: Any) -> float:
        """Absorbs one batch; returns its log likelihood at the mean before it, in nats."""
        ekf_filter, log_posterior = self.filter, self.filter.log_posterior
        if log_posterior.model_info.own_plate is not None:
            raise ModelError(
                "the model subsamples by itself, so that a step does not say which rows are new: "
                "pass batches to a model of batches"
            )
        arguments = log_posterior.bind(args, kwargs)
        check_rows(arguments)
        if ekf_filter.takes_rows(arguments):
            batches = rows.map_rows(lambda leaf: leaf[None], arguments)
            if ekf_filter.num_steps == 0 and self._method._compile is True:
                ekf_filter.compile(batches, self._method._last_program)
            value = float(ekf_filter.absorb(batches))
        else:
            (chunk,) = split(log_posterior, [arguments])
            value = float(ekf_filter.absorb_chunk(chunk))
        self._posterior = None
        return value

    @property
    def posterior(self) -> GaussianPosterior:
        """What the filter knows now.

        Raises:
            NotRunError: it has absorbed nothing.
        """
        if self._posterior is None:
            if not self.filter.num_steps:
                raise NotRunError("the filter has absorbed nothing yet: call step(*batch) first")
            fit = self._method._fit_of(self.filter, {}).replaced(data=None)
            self._posterior = GaussianPosterior(fit, self.filter.data.first())
        return self._posterior
