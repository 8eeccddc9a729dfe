"""NUTS on all rows: exact draws, for data that fit into memory."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor

from pyro_scale.core import rows
from pyro_scale.core.exclusive import raise_if_from_handler
from pyro_scale.core.rows import DataLike, Model
from pyro_scale.core.validation import as_count
from pyro_scale.core.warn import warn, without_vmap_warnings
from pyro_scale.data.sources import TensorData
from pyro_scale.diagnostics.local_latents import check_local_latents
from pyro_scale.diagnostics.modes import check_modes_of_nuts
from pyro_scale.diagnostics.resolution import resolution
from pyro_scale.engine.compile_step import check_compile
from pyro_scale.engine.progress import Progress
from pyro_scale.errors import ArgumentError, ConvergenceWarning, PyroScaleWarning
from pyro_scale.exact.chains import Draws, EndedBy, chain_seed, sample
from pyro_scale.exact.log_density import EarlierFunction, LogDensity, log_density
from pyro_scale.exact.nutpie_api import Settings, takes_pointers, version
from pyro_scale.infer.method import Finished, InitStrategy, Method, asks
from pyro_scale.kernels import Hyperparameters
from pyro_scale.model.diagnose import find_broken_site
from pyro_scale.posterior.collect import facts_of
from pyro_scale.posterior.draws import PosteriorDraws
from pyro_scale.results.posterior import Posterior
from pyro_scale.rng.seeds import choose_seed
from pyro_scale.run.blame import WITHIN
from pyro_scale.run.budget import Budget
from pyro_scale.run.problem import Problem, as_log_posterior, prepare

Mass = Literal["diag", "low_rank"]
#: Dimensions up to which mass="low_rank" is allowed.
_MOST_LOW_RANK = 10_000


class NUTS(Method):
    """The no-U-turn sampler on all rows, by nutpie, on a log density that is compiled to C.

    Use this where all rows fit into memory and a gradient of all of them is cheap: its draws are
    exact up to Monte Carlo error, and it tunes itself.  Where a step through all rows is too slow,
    use BAOA on minibatches.  The model is evaluated in float64: the data and a copy of its modules
    are converted.  Draws have the model's dtype, except for latents whose posterior sd is near the
    spacing of that dtype's numbers: those are float64.

    Args:
        model: a Pyro model, a `PyroModule` or a `LogPosterior`.
        num_data: number of rows in all, N; not needed, as the data have all rows.
        init_strategy: where chains start: one of Pyro's strategies, a dict of constrained tensors
            `[num_chains, ...]`, or a fit.
        max_depth: trajectories have at most 2^max_depth leapfrog steps.
        target_accept: acceptance rate that the step size is adapted to; larger values take smaller
            steps, which helps against divergences.
        mass: structure of the mass matrix: `"diag"`, or `"low_rank"` for strongly correlated
            posteriors.
        temperature: 1 is the posterior; T samples exp(log joint / T).
        compile: `"auto"` and True compile the log density if possible; False does not.

    Raises:
        ArgumentError: an argument out of its range.

    Examples:
        >>> import pyro, pyro.distributions as dist, torch, pyro_scale as ps
        >>> def model(y):
        ...     mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(y)):
        ...         pyro.sample("y", dist.Normal(mu, 1.0), obs=y)
        >>> nuts = ps.NUTS(model).run(torch.linspace(-1, 2, 30), seed=0, progress=False)
        >>> nuts.get_samples()["mu"].shape
        torch.Size([4000])
        >>> round(float(nuts.get_samples()["mu"].mean()), 1)  # 30 / 31 of the data's mean
        0.5

    References: Hoffman and Gelman, The no-U-turn sampler, JMLR 2014; Seyboldt, Carlson and
    Carpenter, Preconditioning Hamiltonian Monte Carlo by minimizing Fisher divergence, 2026.
    """

    elsewhere: ClassVar[Mapping[str, str]] = {
        "lr": "nothing: NUTS adapts its step size",
        "step_size": "nothing: NUTS adapts its step size",
        "max_tree_depth": "max_depth=",
        "target_accept_prob": "target_accept=",
        "full_mass": "mass='low_rank'",
        "dense_mass": "mass='low_rank'",
        "jit_compile": "compile=, which is on",
        "thinning": "nothing: draws of NUTS are few and nearly independent",
        "store": "fit.save(path) after the run, for draws that memory holds",
        "checkpoint": "fit.save(path) after the run, for draws that memory holds",
        "resume": "another run with another seed: adaptation is not taken up",
    }

    def __init__(
        self,
        model: Model,
        *,
        num_data: int | None = None,
        init_strategy: InitStrategy = None,
        max_depth: int = 10,
        target_accept: float = 0.8,
        mass: Mass = "diag",
        temperature: float = 1.0,
        compile: bool | Literal["auto"] = "auto",
    ):
        super().__init__(model, init_strategy=init_strategy, num_data=num_data)
        self.max_depth = as_count("max_depth", max_depth)
        if not (isinstance(target_accept, float) and 0 < target_accept < 1):
            raise ArgumentError(f"target_accept={target_accept!r}: pass a float inside (0, 1)")
        if mass not in get_args(Mass):
            raise ArgumentError(f"mass={mass!r}: pass one of {list(get_args(Mass))}")
        if not (isinstance(temperature, int | float) and 0 < temperature < float("inf")):
            raise ArgumentError(f"temperature={temperature!r}: pass a number > 0")
        check_compile(compile)
        self.target_accept, self.mass, self.temperature = target_accept, mass, float(temperature)
        self._compile, self._earlier = compile, EarlierFunction()

    @without_vmap_warnings()
    def run(
        self,
        data: DataLike,
        *,
        num_samples: int = 1000,
        warmup_steps: int = 1000,
        num_chains: int = 4,
        batch_size: int | None = None,
        max_seconds: float | None = None,
        seed: int | None = None,
        progress: bool = True,
    ) -> Self:
        """Adapts the step size and the mass for `warmup_steps` draws, then keeps `num_samples` of
        each chain.

        Args:
            data: all N rows: a `DataLoader`, which is read once and in order, or the model's own
                arguments.
            num_samples: draws to keep, per chain.
            warmup_steps: draws that adapt, and are not kept.
            num_chains: number of chains; they run on as many cores as there are.
            batch_size: None or N: NUTS takes no minibatches.
            max_seconds: time after which the run ends, with the draws so far; all chains then run
                at once, however many cores there are.
            seed: the same seed gives the same draws.
            progress: whether to show a progress bar.

        Returns:
            The method itself.

        Raises:
            ArgumentError, DataError: before the model is run; nutpie is missing. Later, if
                `max_seconds` are over in warm-up.
            ModelError, SiteError, PlateError: before any step.

        Warns:
            ConvergenceWarning: trajectories diverged after warm-up.
            CompileWarning: the log density cannot be compiled, and why.
            PyroScaleWarning: the run was interrupted, or its time is over.  Chains that have
                finished are kept whole; `get_samples()` has the draws of the others too.  If none
                has finished, chains are cut to the shortest with draws after warm-up.
        """
        settings = Settings(
            as_count("num_samples", num_samples),
            as_count("warmup_steps", warmup_steps),
            self.max_depth,
            self.target_accept,
            self.mass == "low_rank",
        )
        takes_pointers()  # raises if nutpie is missing
        deadline = Budget.from_arguments(None, settings.num_samples, max_seconds).deadline
        seed, begun = choose_seed(seed), time.perf_counter()
        problem = self._problem(data, as_count("num_chains", num_chains), batch_size, seed)
        self._forget()
        density = log_density(
            problem.log_posterior,
            problem.data.first(),
            problem.engine.layout.unflatten(problem.positions[0]),
            self.temperature,
            bool(self._compile),
            self._earlier,
        )
        compiled, program = time.perf_counter(), _program_of(density)
        title = f"NUTS, {num_chains} chain{'s' * (num_chains > 1)}, {program}"
        starts = problem.positions[:, : problem.engine.num_latents]
        seeds = [chain_seed(seed, number) for number in range(num_chains)]
        with Progress(num_chains * settings.length, title, progress) as bar:
            draws = sample([density] * num_chains, starts, settings, seeds, bar, deadline)
        times = {
            "sampling_time": time.perf_counter() - compiled,
            "compile_time": compiled - begun,
            "program": program,
        }
        result = self._result(problem, draws, settings, times)
        if draws.is_broken:
            result.attrs["diverged_where"] = _what_broke(problem, density)
        result.attrs.update(_modes_of(result, draws, problem, density, settings))
        for finding in check_local_latents(result):
            result.attrs["local_latents"] = json.dumps(finding.to_dict())
        self._last = Finished(Posterior(_with_enough_digits(result, problem)))
        self._warn(self.posterior.draws, draws.ended_by)
        return self

    starts = asks(Posterior.starts)

    def _problem(
        self, data: DataLike, num_chains: int, batch_size: int | None, seed: int
    ) -> Problem:
        """The analyzed model on all rows of the data, with chains at their starts.

        Args:
            data: data as for `run`; a loader is read once, in order.
            num_chains: number of chains.
            batch_size: what the user passed: None or N.
            seed: seed of the run.

        Raises:
            ArgumentError: `batch_size` is smaller than N, or `mass="low_rank"` has too many
                dimensions.
        """
        opened = self._open(data, None)
        if opened.batch_size is not None or not isinstance(opened, TensorData):  # a loader
            arguments = rows.concatenate(list(opened.in_order()))
            opened = TensorData(arguments, rows.count(arguments))
        if batch_size is not None and batch_size != opened.num_data:
            raise ArgumentError(
                f"batch_size={batch_size!r}: NUTS takes all rows at every step; leave it out, or "
                "use BAOA, which takes minibatches"
            )
        log_posterior = as_log_posterior(self.model, opened.num_data)
        starts = self._starts(num_chains, seed)
        problem = prepare(log_posterior, opened, Hyperparameters(), starts, num_chains, seed)
        size = problem.engine.num_latents
        if self.mass == "low_rank" and size > _MOST_LOW_RANK:
            raise ArgumentError(f"mass='low_rank': the model has {size:,} dimensions; pass 'diag'")
        return problem

    def _result(
        self, problem: Problem, draws: Draws, settings: Settings, times: Mapping[str, Any]
    ) -> PosteriorDraws:
        """The posterior's draws: NUTS's draws of the latents, together with the fixed values of
        `pyro.param` sites.

        Args:
            problem: the analyzed model.
            draws: draws and statistics of all chains.
            settings: settings of the run, for `attrs`.
            times: seconds that the run took and how its steps ran (compiled or not), for `attrs`.
        """
        num_chains, layout = len(problem.positions), problem.engine.layout
        points = problem.positions[0, problem.engine.num_latents :].double()

        def with_points(latents: Tensor) -> Tensor:
            return torch.cat([latents.to(points), points.expand(*latents.shape[:-1], -1)], -1)

        return PosteriorDraws(
            log_posterior=problem.log_posterior,
            data=problem.data,
            layout=layout,
            positions=with_points(draws.positions),
            sample_stats=draws.sample_stats,
            chains=None if len(draws.numbers) == num_chains else draws.numbers,
            unfinished=with_points(draws.unfinished) if len(draws.unfinished) else None,
            attrs={
                "method": type(self).__name__,
                "max_depth": self.max_depth,
                "target_accept": self.target_accept,
                "mass": self.mass,
                "temperature": self.temperature,
                "num_samples": settings.num_samples,
                **facts_of(problem.log_posterior, problem.seed),
                **times,
            },
        )

    @staticmethod
    def _warn(result: PosteriorDraws, ended_by: EndedBy) -> None:
        """Warns if the run was ended early, or if any kept trajectory diverged.

        Args:
            result: draws of the run.
            ended_by: what ended the run early.
        """
        if ended_by is not None:
            chains, draws = result.positions.shape[:2]
            others = 0 if result.unfinished is None else len(result.unfinished)
            more = f"; get_samples() has {others:,} more, of other chains" if others else ""
            what = "interrupted" if ended_by == "Control-C" else "max_seconds are over"
            warn(PyroScaleWarning, f"{what}: there are {chains} x {draws} draws{more}")
        divergent = int(result.sample_stats["diverging"].sum())
        where = result.attrs.get("diverged_where", "")
        if divergent:
            warn(
                ConvergenceWarning,
                f"{divergent} of {result.sample_stats['diverging'].numel()} trajectories diverged"
                f"{where}: "
                + (
                    WITHIN
                    if where
                    else "raise target_accept (0.95), pass mass='low_rank', or write the model "
                    "with latents that depend less on each other (centered where data are many, "
                    "non-centered where they are few)"
                ),
                code="divergences",
            )


def _program_of(density: LogDensity) -> str:
    """How nutpie evaluates the log density, as a phrase for titles and reports, such as "compiled
    to C"; with a note if nutpie has to call the compiled function from Python."""
    if density.native is None or takes_pointers():
        return density.program
    return (
        f"{density.program}, called from Python (nutpie {version()} is not known to take pointers)"
    )


def _modes_of(
    result: PosteriorDraws,
    draws: Draws,
    problem: Problem,
    density: LogDensity,
    settings: Settings,
) -> dict[str, str]:
    """Facts about the modes of the posterior, for `attrs` and the report: the finding whether draws
    are in all of them, as JSON text; empty if searches find one mode, or none, or if the run was
    ended early.

    Args:
        result: draws of the run.
        draws: the same, as NUTS returned them.
        problem: the analyzed model.
        density: log density of the run.
        settings: settings of the run.
    """
    if draws.ended_by is not None:
        return {}
    steps = float(result.sample_stats["n_steps"].double().mean())
    gradients = steps * settings.length * result.num_chains
    try:
        findings = check_modes_of_nuts(result, draws.positions, problem, density, gradients)
    except KeyboardInterrupt:  # ends the searches, and keeps the draws
        return {}
    except Exception as error:  # of the model, far from where draws are
        raise_if_from_handler(error)
        return {}
    texts = [json.dumps(f.to_dict() | {"severity": f.severity}) for f in findings]
    return {"modes": texts[0]} if texts else {}


def _with_enough_digits(result: PosteriorDraws, problem: Problem) -> PosteriorDraws:
    """The draws, with those latents in float64 that the model's dtype would visibly round, because
    their posterior sd is near the spacing of its numbers.

    Where a deterministic site would be rounded, all latents become float64.  The result is
    unchanged if nothing is rounded or the model does not run on float64 values."""
    layout, rounded = result.layout, {finding.site for finding in resolution(result)}
    latents = set(result.log_posterior.latents)
    for names in (rounded & latents, latents) if rounded else ():
        sites = zip(layout.names, layout.dtypes, strict=True)
        dtypes = tuple(torch.float64 if name in names else dtype for name, dtype in sites)
        wide = replace(result, layout=replace(layout, dtypes=dtypes))
        with contextlib.suppress(Exception):  # of a model in which dtypes clash
            params = wide.layout.unflatten(wide.positions[0, 0])
            batch = problem.data.first()
            problem.log_posterior(params, batch, problem.log_posterior.first_indices())
            if len(resolution(wide)) < len(rounded):
                return wide
    return result


def _what_broke(problem: Problem, density: LogDensity) -> str:
    """A clause for the warning of divergences: at which site the log density or its gradient was
    not finite when evaluated during the run.

    Args:
        problem: the analyzed model.
        density: log density, which remembers the point at which it was not finite.
    """
    layout, position = density.layout, density.function.not_finite_at
    points = {name: p.unconstrained for name, p in problem.log_posterior.points.items()}
    params = layout.unflatten(position.to(layout.dtype)) | points
    site, finding = find_broken_site(problem.log_posterior, params, problem.data.first())
    if site is not None:
        return f", as the log density of site '{site}' is {finding} there"
    _, gradient = density.function(position)
    broken = (~gradient.isfinite()).nonzero()
    if not len(broken):
        return ", as the log joint is not finite there"
    return f", as the gradient at site '{layout.site_at(int(broken[0]))}' is not finite there"
