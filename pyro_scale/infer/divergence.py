"""What to say when chains become NaN or infinite."""

from __future__ import annotations

from torch import Tensor

from pyro_scale.drive.draws import Draws


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
