"""How short runs are asked for."""

QUIET = {"seed": 0, "progress": False}
#: Every state is a draw, from the first.
EVERY_STEP = {"warmup_steps": 0, "thinning": 1}
ONE_CHAIN = {**EVERY_STEP, "num_chains": 1}
