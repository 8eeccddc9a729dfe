"""The Laplace approximation."""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import time
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal, Self, get_args

import torch
from torch import Tensor

from pyro_scale.core.gaussian import Diagonal, Gaussian, Kronecker
from pyro_scale.core.layout import Layout
from pyro_scale.core.rows import DataLike, Model
from pyro_scale.core.validation import as_count, as_flag
from pyro_scale.core.warn import without_vmap_warnings
from pyro_scale.curvature.chunks import chunks_of, is_row_wise
from pyro_scale.curvature.density import FullDataDensity
from pyro_scale.curvature.evidence import OF_ROWS, GaussianStructure, Search
from pyro_scale.curvature.ggn import Curvature
from pyro_scale.curvature.modes import Candidate
from pyro_scale.curvature.precision import CurvatureKind
from pyro_scale.data.open import open_data
from pyro_scale.diagnostics.approximation import check_fit
from pyro_scale.distributed.sums import Sums
from pyro_scale.distributed.workers import Distributed, Workers
from pyro_scale.engine.progress import Progress
from pyro_scale.errors import ArgumentError, ModelError
from pyro_scale.infer.approximation import Approximation, fit_of
from pyro_scale.infer.method import Finished, InitStrategy, asks
from pyro_scale.kernels import Hyperparameters
from pyro_scale.posterior.collect import facts_of
from pyro_scale.posterior.gaussians import Fit
from pyro_scale.results.gaussian import GaussianPosterior, as_prior, as_temperature
from pyro_scale.rng.seeds import choose_seed
from pyro_scale.run.by_rank import check_same, check_same_call
from pyro_scale.run.problem import Problem, as_log_posterior, module_device, position_of, prepare
from pyro_scale.run.resume import identity_of

#: A mode that the user passed is far from the density's if the square of its distance, in posterior
#: sds, exceeds the first number plus the second times the number of dimensions.  The mode of the
#: sites' values (without Jacobians), and networks trained without the prior, are nearer.
_FAR_MODE, _FAR_PER_DIMENSION = 1.0, 0.1
#: Dimensions up to which structure="auto" is dense.
_MOST_DENSE = 1000
#: Directions of structure="low_rank", by default.
_RANK = 20
#: Cost of a fit, in passes through the data that evaluate the log joint.  The check of the fit may
#: cost as much.
_PASSES = 100
#: A Gaussian's center: that of a fit, or values by site; None if it is searched for.
Mode = Mapping[str, Tensor] | Approximation | GaussianPosterior | None
#: Note in `attrs["curvature"]` where the Hessian replaces the GGN.
_NO_GGN = ", of the whole log joint, as the data have no GGN"


class Laplace(Approximation):
    """A Gaussian in unconstrained space at the posterior's mode; its precision is the curvature of
    the negative log joint there (MacKay 1992; the paper's A.1).

    The precision is the prior's exact Hessian plus the likelihood's curvature, summed over all rows
    in a single pass through the data.  It does not depend on the batch size.

    Args:
        model: a Pyro model, a `PyroModule` or a `LogPosterior`.
        structure: `"dense"`, `"diag"`, or `"auto"`: dense up to 1,000 dimensions, as a diagonal
            Gaussian of correlated elements is too narrow.  `"kron"`, for networks: each weight of
            a product, convolution or projection, and each bias, has a block of Kronecker factors
            (K-FAC, Martens and Grosse 2015; Ritter et al. 2018); its prior must have a single scale
            unless it is a vector.  Other elements are independent.  `fit.attrs["factors"]` and
            `fit.attrs["independent"]` list the sites of either kind.  `"low_rank"`, for other
            models of many dimensions: a diagonal, and the directions about which the data say most,
            in units of the prior's sds.
        curvature: kind of the likelihood's curvature: `"ggn"`, the generalized Gauss-Newton matrix,
            never negative; `"monte_carlo"`, an estimate of the GGN from one drawn observation a
            row, for many outputs; `"empirical_fisher"`; or `"hessian"`, the Hessian of the whole
            log joint. If the Fisher information of a distribution is not known, the GGN is
            estimated from 100 draws a row; `fit.attrs["curvature"]` says so. Data that are one
            joint density (a Gaussian process, a loop over time, a `pyro.factor`) have no GGN; then
            `"ggn"` means the Hessian.
        sites: names of the sites that get a Gaussian, or patterns, such as `"net.2.*"` for a
            network's last layer; others stay at the mode.  All by default.
        temperature: factor on the covariance; 1 is the posterior.
        rank: number of directions of `"low_rank"`; 20 by default.
        corrected: for `"kron"`, whether each block has the curvature's exact diagonal in the basis
            of its factors' eigenvectors (EKFAC; George et al. 2018).  The block is then nearer to
            the curvature, in the Frobenius norm.  This takes a second pass through the rows.
        init_strategy: where the search for the mode starts.
        num_data: number of rows in all, N; None takes it from the data.

    Raises:
        ArgumentError: an argument is unknown or out of range.

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
        model: Model,
        *,
        structure: GaussianStructure | Literal["auto"] = "auto",
        curvature: CurvatureKind = "ggn",
        sites: Sequence[str] | None = None,
        temperature: float = 1.0,
        rank: int | None = None,
        corrected: bool = False,
        init_strategy: InitStrategy = None,
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
        self.rank = _RANK if rank is None else as_count("rank", rank)

    @without_vmap_warnings()
    def run(
        self,
        data: DataLike,
        *,
        mode: Mode = None,
        tune: Sequence[str] | None = None,
        batch_size: int | None = None,
        num_chains: int = 1,
        seed: int | None = None,
        progress: bool = True,
        distributed: Distributed = "auto",
    ) -> Self:
        """Finds the mode, unless it is passed, and the curvature there.

        The mode is that of the density in unconstrained space, found by L-BFGS on all rows and,
        for a dense structure, refined by Newton's method with the same curvature.

        Args:
            data: all N rows: a `DataLoader`, or the model's own arguments, as for samplers.
            mode: where the Gaussian is centered: a fitted `MAP`, or a dict of constrained values by
                site.  By default the mode is searched for.
            tune: `pyro.param` sites, such as a prior's scale or the noise, that maximize the
                marginal likelihood (type-II maximum likelihood), with the mode moving along.
                Others are part of the mode.
            batch_size: number of rows that are evaluated at a time, which changes the result by
                rounding only; None for the default.
            num_chains: number of starts of the search for the mode.  The fits are sorted by their
                evidence, the largest first; `params` and `guide` are those of the first, and draws
                come from all alike.
            seed: seed of the starts, and of draws from the fit.
            progress: whether to show a progress bar.
            distributed: `"auto"` shares the rows among the processes of torch's process group, or
                of torchrun, each of which then has the fit.  If the likelihood is a joint density
                of all rows, rank 0 does everything.  With `"all"`, the processes also share the
                rows of `predict`, `log_likelihood` and `loo`, which then have to be called on every
                rank.  False ignores the group.

        Returns:
            The method itself.

        Raises:
            ArgumentError, DataError: before the model is run; or there is no mode; or the log joint
                does not depend on a param in `tune`.
            ModelError, SiteError, PlateError: before any step; or the curvature is not positive.
            RankError: another process has failed or died, or has other data or arguments.

        Warns:
            ApproximationWarning: the passed mode is far from the density's; or `tune` ended where
                the evidence still has a slope, because rounding leaves the modes of many weights
                too uncertain.
        """
        workers, begun = Workers.from_group(distributed), time.perf_counter()
        call = {"num_chains": num_chains, "seed": seed, "batch_size": batch_size}
        with workers.together():
            check_same_call(workers, call | {"tune": tune and list(tune), "mode": _type_of(mode)})
            num_chains = as_count("num_chains", num_chains)
            if tune and mode is not None:
                raise ArgumentError("tune moves the mode: leave mode out")
            if (fit := fit_of(mode)) is not None:
                num_chains = len(fit.centers)
            seed = workers.broadcast(choose_seed(seed), "the choice of a seed")
            opened = self._open(data, batch_size)
            kernel, searches = Hyperparameters(), mode is None
            problem = self._analyze(opened, opened.num_data, kernel, num_chains, seed, searches)
            problem = self._shared_out(problem, workers)
            sites, tuned = self._sites_of(problem), _tuned_places(problem, tune or ())
            fixed = [_fixed_center(problem, mode, start) for start in range(num_chains)]
            search = self._search(problem, sites, batch_size, fixed[0], tuned=tuned)
            self._forget()

            def candidates(search: Search) -> list[Candidate]:
                modes = []
                with Progress(num_chains, type(self).__name__, progress, "log evidence") as bar:
                    for position, center in zip(problem.positions, fixed, strict=True):
                        modes.append(_candidate_from(position, center)(search))
                        bar.update(1, modes[-1].log_evidence)
                return sorted(modes, key=lambda candidate: -candidate.log_evidence)

            modes = search.run(candidates, Sums(workers, problem.positions.device))
            seconds = time.perf_counter() - begun
            self._keep(problem, search, modes, seconds, mode is not None)
        return self

    def update(
        self,
        data: DataLike,
        *,
        mode: Mode = None,
        batch_size: int | None = None,
        progress: bool = True,
        distributed: Distributed = "auto",
    ) -> Self:
        """Continues with more data: the old posterior becomes the prior (the paper's equation 1).
        On a linear model, two halves in sequence give the fit of all rows.

        Args:
            data: new rows.
            mode: center of the Gaussian, as for `run`, of the density with the new prior, such as a
                `MAP` of `laplace.as_prior()`; by default searched for from the old mode.
            batch_size: number of rows that are evaluated at a time; None for the default.
            progress: whether to show a progress bar.
            distributed: which processes share the rows, as for `run`.

        Returns:
            The method itself.  Its evidence is that of the new rows given the old ones.
            `pyro.param` sites keep their old values.

        Raises:
            NotRunError: there is no old posterior.
            ArgumentError: the old posterior is over only some of the sites; and as for `run`.
        """
        old, workers = self.fit, Workers.from_group(distributed)
        sums = Sums(workers, old.centers.device)
        begun, candidates, title = time.perf_counter(), list[Candidate](), type(self).__name__
        with (
            workers.together(),
            Progress(len(old.centers), title, progress and workers.is_first, "log evidence") as bar,
        ):
            check_same_call(workers, {"batch_size": batch_size, "mode": _type_of(mode)})
            for start, center in enumerate(old.centers):
                opened = open_data(data, batch_size, None, module_device(self.model))
                log_posterior = as_log_posterior(as_prior(old, start), opened.num_data)
                problem = prepare(
                    log_posterior, opened, Hyperparameters(), None, 1, old.seed, mode is None
                )
                problem = self._shared_out(problem, workers)
                fixed = _fixed_center(problem, mode, start)
                engine = problem.engine
                points = torch.arange(engine.num_latents, engine.layout.size)  # keep their values
                search = self._search(problem, old.sites, batch_size, fixed, points)
                candidates.append(search.run(_candidate_from(center, fixed), sums))
                bar.update(1, candidates[-1].log_evidence)
            seconds = time.perf_counter() - begun
            self._keep(problem, search, candidates, seconds, mode is not None)
        return self

    def at_temperature(self, temperature: float) -> Laplace:
        """A copy of this method whose Gaussians are those at another temperature (covariance
        proportional to temperature); see `GaussianPosterior.at_temperature`. This method does not
        change."""
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
        """The search for the mode and the Gaussian there, prepared for these rows of data but not
        yet run.

        Args:
            problem: the analyzed model on the data, with starts.
            sites: names of the latent sites that get a Gaussian.
            num_rows: number of rows that are evaluated at a time; None for the default.
            fixed: the Gaussian's center, `[D]`, if the user passed one; otherwise None.
            held: indices, among the D unconstrained elements, of those that the search must not
                move; None if there are none.
            tuned: indices, among the D unconstrained elements, of params that maximize the
                evidence; None if there are none.

        Raises:
            ArgumentError: the structure is impossible for the model, or its matrices do not fit
                into memory.
        """
        density = FullDataDensity(problem.log_posterior, problem.data, problem.engine.layout)
        structure = self.structure
        if structure == "auto":
            size = len(problem.engine.layout.places(sites))
            structure = "dense" if size <= _MOST_DENSE else "diag"
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

    def _shared_out(self, problem: Problem, workers: Workers) -> Problem:
        """The problem with the processes that share its rows, after a check that all have the same
        data, model and arguments.

        Raises:
            RankError: a process has others.
        """
        problem = dataclasses.replace(problem, workers=workers)
        if not problem.is_alone:
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
            check_same(problem, identity_of(problem, about, {}))
        return problem

    def _kind(self, problem: Problem, position: Tensor) -> tuple[CurvatureKind, list[str]]:
        """(Kind of curvature to use for the data; notes on what is estimated from draws, for
        `fit.attrs`).

        The kind is the one that the user asked for, except "hessian" in place of "ggn" if the data
        are one joint density, which has no GGN.

        Args:
            problem: the analyzed model on the data.
            position: point in unconstrained space, `[D]`, at which the model is examined.

        Raises:
            ModelError: the likelihood has no curvature of the kind that the user asked for.
        """
        if self.curvature == "hessian":
            return "hessian", []
        log_posterior = problem.log_posterior
        chunk = next(chunks_of(log_posterior, problem.data, 1))
        params, curvature = problem.engine.layout.unflatten(position), self.curvature
        try:
            notes = Curvature(log_posterior, curvature).notes
            return curvature, notes(params, chunk.arguments, chunk.indices)
        except ModelError:
            if curvature != "ggn":
                raise
            return "hessian", []

    def _sites_of(self, problem: Problem) -> tuple[str, ...]:
        """Names of the latent sites that get a Gaussian: all, or those that match the `sites` that
        the user passed.

        Raises:
            ArgumentError: a name or pattern matches no site.
        """
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
        is_passed: bool,
    ) -> None:
        """Stores the result of a run in this method, as a posterior, and warns if the Gaussians do
        not fit the posterior.

        Args:
            problem: the analyzed model on the data.
            search: the search that found the Gaussians.
            candidates: what the search found from each start: the center, the Gaussian there, the
                log evidence and the distance from the mode.
            seconds: seconds that the search took.
            is_passed: whether the user passed the mode; then its distance from the density's mode
                is checked.
        """
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
            read_together=problem.read_together,
        )
        square = max(candidate.distance for candidate in candidates)
        reason = _why_far(square, len(fit.places)) if is_passed else None
        self._last = Finished(GaussianPosterior(fit))
        sums = Sums(problem.workers, fit.centers.device)
        check_fit(fit, _PASSES * problem.log_posterior.num_data, sums, reason)


def _why_far(square: float, size: int) -> str | None:
    """The text of a warning that the mode which the user passed is far from the density's; None if
    it is near.

    Args:
        square: squared distance between the two in posterior sds, estimated by a step of Newton's
            method.
        size: number of dimensions of the Gaussian, with which the limit grows.
    """
    if square <= _FAR_MODE + _FAR_PER_DIMENSION * size:
        return None
    return (
        f"the given mode is {square**0.5:.3g} posterior sds away from that of the density, "
        "by a step of Newton's method, so the Gaussian is in the wrong place. Was it trained on "
        "these data, and copied after training? Leave mode= out to have it found, or pass a MAP"
    )


def _factors_of(gaussian: Gaussian, sites: Sequence[str], layout: Layout) -> dict[str, str]:
    """Two entries of `Fit.attrs` for a Gaussian of Kronecker factors, each a text of site names
    separated by commas: `factors`, the sites that have Kronecker factors, and `independent`, the
    sites of independent elements. An empty dict for other Gaussians."""
    if not isinstance(gaussian, Kronecker):
        return {}
    places = layout.places(sites)[gaussian.others.cpu()].tolist()
    independent = {layout.site_at(place) for place in places}
    return {
        "factors": ", ".join(name for name in sites if name not in independent),
        "independent": ", ".join(name for name in sites if name in independent),
    }


def _fixed_center(problem: Problem, mode: Mode, start: int) -> Tensor | None:
    """The Gaussian's center that the user passed as `mode`, `[D]`, in unconstrained space; None if
    `mode` is None, and has to be searched for.

    Args:
        problem: the analyzed model.
        mode: a fit, or constrained values by site.
        start: number of the start, to take the center of a fit from several starts.

    Raises:
        ArgumentError: `mode` is something else, or a fit of other sites.
    """
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
    """A function of the search, which returns the Gaussian's center with the Gaussian and its log
    evidence: at the mode that is found from `start`, or at the point `fixed` (both `[D]`) if that
    is not None. A process calls the function for each start that it is to do."""
    return lambda search: search.best(start) if fixed is None else search.at(fixed)


def _type_of(mode: object) -> str | None:
    """The name of the type of the user's `mode`, or None if there is none and the mode is searched
    for. Processes compare this name only, to detect different calls: the values that rank 0 was
    passed are used by all."""
    return None if mode is None else type(mode).__name__


def _tuned_places(problem: Problem, names: Sequence[str]) -> Tensor | None:
    """Indices, among the D unconstrained elements, of the `pyro.param` sites that the user named in
    `tune`, which maximize the evidence; None if no names were passed.

    Raises:
        ArgumentError: the model has no `pyro.param` of that name.
    """
    names, points = [names] if isinstance(names, str) else names, problem.log_posterior.points
    for name in names:
        if name not in points:
            raise ArgumentError(
                f"tune: no pyro.param '{name}'; the model has {list(points)}; make it one, such as "
                "pyro.param('scale', torch.tensor(1.0), constraints.positive)"
            )
    return problem.engine.layout.places(names) if names else None
