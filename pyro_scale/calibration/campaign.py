"""All simulations of a method on a model, block by block."""

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
from pyro_scale.calibration.truth import Truth
from pyro_scale.core.memory import bytes_of
from pyro_scale.core.warn import warn
from pyro_scale.engine.progress import Progress
from pyro_scale.errors import ArgumentError, NonFiniteError, PyroScaleWarning
from pyro_scale.model.fingerprint import first_difference, model_fingerprint
from pyro_scale.rng.seeds import Purpose, derived_seed
from pyro_scale.run.resume import digest_of
from pyro_scale.tuning.groups import Lengths
from pyro_scale.tuning.policy import SIMULATIONS

#: Copies of a data set, and numbers of draws and their neighbors, that a simulation takes.
_COPIES, _COPIES_OF_DRAWS = 4, 3
#: By how much another machine may round what the first simulations have come to.
_MACHINE_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Campaign:
    """What is simulated, and how it is fitted and ranked.

    Attributes:
        truth: where data sets come from.
        stack: of the first data set, with what all have in common.
        fitter: of the method.
        quantities: functions of (sites, data), ranked besides latents and the log likelihood.
        predict_at: rows whose observations are ranked among predictions; None for none.
        count: simulations.
        seed: of all.
        title: of the progress bar.
        progress: whether to show it.
        memory_budget: bytes for data sets and draws; None for half of the machine's.
        attrs: what is known of it.
    """

    truth: Truth
    stack: Stack
    fitter: Fitter
    quantities: Mapping[str, Quantity]
    predict_at: Any
    count: int
    seed: int
    title: str
    progress: bool
    memory_budget: int | None
    attrs: Mapping[str, Any]

    def run(self, earlier: SBC | None = None) -> SBC:
        """All simulations, or those that an earlier call was interrupted before.

        Warns:
            PyroScaleWarning: it was interrupted; the result has the simulations until then.
        """
        begun = time.perf_counter()
        params = self.truth.params(self.count, self.seed)
        lengths = None if earlier is None else Lengths(**earlier.attrs["lengths"])
        if earlier is not None:
            self._check_same(earlier, params)
        done = 0 if earlier is None else earlier.num_simulations
        parts, facts = [] if earlier is None else [_part_of(earlier)], dict[str, Any]()
        spans = self._spans(done)
        with Progress(self.count, self.title, self.progress) as bar:
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
                    a_fit = (time.perf_counter() - started) / (stop - start)
                    parts.append(_Part.of(sampled, ranked, start))
                    facts |= {"program": sampled.program, **sampled.facts}
                    facts |= {f"steps_{stage}": n for stage, n in sampled.steps.items()}
                    bar.update(stop - start)
                    bar.say(f"at most about {a_fit * (self.count - stop):,.0f} s more")
            except KeyboardInterrupt:
                if not parts:
                    raise
                kept = sum(len(part.ess) for part in parts)
                warn(
                    PyroScaleWarning,
                    f"interrupted: {kept} of {self.count} simulations are done; the same call "
                    "with resume= goes on with them",
                )
        spent = time.perf_counter() - begun
        own = {
            "seed": self.seed,
            "blocks": len(spans),
            "rows": self._rows,
            "log_densities": self._log_densities,
            "lengths": dataclasses.asdict(lengths or Lengths()),
            "seconds": round(spent + (0 if earlier is None else earlier.attrs["seconds"]), 2),
        }
        return self._result(parts, {**self.attrs, **facts, **own})

    def _fit(
        self, params: Mapping[str, Tensor], start: int, stop: int, lengths: Lengths | None
    ) -> tuple[Sampled, Ranked]:
        """Simulations start ... stop - 1."""
        stack, true = self._simulated(params, start, stop)
        sampled = self.fitter.fit(stack, lengths)
        seed = derived_seed(self.seed, start, Purpose.SIMULATION, 3)
        how = self.quantities, self.predict_at, seed
        return sampled, rank(self.truth.fitted, stack, true, sampled.positions, *how)

    def _simulated(
        self, params: Mapping[str, Tensor], start: int, stop: int
    ) -> tuple[Stack, Tensor]:
        """(The data sets start ... stop - 1, the params that they were drawn from,
        `[data sets, D]`)."""
        observed = self.truth.observed(params, start, stop, self.seed)
        seeds = [simulation_seed(self.seed, number) for number in range(start, stop)]
        stack = self.stack.with_data(observed, seeds)
        true = [
            stack.layout.flatten({name: value[i] for name, value in params.items()})
            for i in range(start, stop)
        ]
        return stack, torch.stack(true)

    def _check_same(self, earlier: SBC, params: Mapping[str, Tensor]) -> None:
        """Refuses the simulations of another call.

        Raises:
            ArgumentError: it says what differs.
        """
        for name, value in self.attrs.items():
            if earlier.attrs.get(name) != value:
                raise ArgumentError(
                    f"resume: it was run with {name}={earlier.attrs.get(name)}, and not {value}: "
                    "pass the arguments of the interrupted call"
                )
        own = {*self.truth.fitted.latents, LOGLIK, *self.quantities}
        if self.predict_at is not None:
            own |= {f"{name} (predicted)" for name in self.truth.fitted.places}
        if own != set(earlier.ranks):
            differs = "it is of another model, or of other quantities"
        elif earlier.attrs.get("rows") != self._rows:
            differs = "covariates, or the rows of predictive=, are other ones"
        elif line := first_difference(
            earlier.attrs.get("log_densities", {}), self._log_densities, _MACHINE_TOLERANCE
        ):
            differs = f"the model, the simulator or the rows are other ones: {line}"
        elif other := self._other_value(earlier, params):
            differs = f"'{other}' has other values at the same latents and data"
        else:
            return
        raise ArgumentError(f"resume: {differs}: pass the arguments of the interrupted call")

    def _other_value(self, earlier: SBC, params: Mapping[str, Tensor]) -> str | None:
        """What the first true latents and data sets have another value of, in an earlier result."""
        count = min(earlier.num_simulations, AT_ONCE)
        stack, true = self._simulated(params, 0, count)
        here = rank(
            self.truth.fitted, stack, true, true[:, None].expand(-1, 2, -1), self.quantities
        )
        for name, values in here.true.items():
            then = earlier.true[name][:count]
            if then.shape != values.shape or not torch.allclose(
                then.double(), values, rtol=1e-4, atol=_MACHINE_TOLERANCE, equal_nan=True
            ):
                return name
        return None

    @cached_property
    def _rows(self) -> str:
        """Digests of the rows that simulations have in common, and of those of predictions."""
        given = [self.stack.shared, self.predict_at]
        return ", ".join("none" if each is None else digest_of(each) for each in given)

    @cached_property
    def _log_densities(self) -> dict[str, float]:
        """What tells the first simulation from that of another model, simulator or rows."""
        params = self.truth.params(1, self.seed)
        stack = self._simulated(params, 0, 1)[0]
        first = {name: value[0] for name, value in params.items()}
        rows, where = stack.arguments(torch.tensor(0)), "at the first true latents"
        return model_fingerprint(stack.log_posterior, first, rows, where=where)

    def _spans(self, done: int) -> list[tuple[int, int]]:
        """The blocks that are left, as (first simulation, the one after the last): a small one,
        which tells how long it takes, and as many at a time as memory holds."""
        data = sum(table[0].nbytes for table in self.stack.own.values())
        each = _COPIES * data + _COPIES_OF_DRAWS * SIMULATIONS.draws * self.stack.layout.size * 8
        there = self.memory_budget or bytes_of(torch.device("cpu")) // 2
        most = max(1, min(self.fitter.most_at_once, there // each))
        first = min(self.count, done + min(most, AT_ONCE))
        size = math.ceil((self.count - first) / max(1, math.ceil((self.count - first) / most)))
        others = range(first, self.count, max(1, size))
        return [(done, first), *((at, min(at + size, self.count)) for at in others)]

    def _result(self, parts: Sequence[_Part], attrs: dict[str, Any]) -> SBC:
        names = list(parts[0].ranked.ranks)

        def joined(field: str) -> dict[str, Tensor]:
            columns = [getattr(part.ranked, field) for part in parts]
            return {name: torch.cat([column[name] for column in columns]) for name in names}

        ess = torch.cat([part.ess for part in parts])
        failed = {number: why for part in parts for number, why in part.failed.items()}
        slow = [number for part in parts for number in part.slow]
        return SBC(
            ranks=joined("ranks"),
            num_draws=SIMULATIONS.ranked,
            true=joined("true"),
            mean=joined("mean"),
            sd=joined("sd"),
            ess=ess,
            failed=failed,
            slow=slow,
            seeds=[simulation_seed(self.seed, number) for number in range(len(ess))],
            attrs=attrs,
            of_data=(LOGLIK, *self.quantities),
            data_of=self._data,
        )

    def _data(self, number: int) -> Any:
        """The data of one simulation, as the fitted model takes them."""
        params = self.truth.params(self.count, self.seed)
        observed = self.truth.observed(params, number, number + 1, self.seed)
        return self.truth.fitted.given({name: table[0] for name, table in observed.items()})


@dataclass(frozen=True)
class _Part:
    """What some simulations came to."""

    ess: Tensor
    slow: Sequence[int]
    failed: dict[int, str]
    ranked: Ranked

    @classmethod
    def of(cls, sampled: Sampled, ranked: Ranked, start: int) -> _Part:
        """Those from a number on."""
        slow = (start + torch.nonzero(sampled.ess < sampled.enough)[:, 0]).tolist()
        failed = {start + number: why for number, why in sampled.failed.items()}
        return cls(sampled.ess, [each for each in slow if each not in failed], failed, ranked)


def _part_of(sbc: SBC) -> _Part:
    ranked = Ranked(dict(sbc.ranks), dict(sbc.true), dict(sbc.mean), dict(sbc.sd))
    return _Part(torch.as_tensor(sbc.ess), sbc.slow, dict(sbc.failed), ranked)


def simulation_seed(seed: int, number: int) -> int:
    """The seed of one simulation's fit."""
    return derived_seed(seed, number, Purpose.SIMULATION, 2)
