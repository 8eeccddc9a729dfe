"""What warm-ups chose, which runs do not keep."""

import contextlib

from pyro_scale.infer import sampler_run


@contextlib.contextmanager
def recorded():
    """The choices of the runs inside, as a list."""
    plan_run, made = sampler_run.plan_run, []

    def recording(*args):
        plan, choice = plan_run(*args)
        made.append(choice)
        return plan, choice

    sampler_run.plan_run = recording
    try:
        yield made
    finally:
        sampler_run.plan_run = plan_run
