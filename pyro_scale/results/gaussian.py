"""The posterior of an approximation: Gaussians, and their draws."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor

from pyro_scale.core.gaussian import Dense, Diagonal, Kronecker, LowRank
from pyro_scale.core.rows import Arguments, DataLike
from pyro_scale.core.validation import as_count
from pyro_scale.core.warn import warn
from pyro_scale.diagnostics.approximation import advice_for, report_on_fit
from pyro_scale.diagnostics.policy import WEIGHTS
from pyro_scale.diagnostics.psis import Psis, psis
from pyro_scale.diagnostics.report import Report
from pyro_scale.errors import ApproximationWarning, ArgumentError
from pyro_scale.marginal.integrated import integrated_of
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.posterior import local_latents, predictive
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.posterior.gaussians import Fit, Guide
from pyro_scale.posterior.like_run import check_like_run
from pyro_scale.posterior.linearized import predict as predict_linearized
from pyro_scale.posterior.prediction_sets import check_interval, predict_sets
from pyro_scale.posterior.reductions import Reduce, Reduction
from pyro_scale.results.call_checks import check_calls
from pyro_scale.results.posterior import Posterior
from pyro_scale.rng.seeds import Purpose, generator
from pyro_scale.tuning.early_stopping import has_converged

if TYPE_CHECKING:
    import pandas

#: Least draws of each start that `sample(resample=True)` weighs.
_PROPOSALS = 1000
#: Squared distance from the mode, in posterior sds, above which the evidence is too low.
_FAR = 0.01
#: Facts of a fit that are those of its importance weights, at its own temperature.
_OF_WEIGHTS = "pareto_k", "psis", "report"


class GaussianPosterior(Posterior):
    """The posterior of an approximation: a Gaussian in unconstrained space, or several from
    different starts; for a `MAP`, points.

    Args:
        fit: the Gaussians, with the model, the data and the run's facts.
        batch: a batch of the data, as the model's arguments, if `fit` has no data; otherwise None.
    """

    def __init__(self, fit: Fit, batch: Arguments | None = None):
        self._fit, self._batch = fit, batch

    @classmethod
    def from_contents(cls, contents: Mapping[str, Any], draws: PosteriorDraws) -> Self:
        """The posterior that a file holds; used by `load`.

        Args:
            contents: contents of the file, by name, as `contents` wrote them.
            draws: draws of the fit, from the file, with the model and the run's facts.

        Raises:
            ValueError: shapes in the file contradict each other.
        """
        structures: Any = {"dense": Dense, "diag": Diagonal, "kron": Kronecker, "low_rank": LowRank}
        kind = structures[contents["structure"]]
        attrs = draws.attrs
        if contents["trace"] is not None and "objective" not in attrs:  # a file of version 0.2
            objectives = {"MAP": "log joint", "EKF": "log_lik"}
            attrs["objective"] = objectives.get(contents["method"], "ELBO")
        fit = Fit(
            draws.log_posterior,
            None,
            draws.layout,
            contents["centers"],
            tuple(contents["sites"]),
            tuple(kind.from_contents(**gaussian) for gaussian in contents["gaussians"]),
            attrs["seed"],
            attrs,
            contents["trace"],
        )
        if fit.centers.shape[1:] != (fit.layout.size,):
            raise ValueError(f"centers of shape {list(fit.centers.shape)}")
        fit.by_start(torch.arange(fit.num_starts))  # raises if shapes differ
        return cls(fit, contents["arguments"])

    @property
    def fit(self) -> Fit:
        """The `Fit` that this posterior is made of: the Gaussians in unconstrained space, one a
        start (none for a `MAP`), their centers, and the run's settings."""
        return self._fit

    @property
    def draws(self) -> PosteriorDraws:
        """Draws of the fit in unconstrained space: 1,000 of each start, as one chain a start, the
        same at each call; one for a `MAP`."""
        return self.fit.result

    @property
    def attrs(self) -> dict[str, Any]:
        """Facts of the run by name: method, structure, N, seed, versions, seconds, ..."""
        return self.fit.attrs

    @property
    def size(self) -> str:
        """A text for `repr` such as "N = 1,000, starts: 2": the number of rows and of Gaussians."""
        return f"N = {self.fit.log_posterior.num_data:,}, starts: {self.fit.num_starts}"

    @check_calls
    def sample(
        self, num_samples: int, seed: int | None = None, resample: bool = False
    ) -> dict[str, Tensor]:
        """New constrained draws, `[num_samples, ...]` by site, from each start in turn.

        Args:
            num_samples: number of draws.
            seed: seed of the draws, which also are the first ones for a larger `num_samples`; by
                default, draws are from torch's generator.
            resample: whether to bring the draws closer to the posterior by importance resampling:
                draws are picked, with replacement and in proportion to their weights, among
                `num_samples` draws of the fit (at least 1,000 a start).  This evaluates all rows at
                all draws.

        Raises:
            ArgumentError: `resample` for a fit without weights (see `psis`).

        Warns:
            ApproximationWarning: the weights have too heavy a tail to be trusted.
        """
        count = as_count("num_samples", num_samples)
        if resample:
            return self._resample(count, seed)
        return {name: value[0] for name, value in self.drawn(count, seed).samples.items()}

    @check_calls
    def psis(self, num_rows: int | None = None) -> Psis:
        """Pareto-smoothed importance weights of the fit's draws (those of `get_samples`) against
        the log joint of all rows at the fit's temperature, in unconstrained space.

        The shape of their tail, `pareto_k`, shows whether the fit can be trusted.  Up to 0.7 it
        can, and `sample(n, resample=True)` improves it; above, use a sampler.  Beyond about 100
        dimensions k is large for every Gaussian and does not reflect the predictions of a network:
        check those on held-out rows.

        Args:
            num_rows: number of rows to evaluate; by default all, or as many as give the log weights
                to within 0.2 nats if all take too long.

        Raises:
            ArgumentError: the fit has no density (a mode, temperature 0), or is not meant to be the
                posterior; the data are gone; it would take too long.
        """
        if num_rows is not None:
            num_rows = as_count("num_rows", num_rows, least=2)
        return psis(self.fit, self.fit.result, num_rows)

    @check_calls
    def starts(self, num_chains: int, seed: int) -> dict[str, Tensor]:
        """Starting points for `num_chains` chains: draws of the fit, from each start's Gaussian in
        turn. Returns constrained values `[num_chains, ...]` by site, of the latent sites and of
        `params`."""
        drawn = self.sample(as_count("num_chains", num_chains), seed)
        params = {n: value.expand(num_chains, *value.shape) for n, value in self.params.items()}
        return {name: drawn[name] for name in self.fit.log_posterior.latents} | params

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
        linearized: bool | Literal["probit"] = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Posterior predictive draws by site, `[draws, ...]`, one for each draw of the
        approximation; or what `reduce` or `interval` requests.

        Args:
            *args: arguments of the model, with the rows to predict.
            **kwargs: keyword arguments of the model.
            num_samples: number of draws of the approximation to use, as for samplers.
            batch_size: rows in memory at a time, as for samplers; with `linearized`, memory is
                needed for all draws of `batch_size` rows.
            return_sites: names of sites to predict, as for samplers.
            reduce: statistic of the predictive draws to return, as for samplers.
            interval: probability of the intervals or sets to return, as for samplers.
            calibrate: held-out rows that make the intervals conformal, as for samplers.
            linearized: whether to linearize the arguments of the observed sites' distributions in
                the params, around the Gaussian's mean and on an unconstrained scale, which is the
                model that the GGN approximates (Immer et al. 2021).  For networks, it is closer to
                the posterior than draws of the Gaussian.  `"probit"` gives class probabilities in
                closed form (MacKay 1992): for Bernoulli and Categorical sites, from logits divided
                by sqrt(1 + pi/8 times their variance), accurate to a few percent.  Draws are then
                of these probabilities, and `reduce="mean"` gives them without Monte Carlo.  It
                takes as many passes as the Gaussian has elements.

        Raises:
            ArgumentError: `linearized` for a site without a distribution, or without a Gaussian;
                `"probit"` for a site without classes; an unknown `reduce`; and, with `interval` and
                `calibrate`, as for samplers.
            DataError: as for samplers.
        """
        check_interval(interval, calibrate, reduce)
        if linearized not in (False, True, "probit"):
            raise ArgumentError(f"linearized={linearized!r}: pass True, False or 'probit'")
        held_out = None if calibrate is None else self._open(calibrate)
        fit = self.fit
        total = fit.num_starts * fit.num_draws
        if integrated_of(fit.log_posterior) is not None:
            if linearized or interval is not None:
                raise ArgumentError(
                    "predict: linearized and interval are not for models whose latents were summed "
                    "out: leave them out"
                )
            every = torch.arange(total)
            chosen = every if num_samples is None else predictive.spread_evenly(total, num_samples)
            drawn, arguments = local_latents.to_predict(fit.thin(chosen), args, kwargs)
            return predictive.predict(drawn, arguments, None, batch_size, return_sites, reduce)
        arguments = fit.log_posterior.bind(args, kwargs)
        predictive.check_model(fit.log_posterior, "predict")
        check_like_run(fit.log_posterior, fit.data, args, kwargs)

        def predict(
            arguments: Arguments, names: Sequence[str] | None, reduce: Reduce | Reduction | None
        ) -> dict[str, Any]:
            options = batch_size, names, reduce
            if linearized:
                probit = linearized == "probit"
                return predict_linearized(fit, arguments, num_samples, *options, probit)
            if num_samples is None:
                result = fit.result
            else:  # a network's 1,000 draws may be more than memory holds
                result = fit.thin(predictive.spread_evenly(total, num_samples))
            return predictive.predict(result, arguments, None, *options)

        if interval is None:
            return predict(arguments, return_sites, reduce)
        count = total if num_samples is None else len(predictive.spread_evenly(total, num_samples))
        first = fit.thin(torch.arange(1))
        return predict_sets(first, predict, arguments, return_sites, interval, held_out, count)

    @check_calls
    def guide(self) -> Guide:
        """The Gaussian of the first start as a Pyro guide, for `pyro.infer.Predictive(model,
        guide=...)`, or to continue with `SVI`.

        Values of `pyro.param` are read from Pyro's store: `write_params()` puts those of the fit
        there."""
        return Guide(self.fit)

    @check_calls
    def mass(self) -> dict[str, Tensor]:
        """A `mass` for samplers with which all elements move at the same rate: the diagonal of the
        Gaussian's precision divided by N, by site, in the site's unconstrained shape (averaged over
        starts).  `lr` is then in units of an element's sd given the others.

        Raises:
            ArgumentError: the fit has no Gaussian.
        """
        fit = self.fit
        if not fit.gaussians:
            raise ArgumentError(f"{self.attrs['method']} has no Gaussian: fit a Laplace or VI")
        warm = [fit.at_temperature_1(start) for start in range(len(fit.gaussians))]
        diagonals = [gaussian.precision_diagonal for gaussian in warm]
        mass = torch.ones_like(fit.centers[0])
        mass[fit.places] = torch.stack(diagonals).mean(0) / fit.log_posterior.num_data
        of_sites = fit.layout.unflatten(mass)
        return {site: of_sites[site] for site in fit.sites}

    @check_calls
    def as_prior(self) -> LogPosterior:
        """The model with this Gaussian (of the first start) as its prior, for any method to
        continue with other data (the paper's equation 1).

        The Gaussian is that at temperature 1, whatever the temperature of the fit.  `pyro.param`
        sites start at the model's initial values: `write_params` replaces these by the fit's.

        Raises:
            ArgumentError: the fit has no Gaussian, one at temperature 0, or one for some sites
                only; or the likelihood is a joint density of all rows, which more rows would
                change.
        """
        return as_prior(self.fit, 0)

    @check_calls
    def at_temperature(self, temperature: float) -> GaussianPosterior:
        """A new posterior with the Gaussians at another temperature, to which covariances are
        proportional; needs no pass through the data.

        Args:
            temperature: 1 is the posterior, 0 the mode alone.

        Raises:
            ArgumentError: the temperature is below 0; or the fit's own is 0, so that it has no
                spread.
        """
        fit, temperature = self.fit, as_temperature(temperature)
        warm = [fit.at_temperature_1(start) for start in range(len(fit.gaussians))]
        attrs = {k: v for k, v in fit.attrs.items() if k not in _OF_WEIGHTS}
        tempered = fit.replaced(
            gaussians=tuple(gaussian.temper(temperature) for gaussian in warm),
            attrs={**attrs, "temperature": temperature},
        )
        return GaussianPosterior(tempered, self._batch)

    @check_calls
    def log_marginal_likelihood(self) -> Tensor:
        """The log evidence of a `Laplace` fit, a scalar in nats:
        log joint + D/2 log 2 pi - log det(precision)/2 at the mode, at temperature 1, over the
        sites with a Gaussian; the largest of all starts.

        Raises:
            ArgumentError: the fit is not of `Laplace`.

        Warns:
            ApproximationWarning: the point is not the mode of the density in unconstrained space.
        """
        evidence = self.attrs.get("log_evidence")
        if evidence is None:
            raise ArgumentError("log_marginal_likelihood: it is of Laplace, which is at the mode")
        best = max(range(len(evidence)), key=evidence.__getitem__)
        far = self.attrs["distance"][best]
        if far > _FAR:
            warn(
                ApproximationWarning,
                f"the given mode is {far**0.5:.2g} posterior sds away from that in unconstrained "
                "space, so its evidence is too low: leave mode= out to have it found",
            )
        return torch.tensor(evidence[best], dtype=torch.float64)

    @property
    def trace(self) -> Tensor:
        """The objective's estimate at every step, in nats, a total over all rows: `[starts,
        steps]`.

        Raises:
            ArgumentError: the fit was not found step by step.
        """
        if self.fit.trace is None:
            raise ArgumentError("trace: the fit was not found step by step, so there is none")
        return self.fit.trace

    @property
    def converged(self) -> bool:
        """Whether the fit of every start has converged.

        For a Gaussian in up to 100 dimensions, if gradients of all rows at its draws cost no more
        than the run: whether every mean is within 0.1 sds, and every sd within 3%, of where the
        bound is largest, apart from chance (one fit in a thousand).  Otherwise, whether the
        objective changes, from the third quarter of the steps to the last, by significantly less
        than 0.1 nats times the square root of the number of dimensions, and has not fallen since
        the first quarter; False if noise hides that.  At a constant lr the fit may still fluctuate
        then."""
        return bool(self._converged.all())

    @property
    def _converged(self) -> Tensor:
        """For each start, whether its fit has converged, booleans `[starts]`; see `converged`."""
        measured = self.fit.attrs.get("at_optimum")
        if measured is not None:
            return torch.tensor(measured, dtype=torch.bool)
        return has_converged(self.trace, self.fit.layout.size)

    @check_calls
    def diagnostics(self) -> pandas.DataFrame:  # type: ignore[override]  # of no chains
        """Numbers that show whether the fit can be trusted: a DataFrame with a row for each start.

        Columns:

        - for `Laplace`: `log_evidence`, in nats; `distance` of the point from the mode, in
          posterior sds, by one step of Newton's method;
        - for `MAP`, `VI` and `IVON`: the mean objective over the last tenth of the steps, a total
          in nats; `steps`; `converged`;
        - for `EKF`: `steps`; `log_lik`, the sum of the batches' log likelihoods, each at the mean
          before it, in nats;
        - for a Gaussian, `pareto_k` of the importance weights that the run computed (see `psis`),
          NaN if it is not known: `attrs["psis"]` says why.
        """
        import pandas

        attrs = self.fit.attrs
        columns: dict[str, Any]
        if "log_evidence" in attrs:
            distance = [square**0.5 for square in attrs["distance"]]
            columns = {"log_evidence": attrs["log_evidence"], "distance": distance}
        elif attrs["objective"] == "log_lik":
            columns = {"steps": [self.trace.shape[1]], "log_lik": [float(self.trace.sum())]}
        else:
            last = self.trace[:, -max(1, self.trace.shape[1] // 10) :].mean(1)
            steps = [self.trace.shape[1]] * len(last)
            columns = {attrs["objective"]: last, "steps": steps, "converged": self._converged}
        table = pandas.DataFrame(columns)
        table.index.name = "start"
        table.attrs.update(attrs)
        if self.fit.gaussians:
            table["pareto_k"] = attrs.get("pareto_k", math.nan)
        return table

    @check_calls
    def report(self) -> Report:
        """How far to trust the approximation, and what to do if not: yes if its importance weights
        show that means are within 0.1 posterior sds and sds within 5%, at the fit's temperature.

        `str(report)` is the text, `.verdict` is `"yes"`, `"no"`, `"unknown"` or (for points, such
        as those of `MAP`) `"ensemble"`, `.to_frame()` has a row for each site and check.
        """
        return report_on_fit(self.fit)

    def drawn(self, count: int, seed: int | None) -> PosteriorDraws:
        """New draws of the fit, `[1, count, D]` in unconstrained space as one chain, from the
        Gaussians of all starts in turn; for a `MAP`, copies of its modes.

        Args:
            count: number of draws.
            seed: seed of the draws; None draws from torch's generator.
        """
        fit = self.fit
        if not fit.gaussians:
            noise = fit.centers.new_zeros(count, 0)
        else:
            noise = fit.noise(count) if seed is None else fit.seeded_noise(count, seed)
        return fit.draws(noise)

    def contents(self) -> dict[str, Any]:
        """What `save` writes to a file, tensors and plain values by name: the run's facts, and the
        Gaussians with their centers and the objective at every step. `from_contents` reads it."""
        fit = self.fit
        return {
            **super().contents(),
            "gaussians": [gaussian.contents() for gaussian in fit.gaussians],
            "centers": fit.centers,
            "sites": list(fit.sites),
            "trace": fit.trace,
            "structure": fit.attrs["structure"],
        }

    # ------------------------------------------------------------------ inside

    def _resample(self, count: int, seed: int | None) -> dict[str, Tensor]:
        """Constrained draws by importance resampling against the posterior, `[count, ...]` by site.

        Args:
            count: number of draws.
            seed: seed of the draws; None draws from torch's generator.

        Warns:
            ApproximationWarning: the weights have too heavy a tail to be trusted.
        """
        proposed = self.drawn(max(count, self.fit.num_starts * _PROPOSALS), seed)
        table = psis(self.fit, proposed)
        if not table.pareto_k <= WEIGHTS.pareto_k:
            warn(
                ApproximationWarning,
                "resample: the approximation does not fit the posterior: Pareto k of its "
                f"importance weights is {table.pareto_k:.2f}, above {WEIGHTS.pareto_k}; try: "
                f"{advice_for(self.fit)}",
                code="pareto-k",
            )
        source = None if seed is None else generator(seed, 0, Purpose.APPROXIMATION, block=2)
        weights = table.log_weights.exp()
        chosen = torch.multinomial(weights, count, replacement=True, generator=source)
        return {name: value[0, chosen] for name, value in proposed.samples.items()}


def as_temperature(temperature: float) -> float:
    """The temperature as a float, if it is a finite number >= 0.

    Raises:
        ArgumentError: the temperature is no number, negative, or infinite.
    """
    if not isinstance(temperature, int | float) or not 0 <= temperature < math.inf:
        raise ArgumentError(f"temperature={temperature!r}: pass a number >= 0")
    return float(temperature)


def as_prior(fit: Fit, start: int) -> LogPosterior:
    """The model with the Gaussian of one start of a fit, at temperature 1, as its prior, to
    continue with other data.

    Args:
        fit: an approximation over all latent sites.
        start: number of the start.

    Raises:
        ArgumentError: the fit has no Gaussian over all latent sites; or the likelihood is a joint
            density of all rows.
    """
    log_posterior = fit.log_posterior
    if not fit.gaussians or set(fit.sites) != set(log_posterior.latents):
        raise ArgumentError(
            "the old posterior as the next prior: a Gaussian over all latent sites is needed; fit "
            "Laplace, VI or EKF without sites="
        )
    if any(rule.whole_data for rule in log_posterior.model_info.scaling.rules.values()):
        raise ArgumentError(
            "the old posterior as the next prior: the likelihood is a joint density of all rows, "
            "so it is not a product over batches; run on all rows together"
        )
    return LogPosterior(log_posterior.model).with_gaussian_prior(fit.at_temperature_1(start))
