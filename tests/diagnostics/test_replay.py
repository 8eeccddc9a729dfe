"""The last steps of a chain that broke: what was written is what happened, and what `replay` says
of it is so."""

import dataclasses
import functools
import itertools
import math
import random
import re
from functools import partial
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from densities import linear_regression
from models import of_network
from reference import close, double, normals
from repetitions import long_but
from runs import ONE_CHAIN
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, TensorDataset

import pyro_scale as ps
from pyro_scale.diagnostics import crash_dump
from pyro_scale.engine import inputs
from pyro_scale.engine import step_recorder as last_steps
from pyro_scale.errors import FileError, NonFiniteError
from pyro_scale.storage import files

N, B = 60, 10
X = normals(N, 2, seed=1)
Y = X @ double(1.0, -0.5) + 0.3 * normals(N, seed=2)
QUIET = {**ONE_CHAIN, "num_samples": 300, "seed": 3, "progress": False}
IN_BATCHES = {**QUIET, "batch_size": B}
regression = linear_regression(0.3)


def prior(name, size=2):
    pyro.factor("no data", torch.zeros(()))
    return pyro.sample(name, dist.Normal(torch.zeros(size).double(), 1.0).to_event(1))


def wider_prior(x, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(2).double(), 3.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, double(0.3)[0]), obs=y)


def another_name(x, y):
    w = prior("weight")
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, double(0.3)[0]), obs=y)


def subsampling_itself(x, y):
    w = prior("w")
    with pyro.plate("data", N, subsample_size=B) as i:
        pyro.sample("y", dist.Normal(x[i] @ w, double(0.3)[0]), obs=y[i])


def with_shift(x, y):
    shift = pyro.param("shift", double(0.2, 0.1))
    w = prior("w")
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ (w + shift), double(0.3)[0]), obs=y)


def root_of_a_negative(x, y):
    """The density of y is NaN where v < -1, and with it all gradients, that of a first."""
    a = prior("a")
    v = pyro.sample("v", dist.Normal(double(0.0)[0], 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ a, torch.sqrt(1 + v)), obs=y)


def root_at_zero(x):
    """Its value is finite everywhere; the derivative of v's part is infinite at once."""
    u = prior("u")
    v = pyro.sample("v", dist.Normal(double(0.0)[0], 1.0))
    pyro.factor("root", torch.where(v > 1.0, torch.sqrt(v - v.detach()), 0.0))
    with pyro.plate("data", len(x)):
        pyro.sample("x", dist.Normal(u, 1.0).to_event(1), obs=x)


def not_a_covariance(x):
    """Its matrix has no Cholesky factor where r is 1 or more."""
    r = pyro.sample("r", dist.Normal(double(0.0)[0], 1.0))
    covariance = torch.eye(2).double() + r * (1 - torch.eye(2).double())
    with pyro.plate("data", len(x)):
        pyro.sample("x", dist.MultivariateNormal(double(0.0, 0.0), covariance), obs=x)


def nan_above_2(x, y):
    w = pyro.sample("w", dist.Normal(double(0.0)[0], 1.0))
    pyro.factor("cliff", w * torch.where(w > 2.0, torch.nan, 0.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(w, 30.0), obs=y)


def broken(sampler, data=(X, Y), **kwargs):
    """What the error says of a run that breaks."""
    with pytest.raises(NonFiniteError) as error:
        sampler.run(data, **{**IN_BATCHES, **kwargs})
    return str(error.value)


@functools.cache
def message_of_divergence():
    """What the error says of a run whose steps are much too long."""
    return broken(ps.SGLD(regression, lr=1e3))


def path_in(message):
    return Path(re.search(r"ps\.replay\('(.*?)', model\) reruns the last", message)[1])


def failures(message):
    """chain -> (step, site), as the error says."""
    found = re.findall(r"chain (\d+) at step (\d+)(?:, site '(\w+)')?", message)
    return {int(chain): (int(step), site) for chain, step, site in found}


def replay_of(message, model, path=None):
    """The replay, which tells the same chain, step and states as the run."""
    found = ps.replay(path or path_in(message), model)
    assert found.step == failures(message)[found.chain][0]
    assert found.steps["step"].iloc[-1] == found.step
    assert "is not what it was" not in found.reason
    return found


# ------------------------------------------------------------------ what is written


TOO_LONG = {
    "at once": partial(ps.SGLD, lr=1e40),
    "SGLD": partial(ps.SGLD, lr=40.0),
    "SGHMC": partial(ps.SGHMC, lr=5.0),
    "BAOA": partial(ps.BAOA, lr=9.0),
    "UBU": partial(ps.UBU, lr=9.0),
    "SGNHT": partial(ps.SGNHT, lr=9.0),
    "by site": partial(ps.SGLD, lr={"w": double(0.02, 40.0)}),
    "a schedule": partial(ps.BAOA, lr=lambda step: 0.05 if step < 30 else 20.0),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "compile"),
    long_but(
        [(name, compile) for name in TOO_LONG for compile in (False, True)],
        *[("at once", False), ("SGNHT", False), ("a schedule", False), ("by site", True)],
    ),
)
def test_the_states_are_those_of_the_run(name, compile):
    make = partial(TOO_LONG[name], regression)
    message = broken(make(compile=compile), num_chains=2)
    for chain, (step, site) in failures(message).items():
        path = path_in(message).with_name(f"crash-dump-{chain}")
        steps = files.read(path, "crash dump")["steps"]
        numbers = [each["number"] for each in steps]
        assert numbers == list(range(step - len(steps) + 1, step + 1))
        assert len(steps) == min(16, step + 1) or step > 64  # later, as many as the block has
        positions = [each["state"]["position"] for each in steps if each["number"] > 0]
        check_steps(positions, make(compile=compile), chain, step, torch.equal)
        check_steps(positions, make(compile=False), chain, step, torch.allclose)
        found = replay_of(message, regression, path)
        assert (found.chain, found.site) == (chain, site)
        assert f"the gradient of '{site}' grew" in found.reason
        assert "the step size is above the stable range" in found.reason


def check_steps(positions, sampler, chain, step, equal):
    """Of the steps up to one, as of a run of two chains that ends there."""
    steps = {**IN_BATCHES, "num_samples": step, "num_chains": 2}
    try:
        sampler.run((X, Y), **steps)
    except NonFiniteError:  # of the other chain
        chain = 0  # of those that have finished
    kept = sampler.posterior.draws.positions[chain]
    assert all(map(equal, positions, kept[len(kept) - len(positions) :]))


@pytest.mark.slow
@pytest.mark.parametrize("budget", [1, 3000])
def test_tapes_are_written_over_and_steps_are_not(budget, monkeypatch):
    loader = DataLoader(TensorDataset(X, Y), batch_size=B)
    make = partial(
        ps.SGLD, nan_above_2, lr=3.0, temperature=4.0, init_strategy={"w": double(0.0, 0.0)}
    )
    whole = files.read(
        path_in(broken(make(), loader, batch_size=None, num_chains=2)), "crash dump"
    )["steps"]
    monkeypatch.setattr(inputs, "_BUDGET", budget)
    message = broken(make(), loader, batch_size=None, num_chains=2)
    cut = files.read(path_in(message), "crash dump")["steps"]
    replay_of(message, nan_above_2)
    count = min(len(whole), len(cut))
    assert count > 4
    for one, other in zip(whole[-count:], cut[-count:], strict=True):
        assert one["number"] == other["number"]
        for mine, theirs in zip(*map(pytree.tree_leaves, (one, other)), strict=True):
            assert not isinstance(mine, torch.Tensor) or torch.equal(mine, theirs)


@pytest.mark.slow
def test_noise_batches_and_values_are_those_of_the_step():
    """One step of SGLD by hand: x + lr g + sqrt(2 lr T / N) noise, g over N."""
    message = broken(ps.SGLD(regression, lr=lambda step: 2.0 + 0.01 * step, temperature=0.7))
    steps = files.read(path_in(message), "crash dump")["steps"]
    log_posterior = ps.LogPosterior(regression, N)
    for step, after in itertools.pairwise(steps[:-1]):
        lr, w = 2.0 + 0.01 * step["number"], step["state"]["position"]
        assert len(step["arguments"][0]) == B
        gradient, evaluation = log_posterior.grad({"w": w}, step["arguments"])
        close(torch.tensor(step["log_joint"], dtype=torch.float64), evaluation.log_joint)
        noise = (2 * lr * 0.7 / N) ** 0.5 * step["noise"][0]
        close(after["state"]["position"], w + lr * gradient["w"] / N + noise)


@pytest.mark.slow
def test_the_table_and_what_to_go_on_with():
    message = broken(ps.BAOA(regression, lr=1.5))
    found = replay_of(message, regression)
    log_posterior = ps.LogPosterior(regression, N)
    gradient, evaluation = log_posterior.grad(found.params, found.batch)
    assert not torch.isfinite(torch.cat([gradient["w"], evaluation.log_joint[None]])).all()
    steps = files.read(path_in(message), "crash dump")["steps"]
    assert list(found.steps) == ["step", "lr", "log_joint", "w value", "w gradient"]
    assert (found.steps["lr"] == 1.5).all()
    for row, step in list(zip(found.steps.to_dict("records"), steps, strict=True))[:5]:
        w = step["state"]["position"]
        gradient, evaluation = log_posterior.grad({"w": w}, step["arguments"])
        assert row["w value"] == pytest.approx(math.hypot(*w.tolist()))
        assert row["w gradient"] == pytest.approx(math.hypot(*(gradient["w"] / N).tolist()))
        assert row["log_joint"] == pytest.approx(float(evaluation.log_joint))
    assert found.reason in str(found)
    assert found.steps.to_string(index=False) in str(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        partial(ps.SGHMC, lr=0.3, control_variates={"w": double(0.5)[0]}),
        partial(ps.SGLD, lr=2.0, subtract_noise=True),
    ],
    ids=["control variates", "subtracted noise"],
)
@pytest.mark.filterwarnings("ignore:subtract_noise")
def test_what_is_known_of_the_mode_goes_along(make):
    """At values at which it counts."""
    sampler = make(nan_above_2, init_strategy={"w": double(0.0)})
    found = replay_of(broken(sampler, num_samples=3000), nan_above_2)
    assert found.site == "cliff"
    assert len(found.steps) > 1


@pytest.mark.slow
@pytest.mark.parametrize("num_chains", [1, 3])
def test_points_go_with_all_chains(num_chains, store):
    """One chain is replayed, but points move by the mean of all."""
    message = broken(ps.SGLD(with_shift, lr=2.0), num_chains=num_chains)
    assert replay_of(message, with_shift).params.keys() == {"w", "shift"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("room", "count", "words"), [(3 * (B * 3 + 6) * 8, 3, "last 3 steps"), (1, 1, "last step")]
)
def test_there_is_room_for_so_many_bytes(room, count, words, monkeypatch):
    monkeypatch.setattr(last_steps, "_RECORD_BYTES", room)
    message = broken(ps.SGLD(regression, lr=1e3))
    assert f"reruns the {words} of chain 0" in message
    assert len(replay_of(message, regression).steps) == count


def test_states_that_are_too_large_are_not_held(monkeypatch):
    monkeypatch.setattr(last_steps, "_STATE_BYTES", 1)
    message = broken(ps.SGLD(regression, lr=1e3))
    assert "reruns the last step of chain 0" in message
    replay_of(message, regression)


# ------------------------------------------------------------------ why


@pytest.mark.parametrize("where", ["x", "y"])
def test_a_row_that_is_nan(where):
    x, y = X.clone(), Y.clone()
    (x if where == "x" else y)[-1] = torch.nan
    with pyro.validation_enabled(False):  # else such a y is refused before the run
        message = broken(ps.SGLD(regression, lr=0.01), (x, y))
    found = replay_of(message, regression)
    assert found.site == "y"
    place = "xy".index(where)
    assert f"the batch holds NaN or infinite numbers in argument {place} at step" in found.reason
    assert found.batch[place].isnan().any()
    assert "with validation on, site 'y' raises ValueError: Expected" in found.reason


def test_the_site_whose_density_is_nan_is_named():
    """Not the first one whose value became NaN by it."""
    y = 0.1 * normals(N, seed=5)  # pulls v to -1
    sampler = ps.SGLD(root_of_a_negative, lr=0.1, init_strategy={"v": double(-0.5)})
    message = broken(sampler, (X, y), batch_size=None)
    assert failures(message)[0][1] == "y"
    found = replay_of(message, root_of_a_negative)
    assert found.site == "y"
    assert found.params["v"] < -1
    assert f"site 'y': its log density is NaN at step {found.step}" in found.reason
    assert "finite unconstrained values and a finite batch" in found.reason
    assert "Expected parameter scale" in found.reason


def test_the_site_whose_gradient_is_infinite_is_named():
    sampler = ps.SGLD(root_at_zero, lr=2.0)
    found = replay_of(broken(sampler, (X,), batch_size=None), root_at_zero)
    assert found.site == "v"
    assert "site 'v': its gradient of the log joint is infinite" in found.reason
    assert torch.isfinite(ps.LogPosterior(root_at_zero, N)(found.params, found.batch).log_joint)


@pytest.mark.slow
@pytest.mark.parametrize("compile", long_but([False, True], False))
def test_a_matrix_that_cannot_be_factorized(compile):
    starts = {"r": double(0.5, -0.5)}
    sampler = ps.SGLD(not_a_covariance, lr=0.3, compile=compile, init_strategy=starts)
    message = broken(sampler, (X,), num_chains=2)
    assert message.startswith("the model raised LinAlgError: linalg.cholesky: ")
    assert message.index("ps.replay") < message.index("try lr=0.1 instead of 0.3")
    assert "the model fails at values that chains visit" in message
    found = replay_of(message, not_a_covariance)
    assert found.site == "x"
    assert "site 'x': the model raises" in found.reason
    assert abs(found.params["r"]) >= 1


def test_a_plate_is_never_to_blame():
    """Its site goes before the data's, whose distribution cannot be made of NaN."""

    def model(x, y):
        w = pyro.sample("w", dist.Normal(double(0.0)[0], 1.0))
        bad = torch.where(w < 1.0, torch.nan, 0.0)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Bernoulli(logits=w + bad), obs=(y > 0).double())

    message = broken(ps.SGLD(model, lr=0.05, init_strategy={"w": double(1.5)}), num_samples=500)
    assert message.index("ps.replay") < message.index("Site 'y' has no log density at values")
    found = replay_of(message, model)
    assert found.site == "y"
    assert "'data'" not in found.reason


@pytest.mark.slow
def test_one_of_several_chains():
    starts = {"w": double(0.0, 0.0, 0.0, 1.9)}
    sampler = ps.SGLD(nan_above_2, lr=0.05, init_strategy=starts)
    message = broken(sampler, num_samples=100, num_chains=4, seed=6)
    assert list(failures(message)) == [3]
    assert sampler.get_samples(group_by_chain=True)["w"].shape[0] == 3
    found = replay_of(message, nan_above_2)
    assert (found.chain, found.site) == (3, "cliff")
    assert found.params["w"] > 2.0


# ------------------------------------------------------------------ data


def test_a_loader():
    loader = DataLoader(TensorDataset(X, Y), batch_size=B, shuffle=True)
    found = replay_of(broken(ps.SGLD(regression, lr=1e3), loader, batch_size=None), regression)
    rows = {tuple(row) for row in X.tolist()}
    assert len(found.batch[0]) == B
    assert all(tuple(row) in rows for row in found.batch[0].tolist())


def test_a_dict_of_arguments():
    found = replay_of(broken(ps.SGLD(regression, lr=1e3), {"x": X, "y": Y}), regression)
    assert found.batch.keys() == {"x", "y"}


@pytest.mark.slow
def test_a_model_that_subsamples_by_itself():
    message = broken(ps.SGLD(subsampling_itself, lr=2.0), batch_size=None)
    found = replay_of(message, subsampling_itself)
    assert torch.equal(found.batch[0], X)
    assert found.indices.shape == (B,)
    log_posterior = ps.LogPosterior(subsampling_itself)
    log_posterior.prepare((X, Y))
    log_joint = log_posterior(found.params, found.batch, found.indices).log_joint
    assert not torch.isfinite(log_joint)


@pytest.mark.slow
def test_shared_batches_and_the_whole_data():
    sampler = ps.SGLD(regression, lr=1e3)
    replay_of(broken(sampler, num_chains=2, share_batches=True), regression)
    found = replay_of(broken(sampler, batch_size=None), regression)
    assert torch.equal(found.batch[0], X)
    whole = path_in(broken(sampler, batch_size=None)).stat().st_size
    assert whole < 16 * X.nbytes + 2**15  # the data are there once


@pytest.mark.slow
def test_features_of_a_frozen_base_are_not_written():
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    bayesian = ps.bayesianize(net, prior=dist.Normal(0.0, 1.0), include=["2.*"])

    last_layer = of_network(bayesian, lambda f: dist.Normal(f[:, 0], 0.1))

    assert "replay" not in broken(ps.SGLD(last_layer, lr=5.0))


# ------------------------------------------------------------------ files


@pytest.mark.slow
def test_a_checkpoint_directory_holds_it(tmp_path):
    sampler = ps.SGLD(regression, lr=1e3)
    message = broken(sampler, num_chains=6, checkpoint=tmp_path, checkpoint_every=0)
    assert path_in(message).parent == tmp_path
    found = sorted(file.name for file in tmp_path.glob("crash-dump-*"))
    first = sorted(failures(message), key=lambda chain: failures(message)[chain])
    assert len(found) == 4
    assert path_in(message).name == f"crash-dump-{first[0]}"
    for file in found:
        replay_of(message, regression, tmp_path / file) if file[-1] in map(str, first) else None
    with pytest.raises(NonFiniteError) as resumed:  # the run is over, and stays so
        sampler.run((X, Y), **{**IN_BATCHES, "num_chains": 6}, resume=tmp_path)
    assert path_in(str(resumed.value)) == path_in(message)
    assert sorted(file.name for file in tmp_path.glob("crash-dump-*")) == found


@pytest.mark.slow
def test_a_black_box_is_no_checkpoint(tmp_path):
    message = message_of_divergence()
    (tmp_path / "crash-dump-0").write_bytes(path_in(message).read_bytes())
    ps.SGLD(regression, lr=0.01).run((X, Y), **IN_BATCHES, checkpoint=tmp_path)
    replay_of(message, regression, tmp_path / "crash-dump-0")


def test_nobody_else_can_read_it():
    path = path_in(message_of_divergence())
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert [file.name for file in path.parent.iterdir()] == ["crash-dump-0"]


def test_damage_is_noticed(tmp_path):
    whole = path_in(message_of_divergence()).read_bytes()
    random.seed(0)
    for place in [*random.sample(range(len(whole)), 20), 3, 20]:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << random.randrange(8)
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(FileError):
            ps.replay(tmp_path / "damaged", regression)
    (tmp_path / "damaged").write_bytes(whole[:-1])
    with pytest.raises(FileError, match="was cut off"):
        ps.replay(tmp_path / "damaged", regression)


@pytest.mark.slow
def test_other_files_are_refused(tmp_path):
    ps.SGLD(regression, lr=0.01).run((X, Y), **IN_BATCHES).save(tmp_path / "results")
    with pytest.raises(FileError, match="does not begin as the last steps of a chain"):
        ps.replay(tmp_path / "results", regression)
    with pytest.raises(FileError, match="does not begin as a file of Pyro Scale"):
        ps.SGLD.load(path_in(message_of_divergence()), regression)


def test_another_model_is_refused():
    message = message_of_divergence()
    with pytest.raises(FileError, match=r"'w' is a latent \[2\] of float64 in the file, not in"):
        ps.replay(path_in(message), another_name)
    with pytest.raises(FileError, match="the log prior at the start was"):
        ps.replay(path_in(message), wider_prior)


def test_an_unknown_kernel_is_refused(tmp_path):
    contents = files.read(path_in(message_of_divergence()), "crash dump")
    files.write(tmp_path / "other", {**contents, "kernel": "Unheard"}, "crash dump")
    with pytest.raises(FileError, match="kernel is Unheard, which is not known here"):
        ps.replay(tmp_path / "other", regression)


def no_room(*args, **kwargs):
    raise OSError("no space left on device")


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        (lambda patch: patch.setattr(crash_dump, "mkdtemp", no_room), "no space left on device"),
        (lambda patch: patch.setattr(files.os, "fsync", no_room), "no space left on device"),
        (
            lambda patch: patch.setattr(crash_dump, "_MOST_BYTES", 100),
            r"they take more than .* GiB",
        ),
        (lambda patch: patch.setattr(crash_dump, "model_contents", no_room), "no space left on"),
    ],
    ids=["no directory", "no file", "no room", "another error"],
)
def test_what_cannot_be_written_is_said_and_hides_nothing(patch, reason, monkeypatch):
    patch(monkeypatch)
    message = broken(ps.SGLD(regression, lr=1e3))
    assert failures(message)[0][1] == "w"
    assert "replay" not in message
    assert re.search(rf"\. The last steps, .* could not be written down \({reason}", message)


def test_arguments_that_cannot_be_written_hide_nothing():
    class Options:
        scale = 0.3

    def with_options(x, y, options):
        regression(x, y)

    message = broken(ps.SGLD(with_options, lr=2.0), (X, Y, Options()))
    assert "replay" not in message
    assert "could not be written down (" in message
    assert "Options" in message


@pytest.mark.slow
def test_only_the_run_that_is_given_up_is_written(monkeypatch):
    """Those of a step size that is halved are not."""
    monkeypatch.setattr("pyro_scale.run.execute._MOST_HALVINGS", 1)
    written = []
    monkeypatch.setattr(crash_dump.files, "write", lambda path, *_: written.append(path))
    message = broken(ps.SGLD(nan_above_2, lr="auto", precondition=None))
    assert len(written) == 1
    assert "crash-dump-0" in message


def test_a_replay_is_frozen():
    found = replay_of(message_of_divergence(), regression)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.step = 0
