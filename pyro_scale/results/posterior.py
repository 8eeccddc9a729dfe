"""The posterior of a run: summaries, diagnostics, predictions and export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Never

import torch
from torch import Tensor

from pyro_scale.core.online_moments import Moments
from pyro_scale.core.rows import Arguments, DataLike
from pyro_scale.core.validation import as_count
from pyro_scale.core.warn import warn
from pyro_scale.data.open import open_data
from pyro_scale.data.sources import Data, TensorData
from pyro_scale.diagnostics.ksd import ksd
from pyro_scale.diagnostics.loo import Loo, loo
from pyro_scale.diagnostics.report import Report
from pyro_scale.diagnostics.summary import summary
from pyro_scale.diagnostics.table import diagnostics
from pyro_scale.diagnostics.verdict import report_on_exact
from pyro_scale.errors import ArgumentError, PyroScaleWarning
from pyro_scale.marginal.grouped_data import open_rows
from pyro_scale.marginal.integrated import integrated_of
from pyro_scale.posterior import export, local_latents, predictive
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.posterior.like_run import check_like_run
from pyro_scale.posterior.prediction_sets import check_interval, predict_sets
from pyro_scale.posterior.reductions import Reduce, Reduction
from pyro_scale.posterior.row_batches import data_sites
from pyro_scale.posterior.serialization import contents_of
from pyro_scale.results.call_checks import OF_POSTERIOR, check_calls, missing_attribute
from pyro_scale.rng.seeds import Purpose, choose_seed, generator
from pyro_scale.run.problem import module_device
from pyro_scale.storage import files

if TYPE_CHECKING:
    import pandas

#: Most bytes of pointwise log likelihood that `to_arviz` computes by default.
_LOG_LIKELIHOOD_BYTES = 2**30


class Posterior:
    """The result of a run: draws, and what was measured of them.

    The `posterior` of a method is that of its last run, and does not change when the method runs
    again.  `ps.load(path, model)` reads a posterior that `save` wrote.

    Args:
        draws: draws of a run, with its model, data and measurements.
        batch: a batch of the data, as the model's arguments, if `draws` has no data; otherwise
            None.

    Examples:
        >>> import pyro, pyro.distributions as dist, torch, pyro_scale as ps
        >>> def model(y):
        ...     mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Normal(mu, 1.0), obs=y)
        >>> nuts, quiet = ps.NUTS(model), {"num_samples": 200, "seed": 0, "progress": False}
        >>> first = nuts.run(torch.zeros(30), **quiet).posterior
        >>> second = nuts.run(torch.ones(30), **quiet).posterior
        >>> [round(float(each.get_samples()["mu"].mean()), 1) for each in (first, second)]
        [-0.0, 1.0]
    """

    #: Contents of the file that it was read from, if it was.
    _file: Mapping[str, Any] | None = None

    def __init__(self, draws: PosteriorDraws, batch: Arguments | None = None):
        self._draws, self._batch = draws, batch

    def __getattr__(self, name: str) -> Never:
        """Never returns: raises an AttributeError for an unknown attribute, with a hint if it is
        one of another library."""
        raise missing_attribute(self, name, OF_POSTERIOR)

    @property
    def draws(self) -> PosteriorDraws:
        """The draws in unconstrained space, `[chains, draws, D]` in the attribute `positions`, with
        the model, the data and the measurements of the run."""
        return self._draws

    @property
    def attrs(self) -> dict[str, Any]:
        """Facts of the run by name: method, hyperparameters, N, B, seed, versions, seconds, ..."""
        return self.draws.attrs

    @property
    def size(self) -> str:
        """A text such as "N = 1,000, 4 x 1,000 draws", for `repr`: the number of rows, of chains
        and of draws of a chain."""
        chains, draws = self.draws.positions.shape[:2]
        return f"N = {self.draws.log_posterior.num_data:,}, {chains} x {draws:,} draws"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} by {self.attrs['method']}, {self.size}>"

    @check_calls
    def get_samples(
        self,
        num_samples: int | None = None,
        group_by_chain: bool = False,
        local: bool = False,
    ) -> dict[str, Tensor]:
        """Constrained draws of the latent sites, and of deterministic sites outside the data's
        plate, `[chains * draws, ...]` by site.

        Args:
            num_samples: number of draws in all (per chain, if grouped), evenly thinned; all by
                default.
            group_by_chain: whether to return `[chains, draws, ...]`.  Draws of chains that Ctrl-C
                ended before the others are then left out; otherwise they come last.
            local: whether to return draws of the latents that were summed out, too, as `latents`
                draws them.

        Raises:
            ArgumentError: more draws are requested than there are; `local` together with
                `group_by_chain`, or without latents that were summed out.
        """
        if local:
            if group_by_chain:
                raise ArgumentError("local=True: leave group_by_chain out")
            return self.get_samples(num_samples) | self._latents(num_samples, 0)
        result = self.kept_draws if group_by_chain else self.kept_draws.every_draw
        chains, draws = result.positions.shape[:2]
        if group_by_chain:
            chosen = predictive.spread_evenly(draws, draws if num_samples is None else num_samples)
            return result.samples_at(torch.arange(chains)[:, None], chosen)
        if num_samples is None:
            return result.all_samples()
        chosen = predictive.spread_evenly(chains * draws, num_samples)
        return result.samples_at(chosen // draws, chosen % draws)

    @check_calls
    def latents(self, name: str, num_samples: int | None = None, seed: int = 0) -> Tensor:
        """Draws of a latent that was summed out, one for each draw of the others, `[draws, rows,
        ...]`; of groups, `[draws, groups, ...]` in the order of their labels.

        Each is drawn from p(z | data, other latents) of its row or group, by importance resampling
        among 30 proposals (sds are 0.5% too large).

        Args:
            name: the latent's name.
            num_samples: number of draws, evenly thinned; all by default.
            seed: seed of the draws.

        Raises:
            ArgumentError: no latent of that name was summed out; more draws are requested than
                there are; they do not fit into memory.
        """
        drawn = self._latents(num_samples, seed)
        if name not in drawn:
            raise ArgumentError(f"latents: '{name}' was not summed out; {list(drawn)} were")
        return drawn[name]

    def _latents(self, num_samples: int | None, seed: int) -> dict[str, Tensor]:
        result = self.kept_draws.every_draw
        if integrated_of(result.log_posterior) is None:
            raise ArgumentError(
                "no latents were summed out in this run: get_samples() has those of all sites"
            )
        if num_samples is not None:
            result = predictive.resample_equally(result, num_samples)
        return local_latents.latents(result, choose_seed(seed))

    @check_calls
    def moments(self, levels: Sequence[float] = (0.05, 0.5, 0.95)) -> dict[str, Moments]:
        """Posterior mean, sd, quantiles `[levels, ...]`, split R-hat and ESS of every site, by
        element, in double precision.

        Takes one pass through draws in a store, and none with `store=False`.  Quantiles of more
        than 127 draws are from t-digests (Dunning and Ertl 2019).  Their error in rank is at most
        half a percent at 5% and 95%, and 1.6% at the median.  With `store=False` they are NaN if a
        chain broke, because its draws are already in the digest.

        Args:
            levels: levels of the quantiles, from 0 to 1.

        Raises:
            ArgumentError: a level out of range; draws with weights, for which there is `summary`.
        """
        result = self.draws
        quantiles = levels if isinstance(levels, Sequence) else ()
        if not quantiles or not all(isinstance(p, int | float) and 0 <= p <= 1 for p in quantiles):
            raise ArgumentError(f"levels={levels!r}: pass some numbers from 0 to 1")
        if result.weights is not None:
            raise ArgumentError(
                "moments: the draws have weights (a step size that changes), which "
                "summary() takes into account"
            )
        return result.moments(levels)

    @check_calls
    def summary(self, var_names: list[str] | None = None) -> pandas.DataFrame:
        """Moments, intervals and mixing of every element: a DataFrame with a row for each.

        The columns are those of `arviz.summary` in ArviZ 0.23, whichever ArviZ is installed:
        `mean`, `sd`, the shortest interval with 94% of the draws (`hdi_3%`, `hdi_97%`), Monte Carlo
        standard errors, `ess_bulk`, `ess_tail` and `r_hat`, rounded in the same way.  Constant
        elements have neither R-hat nor ESS.

        A site with more than 100 elements has one row, with the largest R-hat and the smallest ESS
        of up to 200 of them, evenly spread.  With `store=False` the table has the numbers of
        `moments()`: 5%, 50% and 95% quantiles, split R-hat, and `ess` for the mean, which is NaN
        with fewer than 250 draws a chain.

        Args:
            var_names: the sites to list, with a row for each element; all by default.

        Raises:
            ArgumentError: no list, or no site of that name.
        """
        result = self.draws
        if var_names is not None and not isinstance(var_names, list | tuple):
            raise ArgumentError(f"var_names={var_names!r}: pass a list of sites' names")
        for name in var_names or ():
            if name not in result.shapes:
                raise ArgumentError(f"var_names: no site '{name}'; there are {list(result.shapes)}")
        return summary(result, var_names)

    @check_calls
    def diagnostics(self, predict_at: DataLike = None) -> pandas.DataFrame:
        """Numbers that show whether the draws can be trusted: a DataFrame with a row for each
        latent site, and the run's facts in `.attrs`.

        Args:
            predict_at: rows to predict, as the model's own arguments (a tensor, a tuple, a dict).
                Adds R-hat and ESS of each data site's predictive means there.  For networks, check
                predictions: weights have equivalent modes.

        Raises:
            ArgumentError: the model cannot be run on `predict_at`.

        Columns:

        - `r_hat`, `ess_bulk`, `ess_tail`: the worst of the site's elements (of up to 200, evenly
          spread).  With `superchains`, `nested_r_hat`: the worst, over superchains whose chains all
          finished.
        - `temperature`: the temperature of the draws relative to the requested one, by the virial
          theorem, E[-(w - mean) d log joint / dw], on batches that the draws have not seen.  It is
          the mean over the site's elements; 1 is right.  It reacts to long steps, to minibatch
          noise and to short runs.  `max_gradient_temperature` is that of the element whose
          gradient varies most.
        - `kinetic_temperature`, for methods with a momentum: N p^2 / (m T), averaged over up to 32
          moments of the run.  `kinetic_temperature_expected` is its value on a Gaussian posterior
          at this step size without minibatches; an excess is heat.
        - `gradient_variance`: the largest variance of the minibatch gradient of the log joint over
          N.  With control variates, `variance_reduction`: the smallest factor by which they divide
          it.
        - `minibatch_heating`: the factor by which minibatch noise multiplies the temperature, to
          first order in lr: 1 + lr N V / (2 friction mass B T), with V the variance over rows of a
          row's log likelihood gradient.  It is the largest of the elements; combinations of
          elements may be heated more.  Shuffled batches cancel part of it if lr is small.
        - `chain_correlation`, with shared batches: the largest mean correlation between chains,
          which R-hat and ESS do not detect.

        `*_mcse` are Monte Carlo standard errors.

        Warns:
            ConvergenceWarning: chains do not agree: R-hat above 1.05 for a site, or with
                `predict_at` for a prediction (two or more chains of 50 draws each and 400 in all);
                superchains have not forgotten their starts, or fewer than two of them have all of
                their chains.
            BiasWarning: a temperature is significantly off by more than a tenth; or, unless
                temperatures are significantly right, `minibatch_heating` is above 1.1.  The message
                names the lr that would bring it below.  With lr="auto" it advises more steps
                instead, because the choice already weighs heat against slow mixing.
        """
        result = self.draws if predict_at is None else self.kept_draws
        return diagnostics(result, predict_at)

    @check_calls
    def report(self) -> Report:
        """How far to trust the draws, what to do if not, and what the run chose and why.

        `str(report)` is the text, `.verdict` is `"yes"`, `"no"`, `"unknown"` or `"ensemble"`,
        `.to_frame()` has a row for each site and check.

        Raises:
            ArgumentError: the draws are of `step()`, or were not kept.
        """
        attrs = self.kept_draws.attrs
        if "report" in attrs:
            return Report.from_json(attrs["report"])
        if "diverging" in self.draws.sample_stats:  # of NUTS
            return report_on_exact(self.draws, int(attrs["num_samples"]))
        raise ArgumentError(
            "report: it is of a sampler's run, and not of step() or of store=False: call "
            "diagnostics()"
        )

    @check_calls
    def log_likelihood(self, data: DataLike = None) -> dict[str, Tensor]:
        """Log likelihood of each row at each draw, `[chains * draws, N]` in nats by data site.

        The result is not scaled by N/B, but has the model's own scale and mask.  Rows are in the
        order of the data set.  If rows depend on each other, each row's log likelihood is
        conditional on the others; a joint density of all rows is left out.  After
        `run(distributed="all")`, call this on every rank, because ranks share the rows out; the
        same holds for `loo`, `predict` and `to_arviz`.

        Args:
            data: data in any form that `run` takes; those of the run by default.

        Raises:
            ArgumentError: the log posterior was made from a function.
        """
        result = self.kept_draws
        predictive.check_model(result.log_posterior, "log_likelihood")
        return predictive.log_likelihood(result.every_draw, self.open_data(data))

    @check_calls
    def loo(self, num_rows: int | None = None, data: DataLike = None, seed: int = 0) -> Loo:
        """How well the model predicts rows that it has not seen: leave-one-out cross-validation by
        Pareto-smoothed importance sampling (Vehtari, Gelman and Gabry 2017).  The result `elpd` is
        the sum over all rows, in nats.

        A row is left out as a whole, with all its data sites.  With all rows evaluated, it is
        `arviz.loo` of `to_arviz()`.

        Args:
            num_rows: number of rows to evaluate, drawn at random; all by default.  The other rows
                are estimated by their log likelihood at the mean of the draws (Magnusson et al.
                2020).  `subsampling_se` is the standard error of that; with ten rows it is too
                small one time in three.
            data: all rows; those of the run by default.
            seed: seed of the choice of rows.

        Draws are taken to be from the posterior.  For an approximation, the result is only as good
        as the approximation.  If rows depend on other rows (lags), the term of the left-out row is
        removed from the likelihood, but other rows still depend on its value.

        Raises:
            ArgumentError: no data site with a value a row, such as a joint density of all rows;
                sites with different numbers of values; under two rows, under 20 draws.

        Warns:
            ApproximationWarning: the estimate may be unreliable for some rows (Pareto k).
        """
        result, source = self.kept_draws, self.open_data(data)
        return loo(predictive.resample_equally(result, None), source, num_rows, choose_seed(seed))

    @check_calls
    def ksd(
        self,
        data: DataLike = None,
        num_samples: int | None = None,
        num_rows: int | None = None,
    ) -> float:
        """Distance of the draws from the posterior: the squared kernel Stein discrepancy
        `ps.metrics.ksd` of the latent sites in unconstrained space, with each element divided by
        its sd, from gradients of the log joint of all rows at the draws.

        For n exact draws it is about (d + the sum over the d elements of sd^2 E[score^2]) / n,
        which is 2 d / n for independent elements, and more for correlated ones.  Errors due to
        minibatches, long steps or an approximation add to it.  The posterior is that at the
        temperature of the run, with the run's values of `pyro.param`.

        Args:
            data: all rows; those of the run by default.
            num_samples: number of draws, evenly thinned; up to 1,000 by default, because the cost
                is that of n^2 pairs.
            num_rows: number of rows, drawn at random, from which to estimate the gradients; all by
                default.  The estimate is the same for every draw.  Its noise adds to the squared
                discrepancy, so on average over the choice of rows the result is an upper bound.
                Use it to compare methods on the same rows.

        Raises:
            ArgumentError: temperature 0, or not the same for all draws; an element that is the
                same in all of them; `num_rows` for a model that takes all rows together.
            DataError: the data do not hold N rows.
        """
        return ksd(self.kept_draws.every_draw, self.open_data(data), num_samples, num_rows)

    def predict(
        self,
        /,
        *args: Any,
        num_samples: int | None = None,
        batch_size: int | None = None,
        return_sites: Sequence[str] | None = None,
        reduce: Reduce | None = None,
        interval: float | None = None,
        calibrate: DataLike = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Posterior predictive draws by site, `[draws, ...]`, one for each posterior draw; or what
        `reduce` or `interval` requests.

        Observed sites are drawn from torch's generator, whether their data are passed or not.

        Args:
            *args: arguments of the model, with the rows to predict.
            **kwargs: keyword arguments of the model.
            num_samples: number of posterior draws to use, evenly thinned; all by default.
            batch_size: rows in memory at a time; all by default, or 4,096 with `reduce` if rows do
                not depend on each other.
            return_sites: names of sites; by default observed sites, and deterministic sites inside
                the data's plate.
            reduce: a statistic of the draws.  Memory is needed for a few draws of `batch_size` rows
                at a time instead of all.

                - `"mean"`: mean of the predictive distribution, in closed form for each draw; for
                  classes their probabilities, `[rows, classes]` (for a Bernoulli, `[rows]`).
                - `"entropy"`: for classes, `metrics.Uncertainty(total, aleatoric, epistemic)`,
                  `[rows]` each, in nats (the paper's equation 2).
                - `"variance"`: the same by the law of total variance, for sites with a variance.
                - Levels such as `[0.05, 0.5, 0.95]`: quantiles of the draws, `[levels, rows]`.
                  Needs memory for all draws of `batch_size` rows.
            interval: the probability with which an observation is to lie in the returned interval
                or set.  For numbers, the central interval of the draws,
                `metrics.Interval(lower, upper)`, `[rows]` each.  For classes (Categorical,
                OneHotCategorical, Bernoulli), the smallest set whose predictive probabilities add
                up to it, booleans `[rows, classes]`.  If the posterior has fewer than 1,000 draws
                (`MAP` has one) and the model one observed site, several observations are drawn for
                each.  The probability is right if the model and the posterior are.
            calibrate: held-out rows that the fit has not seen, as for `run`, observations included.
                They make the intervals and sets conformal, so that the probability is right for any
                model and fit.

                A new row's observation is in its set with a probability of at least `interval`, and
                of at most interval + 1/(n + 1) if scores have no ties, where n is the number of
                held-out rows, if the new row is exchangeable with them.  The probability is over
                held-out and new rows together, not given x.  If a row has several elements, it is
                the probability of all of them at once.  Each site has its own threshold.

                For numbers, the score is the distance from the central interval divided by its
                width, and intervals are widened or narrowed in proportion to it (CQR-r: Romano,
                Patterson and Candes 2019; Sesia and Candes 2020).  A single factor without a unit
                corrects a wrong noise sd, and noisy rows stay wider than others, as in the model.
                Intervals of counts end at whole numbers and are never empty.  For classes, the
                score is that of adaptive prediction sets, randomized by torch's generator (Romano,
                Sesia and Candes 2020).  A set may be empty if the most probable class is right more
                often than `interval`.

        Raises:
            ArgumentError: `batch_size` for rows that depend on each other; an unknown `reduce`, or
                one that a site does not have; `interval` together with `reduce`, out of range, or
                with too few draws; `calibrate` without `interval`, or for a site whose rows are not
                predicted independently; a log posterior that was made from a function.
            DataError: no rows; too few held-out rows for the level, or rows without observations.
            CallError: not the model's arguments; rows of other dimensions than the run's, or frames
                of other columns.
            CannotDrawError: a distribution that has no draws.
        """
        check_interval(interval, calibrate, reduce)
        result = self.kept_draws.every_draw
        predictive.check_model(result.log_posterior, "predict")
        if integrated_of(result.log_posterior) is None:
            check_like_run(result.log_posterior, result.data, args, kwargs)
            arguments = result.log_posterior.bind(args, kwargs)
        else:
            if calibrate is not None:
                raise ArgumentError("calibrate: it is not for latents that were summed out")
            if num_samples is not None:
                result, num_samples = predictive.resample_equally(result, num_samples), None
            result, arguments = local_latents.to_predict(result, args, kwargs)

        def predict(
            arguments: Arguments, names: Sequence[str] | None, reduce: Reduce | Reduction | None
        ) -> dict[str, Any]:
            return predictive.predict(result, arguments, num_samples, batch_size, names, reduce)

        if interval is None:
            return predict(arguments, return_sites, reduce)
        held_out = None if calibrate is None else self._open(calibrate)
        total = result.positions.shape[0] * result.positions.shape[1]
        count = total if num_samples is None else len(predictive.spread_evenly(total, num_samples))
        return predict_sets(result, predict, arguments, return_sites, interval, held_out, count)

    @check_calls
    def to_arviz(
        self,
        log_likelihood: bool | None = None,
        posterior_predictive: bool = False,
        data: DataLike = None,
    ) -> Any:
        """The run as ArviZ's InferenceData (with ArviZ 1, a DataTree).

        Groups: `posterior`; `sample_stats` (`lp`, the log joint's estimate from the batch of the
        step before the draw; `lr`, `temperature`, ... of that step; `step`, its number);
        `observed_data`; `log_likelihood` (a value for each row, without N/B, ready for
        `arviz.loo`); on request, `posterior_predictive`.  `attrs` holds method, hyperparameters, N,
        B, seed, versions.  If chains broke, `chain` has the numbers of the others, as
        `NonFiniteError` counts them.

        Args:
            log_likelihood: whether to compute that group; by default, if it fits in 1 GiB.
            posterior_predictive: whether to draw that group, for the run's data.
            data: data for all groups but the posterior; those of the run by default.

        Raises:
            ArgumentError: a log posterior made from a function does not have a requested group.
        """
        result = self.kept_draws
        if log_likelihood:
            predictive.check_model(result.log_posterior, "log_likelihood")
        if posterior_predictive:
            predictive.check_model(result.log_posterior, "posterior_predictive")
        groups: dict[str, Mapping[str, Tensor]] = {
            "posterior": result.samples,
            "sample_stats": result.sample_stats,
        }
        if data is None and result.data is None:  # single steps, a file
            return export.to_inference_data(result, groups)
        source, sites = self.open_data(data), data_sites(result)
        observed = predictive.observed_data(result, source)
        if observed:
            groups["observed_data"] = observed
        is_summed = integrated_of(result.log_posterior) is not None
        if log_likelihood is None:
            log_likelihood = _is_small_enough(result, len(sites) + is_summed)
        if log_likelihood and (sites or is_summed):
            pointwise = predictive.log_likelihood(result, source)
            groups["log_likelihood"] = export.grouped(result, pointwise)
        if posterior_predictive and sites:
            drawn = predictive.predict_all(result, source)
            groups["posterior_predictive"] = export.grouped(result, drawn)
        return export.to_inference_data(result, groups)

    @property
    def params(self) -> dict[str, Tensor]:
        """Constrained values of `pyro.param` sites and unfrozen weights after the last step, by
        name, shared by the chains.  (Predictions of a draw use the values at the draw's step.)"""
        return self.draws.params

    @check_calls
    def write_params(self) -> None:
        """Writes the values in `params` to where the model reads them: those of `pyro.param` sites
        into Pyro's param store, those of weights into their modules."""
        self.draws.log_posterior.write_points(self.params)

    @check_calls
    def starts(self, num_chains: int, seed: int) -> dict[str, Tensor]:
        """Starting points for `num_chains` chains: draws chosen at random, with replacement.
        Returns constrained values `[num_chains, ...]` by site, of the latent sites and of `params`.
        """
        result = self.kept_draws.every_draw
        chains, draws = result.positions.shape[:2]
        source = generator(seed, 0, Purpose.INIT)
        count = as_count("num_chains", num_chains)
        places = torch.randint(chains * draws, (count,), generator=source)
        return starts_at(result, places // draws, places % draws)

    @check_calls
    def save(self, path: files.FilePath) -> None:
        """Writes the posterior to a file, from which `ps.load` gives it back.

        The file contains the draws, their statistics, the run's facts (`attrs`), and the first
        batch (all data if the run had no batches), which `ps.load` uses to check the model.  It
        does not contain the other data, the model, or tensors that the model holds.  A file of the
        same name is replaced when the new one is complete.

        Args:
            path: path of the file, a str or a Path.

        Raises:
            ArgumentError: `path` is no path.
            FileError: the file cannot be written, or an argument of the model is neither a
                tensor nor a plain value.
        """
        files.write(path, self.contents() if self._file is None else dict(self._file))

    def contents(self) -> dict[str, Any]:
        """What `save` writes to a file, tensors and plain values by name: the draws with their
        statistics, the run's facts, and a batch of the data, by which `load` checks the model."""
        batch = self._batch if self.draws.data is None else self.draws.data.first()
        assert batch is not None
        return {"method": self.attrs["method"], **contents_of(self.draws, batch)}

    # ------------------------------------------------------------------ inside

    @property
    def kept_draws(self) -> PosteriorDraws:
        """The same object as `draws`, after a check that the run kept its draws; for results that
        cannot be computed from means and quantiles alone.

        Raises:
            ArgumentError: the run kept no draws (`store=False`).
        """
        if self.draws.online is not None:
            raise ArgumentError(
                "the run kept no draws (store=False): summary() and moments() are available; run "
                "it with store='draws.zarr' for draws on disk"
            )
        return self.draws

    def open_data(self, data: DataLike) -> Data:
        """A data source from which to read `data`; the run's own data if `data` is None.

        Args:
            data: data in any form that `run` takes.

        Raises:
            ArgumentError: `data` is None, and the posterior has no data of the run.
        """
        if data is not None:
            return self._open(data)
        if self.draws.data is None:
            raise ArgumentError(
                "the posterior is of step() or from a file, which keep no data: pass the whole "
                "data as data="
            )
        return self.draws.data

    def _open(self, data: DataLike) -> Data:
        """The rows that the user passed, as a data source on the model's device.

        Raises:
            CallError: the rows have other columns or dimensions than those of the run.
        """
        log_posterior = self.draws.log_posterior
        if integrated_of(log_posterior) is not None:
            opened = open_rows(data)
            if not isinstance(opened, TensorData):
                raise ArgumentError("data: local latents are summed out of tensors only")
            return local_latents.with_modes(self.draws, opened)
        check_like_run(log_posterior, self.draws.data, data)
        opened = open_data(data, None, None, module_device(log_posterior))
        opened.first()
        return opened


def _is_small_enough(result: PosteriorDraws, num_sites: int) -> bool:
    """Whether the pointwise log likelihood of the draws fits in 1 GiB, so that `to_arviz` computes
    it by default; warns if not.

    Args:
        result: the draws.
        num_sites: number of data sites.
    """
    size = export.log_likelihood_bytes(result, num_sites)
    if size > _LOG_LIKELIHOOD_BYTES:
        warn(
            PyroScaleWarning,
            f"the pointwise log likelihood would take {size / 2**30:.1f} GiB and is left out: "
            "pass log_likelihood=True to have it, or thin the draws",
            code="log-likelihood",
        )
    return size <= _LOG_LIKELIHOOD_BYTES


def starts_at(result: PosteriorDraws, chains: Tensor, draws: Tensor) -> dict[str, Tensor]:
    """Starting points for chains of another run, taken from draws of this one: constrained values
    `[starts, ...]` by site, of the latent sites and of the point-estimated params.

    Args:
        result: draws of a run.
        chains: chain of each start, `[starts]`.
        draws: number of each start's draw in its chain, `[starts]`.
    """
    sites, params = result.samples_at(chains, draws), result.params
    starts = {name: sites[name] for name in result.log_posterior.latents}
    return starts | {name: v.expand(len(draws), *v.shape) for name, v in params.items()}
