"""Right and wrong samplers, and what `ps.sbc` says: `python benchmarks/calibration/verdicts.py`.

    --only NAME     cases whose name starts so
    --seeds 40      of each case at most; by default as many as the case asks for
    --from 0        the first of them

Each run is 500 simulations, and its verdict is at 5%; one of each right sampler is 20,000, which
find a bias that is six times smaller.  The lr of a wrong sampler follows from
theory: on a Gaussian posterior `GaussianChain` gives the stationary sd without sampling.  Writes
`results/verdicts.json` after each run; `report.py` makes the page.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from models import design, factorial, linear, logistic, scaled, unknown_noise

import pyro_scale as ps
from pyro_scale import kernels
from pyro_scale.kernels.gaussian import GaussianChain

sys.path.append(str(Path(__file__).parents[1]))
from circumstances import circumstances

RESULTS = Path(__file__).parent / "results" / "verdicts.json"
PACKAGES = ("torch", "pyro-ppl", "nutpie", "pyro-scale")
#: Rows of the orthogonal design, and of its batches.
ROWS, BATCH = 48, 12
#: The stationary sd of a wrong sampler, over the posterior's.
TOO_WIDE = 1.1


@dataclass(frozen=True)
class Case:
    """A sampler on a model.

    Attributes:
        name: of it.
        title: in the page's table.
        is_right: whether draws are right, so that a verdict of miscalibrated is a false alarm.
        seeds: how many to run.
        call: of `ps.sbc` with a seed and number of simulations.
        simulations: of each run.
    """

    name: str
    title: str
    is_right: bool
    seeds: int
    call: Callable[..., Any]
    simulations: int = 500


@dataclass(frozen=True)
class Outcome:
    """Of one run.

    Attributes:
        case: its name.
        seed: of it.
        verdict: of all quantities together.
        p_holm: the least of each quantity, adjusted for all elements.
        p_value: the same, of each element by itself.
        z_score_sd: the mean of the latents' elements: true sd over the draws' where the sd is off.
        slow, failed: simulations.
        lr: the step sizes, in words.
        lengths: of the stages.
        seconds: of all of it.
        when: and where.
    """

    case: str
    seed: int
    verdict: str
    p_holm: dict[str, float]
    p_value: dict[str, float]
    z_score_sd: float
    slow: int
    failed: int
    lr: str
    lengths: dict[str, int]
    seconds: float
    when: str = field(default_factory=lambda: circumstances(PACKAGES))


# ------------------------------------------------------------------ step sizes that are too long


def too_long(kernel: Callable[[float], kernels.Kernel], longest: float, batch: int | None) -> float:
    """The lr at which the stationary sd is 1.1 times the posterior's, by bisection.

    Args:
        kernel: of an lr.
        longest: an lr at which it is more.
        batch: rows of a batch that are drawn with replacement; None for all rows.

    The precision is N + 1 in all directions.  At a draw of the posterior rows' gradients have
    variance 1, as residuals have, and batches' 1/B of what is left beyond their mean's 1/N.
    """
    precision = torch.tensor([(ROWS + 1) / ROWS], dtype=torch.float64)
    noise = 0.0 if batch is None else (1 - 1 / ROWS) / batch
    low, high = 0.0, longest
    for _ in range(60):
        lr = (low + high) / 2
        chain = GaussianChain.from_kernel(kernel(lr), kernel(lr).at(0, ROWS), precision)
        variance = chain.covariance(torch.full_like(precision, noise))[0, 0, 0]
        wide = bool(chain.stable.all()) and float(variance * (ROWS + 1)) < TOO_WIDE**2
        low, high = (lr, high) if wide else (low, lr)
    return low


def sgld(lr: float) -> kernels.Kernel:
    """SGLD, on all rows."""
    return kernels.SGLD(lr=lr)


def baoa(lr: float) -> kernels.Kernel:
    """BAOA, in batches."""
    return kernels.BAOA(lr=lr, friction=1.0)


# ------------------------------------------------------------------ cases


def of(method: Any, rows: torch.Tensor, **how: Any) -> Callable[..., Any]:
    """A call of `ps.sbc` on a regression with these covariates."""

    def call(**run: Any) -> Any:
        return ps.sbc(method, (rows, torch.zeros(len(rows))), progress=False, **how, **run)

    return call


def in_batches(model: Any, lr: float) -> Callable[..., Any]:
    """BAOA on the orthogonal design in batches."""
    method = ps.BAOA(model, lr=lr, friction=1.0, control_variates=False)
    return of(method, factorial(ROWS // 16), batch_size=BATCH, simulator=linear(1.0))


def cases() -> list[Case]:
    """All of them."""
    four, orthogonal = design(40, 4), factorial(ROWS // 16)
    sgld_lr, baoa_lr = too_long(sgld, 1.0, None), too_long(baoa, 1.0, BATCH)
    heated = ps.BAOA(linear(1.0), lr=baoa_lr, friction=1.0, control_variates=False)
    return [
        Case(
            "linear",
            "BAOA, nothing set: linear regression, 4 coefficients and the noise's sd, 40 rows",
            True,
            40,
            of(ps.BAOA(unknown_noise), four),
        ),
        Case(
            "logistic",
            "BAOA, nothing set: logistic regression, 5 coefficients, 100 rows",
            True,
            40,
            of(ps.BAOA(logistic), design(100, 5)),
        ),
        Case(
            "many_linear",
            "BAOA on the linear regression, 20,000 simulations",
            True,
            1,
            of(ps.BAOA(unknown_noise), four),
            20_000,
        ),
        Case(
            "many_logistic",
            "BAOA on the logistic regression, 20,000 simulations",
            True,
            1,
            of(ps.BAOA(logistic), design(100, 5)),
            20_000,
        ),
        Case(
            "nuts",
            "NUTS, as a control: the same linear regression",
            True,
            10,
            of(ps.NUTS(unknown_noise), four),
        ),
        Case(
            "sgld_lr",
            f"SGLD on all rows at lr {sgld_lr:.3f}: sd 10% too wide in 4 dimensions",
            False,
            20,
            of(ps.SGLD(linear(1.0), lr=sgld_lr), orthogonal),
        ),
        Case(
            "baoa_lr",
            f"BAOA in batches of {BATCH} of {ROWS} rows at lr {baoa_lr:.3f}: sd 10% too wide in 4 "
            "dimensions",
            False,
            20,
            of(heated, orthogonal, batch_size=BATCH, sampling="replacement"),
        ),
        Case(
            "prior",
            "A prior of sd 0.3 is fitted where `simulator=` has 1: 4 coefficients, 20 rows",
            False,
            20,
            of(ps.BAOA(linear(0.3)), design(20, 4), simulator=linear(1.0)),
        ),
        Case(
            "forgotten",
            f"N/B forgotten: a batch of {BATCH} of {ROWS} rows counts as {BATCH}, lr 0.2",
            False,
            20,
            in_batches(scaled(BATCH / ROWS), 0.2),
        ),
        Case(
            "twice",
            f"N/B twice: {ROWS} rows count as {ROWS * ROWS // BATCH}, lr 0.02",
            False,
            20,
            in_batches(scaled(ROWS / BATCH), 0.02),
        ),
    ]


def run(case: Case, seed: int) -> Outcome:
    """One run."""
    begin = time.perf_counter()
    sbc = case.call(seed=seed, num_simulations=case.simulations)
    seconds = time.perf_counter() - begin
    tables = {name: sbc.summary([name]) for name in sbc.ranks}
    latents = [table.z_score_sd for name, table in tables.items() if name not in sbc.of_data]
    values = [float(value) for column in latents for value in column]
    return Outcome(
        case=case.name,
        seed=seed,
        verdict=sbc.verdict,
        p_holm={name: float(table.p_holm.min()) for name, table in tables.items()},
        p_value={name: float(table.p_value.min()) for name, table in tables.items()},
        z_score_sd=round(sum(values) / len(values), 4),
        slow=len(sbc.slow),
        failed=len(sbc.failed),
        lr=str(sbc.attrs.get("lr", "")),
        lengths=dict(sbc.attrs["lengths"]),
        seconds=round(seconds, 1),
    )


def load() -> list[Outcome]:
    """What there is."""
    return [Outcome(**o) for o in json.loads(RESULTS.read_text())] if RESULTS.exists() else []


def save(outcome: Outcome) -> None:
    """It takes the place of an earlier one."""
    merged: Mapping[Any, Outcome] = {
        **{(o.case, o.seed): o for o in load()},
        (outcome.case, outcome.seed): outcome,
    }
    names = [case.name for case in cases()]
    kept = sorted(merged.values(), key=lambda o: (names.index(o.case), o.seed))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text("[\n" + ",\n".join(json.dumps(asdict(o)) for o in kept) + "\n]\n")


def main() -> None:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="NAME")
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--from", type=int, default=0, dest="first", metavar="SEED")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for case in cases():
        if case.name.startswith(arguments.only):
            for seed in range(arguments.first, min(arguments.seeds, case.seeds)):
                outcome = run(case, seed)
                save(outcome)
                print(outcome, flush=True)


if __name__ == "__main__":
    main()
