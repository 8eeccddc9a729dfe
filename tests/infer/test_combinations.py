"""Every combination of numbers and `"auto"`: a sampler runs, or it refuses an argument by its name
before the first step; and what is asked afterwards has an answer."""

import contextlib
import random
import re

import pyro
import pyro.distributions as dist
import pytest
import torch
from methods import TABLE
from reference import normals
from warned import quiet

from pyro_scale.core.schedules import Cyclical, polynomial_decay
from pyro_scale.errors import PyroScaleError
from pyro_scale.run import run as run_module
from pyro_scale.tuning import adjust, choose, training
from pyro_scale.tuning.policy import Pilots, Training, WarmUp

#: Arguments of which None means something.
NONE = {"precondition", "batch_size", "store"}
N = 24
X = normals(N, 2, seed=0)
Y = X @ torch.tensor([1.0, -0.5], dtype=torch.float64) + normals(N, seed=1)

#: Values of a method's arguments, and of run's; the first of each are near the defaults.
ARGUMENTS = {
    "lr": ["auto", 0.1, 1e-3, {"w": 0.1, "s": 0.05}, polynomial_decay(0.1), Cyclical(0.1, 50)],
    "temperature": [1.0, 0, 0.3, 0.0, lambda step: 1.0 if step > 9 else 0.0],
    "friction": [None, "auto", 0.7, polynomial_decay(1.0)],
    "precondition": ["auto", None, "dense", "low_rank", "diag", "kron"],
    "control_variates": [None, None, None, True, False],
    "subtract_noise": [None, None, None, None, True],
}
RUN = {
    "num_samples": [7, 40, 1, 2],
    "warmup_steps": ["auto", 60, 0, 1],
    "thinning": ["auto", 1, 3],
    "batch_size": [None, 6, "auto", N],
    "num_chains": [2, 1, 3],
    "store": [None, None, None, False],
    "sampling": [None, "shuffle", "replacement", "symmetric"],
}
#: Values out of range.
WRONG = {
    "lr": [0, -0.1, "fast", None, {}, {"u": 0.1}],
    "temperature": [-1, "auto", None],
    "precondition": ["full", 3],
    "num_samples": [0, "auto", None, 2.5],
    "warmup_steps": [-1, None, 1.5],
    "thinning": [0, None, "none"],
    "batch_size": [0, 10 * N, "all", 2.5],
    "num_chains": [0, None],
    "sampling": ["random"],
}


def model(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=x.dtype), 1.0).to_event(1))
    s = pyro.sample("s", dist.LogNormal(torch.zeros((), dtype=x.dtype), 0.5))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(x @ w, s), obs=y)


def drawn(number):
    """(The row of a method, its arguments, run's) of so many-th combination; one in eight has a
    value out of range."""
    source, row = random.Random(number), TABLE[number % len(TABLE)]
    every = ARGUMENTS | RUN
    # half of them near the defaults, as of any values few go together
    near = {name: source.random() < (number // len(TABLE)) % 2 * 0.6 for name in every}
    chosen = {n: values[0] if near[n] else source.choice(values) for n, values in every.items()}
    chosen = {name: value for name, value in chosen.items() if value is not None or name in NONE}
    if not row.has_momentum:
        chosen.pop("friction", None)
    if source.random() < 1 / 8:
        wrong = source.choice(sorted(WRONG))
        chosen[wrong] = source.choice(WRONG[wrong])
    how = {name: chosen.pop(name) for name in RUN if name in chosen}
    return row, chosen, how


@pytest.fixture
def short(monkeypatch):
    """Windows and pilots of few steps."""
    monkeypatch.setattr(choose, "WARM_UP", WarmUp(first_window=32))
    for module in (choose, adjust):
        monkeypatch.setattr(module, "PILOTS", Pilots(least=32))
    monkeypatch.setattr(training, "TRAINING", Training(steps=20))


def outcome(row, options, how, monkeypatch, path):
    """The sampler after its run; the error's text where it was refused."""
    steps, simulate, chains = [], run_module.simulate, how["num_chains"]

    def counted(*args, **kwargs):
        steps.append(1)
        return simulate(*args, **kwargs)

    monkeypatch.setattr(run_module, "simulate", counted)
    most = 600 * N * max(1, chains or 1)
    try:
        sampler = row.sampler(model, compile=False, **options)
        quiet(sampler.run, (X, Y), max_rows=most, seed=0, progress=False, **how)
    except PyroScaleError as error:
        refused = str(error)
    else:
        ask(sampler, options, how, path)
        return sampler
    assert not steps, f"refused after the work: {refused}"
    names = "|".join([*options, *how, "max_rows", row.name])
    assert re.search(rf"\b({names})\b", refused), f"names no argument: {refused}"
    return refused


def ask(sampler, options, how, path):
    """Asks all that can be asked after a run."""
    table, told = quiet(sampler.summary), quiet(sampler.diagnostics)
    texts = [repr(sampler), str(sampler), table._repr_html_(), told._repr_html_()]
    if how["store"] is False:
        assert sampler.moments()["w"].mean.shape == (2,)
        return
    report = sampler.report()
    texts += [str(report), report.headline, report.to_frame()._repr_html_()]
    draws = sampler.get_samples(group_by_chain=True)["w"]
    auto = options["lr"] == how["thinning"] == "auto"
    one = auto and options["temperature"] == 0  # where training ends
    assert draws.shape == (how["num_chains"], 1 if one else how["num_samples"], 2)
    assert bool(torch.isfinite(draws).all())
    assert quiet(sampler.to_arviz).posterior["w"].shape == draws.shape
    assert sampler.predict(X)["y"].shape[1:] == (N,)
    sampler.save(path / "run")
    again = type(sampler).load(path / "run", model)
    assert torch.equal(again.get_samples(group_by_chain=True)["w"], draws)
    assert quiet(again.summary).equals(table)
    assert again.report() == report
    texts += [repr(again), quiet(again.diagnostics)._repr_html_()]
    assert all(texts)
    for asked in (sampler.loo, sampler.ksd, sampler.step_size_bias):
        with contextlib.suppress(PyroScaleError):  # under 20 draws, temperature 0
            quiet(asked)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_a_combination_runs_or_is_refused(number, short, monkeypatch, tmp_path):
    outcome(*drawn(number), monkeypatch, tmp_path)
