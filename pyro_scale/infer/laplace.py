"""The Laplace approximation."""

from __future__ import annotations

import copy
import fnmatch
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor

from pyro_scale.core.gaussian import Diagonal, Gaussian, Kronecker
from pyro_scale.core.layout import Layout
from pyro_scale.core.validation import as_count, as_flag
from pyro_scale.core.warn import without_vmap_warnings
from pyro_scale.data.open import open_data
from pyro_scale.diagnostics.check_fit import check_fit
from pyro_scale.distributed.ranks import ALONE, Distributed, Ranks
from pyro_scale.engine.progress import Progress
from pyro_scale.errors import ArgumentError, ModelError
from pyro_scale.fullbatch.chunks import chunks_of, is_row_wise
from pyro_scale.fullbatch.density import FullDataDensity
from pyro_scale.fullbatch.evidence import OF_ROWS, Candidate, GaussianStructure, Search
from pyro_scale.fullbatch.precision import CurvatureKind
from pyro_scale.infer.approximation import Approximation, fit_of
from pyro_scale.infer.method import Finished, asks
from pyro_scale.kernels import Hyperparameters
from pyro_scale.model.curvature.ggn import Curvature
from pyro_scale.posterior.collect import facts_of
from pyro_scale.posterior.gaussians import Fit
from pyro_scale.results.gaussian import GaussianPosterior, as_prior, as_temperature
from pyro_scale.rng.seeds import choose_seed
from pyro_scale.run.by_rank import check_same, check_same_call
from pyro_scale.run.problem import Problem, as_log_posterior, module_device, position_of, prepare
from pyro_scale.run.resume import identity_of

#: The square of the distance to the mode, in posterior sds, from which a mode that was passed is
#: not the density's, in all and for each dimension: the mode of the sites' own values, and networks
#: trained without the prior, are nearer.
_AWAY, _AWAY_EACH = 1.0, 0.1
#: Dimensions up to which structure="auto" is dense.
_MOST_DENSE = 1000
#: Passes through the data, in evaluations of the log joint, that a fit is worth.
_PASSES = 100
#: Where a Gaussian is to be: at a fit's center, or at values by site; None where it is found.
Mode = Mapping[str, Tensor] | Approximation | GaussianPosterior | None
#: What is said of a Hessian that takes the GGN's place.
_NO_GGN = ", of the whole log joint, as the data have no GGN"


class Laplace(Approximation):
    """A Gaussian at the posterior's mode, with the inverse of the log joint's curvature there for
    covariance (MacKay 1992; the paper's A.1), in unconstrained space.

    The precision is the prior's, from the exact Hessian, plus the likelihood's, summed over all
    rows by a single pass through the data; no batch size enters.

    Args:
        model: a Pyro model, a `PyroModule` or a `LogPosterior`.
        structure: `"dense"`, `"diag"`, or `"auto"`: dense up to 1,000 dimensions, as a diagonal
            Gaussian of correlated elements is too narrow.  `"kron"`, for networks: each weight of
            a product, convolution or projection, and each bias, has a block of Kronecker factors
            (K-FAC, Martens and Grosse 2015; Ritter et al. 2018), whose prior must have one scale
            unless it is a vector; other elements are independent.  `fit.attrs["factors"]`
            and `fit.attrs["independent"]` list the sites of either kind.  `"low_rank"`, for
            anything else of many dimensions: the directions that the data know most about, in
            units of the prior's sds, and a diagonal.
        curvature: of the likelihood: `"ggn"`, the generalized Gauss-Newton matrix, never negative;
            `"monte_carlo"`, an estimate of it from one drawn observation a row, for many outputs;
            `"empirical_fisher"`; or `"hessian"`, of the whole log joint.  Where a distribution's
            Fisher information is not known, the GGN is estimated from 100 draws a row:
            `fit.attrs["curvature"]` says so.  Data that are one joint density (a Gaussian process,
            a loop over time, a `pyro.factor`) have no GGN, and `"ggn"` takes the Hessian.
        sites: which sites get a Gaussian, such as a network's last layer; the others stay at the
            mode.  All by default.
        temperature: multiplies the covariance.
        rank: how many directions `"low_rank"` has; 20 by default.
        corrected: of `"kron"`, whether each block has the curvature's own diagonal in the basis of
            its factors' eigenvectors (EKFAC; George et al. 2018).  The block is then nearer to the
            curvature, in the Frobenius norm.  It takes a second pass through the rows.
        init_strategy: where the search for the mode starts.
        num_data: N, which overrides what the data say.

    Raises:
        ArgumentError: an argument that is unknown or out of range.

    Examples:
        >>> import torch, pyro, pyro.distributions as dist
        >>> import pyro_scale as ps
        >>> def model(y=None):
        ...     mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Normal(mu, 1.0), obs=y)
        >>> fit = ps.Laplace(model, structure="dense")
        >>> fit = fit.run((torch.tensor([1.0, 2.0, 3.0]),), seed=0, progress=False)
        >>> gaussian = fit.fit.gaussians[0]
        >>> round(float(gaussian.mean[0]), 3), round(float(gaussian.variance[0]), 3)  # 1 / 3.01
        (1.993, 0.332)
        >>> round(float(fit.log_marginal_likelihood()), 3)
        -6.63
    """

    structures: ClassVar[tuple[str, ...]] = ("auto", *get_args(GaussianStructure))
    elsewhere: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("num_steps", "num_epochs", "optimizer", "lr"), "nothing: it looks for the mode by itself"
    )

    def __init__(
        self,
        model: Any,
        *,
        structure: GaussianStructure | Literal["auto"] = "auto",
        curvature: CurvatureKind = "ggn",
        sites: Sequence[str] | None = None,
        temperature: float = 1.0,
        rank: int | None = None,
        corrected: bool = False,
        init_strategy: Any = None,
        num_data: int | None = None,
    ):
        super().__init__(model, structure=structure, init_strategy=init_strategy, num_data=num_data)
        kinds = [kind for part in get_args(CurvatureKind) for kind in (get_args(part) or (part,))]
        if curvature not in kinds:
            raise ArgumentError(f"curvature={curvature!r}: pass one of {kinds}")
        if structure in OF_ROWS and curvature == "hessian":
            raise ArgumentError(
                f"structure={structure!r}: a Hessian has no such factors: use curvature='ggn'"
            )
        if isinstance(sites, str) or (sites is not None and not list(sites)):
            raise ArgumentError(f"sites={sites!r}: pass a list of sites' names")
        self.curvature, self.temperature = curvature, as_temperature(temperature)
        self._sites = None if sites is None else list(sites)
        if rank is not None and structure != "low_rank":
            raise ArgumentError(
                f"rank={rank!r}: structure={structure!r} has none: pass structure='low_rank', or "
                "leave rank out"
            )
        self.corrected = as_flag("corrected", corrected)
        if self.corrected and structure != "kron":
            raise ArgumentError(
                f"corrected=True: structure={structure!r} has no factors to correct: pass "
                "structure='kron', or leave corrected out"
            )
        self.rank = 20 if rank is None else as_count("rank", rank)

    @without_vmap_warnings()
    def run(
        self,
        data: Any,
        *,
        mode: Mode = None,
        tune: Sequence[str] | None = None,
        batch_size: int | None = None,
        num_chains: int = 1,
        seed: int | None = None,
        progress: bool = True,
        distributed: Distributed = "auto",
    ) -> Self:
        """Finds the mode, unless it is given, and goes through the data once.

        The mode is that of the density in unconstrained space, found by L-BFGS on all rows and,
        for a dense structure, by steps of Newton's method with the same curvature.

        Args:
            data: as for samplers: a `DataLoader`, or the model's own arguments; all N rows.
            mode: where the Gaussian is: a fitted `MAP`, or a dict of constrained values by site.
            tune: `pyro.param` sites, such as a prior's scale or the noise, which are set to
                where the marginal likelihood is largest (type-II maximum likelihood), each time
                at the mode that belongs to them; other such sites are part of the mode.
            batch_size: rows at a time, which changes the result by rounding alone.
            num_chains: starts of the search for the mode.  Where they end is in the order of its
                evidence, the largest first, whose params and guide are the fit's; draws of all
                count alike.
            seed: of the starts, and of the draws.
            progress: whether to show a progress bar.
            distributed: `"auto"` shares the rows out among the processes of torch's process group,
                or of torchrun, each of which then has the fit; of a joint density of all rows,
                rank 0 does all.  With `"all"`, they also share out the rows of what is asked of it
                later (`predict`, `log_likelihood`, `loo`), which then has to be asked on every
                rank.  False ignores the group.

        Returns:
            The method itself.

        Raises:
            ArgumentError, DataError: before the model is run, if there is no mode, or if the log
                joint does not depend on what is tuned.
            ModelError, SiteError, PlateError: before any step; or the curvature is not positive.
            RankError: another process has failed or died, or has other data or arguments.

        Warns:
            ApproximationWarning: the given mode is far from the density's; or `tune` ended where
                the evidence still has a slope, as rounding leaves the modes of many weights too
                uncertain.
        """
        ranks, begun = Ranks.of(distributed), time.perf_counter()
        asked = {"num_chains": num_chains, "seed": seed, "batch_size": batch_size}
        with ranks.together():
            check_same_call(ranks, asked | {"tune": tune and list(tune), "mode": _word_for(mode)})
            num_chains = as_count("num_chains", num_chains)
            if tune and mode is not None:
                raise ArgumentError("tune moves the mode: leave mode out")
            if (fit := fit_of(mode)) is not None:
                num_chains = len(fit.centers)
            chosen = choose_seed(seed)
            seed = ranks.of_first(chosen, "the choice of a seed") if seed is None else chosen
            opened = open_data(data, batch_size, self._num_data, module_device(self.model))
            log_posterior = as_log_posterior(self.model, opened.num_data)
            starts = self._starts(num_chains, seed)
            problem = self._understand(
                log_posterior, opened, Hyperparameters(), starts, num_chains, seed, mode is None
            )
            self._check_same(problem, ranks)
            sites, tuned = self._sites_of(problem), _tuned_places(problem, tune or ())
            fixed = [_fixed_center(problem, mode, start) for start in range(num_chains)]
            search = self._search(problem, sites, batch_size, fixed[0], tuned=tuned)
            self._forget()

            def candidates(search: Search) -> list[Candidate]:
                found = []
                with Progress(num_chains, type(self).__name__, progress, "log evidence") as bar:
                    for position, center in zip(problem.positions, fixed, strict=True):
                        found.append(_candidate_from(position, center)(search))
                        bar.update(1, found[-1].log_evidence)
                return sorted(found, key=lambda candidate: -candidate.log_evidence)

            found = search.on_ranks(ranks, problem.positions, candidates)
            taken = time.perf_counter() - begun
            self._keep(problem, search, found, taken, ranks, mode is not None)
        return self

    def update(
        self,
        data: Any,
        *,
        mode: Mode = None,
        batch_size: int | None = None,
        progress: bool = True,
        distributed: Distributed = "auto",
    ) -> Self:
        """Goes on with more data: the old posterior is the next prior (the paper's equation 1), so
        that on a linear model two halves in sequence are all at once.

        Args:
            data: new rows.
            mode: as for `run`, of the density with that prior, such as a `MAP` of
                `laplace.as_prior()`; found from the old one by default.
            batch_size: rows at a time.
            progress: whether to show a progress bar.
            distributed: as for `run`.

        Returns:
            The method itself, whose evidence is now that of the new rows given the old.  Params
            of `pyro.param` stay as the old rows had them.

        Raises:
            NotRunError: there is no old posterior.
            ArgumentError: it is over some of the sites alone; and as for `run`.
        """
        old, ranks = self.fit, Ranks.of(distributed)
        begun, candidates, title = time.perf_counter(), list[Candidate](), type(self).__name__
        with (
            ranks.together(),
            Progress(len(old.centers), title, progress and ranks.is_first, "log evidence") as bar,
        ):
            check_same_call(ranks, {"batch_size": batch_size, "mode": _word_for(mode)})
            for start, center in enumerate(old.centers):
                opened = open_data(data, batch_size, None, module_device(self.model))
                log_posterior = as_log_posterior(as_prior(old, start), opened.num_data)
                problem = prepare(
                    log_posterior, opened, Hyperparameters(), None, 1, old.seed, mode is None
                )
                self._check_same(problem, ranks)
                fixed = _fixed_center(problem, mode, start)
                search = self._search(problem, old.sites, batch_size, fixed, _points(problem))
                candidates.append(search.on_ranks(ranks, center, _candidate_from(center, fixed)))
                bar.update(1, candidates[-1].log_evidence)
            taken = time.perf_counter() - begun
            self._keep(problem, search, candidates, taken, ranks, mode is not None)
        return self

    def at_temperature(self, temperature: float) -> Laplace:
        """The same, with the fit of `GaussianPosterior.at_temperature`."""
        other = copy.copy(self)
        other._last = Finished(self.posterior.at_temperature(temperature))
        other.temperature = other.fit.temperature
        return other

    log_marginal_likelihood = asks(GaussianPosterior.log_marginal_likelihood)

    # ------------------------------------------------------------------ inside

    def _search(
        self,
        problem: Problem,
        sites: tuple[str, ...],
        num_rows: int | None,
        fixed: Tensor | None,
        held: Tensor | None = None,
        tuned: Tensor | None = None,
    ) -> Search:
        density = FullDataDensity(problem.log_posterior, problem.data, problem.engine.layout)
        structure = self._structure_for(len(problem.engine.layout.places(sites)))
        kind, notes = self._kind(problem, problem.positions[0] if fixed is None else fixed)
        prior = problem.log_posterior.gaussian_prior
        if structure in OF_ROWS and not isinstance(prior, Diagonal | None):
            raise ArgumentError(
                f"structure={structure!r}: the prior is another fit's Gaussian, whose "
                "correlations it cannot keep: run it on all rows together, or use "
                "structure='dense' (or 'diag') for both"
            )
        if structure in OF_ROWS and kind == "hessian":
            raise ArgumentError(
                f"structure={structure!r}: the data are one joint density, and factors are "
                "sums over rows: use structure='diag' or 'dense'"
            )
        how = structure, problem.seed, notes, num_rows, held, tuned, self.rank
        search = Search(density, sites, kind, *how, self.corrected)
        search.check_fits(problem.positions)
        return search

    def _structure_for(self, size: int) -> GaussianStructure:
        """The structure of a Gaussian in so many dimensions."""
        if self.structure == "auto":
            return "dense" if size <= _MOST_DENSE else "diag"
        return self.structure

    def _check_same(self, problem: Problem, ranks: Ranks) -> None:
        """Refuses ranks with other data, another model or other arguments."""
        if not ranks.is_alone:
            about = {
                "method": type(self).__name__,
                "structure": self.structure,
                "curvature": self.curvature,
                "corrected": self.corrected,
                "rank": self.rank,
                "temperature": self.temperature,
                "Gaussian over": self._sites,
                "takes parts of the data": is_row_wise(problem.log_posterior),
            }
            check_same(ranks, identity_of(problem, about, {}))

    def _kind(self, problem: Problem, position: Tensor) -> tuple[CurvatureKind, list[str]]:
        """(The curvature; the Hessian where the data have no GGN.  What of it is estimated)."""
        if self.curvature == "hessian":
            return "hessian", []
        log_posterior = problem.log_posterior
        chunk = next(chunks_of(log_posterior, problem.data, 1))
        where = problem.engine.layout.unflatten(position), chunk.arguments, chunk.indices
        try:
            return self.curvature, Curvature(log_posterior, self.curvature).notes(*where)
        except ModelError:
            if self.curvature != "ggn":
                raise
            return "hessian", []

    def _sites_of(self, problem: Problem) -> tuple[str, ...]:
        latents = problem.log_posterior.latents
        if self._sites is None:
            return latents
        for pattern in self._sites:
            if not fnmatch.filter(latents, pattern):
                raise ArgumentError(f"sites: no site '{pattern}'; the model has {list(latents)}")
        return tuple(n for n in latents if any(fnmatch.fnmatch(n, p) for p in self._sites))

    def _keep(
        self,
        problem: Problem,
        search: Search,
        candidates: Sequence[Candidate],
        seconds: float,
        ranks: Ranks,
        is_given: bool,
    ) -> None:
        gaussians = [candidate.gaussian.temper(self.temperature) for candidate in candidates]
        attrs = {
            "method": type(self).__name__,
            "structure": search.structure,
            "curvature": ", ".join([search.kind, *search.notes])
            + _NO_GGN * (search.kind != self.curvature),
            "temperature": self.temperature,
            "log_evidence": [candidate.log_evidence for candidate in candidates],
            "distance": [candidate.distance for candidate in candidates],
            "fitting_time": seconds,
            **_factors_of(candidates[0].gaussian, search.sites, problem.engine.layout),
            **facts_of(problem.log_posterior, problem.seed),
        }
        fit = Fit(
            log_posterior=problem.log_posterior,
            data=problem.data,
            layout=problem.engine.layout,
            centers=torch.stack([candidate.center for candidate in candidates]),
            sites=search.sites,
            gaussians=tuple(gaussians),
            seed=problem.seed,
            attrs=attrs,
            ranks=ranks if ranks.keeps_all else ALONE,
        )
        square = max(candidate.distance for candidate in candidates)
        reason = _far_away(square, len(fit.places)) if is_given else None
        self._last = Finished(GaussianPosterior(fit))
        check_fit(fit, _PASSES * problem.log_posterior.num_data, ranks, reason)


def _far_away(square: float, size: int) -> str | None:
    """What is said of a mode that was passed, if it is far from the density's: the square of its
    distance in sds, by a step of Newton's method, in so many dimensions."""
    if square <= _AWAY + _AWAY_EACH * size:
        return None
    return (
        f"mode: the given mode is {square**0.5:.3g} posterior sds away from that of the density, "
        "by a step of Newton's method, so the Gaussian is in the wrong place. Was it trained on "
        "these data, and copied after training? Leave mode= out to have it found, or pass a MAP"
    )


def _factors_of(gaussian: Gaussian, sites: Sequence[str], layout: Layout) -> dict[str, str]:
    """Which sites have Kronecker factors, and which have independent elements."""
    if not isinstance(gaussian, Kronecker):
        return {}
    own = layout.places(sites)[gaussian.others.cpu()].tolist()
    alone = {layout.site_at(place) for place in own}
    return {
        "factors": ", ".join(name for name in sites if name not in alone),
        "independent": ", ".join(name for name in sites if name in alone),
    }


def _points(problem: Problem) -> Tensor:
    """Where in a position the points are."""
    return torch.arange(problem.engine.num_latents, problem.engine.layout.size)


def _fixed_center(
    problem: Problem,
    mode: Mode,
    start: int,
) -> Tensor | None:
    """Where the Gaussian is to be, [D], if the user says so."""
    if mode is None:
        return None
    if isinstance(mode, Mapping):
        return position_of(problem, mode, "mode")
    layout, fit = problem.engine.layout, fit_of(mode)
    if fit is None:
        raise ArgumentError(f"mode={mode!r}: pass a fitted MAP, or a dict of constrained values")
    if (fit.layout.names, fit.layout.shapes) != (layout.names, layout.shapes):
        raise ArgumentError(
            f"mode: it has the sites {list(fit.layout.names)}, the model {list(layout.names)}"
        )
    return fit.centers[start].to(problem.positions)


def _candidate_from(start: Tensor, fixed: Tensor | None) -> Callable[[Search], Candidate]:
    """Looks for a candidate from a start, or takes the one where the user wants it."""
    return lambda search: search.best(start) if fixed is None else search.at(fixed)


def _word_for(mode: object) -> str | None:
    """Where a mode is from, for ranks to compare: rank 0's is taken."""
    return None if mode is None else type(mode).__name__


def _tuned_places(problem: Problem, names: Sequence[str]) -> Tensor | None:
    """Where in a position the tuned params are, if any."""
    names, points = [names] if isinstance(names, str) else names, problem.log_posterior.points
    for name in names:
        if name not in points:
            raise ArgumentError(
                f"tune: no pyro.param '{name}'; the model has {list(points)}; make what is to be "
                "tuned one, such as pyro.param('scale', torch.tensor(1.0), constraints.positive)"
            )
    return problem.engine.layout.places(names) if names else None
