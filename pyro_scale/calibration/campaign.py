"""All simulations of a method on a model, block by block."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_scale.calibration.chains import NUM_DRAWS, Sampled
from pyro_scale.calibration.fitters import Fitter
from pyro_scale.calibration.quantities import LOGLIK, Quantity, Ranked, rank
from pyro_scale.calibration.results import SBC
from pyro_scale.calibration.simulations import AT_ONCE
from pyro_scale.calibration.stack import Stack
from pyro_scale.calibration.truth import Truth
from pyro_scale.calibration.warm_up import Lengths
from pyro_scale.core.memory import bytes_of
from pyro_scale.core.warn import warn
from pyro_scale.engine.progress import Progress
from pyro_scale.errors import ArgumentError, NonFiniteError, PyroScaleWarning
from pyro_scale.rng.seeds import Purpose, derived_seed

#: Simulations of a block at most: what Control-C costs.
_MOST_AT_ONCE = 500
#: Copies of a data set, and numbers of draws and their neighbors, that a simulation takes.
_COPIES, _DRAWS = 4, 3 * 400


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
        params, lengths = self.truth.params(self.count, self.seed), self._lengths(earlier)
        if earlier is not None:
            self._check_same(earlier, params)
        done = 0 if earlier is None else earlier.num_simulations
        size = self._block_size(params)
        parts, facts = [] if earlier is None else [_part_of(earlier)], dict[str, Any]()
        with Progress(self.count, self.title, self.progress) as bar:
            bar.update(done)
            try:
                if lengths is None:
                    started = time.perf_counter()
                    pilot = self._fit(params, 0, min(AT_ONCE, self.count), None)[0]
                    lengths = pilot.lengths
                    if len(pilot.failed) == len(pilot.ess):
                        raise NonFiniteError(
                            f"sbc: all of the first {len(pilot.ess)} simulations broke: "
                            f"{pilot.failed[0]}; run the method on one data set to see why"
                        )
                    bar.say(self._estimate(time.perf_counter() - started))
                for start in range(done, self.count, size):
                    stop = min(start + size, self.count)
                    sampled, ranked = self._fit(params, start, stop, lengths)
                    facts |= {"program": sampled.program, **sampled.facts}
                    facts |= {f"steps_{stage}": n for stage, n in sampled.steps.items()}
                    parts.append(_Part.of(sampled, ranked, start))
                    bar.update(stop - start)
            except KeyboardInterrupt:
                if not parts:
                    raise
                kept = sum(len(part.ess) for part in parts)
                warn(
                    PyroScaleWarning,
                    f"interrupted: {kept} of {self.count} simulations are done; the same call "
                    "with resume= goes on with them",
                )
        assert lengths is not None
        spent = time.perf_counter() - begun
        own = {
            "seed": self.seed,
            "blocks": math.ceil(self.count / size),
            "lengths": dataclasses.asdict(lengths),
            "seconds": round(spent + (0 if earlier is None else earlier.attrs["seconds"]), 2),
        }
        return self._result(parts, {**self.attrs, **facts, **own})

    def _fit(
        self, params: Mapping[str, Tensor], start: int, stop: int, lengths: Lengths | None
    ) -> tuple[Sampled, Ranked]:
        """Simulations start ... stop - 1."""
        observed = self.truth.observed(params, start, stop, self.seed)
        seeds = [simulation_seed(self.seed, number) for number in range(start, stop)]
        stack = self.stack.with_data(observed, seeds)
        sampled = self.fitter.fit(stack, lengths)
        true = torch.stack(
            [
                stack.layout.flatten({name: value[i] for name, value in params.items()})
                for i in range(start, stop)
            ]
        )
        seed = derived_seed(self.seed, start, Purpose.SIMULATION, 3)
        how = self.quantities, self.predict_at, seed
        return sampled, rank(self.truth.fitted, stack, true, sampled.positions, *how)

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
        done = earlier.num_simulations
        own = {*self.truth.fitted.latents, LOGLIK, *self.quantities}
        if self.predict_at is not None:
            own |= {f"{name} (predicted)" for name in self.truth.fitted.places}
        is_same = own == set(earlier.ranks)
        if is_same:
            here = {name: value[:done] for name, value in params.items()}
            true = torch.vmap(self.truth.fitted.log_posterior.constrain)(here)
            is_same = all(
                true[name].shape == earlier.true[name].shape
                and torch.allclose(true[name].double(), earlier.true[name].double(), rtol=1e-4)
                for name in self.truth.fitted.latents
            )
        if not is_same:
            raise ArgumentError(
                "resume: it is of another model, or of other quantities: pass the arguments of the "
                "interrupted call"
            )

    def _lengths(self, earlier: SBC | None) -> Lengths | None:
        return None if earlier is None else Lengths(**earlier.attrs["lengths"])

    def _block_size(self, params: Mapping[str, Tensor]) -> int:
        """Simulations that memory holds at once, in blocks of about the same size."""
        data = sum(table[0].nbytes for table in self.stack.own.values())
        each = _COPIES * data + _DRAWS * self.stack.layout.size * 8
        there = self.memory_budget or bytes_of(torch.device("cpu")) // 2
        most = max(1, min(_MOST_AT_ONCE, there // each))
        return math.ceil(self.count / math.ceil(self.count / most))

    def _estimate(self, seconds: float) -> str:
        more = seconds * max(0, self.count / AT_ONCE - 1)
        return f"at most about {more:,.0f} s"

    def _result(self, parts: Sequence[_Part], attrs: dict[str, Any]) -> SBC:
        names = list(parts[0].ranked.ranks)

        def joined(field: str) -> dict[str, Tensor]:
            columns = [getattr(part.ranked, field) for part in parts]
            return {name: torch.cat([column[name] for column in columns]) for name in names}

        ess = torch.cat([part.ess for part in parts])
        failed = {number: why for part in parts for number, why in part.failed.items()}
        return SBC(
            ranks=joined("ranks"),
            num_draws=NUM_DRAWS,
            true=joined("true"),
            mean=joined("mean"),
            sd=joined("sd"),
            ess=ess,
            failed=failed,
            slow=[number for part in parts for number in part.slow],
            seeds=[simulation_seed(self.seed, number) for number in range(len(ess))],
            attrs=attrs,
            of_data=(LOGLIK, *self.quantities),
        )


@dataclass(frozen=True)
class _Part:
    """What some simulations came to."""

    ess: Tensor
    failed: dict[int, str]
    slow: list[int]
    ranked: Ranked

    @classmethod
    def of(cls, sampled: Sampled, ranked: Ranked, start: int) -> _Part:
        """Those from some number on."""
        few = torch.nonzero(sampled.ess < sampled.enough)[:, 0].tolist()
        slow = [start + number for number in few if number not in sampled.failed]
        return cls(sampled.ess, _shifted(sampled.failed, start), slow, ranked)


def _part_of(sbc: SBC) -> _Part:
    ranked = Ranked(dict(sbc.ranks), dict(sbc.true), dict(sbc.mean), dict(sbc.sd))
    return _Part(torch.as_tensor(sbc.ess), dict(sbc.failed), list(sbc.slow), ranked)


def _shifted(failed: Mapping[int, str], start: int) -> dict[int, str]:
    return {start + number: why for number, why in failed.items()}


def simulation_seed(seed: int, number: int) -> int:
    """The seed of one simulation's fit."""
    return derived_seed(seed, number, Purpose.SIMULATION, 2)
