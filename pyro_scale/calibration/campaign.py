"""Runs all simulations of a calibration, in blocks of data sets that are fitted together, and
continues interrupted calibrations.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_scale.calibration.chains import Sampled
from pyro_scale.calibration.fitters import Fitter
from pyro_scale.calibration.quantities import LOGLIK, Quantity, Ranked, rank
from pyro_scale.calibration.results import SBC
from pyro_scale.calibration.simulations import AT_ONCE
from pyro_scale.calibration.stack import Stack
from pyro_scale.calibration.summed_out import SummedOut
from pyro_scale.calibration.truth import Truth
from pyro_scale.core.memory import bytes_of
from pyro_scale.core.rows import Arguments
from pyro_scale.core.warn import warn
from pyro_scale.engine.progress import Progress
from pyro_scale.errors import ArgumentError, NonFiniteError, PyroScaleWarning
from pyro_scale.model.fingerprint import first_difference, model_fingerprint
from pyro_scale.rng.seeds import Purpose, derived_seed
from pyro_scale.run.resume import digest_of
from pyro_scale.tuning.groups import Lengths
from pyro_scale.tuning.policy import SIMULATIONS

#: Memory that a simulation needs, in copies of its data set, and copies of its draws in float64.
_COPIES_OF_DATA, _COPIES_OF_DRAWS = 4, 3
#: Relative difference that rounding on another machine may cause.
_MACHINE_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Campaign:
    """The simulations of one call of `sbc`: each draws true parameters and a data set from them,
    fits the method to the data set, and ranks the true values among the posterior draws.

    Attributes:
        truth: source of true parameters and data sets: the prior or a posterior.
        stack: the first data set, with the rows of data that all data sets share, and settings of
            how steps are executed.
        fitter: object that fits the method to data sets and returns posterior draws.
        quantities: functions of (sites, data), by name, ranked besides latents and the log
            likelihood.
        predict_at: rows of data whose observations are ranked among predictions; None for none.
        count: number of simulations.
        seed: seed from which the seeds of all simulations follow.
        title: title of the progress bar.
        attrs: settings of the call, which the result keeps.
    """

    truth: Truth
    stack: Stack
    fitter: Fitter | SummedOut
    quantities: Mapping[str, Quantity]
    predict_at: Arguments | None
    count: int
    seed: int
    title: str
    attrs: Mapping[str, Any]

    def run(self, earlier: SBC | None, progress: bool, memory_budget: int | None) -> SBC:
        """Runs all simulations, or those that an interrupted call's result lacks, and returns the
        result.

        Args:
            earlier: result of the interrupted call; None to run all.
            progress: whether to show a progress bar.
            memory_budget: bytes for data sets and draws; None for half of the machine's memory.

        Raises:
            ArgumentError: `earlier` is the result of another call.
            NonFiniteError: all simulations of the first block broke.

        Warns:
            PyroScaleWarning: the run was interrupted; the result has the simulations until then.
        """
        begun = time.perf_counter()
        params = self.truth.params(self.count, self.seed)
        blocks, facts, lengths, done, seconds = list[_Block](), dict[str, Any](), None, 0, 0.0
        if earlier is not None:
            self._check_same(earlier, params)
            blocks, done = [_Block.from_result(earlier)], earlier.num_simulations
            lengths, seconds = Lengths(**earlier.attrs["lengths"]), earlier.attrs["seconds"]
        spans = self._spans(done, memory_budget)
        with Progress(self.count, self.title, progress) as bar:
            bar.update(done)
            try:
                if lengths is None and self.fitter.has_lengths:
                    lengths = self._fit(params, *spans[0], None)[0].lengths
                for start, stop in spans:
                    started = time.perf_counter()
                    sampled, ranked = self._fit(params, start, stop, lengths)
                    if not start and len(sampled.failed) == stop:
                        raise NonFiniteError(
                            f"sbc: all of the first {stop} simulations broke: {sampled.failed[0]}; "
                            "run the method on the data themselves to see why"
                        )
                    seconds_a_fit = (time.perf_counter() - started) / (stop - start)
                    blocks.append(_Block.from_fit(sampled, ranked, start))
                    facts |= {"program": sampled.program, **sampled.facts}
                    facts |= {f"steps_{stage}": n for stage, n in sampled.steps.items()}
                    bar.update(stop - start)
                    bar.say(f"at most about {seconds_a_fit * (self.count - stop):,.0f} s more")
            except KeyboardInterrupt:
                if not blocks:
                    raise
                kept = sum(len(block.ess) for block in blocks)
                warn(
                    PyroScaleWarning,
                    f"interrupted: {kept} of {self.count} simulations are done; the same call "
                    "with resume= continues",
                )
        facts |= {
            "seed": self.seed,
            "blocks": len(spans),
            "rows": self._rows,
            "log_densities": self._log_densities,
            "lengths": dataclasses.asdict(lengths or Lengths()),
            "seconds": round(time.perf_counter() - begun + seconds, 2),
        }
        return self._result(blocks, {**self.attrs, **facts})

    def _fit(
        self, params: Mapping[str, Tensor], start: int, stop: int, lengths: Lengths | None
    ) -> tuple[Sampled, Ranked]:
        """(Posterior draws of simulations start, ..., stop - 1 and how they were made; ranks of
        their true values among these draws).

        Args:
            params: true params of all simulations, by site, `[count, ...]`.
            start: number of the first simulation.
            stop: one more than the number of the last simulation.
            lengths: numbers of steps of warm-up and thinning that earlier simulations determined;
                None to determine them on these simulations.
        """
        stack, true = self._simulate(params, start, stop)
        sampled = self.fitter.fit(stack, lengths)
        seed = derived_seed(self.seed, start, Purpose.SIMULATION, 3)
        model, draws = self.truth.fitted, sampled.positions
        return sampled, rank(model, stack, true, draws, self.quantities, self.predict_at, seed)

    def _simulate(
        self, params: Mapping[str, Tensor], start: int, stop: int
    ) -> tuple[Stack, Tensor]:
        """(Data sets start, ..., stop - 1, as a stack; the true params that each was drawn from,
        unconstrained, `[data sets, D]`).

        Args:
            params: true params of all simulations, by site, `[count, ...]`.
            start: number of the first data set.
            stop: one more than the number of the last.
        """
        observed = self.truth.observed(params, start, stop, self.seed)
        seeds = [simulation_seed(self.seed, number) for number in range(start, stop)]
        stack = self.stack.with_data(observed, seeds)
        true = [
            stack.layout.flatten({name: value[i] for name, value in params.items()})
            for i in range(start, stop)
        ]
        return stack, torch.stack(true)

    def _check_same(self, earlier: SBC, params: Mapping[str, Tensor]) -> None:
        """Raises an error if an earlier result is not one of this call: other settings, quantities,
        covariates, model or simulator.

        Args:
            earlier: result of an interrupted call.
            params: true params of all simulations, by site, `[count, ...]`.

        Raises:
            ArgumentError: the calls differ; the message says in what.
        """
        for name, value in self.attrs.items():
            if earlier.attrs.get(name) != value:
                raise ArgumentError(
                    f"resume: it was run with {name}={earlier.attrs.get(name)}, and not {value}: "
                    "pass the arguments of the interrupted call"
                )
        fitted = self.truth.fitted
        sites = fitted.log_posterior.model_info.sites
        latents = fitted.select_ranked({name: sites[name].value for name in fitted.latents})
        names = {*latents, LOGLIK, *self.quantities}
        if self.predict_at is not None:
            names |= {f"{name} (predicted)" for name in fitted.places}
        if names != set(earlier.ranks):
            differs = "its model or its quantities differ"
        elif earlier.attrs.get("rows") != self._rows:
            differs = "covariates, or the rows of predictive=, differ"
        elif line := first_difference(
            earlier.attrs.get("log_densities", {}), self._log_densities, _MACHINE_TOLERANCE
        ):
            differs = f"the model, the simulator or the rows differ: {line}"
        elif quantity := self._quantity_that_differs(earlier, params):
            differs = f"'{quantity}' has other values at the same latents and data"
        else:
            return
        raise ArgumentError(f"resume: {differs}: pass the arguments of the interrupted call")

    def _quantity_that_differs(self, earlier: SBC, params: Mapping[str, Tensor]) -> str | None:
        """The name of a quantity whose true values in the first simulations differ from those of an
        earlier result; None if all agree.

        Args:
            earlier: result of an interrupted call.
            params: true params of all simulations, by site, `[count, ...]`.
        """
        count = min(earlier.num_simulations, AT_ONCE)
        stack, true = self._simulate(params, 0, count)
        twice = true[:, None].expand(-1, 2, -1)
        for name, values in rank(
            self.truth.fitted, stack, true, twice, self.quantities
        ).true.items():
            before = earlier.true[name][:count]
            if before.shape != values.shape or not torch.allclose(
                before.double(), values, rtol=1e-4, atol=_MACHINE_TOLERANCE, equal_nan=True
            ):
                return name
        return None

    @cached_property
    def _rows(self) -> str:
        """A text with hashes of the rows of data that all data sets share, and of the rows of
        predictions, to tell whether an earlier result had the same rows.
        """
        parts = [self.stack.shared, self.predict_at]
        return ", ".join("none" if part is None else digest_of(part) for part in parts)

    @cached_property
    def _log_densities(self) -> dict[str, float]:
        """Log densities of the first simulation by name, in nats, to tell whether an earlier result
        had the same model, simulator and rows."""
        params = self.truth.params(1, self.seed)
        stack = self._simulate(params, 0, 1)[0]
        first = {name: value[0] for name, value in params.items()}
        rows, where = stack.arguments(torch.tensor(0)), "at the first true latents"
        return model_fingerprint(stack.log_posterior, first, rows, where=where)

    def _spans(self, done: int, memory_budget: int | None) -> list[tuple[int, int]]:
        """The blocks in which the simulations after the first `done` are run, as pairs (number of
        the first, one more than the number of the last). The first block is small, so that the
        progress bar soon shows how long simulations take; others are as large as memory allows."""
        bytes_of_data = sum(table[0].nbytes for table in self.stack.tables.values())
        bytes_of_draws = SIMULATIONS.draws * self.stack.layout.size * 8
        bytes_of_one = _COPIES_OF_DATA * bytes_of_data + _COPIES_OF_DRAWS * bytes_of_draws
        budget = memory_budget or bytes_of(torch.device("cpu")) // 2
        most = max(1, min(self.fitter.most_at_once, budget // bytes_of_one))
        first = min(self.count, done + min(most, AT_ONCE))
        size = math.ceil((self.count - first) / max(1, math.ceil((self.count - first) / most)))
        starts = range(first, self.count, max(1, size))
        return [(done, first), *((start, min(start + size, self.count)) for start in starts)]

    def _result(self, blocks: Sequence[_Block], attrs: dict[str, Any]) -> SBC:
        names = list(blocks[0].ranked.ranks)

        def join(field: str) -> dict[str, Tensor]:
            columns = [getattr(block.ranked, field) for block in blocks]
            return {name: torch.cat([column[name] for column in columns]) for name in names}

        ess = torch.cat([block.ess for block in blocks])
        return SBC(
            ranks=join("ranks"),
            num_draws=SIMULATIONS.ranked,
            true=join("true"),
            mean=join("mean"),
            sd=join("sd"),
            ess=ess,
            failed={number: why for block in blocks for number, why in block.failed.items()},
            slow=[number for block in blocks for number in block.slow],
            seeds=[simulation_seed(self.seed, number) for number in range(len(ess))],
            attrs=attrs,
            of_data=(LOGLIK, *self.quantities),
            data_of=self._data,
        )

    def _data(self, number: int) -> Any:
        """The data set of one simulation, drawn again, as it is passed to a method; for `SBC.data`.

        Args:
            number: number of the simulation, from 0.
        """
        params = self.truth.params(self.count, self.seed)
        observed = self.truth.observed(params, number, number + 1, self.seed)
        return self.truth.fitted.data_set({name: table[0] for name, table in observed.items()})


@dataclass(frozen=True)
class _Block:
    """Results of simulations that were run together, as a part of the result of `sbc`.

    Attributes:
        ess: effective draws of each simulation, `[simulations]`.
        slow: numbers of simulations with too few effective draws, except those that failed.
        failed: a dict from the number of a failed simulation to the reason.
        ranked: ranks, true values and moments of the draws, by quantity.
    """

    ess: Tensor
    slow: Sequence[int]
    failed: Mapping[int, str]
    ranked: Ranked

    @classmethod
    def from_fit(cls, sampled: Sampled, ranked: Ranked, start: int) -> _Block:
        """The results of consecutive simulations as a block.

        Args:
            sampled: posterior draws of the simulations, with reasons of failure.
            ranked: ranks of the true values among the draws.
            start: number of the first simulation.
        """
        failed = {start + number: why for number, why in sampled.failed.items()}
        slow = (start + torch.nonzero(sampled.ess < sampled.enough)[:, 0]).tolist()
        slow = [number for number in slow if number not in failed]
        return cls(sampled.ess, slow, failed, ranked)

    @classmethod
    def from_result(cls, sbc: SBC) -> _Block:
        """The results of an earlier, interrupted call as one block, to be joined with those of the
        simulations that the call lacks."""
        ranked = Ranked(dict(sbc.ranks), dict(sbc.true), dict(sbc.mean), dict(sbc.sd))
        return cls(torch.as_tensor(sbc.ess), sbc.slow, dict(sbc.failed), ranked)


def simulation_seed(seed: int, number: int) -> int:
    """The seed of the method's fit in one simulation, derived from the seed of the call of `sbc`
    and the simulation's number; different simulations have independent seeds."""
    return derived_seed(seed, number, Purpose.SIMULATION, 2)
