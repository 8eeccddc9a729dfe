"""Rows that are passed after a run, beside those that it had."""

import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from models import normal, of_rows
from runs import QUIET

import pyro_scale as ps
from pyro_scale.errors import ArgumentError, CallError

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(40, 3, generator=GENERATOR)
Y = X @ torch.tensor([1.0, -2.0, 0.5]) + 0.1 * torch.randn(40, generator=GENERATOR)
FRAME, Z = pd.DataFrame(X.numpy(), columns=["a", "b", "c"]), pd.Series(Y.numpy())


regression = of_rows(lambda x, w: dist.Normal(x @ w, 0.1), w=normal(3))
slope = of_rows(lambda x, w: dist.Normal(w * x.reshape(len(x)), 1.0), w=normal())


def series(x, n, y=None):
    """Of any length, with an index that is no feature and a constant."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(w * x.mean((-1, -2)) * n, 1.0), obs=y)


def subsampled(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(x), subsample_size=10) as rows:
        pyro.sample("y", dist.Normal(x[rows] @ w, 0.1), obs=None if y is None else y[rows])


def run_method(model, data, method=ps.Laplace):
    if method is ps.BAOA:
        how = {"num_samples": 8, "num_chains": 2, "warmup_steps": 5, "thinning": 1}
        return ps.BAOA(model, lr=0.1, compile=False).run(data, **how, **QUIET)
    return method(model).run(data, **QUIET)


@pytest.fixture(scope="module", params=[ps.BAOA, ps.Laplace], ids=["BAOA", "Laplace"])
def fit(request):
    return run_method(regression, (FRAME, Z), request.param)


SHUFFLED = FRAME[["c", "b", "a"]]
RENAMED = FRAME.rename(columns={"a": "d"})
ORDER = r"argument x has the columns \['c', 'b', 'a'\], and the run had \['a', 'b', 'c'\]; .*"
CALLS = {
    "by place": lambda fit, x: fit.predict(x),
    "by name": lambda fit, x: fit.predict(x=x),
    "log_likelihood": lambda fit, x: fit.log_likelihood((x, Z)),
    "a dict": lambda fit, x: fit.log_likelihood({"y": Z, "x": x}),
    "loo": lambda fit, x: fit.loo(data=(x, Z)),
    "compare": lambda fit, x: ps.compare({"fit": fit}, data=(x, Z)),
    "to_arviz": lambda fit, x: fit.to_arviz(data=(x, Z)),
    "calibrate": lambda fit, x: fit.predict(FRAME, interval=0.5, calibrate=(x, Z)),
    "predict_at": lambda fit, x: fit.diagnostics(predict_at=x),
}


@pytest.mark.parametrize("call", CALLS)
def test_columns_in_another_order_are_refused(fit, call):
    if call == "predict_at" and isinstance(fit, ps.Laplace):
        pytest.skip("an approximation has no chains to compare")
    with pytest.raises(ArgumentError, match=ORDER + r"pass x\[\['a', 'b', 'c'\]\]"):
        CALLS[call](fit, SHUFFLED)


def test_data_by_name_have_the_same_columns():
    fit = run_method(regression, {"x": FRAME, "y": Z})
    with pytest.raises(CallError, match=ORDER):
        fit.predict(SHUFFLED)


def test_models_that_subsample_by_themselves_know_the_columns():
    with pytest.raises(CallError, match=ORDER):
        run_method(subsampled, (FRAME, Z), ps.BAOA).predict(SHUFFLED)


def test_other_columns_are_refused(fit):
    with pytest.raises(CallError, match=r"'d'.* or x\.to_numpy\(\) if they are the same"):
        fit.predict(RENAMED)
    with pytest.raises(CallError, match=r"columns \['a'\], .* pass x\[\['a', 'b', 'c'\]\]"):
        fit.predict(FRAME[["a"]])
    with pytest.raises(CallError, match=r"columns \['a', 'b', 'c', 'd'\]"):
        fit.predict(FRAME.assign(d=0.0))


def test_rows_without_names_and_with_the_same_pass(fit):
    torch.manual_seed(0)
    expected = fit.predict(FRAME)["y"]
    for rows in (X, X.numpy(), pd.DataFrame(X.numpy()), FRAME[["a", "b", "c"]]):
        torch.manual_seed(0)
        assert torch.equal(fit.predict(rows)["y"], expected)
    assert fit.log_likelihood((SHUFFLED[["a", "b", "c"]], Z))["y"].shape[-1] == 40


def test_frames_of_arrays_are_known_by_their_numbers():
    fit = run_method(regression, (pd.DataFrame(X.numpy()), Z))
    fit.predict(FRAME)  # by words, which say nothing about numbers
    with pytest.raises(CallError, match=r"columns \[2, 1, 0\], and the run had \[0, 1, 2\]"):
        fit.predict(pd.DataFrame(X.numpy())[[2, 1, 0]])


def test_of_many_columns_those_that_differ_are_named():
    names = [f"c{place}" for place in range(60)]
    wide = pd.DataFrame(torch.randn(40, 60, generator=GENERATOR).numpy(), columns=names)
    fit = run_method(lambda x, y=None: slope(x.sum(1), y), (wide, Z))
    swapped = wide[[*names[:50], "c51", "c50", *names[52:]]]
    with pytest.raises(CallError, match=r"columns \[\.\.\., 'c51', 'c50', 'c52', \.\.\.\], and"):
        fit.predict(swapped)
    with pytest.raises(CallError, match=r"columns \['c0'\], and the run had \[\.\.\., 'c1', 'c2'"):
        fit.predict(wide[["c0"]])


@pytest.mark.parametrize("row", [X[0], X[0].numpy(), FRAME.iloc[0]], ids=["tensor", "array", "row"])
def test_one_row_is_no_vector(fit, row):
    fix = "x.to_frame().T" if isinstance(row, pd.Series) else "x[None]"
    with pytest.raises(CallError, match=r"shape \[3\], .* rows of shape \[N, 3\]: pass") as error:
        fit.predict(row)
    assert f"one row as {fix}" in str(error.value)
    one = row.to_frame().T if isinstance(row, pd.Series) else row[None]
    assert fit.predict(one)["y"].shape[-1] == 1
    with pytest.raises(CallError, match=r"shape \[3\]"):
        fit.log_likelihood((row, Z[:3]))


def test_columns_and_vectors_are_told_apart():
    with pytest.raises(CallError, match=r"shape \[40, 1\], .* \[N\]: pass x\.squeeze\(1\)"):
        run_method(slope, (X[:, 0], Y)).predict(X[:, :1])
    with pytest.raises(CallError, match=r"shape \[40\], .* \[N, 1\]: pass x\[:, None\]"):
        run_method(slope, (X[:, :1], Y)).predict(X[:, 0])


def test_other_sizes_and_constants_pass():
    """A model of sequences of any length, `[N, length, 2]`."""
    fit = run_method(series, (torch.ones(20, 5, 2), 2, torch.ones(20)))
    assert fit.predict(torch.ones(4, 9, 1), 3, None)["y"].shape[-1] == 4
    assert fit.predict(torch.ones(4, 5, 2), torch.ones(4))["y"].shape[-1] == 4
    assert fit.predict(n=torch.tensor(3.0), x=torch.ones(1, 1, 1))["y"].shape[-1] == 1


def test_a_loaded_fit_knows_dimensions(tmp_path):
    run_method(regression, (FRAME, Z), ps.BAOA).save(tmp_path / "fit.pt")
    loaded = ps.BAOA.load(tmp_path / "fit.pt", regression)
    loaded.predict(FRAME)
    with pytest.raises(CallError, match=r"one row as x\[None\]"):
        loaded.predict(X[0])
