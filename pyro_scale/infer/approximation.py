"""What MAP, VI, Laplace and EKF share once they have run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from pyro_scale.core.gaussian import Dense, Diagonal
from pyro_scale.core.kronecker import Kronecker
from pyro_scale.core.low_rank import LowRank
from pyro_scale.core.rows import Arguments
from pyro_scale.core.validation import as_count
from pyro_scale.core.warn import warn
from pyro_scale.diagnostics.policy import WEIGHTS
from pyro_scale.diagnostics.psis import Psis, psis, rows_for, sums_at
from pyro_scale.diagnostics.resolution import resolution
from pyro_scale.distributed.ranks import ALONE, Ranks
from pyro_scale.errors import ApproximationWarning, ArgumentError, DataError, NotRunError
from pyro_scale.fullbatch.evidence import GaussianStructure
from pyro_scale.infer.method import Method
from pyro_scale.infer.sharded import WHOLE_NOWHERE, predict_sharded
from pyro_scale.model.log_posterior import LogPosterior
from pyro_scale.posterior import predictive
from pyro_scale.posterior.draws import Result
from pyro_scale.posterior.gaussians import Fit
from pyro_scale.posterior.guide import Guide
from pyro_scale.posterior.like_run import check_like_run
from pyro_scale.posterior.linearized import predict as predict_linearized
from pyro_scale.posterior.prediction_sets import check_asked, predict_sets
from pyro_scale.posterior.reductions import Reduce, Reduction
from pyro_scale.posterior.serialization import result_of
from pyro_scale.rng.seeds import Purpose, generator

#: Which elements a Gaussian knows to be correlated: none, or all.
Structure = Literal["diag", "dense"]

#: Dimensions up to which a run looks at its fit's importance weights: beyond them, their tail is
#: heavy however well a network's fit predicts.
_MOST_DIMENSIONS = 100
#: Draws of each start that are weighed, at least.
_PROPOSALS = 1000
#: Evaluations of rows at draws that are always cheap.
_CHEAP = 2**22
#: Numbers of draws, sites without a Gaussian included, that are few.
_MOST_NUMBERS = 2**22


class Approximation(Method):
    """A Gaussian in unconstrained space, or several from different starts.

    Args:
        model: a Pyro model, a `PyroModule` or a `LogPosterior`.
        structure: `"diag"` or `"dense"`.
        init_strategy: where it starts: one of Pyro's, a dict of constrained tensors
            `[num_chains, ...]`, or another fit.
        num_data: N, which overrides what the data say.

    Raises:
        ArgumentError: an argument that is unknown or out of range.
    """

    #: What `structure` may be.
    structures: ClassVar[tuple[str, ...]] = get_args(Structure)

    def __init__(
        self,
        model: Any,
        *,
        structure: GaussianStructure | Literal["auto"] = "diag",
        init_strategy: Any = None,
        num_data: int | None = None,
    ):
        super().__init__(model, init_strategy=init_strategy, num_data=num_data)
        if structure not in self.structures:
            raise ArgumentError(f"structure={structure!r}: pass one of {self.structures}")
        #: Of an "auto" that is chosen once the number of dimensions is known.
        self.structure: GaussianStructure = "dense" if structure == "auto" else structure
        self._fit: Fit | None = None

    @property
    def fit(self) -> Fit:
        """The Gaussians, in unconstrained space.

        Raises:
            NotRunError: nothing has been run.
        """
        if self._sharded is not None:
            raise ArgumentError(WHOLE_NOWHERE)
        if self._fit is None:
            raise NotRunError(f"{type(self).__name__} has no fit yet: call run(data, ...) first")
        return self._fit

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
        return {name: value[0] for name, value in self._draw(count, seed).samples.items()}

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
        self._check_targets()
        table = psis(self.fit, self.fit.result, num_rows)
        self._note(table)
        return table

    def starts(self, num_chains: int, seed: int) -> dict[str, Tensor]:
        """Where chains begin that start from this fit: draws of the latent sites, and `params`,
        `[num_chains, ...]`."""
        drawn = self.sample(num_chains, seed)
        params = {n: value.expand(num_chains, *value.shape) for n, value in self.params.items()}
        return {name: drawn[name] for name in self.fit.log_posterior.latents} | params

    def predict(
        self,
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
        if self._sharded is not None:
            if linearized:
                raise ArgumentError(WHOLE_NOWHERE)
            chosen = num_samples, batch_size, return_sites, reduce, interval
            return predict_sharded(self._sharded.draws, args, kwargs, *chosen)
        if calibrate is not None and self._fit is None:
            raise NotRunError(f"calibrate: {type(self).__name__} has no fit yet: run it first")
        held_out = None if calibrate is None else self._open(calibrate)
        fit, arguments = self._to_predict(args, kwargs)
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

    def _to_predict(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Fit, Arguments]:
        """What predicts, and the model's own arguments as that takes them."""
        return self.fit, self.fit.log_posterior.bind(args, kwargs)

    def guide(self) -> Guide:
        """The Gaussian as a Pyro guide, for `pyro.infer.Predictive(model, guide=...)`, and `SVI`,
        which goes on from it; of the first start.  Params of `pyro.param` are read from Pyro's
        store: `write_params()` puts those of the fit there."""
        return Guide(self.fit)

    def mass(self) -> dict[str, Tensor]:
        """A sampler's `mass` with which all elements move about alike: the diagonal of the
        precision over N, by site, in unconstrained space.  With it, `lr` is in units of what one
        element's sd is given the others.

        Raises:
            ArgumentError: there is no Gaussian.
        """
        fit = self.fit
        if not fit.gaussians:
            raise ArgumentError(f"{type(self).__name__} has no Gaussian: fit a Laplace or VI")
        warm = [fit.at_temperature_1(start) for start in range(len(fit.gaussians))]
        diagonals = [each.precision_diagonal for each in warm]
        mass = torch.ones_like(fit.centers[0])
        mass[fit.places] = torch.stack(diagonals).mean(0) / fit.log_posterior.num_data
        of_sites = fit.layout.unflatten(mass)
        return {site: of_sites[site] for site in fit.sites}

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

    def _results(self) -> Result:
        return self.fit.result

    # ------------------------------------------------------------------ inside

    def _draw(self, count: int, seed: int | None) -> Result:
        """Fresh draws, `[1, count]`."""
        fit = self.fit
        if not fit.gaussians:
            noise = fit.centers.new_zeros(count, 0)
        else:
            noise = fit.noise(count) if seed is None else fit.seeded_noise(count, seed)
        return fit.draws(noise)

    def _resample(self, count: int, seed: int | None) -> dict[str, Tensor]:
        self._check_targets()
        proposed = self._draw(max(count, self.fit.num_starts * _PROPOSALS), seed)
        table = psis(self.fit, proposed)
        if not table.pareto_k <= WEIGHTS.pareto_k:
            warn(ApproximationWarning, f"resample: {self._advise(table.pareto_k)}", code="pareto-k")
        source = None if seed is None else generator(seed, 0, Purpose.APPROXIMATION, block=2)
        weights = table.log_weights.exp()
        chosen = torch.multinomial(weights, count, replacement=True, generator=source)
        return {name: value[0, chosen] for name, value in proposed.samples.items()}

    def _check_targets(self) -> None:
        """Refuses importance weights where the fit is not meant to be the model's posterior."""

    def _note(self, table: Psis) -> None:
        """Keeps what the weights say."""
        self.fit.attrs.update(pareto_k=table.pareto_k, psis=table.words)

    def _check_the_fit(
        self, evaluations: int, ranks: Ranks = ALONE, reason: str | None = None
    ) -> None:
        """Looks at the importance weights where that costs less than the fit did, whose worth in
        evaluations of a row's log density is given; ranks share the rows out.  A reason that is
        known already for a fit that is wrong is what is said."""
        if reason is not None:
            warn(ApproximationWarning, reason, code="pareto-k")
        fit = self.fit
        if not fit.gaussians or fit.data is None:
            return
        if len(fit.places) > _MOST_DIMENSIONS:
            fit.attrs["psis"] = (
                f"not known: of {len(fit.places):,} dimensions; beyond {_MOST_DIMENSIONS} the "
                "weights say nothing of a network: look at predictions of held-out rows"
            )
            return
        draws, budget = fit.num_starts * fit.num_draws, max(_CHEAP, evaluations)
        rows = rows_for(fit.log_posterior, len(fit.places), draws, budget)
        if rows is None or draws * fit.layout.size > _MOST_NUMBERS:
            fit.attrs["psis"] = "not known: dearer than the fit; call psis()"
            return
        for finding in resolution(fit.result) if fit.temperature else ():
            if finding.site in fit.sites:  # others are held where they are
                told = f"site '{finding.site}': {finding.told}; try: {finding.advice}"
                warn(ApproximationWarning, told)
        sums = sums_at(fit, fit.result, ranks)

        def look() -> Psis | str:
            try:
                self._check_targets()
                return psis(fit, fit.result, rows, sums=sums)
            except (DataError, RuntimeError, ValueError, NotImplementedError) as error:
                return f"not known: {error}"

        table = sums.run(look)
        if isinstance(table, str):
            fit.attrs["psis"] = table
            return
        self._note(table)
        if reason is not None:
            return
        if table.pareto_k > WEIGHTS.pareto_k:
            warn(ApproximationWarning, self._advise(table.pareto_k), code="pareto-k")
        elif table.shift > WEIGHTS.shift:
            warn(
                ApproximationWarning,
                "the approximation does not fit the posterior: importance weights move its mean "
                f"by {table.shift:.2g} of its sds: take sample(n, resample=True), "
                f"{self._denser}or a sampler such as BAOA",
                code="pareto-k",
            )
        elif table.spread > WEIGHTS.spread:
            warn(
                ApproximationWarning,
                "the approximation does not fit the posterior: it is too narrow, by the log joint "
                f"at its draws {table.spread:.2g} times: take {self._denser}a sampler such as BAOA",
                code="too-narrow",
            )

    def _advise(self, pareto_k: float) -> str:
        """What a bad k means, and what to do."""
        return (
            f"the approximation does not fit the posterior: Pareto k of its importance weights is "
            f"{pareto_k:.2f}, above {WEIGHTS.pareto_k}: use {self._denser}another parametrization, "
            "or a sampler such as BAOA, which may start from it (init_strategy=)"
        )

    @property
    def _denser(self) -> str:
        """Advice that is left to a fit that leaves correlations out."""
        return "" if self.structure == "dense" else "structure='dense', "

    def _with_k(self, table: Any) -> Any:
        """The table of diagnostics, with the fit's Pareto k in it."""
        if self.fit.gaussians:
            table["pareto_k"] = self.fit.attrs.get("pareto_k", math.nan)
        return table

    def _contents(self) -> dict[str, Any]:
        fit = self.fit
        kept = {
            "gaussians": [gaussian.contents() for gaussian in fit.gaussians],
            "centers": fit.centers,
            "sites": list(fit.sites),
            "trace": fit.trace,
            "structure": fit.attrs.get("structure", self.structure),
        }
        return {**super()._contents(), **kept}

    def _restore(self, contents: Mapping[str, Any], log_posterior: LogPosterior) -> None:
        result = result_of(contents, log_posterior)
        self.structure = contents["structure"]
        kind: Any = {"dense": Dense, "diag": Diagonal, "kron": Kronecker, "low_rank": LowRank}[
            self.structure
        ]
        self._fit = Fit(
            log_posterior,
            None,
            result.layout,
            contents["centers"],
            tuple(contents["sites"]),
            tuple(kind.of_contents(**each) for each in contents["gaussians"]),
            contents["attrs"]["seed"],
            result.attrs,
            contents["trace"],
        )
        if self._fit.centers.shape[1:] != (result.layout.size,):
            raise ValueError(f"centers of shape {list(self._fit.centers.shape)}")
        self._fit.by_start(torch.arange(self._fit.num_starts))  # which raises where shapes differ


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
