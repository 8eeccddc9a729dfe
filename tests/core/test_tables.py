"""Arrays and data frames as tensors: what they hold, and nothing else."""

import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from dtypes import default_dtype
from scipy import stats

import pyro_scale as ps
from pyro_scale.core.rows import as_arguments
from pyro_scale.errors import DataError

RNG = np.random.default_rng(0)
NORMAL = RNG.normal(size=(40, 3))
FRAME = pd.DataFrame({"a": NORMAL[:4, 0], "b": range(4), "c": [True, False, True, True]})
SECONDS = 1.7e9 + np.arange(200.0)


@pytest.fixture(autouse=True)
def in_float32():
    """Whatever other tests have made the default."""
    with default_dtype(torch.float32), warnings.catch_warnings():
        warnings.simplefilter("error")  # NumPy's and torch's, of memory that is not writable
        yield


def tensor(table):
    (found,) = as_arguments(table)
    return found


def read_only(values):
    values = values.copy()
    values.flags.writeable = False
    return values


HELD = {
    "float64": (NORMAL, torch.float32),
    "float32": (NORMAL.astype("f4"), torch.float32),
    "float16": (NORMAL.astype("f2"), torch.float32),
    "long double": (NORMAL.astype("g"), torch.float32),
    "big-endian": (NORMAL.astype(">f8"), torch.float32),
    "big-endian integers": (np.arange(5).astype(">i4"), torch.int32),
    "backwards": (NORMAL[::-1, ::-1], torch.float32),
    "integers backwards": (np.arange(5)[::-1], torch.int64),
    "by column": (np.asfortranarray(NORMAL), torch.float32),
    "read-only": (read_only(NORMAL), torch.float32),
    "read-only integers": (read_only(np.arange(5)), torch.int64),
    "int8": (np.arange(5, dtype="i1"), torch.int8),
    "uint8": (np.arange(5, dtype="u1"), torch.uint8),
    "uint16": (np.array([0, 65535], "u2"), torch.int32),
    "uint32": (np.array([0, 2**32 - 1], "u4"), torch.int64),
    "booleans": (np.array([True, False]), torch.bool),
    "images": (RNG.normal(size=(6, 4, 4)), torch.float32),
    "infinite": (np.array([1.0, np.inf]), torch.float32),
    "constant": (np.full(5, 0.1), torch.float32),
    "constant but for rounding": (np.array([0.3, 0.1 + 0.2]), torch.float32),
    "nothing masked": (np.ma.array([1.0, 2.0], mask=[False, False]), torch.float32),
    "years": (1990 + np.arange(400) / 12, torch.float32),
    "a series": (FRAME["a"], torch.float32),
    "a series of integers": (FRAME["b"], torch.int64),
    "nullable": (FRAME["b"].astype("Int32"), torch.int32),
    "nullable floats": (FRAME["a"].astype("Float64"), torch.float32),
    "nullable booleans": (FRAME["c"].astype("boolean"), torch.bool),
    "sparse": (pd.Series(pd.arrays.SparseArray([0, 0, 3])), torch.int64),
    "integers": (FRAME[["b"]], torch.int64),
    "integers and booleans": (FRAME[["b", "c"]], torch.int64),
    "mixed": (FRAME, torch.float32),
    "mixed, populations": (FRAME.assign(b=[20_000_001, 331_002_651, 83_783_942, 7]), torch.float32),
    "mixed and nullable": (FRAME.astype({"a": "Float64", "b": "Int64"}), torch.float32),
}


@pytest.mark.parametrize("name", HELD)
def test_numbers_are_held(name):
    table, dtype = HELD[name]
    found = tensor(table)
    expected = np.asarray(table).astype(np.float64)
    assert found.dtype == dtype
    assert found.shape == expected.shape
    rounding = 2**-24 if dtype == torch.float32 else 0.0
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=rounding, atol=0)


@pytest.mark.parametrize("kind", ["int64", "double", "bool"])
def test_columns_of_arrows(kind):
    pytest.importorskip("pyarrow")
    column = pd.Series([1, 0, 1]).astype(f"{kind}[pyarrow]")
    assert tensor(column).tolist() == [1, 0, 1]
    assert tensor(column).dtype == {"int64": torch.int64, "bool": torch.bool}.get(
        kind, torch.float32
    )


def test_floats_are_in_the_default_dtype():
    torch.set_default_dtype(torch.float64)
    assert torch.equal(tensor(NORMAL), torch.from_numpy(NORMAL))
    assert torch.equal(tensor(SECONDS), torch.from_numpy(SECONDS))


def test_neither_side_sees_what_the_other_writes():
    for array in (np.arange(4.0, dtype="f4"), np.arange(4), np.ones(4, bool)):
        before, found = array.copy(), tensor(array)
        found.zero_()
        assert (array == before).all()
        found = tensor(array)
        array[:] = 0
        assert torch.equal(found, torch.from_numpy(before))


def test_tables_are_found_wherever_arguments_nest():
    arguments = as_arguments({"x": {"u": np.zeros(3)}, "n": 3, "z": (FRAME["a"], np.float64(2.0))})
    assert isinstance(arguments["x"]["u"], torch.Tensor)
    assert isinstance(arguments["z"][0], torch.Tensor)
    assert arguments["n"] == 3
    assert isinstance(arguments["z"][1], np.float64)


REFUSED = {
    "objects": (np.array([1, None], object), "argument 0 has objects"),
    "strings": (np.array(["a"]), "argument 0 has strings"),
    "bytes": (np.array([b"a"]), "argument 0 has strings"),
    "dates": (np.array(["2020-01-01"], "M8[s]"), "argument 0 has dates"),
    "durations": (np.array([1], "m8[s]"), "argument 0 has durations"),
    "complex": (np.array([1j]), r"argument 0 has complex numbers.*\.real"),
    "records": (np.zeros(2, [("a", "f8")]), "argument 0 has no numbers"),
    "uint64": (np.arange(3, dtype="u8"), r"argument 0 has uint64.*astype\('int64'\)"),
    "NaN": (np.array([1.0, np.nan]), "argument 0 has missing values"),
    "NaN in a table": (np.array([[1.0, np.nan]]), "argument 0, column 1 has missing"),
    "masked": (np.ma.array([1.0, 2.0], mask=[False, True]), "masked values"),
    "too large": (np.array([1.0, 1e300]), "float32 cannot hold .*too large"),
    "too small": (NORMAL[:, 0] * 1e-60, "float32 cannot hold .*distinct"),
    "seconds since 1970": (SECONDS, "float32 cannot hold .*of 200 distinct values 3 would be left"),
    "minutes since 1970": (1.7e9 + 60 * np.arange(200.0), "distinct"),
    "a day in hours": (1.7e9 + 3600 * np.arange(24.0), r"rounding would move them by 0\.00"),
    "one of many columns": (
        np.concatenate([NORMAL, 1e9 + NORMAL], 1),
        "argument 0, column 3 has numbers that float32 cannot hold",
    ),
    "one of many elements": (
        np.stack([NORMAL, 1e9 + NORMAL], 2),
        r"argument 0, element \[:, 0, 1\]",
    ),
    "a column of strings": (FRAME.assign(s="x"), "argument 0, column 's' has strings"),
    "a column of objects": (
        FRAME.assign(s=pd.Series([1, "x", 2, 3], dtype=object)),
        "column 's' has objects",
    ),
    "a column of dates": (FRAME.assign(s=pd.Timestamp("2020")), "column 's' has dates"),
    "with a zone": (FRAME.assign(s=pd.Timestamp("2020", tz="UTC")), "column 's' has dates"),
    "categories": (FRAME.assign(s=pd.Categorical(list("abca"))), r"column 's' has categories"),
    "categories of booleans": (pd.Series(pd.Categorical([True, False])), "has categories"),
    "a missing value": (FRAME.assign(a=[1, 2, 3, None]), "column 'a' has missing"),
    "a missing integer": (pd.Series([1, None], dtype="Int64"), "argument 0 has missing"),
    "integers beside floats": (
        FRAME.assign(b=2**60 + np.arange(4)),
        "column 'b' .*float32 cannot hold",
    ),
    "an id beside floats": (
        FRAME.assign(b=[1, 2**24, 2**24 + 1, 7]),
        "column 'b' has integers, some of which are one in float32.*argument of its own",
    ),
    "two columns of one name": (FRAME[["a", "a"]], r"two columns of one name \(\['a'\]\)"),
    "levels of columns": (pd.concat({"u": FRAME}, axis=1), "columns with a MultiIndex"),
    "levels of rows": (FRAME.set_index(["b", "c"]), "rows with a MultiIndex.*reset_index"),
    "no columns": (FRAME[[]], "no columns"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_number_or_would_change_is_refused_by_name(name):
    table, message = REFUSED[name]
    with pytest.raises(DataError, match=message):
        tensor(table)


@pytest.mark.parametrize("far", [0, 1, 20, 80])
def test_many_continuous_values_are_never_refused(far):
    """Some of a million are the same in float32, and nothing is lost."""
    values = far + stats.norm.ppf((np.arange(400_000) + 0.5) / 400_000)
    assert len(tensor(values)) == len(values)


def test_frames_without_rows_are_refused():
    def model(x):
        raise AssertionError

    with pytest.raises(DataError, match="no rows"):
        ps.explain(model, FRAME[:0])


def test_the_same_labels_in_another_order_are_refused():
    series = pd.Series(NORMAL[:4, 0])
    with pytest.raises(DataError, match="argument 1 has the labels of argument 0 in another order"):
        as_arguments((FRAME, series[::-1]))
    with pytest.raises(DataError, match="argument 'y' has the labels of argument 'x' in another"):
        as_arguments({"x": FRAME, "y": series.sample(frac=1.0, random_state=1)})
    for same in (series, series.set_axis(list("abcd")), series[::-1].reset_index(drop=True)):
        as_arguments((FRAME, same))  # in the same order, or labels of its own
    as_arguments((FRAME[::-1], series[::-1], series.to_numpy()))
    as_arguments((FRAME.set_axis([0, 0, 1, 1]), series.set_axis([0, 1, 0, 1])))
