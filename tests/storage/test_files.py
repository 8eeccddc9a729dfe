"""Results on disk: what is read is what was written, bit for bit, or an error of ours."""

import functools
import itertools
import os
import random
import warnings
from pathlib import Path

import numpy as np
import pandas
import pyro
import pyro.distributions as dist
import pytest
import stored
import torch
from both_arviz import groups_of
from damage import crafted, saved
from models import normal, of_rows
from processes import launch
from pyro.nn import PyroModule, PyroParam
from reference import double, normals
from repetitions import long_but
from row_datasets import RowByName
from stored import (
    QUIET,
    SIZE,
    X,
    Y,
    mixture,
    of_two_params,
    own_subsamples,
    predicted,
    regression,
    same,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_scale as ps
from pyro_scale.errors import ArgumentError, FileError, NonFiniteError, NotRunError
from pyro_scale.infer.method import Method
from pyro_scale.storage import files

pytestmark = pytest.mark.usefixtures("store")

GROUP = torch.arange(SIZE) % 3
VECTOR = normal(2, dtype=torch.float64)


def positive():
    return dist.LogNormal(double(0.0)[0], 0.5)


renamed = of_rows(lambda x, weight, s: dist.Normal(x @ weight, s), weight=VECTOR, s=positive)
wider = of_rows(
    lambda x, w, s: dist.Normal(x @ w[:2], s), w=normal(3, dtype=torch.float64), s=positive
)
narrower_float = of_rows(lambda x, w, s: dist.Normal(x @ w.double(), s), w=normal(2), s=positive)
other_support = of_rows(
    lambda x, w, s: dist.Normal(x @ w, s), w=VECTOR, s=lambda: dist.Uniform(double(0.0)[0], 50.0)
)


def point_instead(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(2).double(), 1.0).to_event(1))
    s = pyro.param("s", double(1.0)[0], constraint=dist.constraints.positive)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, s), obs=y)


def of_one_argument(x):
    pyro.factor("no data", torch.zeros(()))
    pyro.sample("w", dist.Normal(torch.zeros(2).double(), 1.0).to_event(1))


def grouped(x, group, y):
    with pyro.plate("groups", 3):
        level = pyro.sample("level", dist.Normal(double(0.0)[0], 1.0))
        s = pyro.sample("s", dist.Gamma(double(2.0)[0], 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(level[group], s[group]), obs=y)


def fixed_plate(x, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(2).double(), 1.0).to_event(1))
    with pyro.plate("data", SIZE, subsample_size=5):
        pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)


def of_many_supports(x):
    one = torch.ones((), dtype=torch.float64)
    chol = pyro.sample("L", dist.LKJCholesky(2, one))
    top = pyro.sample("top", dist.Uniform(one, 3.0))
    p = pyro.sample("p", dist.Dirichlet(torch.ones(3).double()))
    below = pyro.sample("below", dist.Uniform(0 * one, top))  # a support that hangs on another site
    with pyro.plate("data", len(x)):
        scale = p[0] * below * chol
        pyro.sample("y", dist.MultivariateNormal(0 * x[0], scale_tril=scale), obs=x)


def jointly(x, y):
    """A model that takes the whole data at once."""
    w = pyro.sample("w", dist.Normal(torch.zeros(2).double(), 1.0).to_event(1))
    covariance = torch.eye(len(x)).double() + 0.1
    pyro.sample("y", dist.MultivariateNormal(x @ w, covariance), obs=y)


def with_options(x, options):
    w = pyro.sample("w", dist.Normal(torch.zeros(2).double(), options["sd"]).to_event(1))
    with pyro.plate("data", len(x)):
        mean = x @ w if options["names"][0] == "linear" else 0 * w[0]
        pyro.sample("y", dist.Normal(mean, 1.0), obs=options["y"])


def without_data():
    pyro.factor("no data", torch.zeros(()))
    pyro.sample("w", dist.Normal(torch.zeros(2).double(), 1.0).to_event(1))


class Net(PyroModule):
    """A Bayesian layer, a plain one whose weights are learned, and a PyroParam."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = ps.bayesianize(nn.Linear(2, 3).double())
        self.head = nn.Linear(3, 1).double()
        self.scale = PyroParam(double(0.8)[0], constraint=dist.constraints.positive)

    def forward(self, x, y=None):
        mean = self.head(self.body(x).tanh())[:, 0]
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(mean, self.scale), obs=y)


fitted = functools.partial(stored.fitted, num_samples=8, batch_size=None, seed=0, compile="auto")


def after_steps(model=regression, data=(X, Y), **kwargs):
    fit = ps.BAOA(model, lr=0.1, **kwargs)
    pyro.set_rng_seed(3)
    fit.step(*data)
    fit.step(*data)
    return fit


def decreasing(step):
    return 0.1 / (1 + step) ** 0.3


NET = Net()
NAMED = RowByName(x=X, y=Y)
BATCHES = DataLoader(NAMED, batch_sampler=[range(7), range(7, SIZE)])
LOG_POSTERIOR = ps.LogPosterior.from_function(
    lambda params, batch: -0.5 * (batch[0] @ params["w"]).square().mean(),
    {"w": torch.ones(2).double()},
    num_data=SIZE,
)
#: By what is special: how to fit, the model, other data and arguments to predict for.
CASES = {
    **{
        name: (lambda how=how: fitted(**how), regression, (X, Y), (X[:4],))
        for name, how in {
            "whole data": {},
            "minibatches": {"batch_size": 5},
            "by name": {"data": {"y": Y, "x": X}, "batch_size": 5},
            "one draw": {"num_samples": 1},
            "automatic lr": {"batch_size": 5, "lr": "auto", "precondition": None},
            "chosen coordinates": {"batch_size": 5, "lr": "auto"},
            "by site": {"lr": {"w": 0.1, "s": lambda step: 0.1 / (1 + step)}, "batch_size": 5},
            "control variates": {"batch_size": 3, "control_variates": True},
            "weights": {"lr": decreasing, "method": ps.SGLD},
            "shared batches": {"batch_size": 5, "share_batches": True},
            "compiled": {"batch_size": 5, "num_chains": 2, "compile": True},
        }.items()
    },
    **{
        name: (lambda m=model, d=data, b=batch: fitted(m, d, batch_size=b), model, data, arguments)
        for name, model, data, batch, arguments in [
            ("float32", regression, (X.float(), Y.float()), 5, (X[:4].float(),)),
            ("params", of_two_params, (X, Y), 5, (X, Y)),
            ("network", NET, (X, Y), 5, (X[:4],)),
            ("plates", grouped, (X, GROUP, Y), 6, (X, GROUP, Y)),
            ("own subsamples", own_subsamples, (X, Y), None, (X, Y)),
            ("supports", of_many_supports, X, 5, (X,)),
            ("enumerated", mixture, Y, 5, (Y,)),
            ("jointly", jointly, (X, Y), None, (X, Y)),
            ("a log posterior", ps.LogPosterior(regression), (X, Y), 5, (X[:4],)),
            ("stream", regression, BATCHES, None, (X[:4],)),
        ]
    },
    "loader": (
        lambda: fitted(data=DataLoader(TensorDataset(X, Y), 5, shuffle=True)),
        *(regression, DataLoader(TensorDataset(X, Y), 5), (X[:4],)),
    ),
    "by index": (
        lambda: fitted(data=DataLoader(NAMED, 5, shuffle=True)),
        *(regression, DataLoader(NAMED, 5), (X[:4],)),
    ),
    "steps": (lambda: after_steps(num_data=100), regression, (X, Y), (X[:4],)),
    "steps of own subsamples": (
        lambda: after_steps(own_subsamples),
        own_subsamples,
        (X, Y),
        (X, Y),
    ),
    "steps of a fixed plate": (
        lambda: after_steps(fixed_plate, (X[:5], Y[:5])),
        *(fixed_plate, None, (X[5:10], Y[5:10])),
    ),
}


def same_groups(actual, expected):
    assert groups_of(actual) == groups_of(expected)
    for group in groups_of(expected):
        assert actual[group].identical(expected[group]), group
    assert actual.attrs == expected.attrs


def same_results(actual, expected, data, arguments):
    same(actual.get_samples(group_by_chain=True), expected.get_samples(group_by_chain=True))
    same(actual.get_samples(1), expected.get_samples(1))
    same(actual.params, expected.params)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few draws, and of the noise of batches
        pandas.testing.assert_frame_equal(actual.summary(), expected.summary())
        tables = actual.diagnostics(), expected.diagnostics()
    pandas.testing.assert_frame_equal(*tables)
    assert tables[0].attrs == tables[1].attrs
    same(predicted(actual, arguments), predicted(expected, arguments))
    if data is not None:
        same(actual.log_likelihood(data), expected.log_likelihood(data))
        same_groups(actual.to_arviz(data=data), expected.to_arviz(data=data))


# ------------------------------------------------------------------ round trips


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of few steps
@pytest.mark.parametrize(
    "case",
    long_but(
        CASES,
        *["minibatches", "float32", "chosen coordinates", "control variates", "weights"],
        *["params", "network", "stream", "supports", "steps"],
    ),
)
def test_what_is_read_is_what_was_written(case, tmp_path):
    fit, model, data, arguments = CASES[case]
    before = fit()
    before.save(tmp_path / "run.ps")
    pyro.clear_param_store()
    after = type(before).load(tmp_path / "run.ps", model)
    assert isinstance(after, type(before))
    same_results(after, before, data, arguments)
    assert not list(pyro.get_param_store())
    groups = groups_of(after.to_arviz())
    assert groups == {"posterior", "sample_stats"}


@pytest.mark.parametrize(
    "case", long_but(["minibatches", "params", "own subsamples", "steps"], "own subsamples")
)
def test_what_was_read_can_be_written_again(case, tmp_path):
    fit, model, data, arguments = CASES[case]
    before = fit()
    before.save(tmp_path / "run.ps")
    again = type(before).load(tmp_path / "run.ps", model)
    again.save(tmp_path / "again.ps")
    same_results(type(before).load(tmp_path / "again.ps", model), before, data, arguments)


READ = """
import test_files
from stored import X, Y, of_two_params, predicted
ready()
fit = test_files.ps.BAOA.load(sys.argv[1], of_two_params)
samples, params = fit.get_samples(group_by_chain=True), fit.params
torch.save([samples, params, predicted(fit, (X, Y))], sys.argv[2])
"""


@pytest.mark.long
def test_another_process_reads_the_same(tmp_path):
    fit = fitted(of_two_params, batch_size=5)
    fit.save(tmp_path / "run.ps")
    paths = tmp_path / "run.ps", tmp_path / "read"
    assert launch(READ, *paths, places=[Path(__file__).parent]).wait() == 0
    samples, params, drawn = torch.load(tmp_path / "read")
    same(samples, fit.get_samples(group_by_chain=True))
    same(params, fit.params)
    same(drawn, predicted(fit, (X, Y)))


def test_a_log_posterior_from_a_function(tmp_path):
    fit = fitted(LOG_POSTERIOR, (X,), batch_size=5)
    fit.save(tmp_path / "run.ps")
    same(ps.BAOA.load(tmp_path / "run.ps", LOG_POSTERIOR).get_samples(), fit.get_samples())


def test_a_model_without_data(tmp_path):
    fit = fitted(without_data, None)
    fit.save(tmp_path / "run.ps")
    after = ps.BAOA.load(tmp_path / "run.ps", without_data)
    same(after.get_samples(), fit.get_samples())
    same_groups(after.to_arviz(), fit.to_arviz())


def test_plain_values_among_the_arguments(tmp_path):
    """The whole data at every step, since dicts among the arguments hold rows as well."""
    options = {"names": ["linear", ("a", 1, True, None)], "sd": 2.0, "y": Y}
    fit = fitted(with_options, (X, options), batch_size=6)
    fit.save(tmp_path / "run.ps")
    after = ps.BAOA.load(tmp_path / "run.ps", with_options)
    same_results(after, fit, (X, options), (X, options))


def test_a_file_is_small_where_the_batch_is(tmp_path):
    """Of tensors that are views, the part alone is written."""
    x = normals(200_000, 2, seed=1)
    fitted(data=(x, x[:, 0]), batch_size=5).save(tmp_path / "run.ps")
    assert (tmp_path / "run.ps").stat().st_size < 30_000


def test_path_is_a_str_or_a_path(tmp_path, monkeypatch):
    fit = fitted()
    fit.save(str(tmp_path / "run.ps"))
    same(ps.BAOA.load(str(tmp_path / "run.ps"), regression).get_samples(), fit.get_samples())
    monkeypatch.chdir(tmp_path)
    fit.save("here.ps")
    assert (tmp_path / "here.ps").exists()
    same(ps.BAOA.load(Path("here.ps"), regression).get_samples(), fit.get_samples())
    for wrong in (7, None, b"run.ps", "a\0b"):
        with pytest.raises(ArgumentError, match=r"path=.*: pass a str or a Path"):
            fit.save(wrong)
        with pytest.raises(ArgumentError, match=r"path=.*: pass a str or a Path"):
            ps.BAOA.load(wrong, regression)


def test_results_of_a_device_that_is_not_here_are_read(tmp_path):
    fit = fitted(batch_size=5)
    fit.save(tmp_path / "run.ps")
    files.write(tmp_path / "far.ps", files.read(tmp_path / "run.ps") | {"device": "cuda:99"})
    same(ps.BAOA.load(tmp_path / "far.ps", regression).get_samples(), fit.get_samples())


def test_chains_that_finished_are_saved(tmp_path):
    start = {"w": torch.zeros(3, 2).double(), "s": torch.ones(3).double()}
    start["w"][1] = 1e150
    fit = ps.SGLD(regression, lr=0.05, init_strategy=start)
    with pytest.raises(NonFiniteError):
        fit.run((X, Y), **{**stored.HOW, "num_samples": 8, "batch_size": None}, **QUIET)
    fit.save(tmp_path / "run.ps")
    after = ps.SGLD.load(tmp_path / "run.ps", regression)
    assert after.get_samples(group_by_chain=True)["w"].shape == (2, 8, 2)
    same_results(after, fit, (X, Y), (X,))


def test_params_are_written_to_where_they_belong(tmp_path):
    fit = fitted(of_two_params)
    fit.save(tmp_path / "run.ps")
    after = ps.BAOA.load(tmp_path / "run.ps", of_two_params)
    after.write_params()
    assert torch.equal(pyro.param("scale").detach(), fit.params["scale"])


def test_params_in_the_store_do_not_change_what_is_read(tmp_path):
    fit = fitted(of_two_params)
    fit.save(tmp_path / "run.ps")
    pyro.param("scale", double(9.0)[0], constraint=dist.constraints.positive)
    same(ps.BAOA.load(tmp_path / "run.ps", of_two_params).params, fit.params)
    assert float(pyro.param("scale").detach()) == pytest.approx(9.0)


def test_torchs_generator_is_left_as_it_was(tmp_path):
    fit = fitted(batch_size=5)
    before = torch.random.get_rng_state()
    fit.save(tmp_path / "run.ps")
    ps.BAOA.load(tmp_path / "run.ps", regression)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_nothing_is_saved_before_a_run(tmp_path):
    with pytest.raises(NotRunError, match="BAOA has no draws yet"):
        ps.BAOA(regression, lr=0.1).save(tmp_path / "run.ps")
    assert not list(tmp_path.iterdir())


def test_what_was_loaded_is_not_run(tmp_path):
    fitted().save(tmp_path / "run.ps")
    after = ps.BAOA.load(tmp_path / "run.ps", regression)
    for go_on in (
        lambda: after.run((X, Y), num_samples=2, warmup_steps=0, thinning=1, num_chains=1),
        lambda: after.step(X, Y),
    ):
        with pytest.raises(NotRunError, match=r"make a new one, BAOA\(model, ...\)"):
            go_on()
    with pytest.raises(ArgumentError, match=r"or from a file, which keep no data: .*data="):
        after.log_likelihood()


# ------------------------------------------------------------------ classes


def test_a_class_loads_its_own_files_and_those_of_classes_below_it(tmp_path):
    fitted(method=ps.SGHMC).save(tmp_path / "run.ps")
    for kind in (ps.SGHMC, ps.Sampler, Method):
        after = kind.load(tmp_path / "run.ps", regression)
        assert isinstance(after, ps.SGHMC)
        assert type(after).__name__ == "SGHMC"
    with pytest.raises(FileError, match=r"results of SGHMC, not of BAOA: call SGHMC\.load"):
        ps.BAOA.load(tmp_path / "run.ps", regression)


# ------------------------------------------------------------------ other models


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (renamed, r"'w' is a latent \[2\] of float64 in the file, not in the model; .*'weight'"),
        (wider, r"'w' is a latent \[2\] of float64 in the file, a latent \[3\] of float64 in"),
        (narrower_float, r"'w' is a latent \[2\] of float64 .* \[2\] of float32 in the model"),
        (other_support, "'s' has another support or transform"),
        (point_instead, r"'s' is a latent \[\] of float64 in the file, a param \[\] of float64"),
        (of_one_argument, r"does not run on the file's batch \(CallError: .*too many"),
        (ps.LogPosterior(regression, 50), "N is 13 in the file, 50 here"),
    ],
)
def test_another_model_is_refused_by_what_differs(model, message, tmp_path):
    fitted(batch_size=5).save(tmp_path / "run.ps")
    with pytest.raises(FileError, match=message) as caught:
        ps.BAOA.load(tmp_path / "run.ps", model)
    assert str(caught.value).endswith("pass the model that was run")


def test_other_params_are_refused(tmp_path):
    def other(x, y):
        scale = pyro.param("scale", double(0.7, 0.7), constraint=dist.constraints.positive)
        w = pyro.sample("w", dist.Normal(double(0.3, 0.1), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, scale[0]), obs=y)

    fitted(of_two_params, batch_size=5).save(tmp_path / "run.ps")
    with pytest.raises(FileError, match=r"'shift' is a param .*not in the model") as caught:
        ps.BAOA.load(tmp_path / "run.ps", other)
    assert "'scale' is a param [] of float64 in the file, a param [2] of" in str(caught.value)


def test_a_model_that_is_none_is_refused(tmp_path):
    fitted().save(tmp_path / "run.ps")
    with pytest.raises(ArgumentError, match="not callable"):
        ps.BAOA.load(tmp_path / "run.ps", 3)


class Settings:
    sd = 1.0


def test_arguments_that_are_not_plain_are_refused_by_name(tmp_path):
    def model(x, settings):
        w = pyro.sample("w", dist.Normal(torch.zeros(2).double(), settings.sd).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=Y[: len(x)])

    for data, place in (
        ((X, Settings()), r"arguments\[1\]"),
        ({"x": X, "settings": Settings()}, r"arguments\['settings'\]"),
    ):
        with pytest.raises(FileError, match=rf"{place} is a Settings, .*functools\.partial"):
            fitted(model, data).save(tmp_path / "run.ps")
    assert not list(tmp_path.iterdir())
    bound = functools.partial(model, settings=Settings())
    fit = fitted(bound, X)
    fit.save(tmp_path / "run.ps")
    same(ps.BAOA.load(tmp_path / "run.ps", bound).get_samples(), fit.get_samples())


# ------------------------------------------------------------------ damage


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A file's bytes, and a place to damage copies of them."""
    path = tmp_path_factory.mktemp("files") / "run.ps"
    fitted(batch_size=5).save(path)
    return path.read_bytes(), path.with_name("damaged.ps")


def test_no_single_byte_can_change_unnoticed(written):
    whole, path = written
    source = random.Random(0)
    places = [*range(120), *(source.randrange(len(whole)) for _ in range(200))]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= source.randrange(1, 256)
        path.write_bytes(damaged)
        with pytest.raises(FileError):
            ps.BAOA.load(path, regression)


def test_no_end_can_be_missing_unnoticed(written):
    whole, path = written
    lengths = [*range(150), *range(150, len(whole), 97), len(whole) - 1]
    for length in lengths:
        path.write_bytes(whole[:length])
        with pytest.raises(FileError):
            ps.BAOA.load(path, regression)
    path.write_bytes(whole[:-1])
    with pytest.raises(FileError, match="was cut off"):
        ps.BAOA.load(path, regression)
    path.write_bytes(whole + b"\0")
    with pytest.raises(FileError, match="has something after its end"):
        ps.BAOA.load(path, regression)


def test_what_is_wrong_is_said(written, tmp_path):
    whole, path = written
    with pytest.raises(FileError, match=r"nothing\.ps' cannot be read \(No such file"):
        ps.BAOA.load(tmp_path / "nothing.ps", regression)
    with pytest.raises(FileError, match=r"cannot be read \(Is a directory"):
        ps.BAOA.load(tmp_path, regression)
    torch.save({"w": X}, path)
    with pytest.raises(FileError, match="does not begin as a file of Pyro Scale's"):
        ps.BAOA.load(path, regression)
    path.write_bytes(whole.replace(b"format 3,", b"format 4,", 1))
    with pytest.raises(FileError, match=r"has format 4, but this version .* reads format 3"):
        ps.BAOA.load(path, regression)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(FileError, match="is damaged"):
        ps.BAOA.load(path, regression)


def test_what_torch_cannot_read_is_an_error_of_ours(tmp_path):
    """Code in a file of ours is not run: torch refuses it."""

    class Code:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "made"),))

    with pytest.raises(FileError, match=r"is intact, but torch .* cannot read it"):
        files.read(crafted(tmp_path / "code.ps", saved({"method": Code()})))
    assert not (tmp_path / "made").exists()


# ------------------------------------------------------------------ writing


def test_a_file_that_cannot_be_written_is_an_error_of_ours(tmp_path):
    fit = fitted()
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "nowhere" / "run.ps", tmp_path / "file" / "run.ps", tmp_path):
        with pytest.raises(FileError, match=r"cannot be written .*: pass a file in a directory"):
            fit.save(path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_must_not_be_written_to(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(FileError, match=r"cannot be written \(Permission denied\)"):
        fitted().save(tmp_path / "run.ps")
    tmp_path.chmod(0o700)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("place", ["replace", "fsync"])
def test_what_was_there_stays_until_the_new_file_is_complete(error, place, tmp_path, monkeypatch):
    old, new = fitted(), fitted(num_samples=4)
    old.save(tmp_path / "run.ps")

    def fail(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, place, fail)
        with pytest.raises(FileError if isinstance(error, OSError) else type(error)):
            new.save(tmp_path / "run.ps")
    assert [path.name for path in tmp_path.iterdir()] == ["run.ps"]
    same(ps.BAOA.load(tmp_path / "run.ps", regression).get_samples(), old.get_samples())
    new.save(tmp_path / "run.ps")
    assert [path.name for path in tmp_path.iterdir()] == ["run.ps"]
    same(ps.BAOA.load(tmp_path / "run.ps", regression).get_samples(), new.get_samples())


def test_a_link_stays_one(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link.ps").symlink_to(tmp_path / "there" / "run.ps")
    fitted().save(tmp_path / "link.ps")
    assert (tmp_path / "link.ps").is_symlink()
    assert (tmp_path / "there" / "run.ps").exists()


def test_contents_come_back_as_they_were(tmp_path):
    wide = torch.arange(12.0).reshape(3, 4)
    contents = {
        "tensors": [wide.T, wide[:, 1], wide[0, 0].expand(3, 5), torch.tensor(True), wide[:0]],
        "kinds": {kind: torch.ones(2, dtype=getattr(torch, kind)) for kind in ("half", "int8")},
        "plain": (None, True, 3, 2**70, -0.0, float("inf"), "ü\n", [], {}, (), {3: ["x"]}),
        "parameter": nn.Parameter(wide),
    }
    files.write(tmp_path / "contents", contents)
    found = files.read(tmp_path / "contents")
    assert repr(found["plain"]) == repr(contents["plain"])
    assert type(found["parameter"]) is torch.Tensor
    tensors = itertools.chain(contents["tensors"], contents["kinds"].values())
    read = itertools.chain(found["tensors"], found["kinds"].values())
    for expected, actual in zip(tensors, read, strict=True):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)
    # sums are taken in the order of strides, so a statistic that all chains share stays shared
    assert found["tensors"][2].stride() == (0, 0)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Settings(), "Settings"),
        ({"inner": [Settings()]}, r"x\['inner'\]\[0\] is a Settings"),
        (np.ones(2), "ndarray"),
        (np.float64(2.0), "float64"),
        ({(1, 2): 3}, "dict"),
        (torch.ones(2, device="meta"), "Tensor"),
        (torch.eye(2).to_sparse(), "Tensor"),
        (len, "builtin_function"),
    ],
)
def test_what_is_not_plain_is_refused(value, name, tmp_path):
    with pytest.raises(FileError, match=rf"{name}.*cannot be saved"):
        files.write(tmp_path / "contents", {"x": value})
    assert not list(tmp_path.iterdir())
