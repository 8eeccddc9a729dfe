"""Every way of running the steps, what chooses among them, and what fails on the way."""

import functools
import os
import re
import subprocess
import sys
import textwrap
import threading
import warnings
from itertools import product
from types import SimpleNamespace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from models import normal, of_rows
from reference import close_in_scale, double, normals
from repetitions import long_but
from runs import EVERY_STEP, QUIET, same_steps
from torch.utils.data import DataLoader, Dataset
from warned import without_replay

import pyro_scale as ps
from pyro_scale.compile import cache, compiled
from pyro_scale.compile.operations import NotALoop
from pyro_scale.data.row_sampler import RowIndices
from pyro_scale.engine import compile_step
from pyro_scale.engine.draws import Steps
from pyro_scale.engine.plan import StepPlan
from pyro_scale.errors import ArgumentError, CompileWarning, NonFiniteError, NotRunError

pytestmark = pytest.mark.usefixtures("float64")

LOOP, STEP, EAGER, ONE_BY_ONE = "compiled loop", "compiled step", "eager", "eager, chain by chain"
X = normals(40, 3)
Y = (X.sum(1) > 0).double()


logistic = of_rows(lambda x, w: dist.Bernoulli(logits=x @ w), w=normal(3))


def ran(model, compile, data=(X, Y), method=ps.BAOA, lr=0.2, **kwargs):
    chosen = {**EVERY_STEP, **QUIET, "num_samples": 200, "num_chains": 2, "batch_size": 7}
    return method(model, lr=lr, compile=compile).run(data, **{**chosen, **kwargs})


def program_of(sampler):
    """What the run and its export say of how the steps were run."""
    name = sampler.posterior.draws.attrs["program"]
    assert sampler.to_arviz(log_likelihood=False).posterior.attrs["program"] == name
    return name


def reasons(caught):
    """The warnings about compilation."""
    found = [w for w in caught if "could not be compiled" in str(w.message)]
    assert all(issubclass(w.category, UserWarning) for w in found)
    return [str(w.message) for w in found]


def keep_in(directory, monkeypatch):
    """Keeps loops in another directory; Inductor's header, slow to build, stays where it is."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache.directory() / "inductor"))
    monkeypatch.setenv("PYRO_SCALE_CACHE_DIR", str(directory))


def refuse(error):
    def refusing(*args, **kwargs):
        raise error

    return refusing


@functools.cache
def plain():
    """The draws without compilation."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sampler = ran(logistic, False)
    assert not reasons(caught)
    return sampler


# ------------------------------------------------------------------ in order


@pytest.mark.slow
def test_a_loop_first(recwarn):
    sampler = ran(logistic, True)
    assert program_of(sampler) == LOOP
    same_steps(sampler, plain())
    assert not reasons(recwarn)


@pytest.mark.slow
def test_then_a_compiled_step(recwarn, monkeypatch):
    """The warning names what is not in the loop, once, and this torch."""
    left = "buf3 = torch.ops.aten.linalg_cholesky_ex.default(buf2)"
    monkeypatch.setattr(compiled, "library_for", refuse(NotALoop(left)))
    sampler = ran(logistic, True)
    assert program_of(sampler) == STEP
    same_steps(sampler, plain())
    assert not reasons(recwarn)
    (warning,) = [str(w.message) for w in recwarn if issubclass(w.category, CompileWarning)]
    assert "torch.ops.aten.linalg_cholesky_ex.default is nothing that" in warning
    assert f"(torch {torch.__version__})" in warning


@pytest.mark.slow
def test_the_compilers_own_error_is_said(monkeypatch, tmp_path):
    keep_in(tmp_path, monkeypatch)
    output = "C++ compile error\n\nCommand:\ng++ x.cpp\n\nOutput:\nx.cpp: In function:\n"
    output += "x.cpp:3:10: fatal error: cpp_prefix.h: No such file\ncompilation terminated."
    monkeypatch.setattr(compiled, "build_library", refuse(RuntimeError(output)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ran(logistic, True, num_samples=5)
    (reason,) = reasons(caught)
    assert "C++ compile error: x.cpp:3:10: fatal error: cpp_prefix.h: No such file; torch" in reason


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "step"),
    long_but(
        [(compile_step, "trace"), (compiled, "compile_graph"), (compiled, "build_library")],
        (compiled, "build_library"),
    ),
)
def test_then_the_step_itself(module, step, monkeypatch, tmp_path):
    """Whatever part of compiling it fails in: no C++ compiler, for one."""
    keep_in(tmp_path, monkeypatch)
    monkeypatch.setattr(module, step, refuse(RuntimeError("no compiler\nhere")))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sampler = ran(logistic, True)
    assert program_of(sampler) == EAGER
    assert torch.equal(sampler.posterior.draws.positions, plain().posterior.draws.positions)
    (reason,) = reasons(caught)
    assert f"(RuntimeError: no compiler; torch {torch.__version__})" in reason
    assert "compile=False" in reason
    (where,) = {w.filename for w in caught if "compiled" in str(w.message)}
    assert where == __file__


def branching(x, y):
    """Python decides by a number of the chain's own."""
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    scale = 1.0 if w.sum() > 0 else 2.0
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=scale * (x @ w)), obs=y)


reading = of_rows(
    lambda x, w: dist.Bernoulli(logits=x @ w * (1 + 0.1 * w[0].item() ** 2)), w=normal(3)
)


@pytest.mark.slow
@pytest.mark.parametrize("model", long_but([branching, reading], branching))
def test_then_chain_by_chain(model):
    """What vmap refuses and what cannot be traced; a trace of one branch would be wrong."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sampler = ran(model, True, num_samples=60)
    assert program_of(sampler) == ONE_BY_ONE
    (reason,) = reasons(caught)
    assert "reads a tensor's value" in reason
    expected = ran(model, False, num_samples=60)
    assert program_of(expected) == ONE_BY_ONE
    assert torch.equal(sampler.posterior.draws.positions, expected.posterior.draws.positions)


# ------------------------------------------------------------------ whether to compile


@pytest.fixture(autouse=True)
def nothing_is_compiled_yet(monkeypatch):
    """As in a process of its own."""
    monkeypatch.setattr(compiled, "_compiled_before", {})


class Inputs:
    """Inputs of steps, of which only the number of chains matters."""

    def __init__(self, num_chains):
        self.num_chains = num_chains

    def of_chains(self, chains):
        return Inputs(len(range(self.num_chains)[chains]))

    def part(self, first, last):
        return self


def compiles(
    compile, steps, num_chains=1, operations=500, rows=0, product=False, agree=None, **engine
):
    """Whether choose_program compiles so many steps of so many operations each, if one of them is
    on matrices of so many rows, one for each chain."""
    matrices = torch.zeros(num_chains, rows, rows)
    nothing = torch.zeros(0)

    def step(state, block, *_):
        assert len(state) == block.num_chains
        matrix = matrices[: block.num_chains].detach()  # two views, as operations
        torch.bmm(matrix, matrix) if product else torch.neg(matrix)
        for _ in range(operations - 3):
            nothing.neg()

    built = SimpleNamespace(program=lambda *_: "built before")
    engine = SimpleNamespace(**{"vectorized": True, "ties_chains": False, **engine})
    positions = torch.zeros(num_chains, 1)
    steps = Steps(steps) if isinstance(steps, int) else steps
    plan = StepPlan(engine, positions, None, {}, steps, 0, compile, built, agree=agree)
    eager = SimpleNamespace(name="eager", run=step)
    example = SimpleNamespace(eager=eager, state=positions, block=Inputs(num_chains))
    return compile_step.choose_program(plan, example, None, str) == "built before"


def test_auto_compiles_runs_that_repay_it():
    """500 operations a step and Python that takes as long as 350, of which 500,000 take as long as
    compiling, and 260 more for each operation."""
    assert not compiles("auto", 741)
    assert compiles("auto", 742)
    assert compiles("auto", 435, operations=2000)
    assert not compiles("auto", 434, operations=2000)
    assert compiles(True, 1)
    assert not compiles(False, 10**9)


def test_auto_counts_elements():
    """14 million elements take as long as 1,000 operations; a compiled product of matrices takes
    as long as an eager one."""
    rows = 3742  # 14,002,564 elements
    assert not compiles("auto", 340, rows=rows)
    assert compiles("auto", 341, rows=rows)
    assert not compiles("auto", 741, rows=200, product=True)
    assert compiles("auto", 742, rows=200, product=True)


def test_auto_counts_all_chains():
    """Of vmapped chains the elements (40,000 each here), of others the operations too; of coupled
    chains a step counts all."""
    for vmapped in ({}, {"ties_chains": True}):
        assert not compiles("auto", 554, num_chains=100, rows=200, **vmapped)
        assert compiles("auto", 555, num_chains=100, rows=200, **vmapped)
    assert compiles("auto", 742, num_chains=100)
    assert not compiles("auto", 741, num_chains=100)
    assert not compiles("auto", 185, num_chains=4, vectorized=False)
    assert compiles("auto", 186, num_chains=4, vectorized=False)


def test_processes_that_take_steps_together_agree_to_compile():
    assert not compiles("auto", 10**6, agree=lambda condition: False)


@pytest.mark.parametrize("steps", [Steps(742), Steps(64, 102, 10), Steps(1, 741)])
def test_auto_counts_all_steps(steps):
    fewer = Steps(steps.num_samples, steps.warmup_steps - 1, steps.thinning)
    assert compiles("auto", steps)
    assert not compiles("auto", fewer if steps.warmup_steps else Steps(741))


@pytest.mark.slow
def test_a_longer_step_is_compiled_for_fewer_steps():
    """The same logistic regression with a prior of 30 sites more."""

    def wide(x, y=None):
        for number in range(30):
            pyro.sample(f"z{number}", dist.Normal(0.0, 1.0))
        return logistic(x, y)

    how = {"num_samples": 10, "thinning": 100, "num_chains": 1}
    assert program_of(ran(logistic, "auto", **how)) == EAGER
    assert program_of(ran(wide, "auto", **how)) == LOOP


@pytest.mark.parametrize("value", ["yes", None, "Auto", 2, "True"])
def test_other_values_are_refused(value):
    with pytest.raises(ArgumentError, match=re.escape(f"compile={value!r}")):
        ps.BAOA(logistic, lr=0.1, compile=value)


def test_zero_is_false_or_refused():
    try:
        sampler = ran(logistic, 0)
    except ArgumentError:
        return
    assert program_of(sampler) == EAGER


@pytest.mark.slow
def test_the_times_add_up():
    fast, slow = ran(logistic, True).posterior.draws.attrs, plain().posterior.draws.attrs
    assert fast["compile_time"] > 0
    assert 0 < fast["sampling_time"] < slow["sampling_time"]
    assert slow["compile_time"] < 0.5


# ------------------------------------------------------------------ programs kept on disk


def scaled(factor):
    return of_rows(lambda x, w: dist.Bernoulli(logits=factor * (x @ w)), w=normal(3, sd=factor))


@pytest.mark.slow
def test_a_built_loop_is_found_again(monkeypatch):
    """By the same graph, whatever the data, without Inductor."""
    ran(scaled(0.5), True)
    monkeypatch.setattr(compiled, "compile_graph", refuse(RuntimeError("asked for")))
    again = ran(scaled(0.5), True, data=(-X, Y), seed=3)
    assert program_of(again) == LOOP
    same_steps(again, ran(scaled(0.5), False, data=(-X, Y), seed=3))


@pytest.mark.long
def test_a_model_that_differs_in_one_number_is_built_anew():
    for factor in (0.5, 0.25):
        same_steps(ran(scaled(factor), True), ran(scaled(factor), False))


linear = of_rows(lambda x, w: dist.Normal(x @ w, 1.0), w=normal(3))


@pytest.mark.parametrize(
    "change", long_but(["batch size", "rows", "type", "strides", "whole"], "batch size", "type")
)
@pytest.mark.long
def test_data_of_another_geometry_are_built_anew(change):
    """A loop knows sizes, strides and types by heart."""
    data, size = {
        "batch size": ((X, Y), 6),
        "rows": ((X[:39], Y[:39]), None),
        "type": ((X, (3 * Y).long()), 7),
        "strides": ((X.repeat(1, 12)[:, ::12], Y), None),
        "whole": ((X, Y), None),
    }[change]
    ran(linear, True)
    fast, slow = (ran(linear, c, data=data, batch_size=size) for c in (True, False))
    assert program_of(fast) == LOOP
    same_steps(fast, slow)


# ------------------------------------------------------------------ nothing is left changed


def settings_now():
    import torch._functorch.config as functorch_config
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile

    return {
        "inductor": config.get_config_copy(),
        "functorch": functorch_config.get_config_copy(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "pybinding": AsyncCompile.cpp_pybinding,
        "random": torch.get_rng_state().tolist(),
        "validation": (dist.Normal.__base__, torch.distributions.Distribution._validate_args),
        "pyro": pyro.settings.get(),
        "params": sorted(pyro.get_param_store().keys()),
        "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "onednn": torch.backends.mkldnn.enabled,
        "filters": list(warnings.filters),
        "environment": dict(os.environ),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "validation"),
    long_but(
        product([None, "trace", "compile_graph", "build_library", "inside"], [True, False]),
        *[(None, True), ("compile_graph", False), ("inside", True)],
    ),
)
def test_settings_are_as_they_were(where, validation, monkeypatch, tmp_path):
    """After a compiled run and after one that failed at any point."""
    keep_in(tmp_path, monkeypatch)
    if where == "inside":
        import torch._inductor.compile_fx as compile_fx

        monkeypatch.setattr(compile_fx, "compile_fx_inner", refuse(RuntimeError("no")))
    elif where:
        module = compile_step if where == "trace" else compiled
        monkeypatch.setattr(module, where, refuse(RuntimeError("no")))
    pyro.clear_param_store()
    pyro.param("other", torch.ones(2))
    with pyro.validation_enabled(validation):
        before = settings_now()
        with warnings.catch_warnings(record=True):
            sampler = ran(logistic, True, num_samples=5)
        after = settings_now()
    assert program_of(sampler) == (EAGER if where else LOOP)
    for name, value in before.items():
        assert after[name] == value, name
    pyro.clear_param_store()


@pytest.mark.slow
def test_settings_while_a_model_is_traced_that_raises():
    """An error of the model's own that only tracing meets falls back too."""
    calls = []

    def model(x, y):
        logistic(x, y)
        from torch.fx.experimental.proxy_tensor import get_proxy_mode

        if get_proxy_mode() is not None:
            calls.append(1)
            raise KeyError("only under make_fx")

    before = settings_now()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sampler = ran(model, True)
    assert calls
    (reason,) = reasons(caught)
    assert "KeyError" in reason
    same_steps(sampler, plain())
    after = settings_now()
    assert {k: v for k, v in after.items() if before[k] != v} == {}


# ------------------------------------------------------------------ chains that fail


def broken_run(model, compile, data, **kwargs):
    """(The sampler, what its error says, but for a file's name)."""
    method = kwargs.pop("method", ps.BAOA)
    sampler = method(model, compile=compile, **kwargs.pop("hypers", {"lr": 0.2}))
    chosen = {
        **EVERY_STEP,
        "num_samples": 150,
        "num_chains": 6,
        "seed": 1,
        "progress": False,
        **kwargs,
    }
    with pytest.raises(NonFiniteError) as caught:
        sampler.run(data, **chosen)
    return sampler, without_replay(str(caught.value))


def failures(message):
    """chain -> (step, site)."""
    found = re.findall(r"chain (\d+) at step (\d+), site '(\w+)'", message)
    return {int(chain): (int(step), site) for chain, step, site in found}


def two_sites(x):
    pyro.sample("v", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("x", dist.Normal(w, 1.0).to_event(1), obs=x)


def two_sites_and_a_point(x):
    p = pyro.param("p", double(1.0, 2.0))
    v = pyro.sample("v", dist.Normal(p, 1.0).to_event(1))
    w = pyro.sample("w", dist.Normal(torch.zeros(3) + v.sum(), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("x", dist.Normal(w, 1.0).to_event(1), obs=x)


@pytest.mark.slow
@pytest.mark.parametrize(("thinning", "warmup"), long_but([(1, 0), (3, 10)], (3, 10)))
def test_a_bad_row_stops_each_chain_when_it_comes_to_it(thinning, warmup):
    """Known from the indices; the others' draws are those of a run without the bad row."""
    rows, bad = normals(400, 3), 13
    broken = rows.clone()
    broken[bad, 1] = torch.nan
    steps = {"num_samples": (150 - warmup) // thinning, "thinning": thinning}
    steps |= {"warmup_steps": warmup, "batch_size": 2, "seed": 3}
    total = warmup + steps["num_samples"] * thinning
    indices = RowIndices(3, range(6), 400, 2, "shuffle").span(0, total)
    expected = {}
    for chain, step, _ in torch.nonzero(indices == bad).tolist():
        expected.setdefault(chain, (step, "x"))
    assert 1 < len(expected) < 5
    assert all(step > 2 for step, _ in expected.values())

    with pyro.validation_enabled(False):  # else the row is refused before the run
        fast, said = broken_run(two_sites, True, broken, **steps)
        slow, said_slowly = broken_run(two_sites, False, broken, **steps)
    assert program_of(fast) == LOOP
    assert failures(said) == expected
    assert said == said_slowly
    assert "holds NaN or infinite numbers" in said
    same_steps(fast, slow)
    healthy = ran(two_sites, True, data=rows, num_chains=6, **steps)
    sound = [chain for chain in range(6) if chain not in expected]
    close_in_scale(fast.posterior.draws.positions, healthy.posterior.draws.positions[sound])


@pytest.mark.slow
def test_a_chain_that_diverges_stops_alone():
    """One start is out of reach; the step and the site are the same, and the batch is not bad."""
    start = double(0.1, 50.0, 0.2, 0.3, 1e3, 0.4)

    def quartic(x):
        v = pyro.sample("v", dist.Normal(0.0, 1.0))
        pyro.factor("wall", -(v**4) / 100)
        two_sites_of(x)

    def two_sites_of(x):
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Normal(w, 1.0).to_event(1), obs=x)

    hypers = {"lr": 0.6, "init_strategy": {"v": start, "w": torch.zeros(6, 3)}}
    found = [broken_run(quartic, c, X, hypers=dict(hypers), batch_size=5) for c in (True, False)]
    (fast, said), (slow, said_slowly) = found
    assert program_of(fast) == LOOP
    assert said == said_slowly
    assert set(failures(said)) >= {4}
    assert {site for _, site in failures(said).values()} == {"v"}
    assert "a step size above the stable range" in said
    same_steps(fast, slow)


@pytest.mark.long
def test_a_chain_that_fails_beside_points():
    """All chains are one program then, and what the sound ones share stays sound."""
    pyro.clear_param_store()
    rows = normals(400, 3)
    rows[123, 1] = torch.inf
    found = [
        broken_run(two_sites_and_a_point, c, rows, batch_size=2, seed=3) for c in (True, False)
    ]
    (fast, said), (slow, said_slowly) = found
    assert program_of(fast) == LOOP
    assert said == said_slowly
    assert 1 <= len(failures(said)) < 6
    same_steps(fast, slow)
    assert torch.isfinite(fast.params["p"]).all()
    close_in_scale(fast.params["p"], slow.params["p"])


def curves(y):
    """A factorization of what the state says, which NaN upsets for all chains at once."""
    length = pyro.sample("length", dist.LogNormal(-1.0, 0.3))
    place = torch.linspace(0, 1, 3)
    covariance = torch.exp(-0.5 * ((place[:, None] - place) / length).square()) + torch.eye(3)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(3), covariance), obs=y)


@pytest.mark.long
def test_a_broken_chain_upsets_no_factorization():
    """Another chain's state stands in for it, chain 0's too."""
    rows = normals(400, 3)
    rows[123, 1] = torch.nan
    with pyro.validation_enabled(False):  # else the row is refused before the run
        found = [broken_run(curves, c, rows, batch_size=2, seed=4) for c in (True, False)]
    (fast, said), (slow, said_slowly) = found
    assert program_of(fast) == STEP
    assert said == said_slowly
    assert 0 in failures(said)
    assert 1 < len(failures(said)) < 6
    same_steps(fast, slow)


@pytest.mark.slow
def test_all_chains_fail_at_a_step():
    hypers = {"lr": lambda step: 0.2 if step < 137 else 1e200}
    said = []
    for compile in (True, False):
        sampler, message = broken_run(two_sites, compile, X, hypers=hypers, num_chains=3)
        said.append(message)
        with pytest.raises(NotRunError):
            sampler.get_samples()
    assert said[0] == said[1]
    assert said[0].count("chain ") == 3
    first, *others = failures(said[0]).values()
    assert 137 <= first[0] <= 140
    assert len(others) == 2


# ------------------------------------------------------------------ errors


class Broken(Dataset):
    """A data set whose last row cannot be read."""

    def __len__(self):
        return 60

    def __getitem__(self, i):
        if i == 59:
            raise LookupError(f"row {i} is lost")
        return X[i % 40], Y[i % 40]


@pytest.mark.parametrize("compile", [True, False])
def test_an_error_of_the_data_comes_out_as_it_is(compile):
    class Order:
        """Comes to the last row late, and to none twice."""

        def __iter__(self):
            return iter(range(60))

        def __len__(self):
            return 60

    loader = DataLoader(Broken(), 1, sampler=Order())
    with pytest.raises(LookupError, match="row 59 is lost"):
        ran(logistic, compile, data=loader, batch_size=None, num_chains=1)
    assert not [t for t in threading.enumerate() if t.name.startswith("pyro_scale-block")]


HEAD = """
    import resource, sys, warnings
    import pyro, pyro.distributions as dist, torch
    import pyro_scale as ps
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
"""


def in_a_process(script):
    """A script's standard output; a crash shows as a signal's number."""
    script = textwrap.dedent(HEAD) + textwrap.dedent(script)
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.long
def test_an_index_out_of_range_in_a_later_batch_is_an_error():
    """Where the model reads a table of its latents by a column of the data."""
    out = in_a_process("""
    group = torch.zeros(400, dtype=torch.long)
    group[300] = 10**6

    def model(group, y):
        b = pyro.sample("b", dist.Normal(torch.zeros(4), 1.0).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(b[group], 1.0), obs=y)

    for chains in (1, 3):
        sampler = ps.BAOA(model, lr=0.1, compile=True)
        try:
            sampler.run((group, torch.ones(400)), batch_size=2, num_samples=500, seed=0,
                        num_chains=chains, progress=False)
        except Exception as error:
            print(chains, type(error).__name__, "out of" in str(error))
    """)
    assert re.findall(r"(\d) \w+Error True", out) == ["1", "3"]


@pytest.mark.long
def test_memory_does_not_grow_with_the_steps():
    """Eight times the steps for as many draws; a byte a number a step would be 16 MB."""
    out = in_a_process("""
    x = torch.randn(100, 4)

    def model(x):
        w = pyro.sample("w", dist.Normal(torch.zeros(4), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Normal(w, 1.0).to_event(1), obs=x)

    peaks = []
    for thinning in (50, 500, 4000):
        sampler = ps.SGHMC(model, lr=0.1, compile=True)
        sampler.run(x, batch_size=2, num_samples=100, thinning=thinning, seed=0, progress=False)
        assert sampler.posterior.draws.attrs["program"] == "compiled loop"
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
    print(*peaks)
    """)
    _, some, many = map(int, out.split())
    assert many - some < 8


@pytest.mark.slow
def test_what_leaves_torch_is_not_frozen():
    """make_fx does not see NumPy: the first batch's features would be kept for ever."""

    def model(x, y):
        z = torch.as_tensor(np.tanh(x.numpy()))
        w = pyro.sample("w", dist.Normal(torch.zeros(3, dtype=torch.float64), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(z @ w, 1.0), obs=y)

    x, y = torch.randn(20, 3, dtype=torch.float64), torch.randn(20, dtype=torch.float64)
    draws = []
    for compile in (True, False):
        sampler = ps.BAOA(model, lr=0.1, compile=compile)
        settings = {**EVERY_STEP, **QUIET, "num_samples": 20, "num_chains": 1, "batch_size": 5}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            draws.append(sampler.run((x, y), **settings).get_samples()["w"])
        frozen = [w for w in caught if "frozen" in str(w.message)]
        assert len(frozen) == compile
    assert torch.equal(*draws)


@pytest.mark.long
def test_a_library_cut_short_is_built_again(tmp_path, monkeypatch):
    """Loading a part of a library kills the process."""
    keep_in(tmp_path, monkeypatch)
    ran(logistic, True)
    (library,) = tmp_path.glob("*.so")
    whole = library.read_bytes()
    library.unlink()  # this process has it in use
    library.write_bytes(whole[: len(whole) // 2])
    assert program_of(ran(logistic, True)) == LOOP
    assert len(library.read_bytes()) == len(whole)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_what_its_eager_steps_give():
    x, y = torch.randn(40, 3, device="cuda"), torch.randn(40, device="cuda")

    model = of_rows(
        lambda x, w: dist.Normal(x @ w, 1.0),
        w=lambda: dist.Normal(torch.zeros(3, device="cuda"), 1.0).to_event(1),
    )
    draws = [
        ps.BAOA(model, lr=0.1, compile=compile)
        .run((x, y), num_samples=50, batch_size=8, num_chains=3, **EVERY_STEP, **QUIET)
        .get_samples()["w"]
        for compile in (True, False)
    ]
    torch.testing.assert_close(*draws, rtol=1e-4, atol=1e-4)
