"""What to say when chains become NaN or infinite, or are about to."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_scale.drive.draws import Draws
from pyro_scale.infer.result import Result

#: Distances from 0 in unconstrained space that chains only come to on their way to infinity.
_EXPLODED = 1e15


def message(draws: Draws, lr: Tensor, hint: str = "") -> str:
    """Which chains stopped, where, and what to try.

    Args:
        draws: what the run kept.
        lr: every step's, `[steps, ...]`.
        hint: where their last steps are.
    """
    stopped = "; ".join(
        f"chain {failure.chain} at step {failure.step}, site '{failure.site}'"
        for failure in draws.failures[:5]
    )
    more = f" and {len(draws.failures) - 5} more" if len(draws.failures) > 5 else ""
    now = float(lr[draws.failures[0].step].max())
    finished = ", ".join(map(str, draws.finished))
    if len(draws.finished) > 10:
        finished = f"{len(draws.finished)} of them"
    kept = f"Finished, and in get_samples(): chains {finished}. " if finished else ""
    if any(failure.bad_batch for failure in draws.failures):
        return (
            f"the state became NaN or infinite: {stopped}{more}. {kept}The batch of that step "
            "holds NaN or infinite numbers: clean the data (torch.isfinite finds them)"
            f"{hint}"
        )
    return (
        f"the state became NaN or infinite: {stopped}{more}. {kept}The step size is most likely "
        f"above the stable range: try lr={now / 3:.2g} instead of {now:.2g}; else start nearer to "
        "the mode (init_strategy=), scale the data, or give the site a tighter prior"
        f"{hint}"
    )


def explosion(result: Result) -> str | None:
    """What to say of chains that have exploded, though their states are finite yet; None where
    none has."""
    last = result.positions[torch.arange(result.num_chains), -1].abs().amax(0)
    if float(last.max()) < _EXPLODED:
        return None
    site, lr = result.layout.site_at(int(last.argmax())), result.sample_stats.get("lr")
    hint = "" if lr is None else f", {float(lr[0, -1]) / 3:.2g} instead of {float(lr[0, -1]):.2g}"
    return (
        f"the chains have exploded: site '{site}' has come to {float(last.max()):.2g} in "
        f"unconstrained space, and no number that is made of the draws means anything. The step "
        f"size is most likely above the stable range: pass a smaller lr{hint}"
    )
