"""How short runs are asked for, and whether two are the same."""

from reference import close_in_scale

QUIET = {"seed": 0, "progress": False}
#: Every state is a draw, from the first.
EVERY_STEP = {"warmup_steps": 0, "thinning": 1}
ONE_CHAIN = {**EVERY_STEP, "num_chains": 1}


def same_steps(fast, slow, tolerance=1e-10):
    """Asserts that two samplers hold the same draws and statistics, and moved at all."""
    mine, theirs = fast.posterior.draws, slow.posterior.draws
    close_in_scale(mine.positions, theirs.positions, tolerance)
    assert mine.positions.dtype == theirs.positions.dtype
    assert mine.sample_stats.keys() == theirs.sample_stats.keys()
    for name, column in theirs.sample_stats.items():
        close_in_scale(mine.sample_stats[name], column, tolerance)
    if mine.positions.shape[1] > 2:
        assert (mine.positions.std(1) > 0).all()
