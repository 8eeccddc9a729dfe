"""The posterior as an approximation left it: Gaussians, and draws of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor

from pyro_scale.core.gaussian import Dense, Diagonal, Kronecker, LowRank
from pyro_scale.core.rows import Arguments
from pyro_scale.core.validation import as_count
from pyro_scale.core.warn import warn
from pyro_scale.diagnostics.check_fit import advice_on, check_targets, note_weights
from pyro_scale.diagnostics.policy import WEIGHTS
from pyro_scale.diagnostics.psis import Psis, psis
from pyro_scale.errors import ApproximationWarning, ArgumentError
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.posterior import predictive
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.posterior.gaussians import Fit
from pyro_scale.posterior.guide import Guide
from pyro_scale.posterior.like_run import check_like_run
from pyro_scale.posterior.linearized import predict as predict_linearized
from pyro_scale.posterior.prediction_sets import check_asked, predict_sets
from pyro_scale.posterior.reductions import Reduce, Reduction
from pyro_scale.results.call_checks import check_calls
from pyro_scale.results.posterior import Posterior
from pyro_scale.rng.seeds import Purpose, generator
from pyro_scale.tuning.early_stopping import has_converged

#: Draws of each start that are weighed, at least.
_PROPOSALS = 1000
#: The square of the distance to the mode, in posterior sds, from which evidence is in doubt.
_FAR = 0.01


class GaussianPosterior(Posterior):
    """A Gaussian approximation of the posterior in unconstrained space, or several from different
    starts; of a `MAP`, points.

    Args:
        fit: the Gaussians, with the model, the data and the run's facts.
        batch: the batch that the model was understood on, where the fit comes without data.
    """

    def __init__(self, fit: Fit, batch: Arguments | None = None):
        self._fit, self._batch = fit, batch

    @classmethod
    def of_contents(cls, contents: Mapping[str, Any], draws: PosteriorDraws) -> Self:
        """What `contents` gave, read from a file.

        Args:
            contents: of the file.
            draws: of the fit, in the file.
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
            tuple(kind.from_contents(**each) for each in contents["gaussians"]),
            attrs["seed"],
            attrs,
            contents["trace"],
        )
        if fit.centers.shape[1:] != (fit.layout.size,):
            raise ValueError(f"centers of shape {list(fit.centers.shape)}")
        fit.by_start(torch.arange(fit.num_starts))  # which raises where shapes differ
        return cls(fit, contents["arguments"])

    @property
    def fit(self) -> Fit:
        """The Gaussians, in unconstrained space."""
        return self._fit

    @property
    def draws(self) -> PosteriorDraws:
        """Draws of the fit: 1,000 of each start, the same at each call; of a `MAP`, one."""
        return self.fit.result

    @property
    def attrs(self) -> dict[str, Any]:
        """Facts of the run: method, structure, N, seed, versions, seconds, ..."""
        return self.fit.attrs

    @property
    def size(self) -> str:
        """N, and how many starts there are, in words."""
        return f"N = {self.fit.log_posterior.num_data:,}, starts: {self.fit.num_starts}"

    @check_calls
    def sample(
        self, num_samples: int, seed: int | None = None, resample: bool = False
    ) -> dict[str, Tensor]:
        """Fresh draws, `[num_samples, ...]` by site, constrained; from each start in turn.

        Args:
            num_samples: how many.
            seed: the same one gives the same draws, however many; torch's generator is used by
                default.
            resample: whether they are draws of the posterior, as near as importance resampling
                brings those of the fit to it: `num_samples` of them (at least 1,000), each taken
                as often as its weight says.  It evaluates all rows at all draws.

        Raises:
            ArgumentError: `resample` of what has no weights (see `psis`).

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
        the log joint of all rows at the fit's temperature, in unconstrained space.  Their tail's
        shape, `pareto_k`, says whether the fit can be trusted: up to 0.7 it can, and
        `sample(n, resample=True)` brings it nearer; above, use a sampler.

        Beyond some 100 dimensions k is large for every Gaussian, and says nothing of what a
        network's fit predicts: look at its predictions on held-out rows.

        Args:
            num_rows: how many rows are evaluated; by default all, or as many as give the log
                weights to within 0.2 nats where all are too dear.

        Raises:
            ArgumentError: there is no density (a mode, temperature 0), or not of this model; the
                data are gone; it is too dear.
        """
        if num_rows is not None:
            num_rows = as_count("num_rows", num_rows, least=2)
        check_targets(self.fit)
        table = psis(self.fit, self.fit.result, num_rows)
        note_weights(self.fit, table)
        return table

    @check_calls
    def starts(self, num_chains: int, seed: int) -> dict[str, Tensor]:
        """Where chains begin that start from this fit: draws of the latent sites, and `params`,
        `[num_chains, ...]`."""
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
        calibrate: Any = None,
        linearized: bool | Literal["probit"] = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Posterior predictive draws, `[draws, ...]`, one for each draw of the approximation, or
        what is asked for of them.

        Args:
            *args: the model's own.
            **kwargs: the model's own.
            num_samples: as for samplers.
            batch_size: as for samplers; with `linearized`, memory is needed for all draws of
                `batch_size` rows.
            return_sites: as for samplers.
            reduce: as for samplers.
            interval: as for samplers.
            calibrate: as for samplers.
            linearized: whether the arguments of the observed sites' distributions are taken as
                linear in the params, around the Gaussian's mean and on an unconstrained scale,
                as the GGN has it (Immer et al. 2021): for networks, closer to the posterior than
                the Gaussian's own draws.  `"probit"` gives the chances of classes in closed form
                (MacKay 1992): of Bernoulli and Categorical sites, logits over
                sqrt(1 + pi/8 times their variance), to some percent.  Draws are of these chances,
                and `reduce="mean"` gives them without Monte Carlo; it takes as many passes as the
                Gaussian has elements.

        Raises:
            ArgumentError: `linearized` of what has no distribution, or without a Gaussian;
                `"probit"` of what are no classes; what `reduce` asks for does not exist; and, with
                `interval` and `calibrate`, as for samplers.
            DataError: as for samplers.
        """
        check_asked(interval, calibrate, reduce)
        if linearized not in (False, True, "probit"):
            raise ArgumentError(f"linearized={linearized!r}: pass True, False or 'probit'")
        held_out = None if calibrate is None else self._open(calibrate)
        fit = self.fit
        arguments = fit.log_posterior.bind(args, kwargs)
        predictive.check_model(fit.log_posterior, "predict")
        check_like_run(fit.log_posterior, fit.data, args, kwargs)
        total = fit.num_starts * fit.num_draws

        def predict(
            arguments: Arguments, names: Sequence[str] | None, reduce: Reduce | Reduction | None
        ) -> dict[str, Any]:
            chosen = batch_size, names, reduce
            if linearized:
                probit = linearized == "probit"
                return predict_linearized(fit, arguments, num_samples, *chosen, probit)
            if num_samples is None:
                result = fit.result
            else:  # a network's 1,000 draws may be more than memory holds
                result = fit.thin(predictive.spread_evenly(total, num_samples))
            return predictive.predict(result, arguments, None, *chosen)

        if interval is None:
            return predict(arguments, return_sites, reduce)
        count = total if num_samples is None else len(predictive.spread_evenly(total, num_samples))
        here = fit.thin(torch.arange(1))
        return predict_sets(here, predict, arguments, return_sites, interval, held_out, count)

    @check_calls
    def guide(self) -> Guide:
        """The Gaussian as a Pyro guide, for `pyro.infer.Predictive(model, guide=...)`, and `SVI`,
        which goes on from it; of the first start.  Params of `pyro.param` are read from Pyro's
        store: `write_params()` puts those of the fit there."""
        return Guide(self.fit)

    @check_calls
    def mass(self) -> dict[str, Tensor]:
        """A sampler's `mass` with which all elements move about alike: the diagonal of the
        precision over N, by site, in unconstrained space.  With it, `lr` is in units of what one
        element's sd is given the others.

        Raises:
            ArgumentError: there is no Gaussian.
        """
        fit = self.fit
        if not fit.gaussians:
            raise ArgumentError(f"{self.attrs['method']} has no Gaussian: fit a Laplace or VI")
        warm = [fit.at_temperature_1(start) for start in range(len(fit.gaussians))]
        diagonals = [each.precision_diagonal for each in warm]
        mass = torch.ones_like(fit.centers[0])
        mass[fit.places] = torch.stack(diagonals).mean(0) / fit.log_posterior.num_data
        of_sites = fit.layout.unflatten(mass)
        return {site: of_sites[site] for site in fit.sites}

    @check_calls
    def as_prior(self) -> LogPosterior:
        """The model with this Gaussian for its prior: what the data have taught, for any method
        to go on from with other data (the paper's equation 1); at temperature 1, whatever the
        fit's.  Params of `pyro.param` start where the model has them: `write_params` puts those of
        the fit there.

        Raises:
            ArgumentError: there is no Gaussian, one at temperature 0, or one for some sites
                alone; or the likelihood is a joint density of all rows, which more rows would
                change.
        """
        return as_prior(self.fit, 0)

    @check_calls
    def at_temperature(self, temperature: float) -> GaussianPosterior:
        """The fit with the covariance of another temperature, without another pass through the
        data.

        Raises:
            ArgumentError: a temperature below 0; a fit at temperature 0, which has no spread.
        """
        fit, temperature = self.fit, as_temperature(temperature)
        warm = [fit.at_temperature_1(start) for start in range(len(fit.gaussians))]
        attrs = {k: v for k, v in fit.attrs.items() if k not in ("pareto_k", "psis")}
        tempered = fit.replaced(
            gaussians=tuple(gaussian.temper(temperature) for gaussian in warm),
            attrs={**attrs, "temperature": temperature},
        )
        return GaussianPosterior(tempered, self._batch)

    @check_calls
    def log_marginal_likelihood(self) -> Tensor:
        """The evidence of a `Laplace`, in nats: log joint + D/2 log 2 pi - log det(precision)/2 at
        the mode, of the start where it is largest; over the sites that have a Gaussian, at
        temperature 1.

        Raises:
            ArgumentError: the fit is not at a mode.

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
        """The objective's estimate at every step, in nats, a total: `[starts, steps]`.

        Raises:
            ArgumentError: the fit was not found step by step.
        """
        if self.fit.trace is None:
            raise ArgumentError("trace: the fit was not found step by step, so there is none")
        return self.fit.trace

    @property
    def converged(self) -> bool:
        """Whether every start's fit is where it is to be.

        Of a Gaussian in up to 100 dimensions, where all rows' gradients at its draws cost no more
        than the run: whether no mean is more than 0.1 sds, and no sd more than 3%, from where the
        bound is largest, but for chance (one fit in a thousand).  Else, whether the objective is
        known to change by less than 0.1 nats times the root of the dimensions from the third
        quarter of the steps to the last, and has not fallen since the first; where noise hides
        that, it is not.  At a constant lr the fit may then still be moving about."""
        return bool(self._converged.all())

    @property
    def _converged(self) -> Tensor:
        """Whether each start's fit is, `[starts]`."""
        measured = self.fit.attrs.get("at_optimum")
        if measured is not None:
            return torch.tensor(measured, dtype=torch.bool)
        return has_converged(self.trace, self.fit.layout.size)

    @check_calls
    def diagnostics(self) -> Any:  # type: ignore[override]  # of no chains
        """A DataFrame, one row a start.

        Columns:

        - of `Laplace`: `log_evidence`, in nats; `distance` of the point from the mode, in posterior
          sds, by one step of Newton's method;
        - of `MAP`, `VI` and `IVON`: the objective's mean over the last tenth of the steps, in nats,
          a total; `steps`; `converged`, whether it is known to rise no more;
        - of `EKF`: `steps`; `log_lik`, the sum of the batches' log likelihoods, each at the mean
          before it, in nats;
        - of a Gaussian, `pareto_k` of all draws' importance weights (see `psis`), NaN where it is
          not known: `attrs["psis"]` says why.
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

    def drawn(self, count: int, seed: int | None) -> PosteriorDraws:
        """Fresh draws, `[1, count]`."""
        fit = self.fit
        if not fit.gaussians:
            noise = fit.centers.new_zeros(count, 0)
        else:
            noise = fit.noise(count) if seed is None else fit.seeded_noise(count, seed)
        return fit.draws(noise)

    def contents(self) -> dict[str, Any]:
        """What `save` writes: tensors and plain values by name."""
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
        check_targets(self.fit)
        proposed = self.drawn(max(count, self.fit.num_starts * _PROPOSALS), seed)
        table = psis(self.fit, proposed)
        if not table.pareto_k <= WEIGHTS.pareto_k:
            told = f"resample: {advice_on(self.fit, table.pareto_k)}"
            warn(ApproximationWarning, told, code="pareto-k")
        source = None if seed is None else generator(seed, 0, Purpose.APPROXIMATION, block=2)
        weights = table.log_weights.exp()
        chosen = torch.multinomial(weights, count, replacement=True, generator=source)
        return {name: value[0, chosen] for name, value in proposed.samples.items()}


def as_temperature(temperature: float) -> float:
    """A temperature of 0 or more.

    Raises:
        ArgumentError: it is none.
    """
    if not isinstance(temperature, int | float) or not 0 <= temperature < math.inf:
        raise ArgumentError(f"temperature={temperature!r}: pass a number >= 0")
    return float(temperature)


def as_prior(fit: Fit, start: int) -> LogPosterior:
    """The model with one of a fit's Gaussians, at temperature 1, for its prior."""
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
