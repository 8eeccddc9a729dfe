"""What a run with nothing set costs, beside NUTS: `python benchmarks/accuracy/rows.py`.

    --only NAME    only the posteriors whose name starts so; the others' entries are kept
    --seed 0
    --once         one run of each: the seconds then have compilation in them

`ps.BAOA(model).run(data, seed=seed)` and `ps.NUTS(model).run(data, seed=seed)` (nutpie's defaults:
1,000 draws of warm-up and 1,000 kept, of four chains) on posteriordb's posteriors.  Gradients of
all rows are counted, of four chains together.  Of BAOA these are the search for modes, looks at the
curvature (a Hessian counts as one gradient for each dimension), warm-up, pilots and draws; of NUTS
all leapfrog steps.  Seconds are those of a second run of the same object, whose programs are
compiled; NUTS's chains run on as many cores as there are, BAOA's on one.  Right is as in
`judge.py`.  Writes `results/rows.md` and `results/rows.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import torch
from entry import Posterior, Tensors
from judge import NOTHING, judge, stored_truth, truth_of
from more import EVERYTHING

import pyro_scale as ps
from pyro_scale.exact.nutpie_api import Chain
from pyro_scale.infer import sampler_run
from pyro_scale.tuning.choice import Choice

HERE = Path(__file__).parent
RESULTS = HERE / "results"
#: What is aimed at: the median of BAOA's rows over NUTS's; seconds, in the median and at most.
RATIO, SECONDS, MOST_SECONDS = 3.0, 5.0, 60.0
STAGES = ("modes", "curvature", "windows", "pilots", "draws")


@dataclass(frozen=True)
class Cost:
    """Of both methods on one posterior.

    Attributes:
        posterior: its name.
        dimensions: of it.
        rows: BAOA's gradients of all rows, by stage.
        nuts_rows: NUTS's leapfrog steps, warm-up included.
        seconds: BAOA's.
        nuts_seconds: NUTS's.
        is_right: whether BAOA's draws are.
        nuts_is_right: whether NUTS's are.
        verdict: of BAOA's run.
    """

    posterior: str
    dimensions: int
    rows: dict[str, float]
    nuts_rows: float
    seconds: float
    nuts_seconds: float
    is_right: bool
    nuts_is_right: bool
    verdict: str

    @property
    def ratio(self) -> float:
        """BAOA's gradients over NUTS's."""
        return sum(self.rows.values()) / max(1.0, self.nuts_rows)


def timed(run: Callable[[int], Any], seed: int, once: bool) -> float:
    """Seconds of a run, whose programs are compiled unless it is the only one."""
    if not once:
        run(seed + 1000)
    begin = time.perf_counter()
    run(seed)
    return time.perf_counter() - begin


def rows_by_stage(baoa: Any, choice: Choice, chains: int = 4) -> dict[str, float]:
    """Gradients of all rows that a run took."""
    attrs = baoa.posterior.attrs
    window, modes, pilot = choice.window, choice.modes, choice.pilot
    latents = choice.problem.engine.num_latents
    return {
        "modes": 0 if modes is None else modes.evaluations,
        "curvature": window.looks * latents,
        "windows": chains * window.steps,
        "pilots": 0 if pilot is None else chains * pilot.steps,
        "draws": chains * attrs["num_samples"] * attrs["thinning"],
    }


def measure(
    posterior: Posterior, data: Tensors, truth: Mapping[str, Any], seed: int, once: bool
) -> Cost:
    """Both runs."""
    quiet: dict[str, Any] = {"progress": False}
    baoa, nuts, leapfrogs = ps.BAOA(posterior.model), ps.NUTS(posterior.model), []
    read, plan_run, choices = Chain._read, sampler_run.plan_run, list[Any]()

    def counting(self: Any, results: Any) -> Any:
        trace = results.get_arrow_trace()  # which can be taken once
        steps = pyarrow.array(trace[1][0].column("n_steps")).to_numpy(False)
        leapfrogs.append(int(steps.sum()))
        return read(self, SimpleNamespace(get_arrow_trace=lambda: trace))

    def choosing(*args: Any) -> Any:
        plan, choice = plan_run(*args)
        choices.append(choice)
        return plan, choice

    sampler_run.plan_run = choosing  # type: ignore[attr-defined]
    seconds = timed(lambda seed: baoa.run(data, seed=seed, **quiet), seed, once)
    errors = judge(baoa.get_samples(group_by_chain=True), posterior.sites, truth)
    Chain._read = counting  # type: ignore[method-assign]
    nuts_seconds, nuts_errors = float("nan"), NOTHING
    try:
        nuts_seconds = timed(lambda seed: nuts.run(data, seed=seed, **quiet), seed, once)
        nuts_errors = judge(nuts.get_samples(group_by_chain=True), posterior.sites, truth)
    except ps.errors.PyroScaleError as error:
        print(f"{posterior.name}: NUTS: {error}", flush=True)
    finally:
        Chain._read = read  # type: ignore[method-assign]
        sampler_run.plan_run = plan_run  # type: ignore[attr-defined]
    return Cost(
        posterior=posterior.name,
        dimensions=choices[-1].problem.engine.num_latents,
        rows=rows_by_stage(baoa, choices[-1]),
        nuts_rows=float(sum(leapfrogs[-4:])),
        seconds=seconds,
        nuts_seconds=nuts_seconds,
        is_right=errors.is_right,
        nuts_is_right=nuts_errors.is_right,
        verdict=baoa.report().verdict,
    )


def quartiles(values: list[float]) -> str:
    """Median, quartiles and the worst."""
    if len(values) < 2:
        return f"{values[0]:.3g}"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.3g} (quartiles {low:.3g} and {high:.3g}, worst {max(values):.3g})"


def page(costs: list[Cost]) -> str:
    """Sums, then a row a posterior."""
    both = [c for c in costs if c.nuts_rows and c.nuts_seconds == c.nuts_seconds]
    shares = {s: statistics.median(c.rows[s] / sum(c.rows.values()) for c in costs) for s in STAGES}
    lines = [
        "# Cost of nothing set",
        "",
        f"{len(costs)} posteriors. Right: BAOA {sum(c.is_right for c in costs)}, NUTS "
        f"{sum(c.nuts_is_right for c in costs)}.",
        "",
        f"- Gradients of BAOA over NUTS's: {quartiles([c.ratio for c in both])}; aim {RATIO:g}.",
        f"- The same where NUTS is right: {quartiles([c.ratio for c in both if c.nuts_is_right])}.",
        f"- Gradients of BAOA: {quartiles([sum(c.rows.values()) for c in costs])}; of NUTS: "
        f"{quartiles([c.nuts_rows for c in both])}.",
        f"- Seconds of BAOA: {quartiles([c.seconds for c in costs])}; aim {SECONDS:g} in the "
        f"median, {MOST_SECONDS:g} at most. Of NUTS: {quartiles([c.nuts_seconds for c in both])}.",
        "- Median shares of BAOA's gradients: "
        + ", ".join(f"{name} {100 * share:.0f}%" for name, share in shares.items())
        + ".",
        "",
        "| posterior | D | " + " | ".join(STAGES) + " | all | NUTS | ratio | s | NUTS s | right | "
        "verdict | NUTS right |",
        "|---" * (len(STAGES) + 10) + "|",
    ]
    for c in costs:
        right = ["yes" if each else "no" for each in (c.is_right, c.nuts_is_right)]
        stages = " | ".join(f"{c.rows[stage]:,.0f}" for stage in STAGES)
        lines.append(
            f"| {c.posterior} | {c.dimensions} | {stages} | {sum(c.rows.values()):,.0f} | "
            f"{c.nuts_rows:,.0f} | {c.ratio:.2f} | {c.seconds:.1f} | {c.nuts_seconds:.1f} | "
            f"{right[0]} | {c.verdict} | {right[1]} |"
        )
    return "\n".join([*lines, ""])


def save(cost: Cost, names: list[str]) -> list[Cost]:
    """All costs so far, with this in the place of an earlier one."""
    path = RESULTS / "rows.json"
    RESULTS.mkdir(exist_ok=True)
    kept = [Cost(**c) for c in json.loads(path.read_text())] if path.exists() else []
    kept = [c for c in kept if c.posterior != cost.posterior and c.posterior in names]
    kept = sorted([*kept, cost], key=lambda c: names.index(c.posterior))
    path.write_text(json.dumps([asdict(c) for c in kept], indent=0) + "\n")
    (RESULTS / "rows.md").write_text(page(kept))
    return kept


def main() -> None:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="NAME")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--once", action="store_true")
    arguments = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    known, costs = stored_truth(), list[Cost]()
    for posterior in EVERYTHING:
        data = posterior.load() if posterior.name.startswith(arguments.only) else None
        if data is None:
            continue
        truth = truth_of(posterior, data, known)
        cost = measure(posterior, data, truth, arguments.seed, arguments.once)
        print(cost, f"{cost.ratio:.2f}", flush=True)
        costs = save(cost, [each.name for each in EVERYTHING])
    print(page(costs))


if __name__ == "__main__":
    main()
