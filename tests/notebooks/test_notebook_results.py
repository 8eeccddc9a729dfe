"""How what notebooks show is compared with what is stored."""

import json

import notebook_results
import pytest
from notebook_results import _cells, _lines, _tolerances, _write, differences


def test_a_line_is_its_words_and_its_numbers():
    ((words, numbers),) = _lines("mean  -1.20 ± 3e-05 of 4,154 draws, w[3]: lr=0.5, nan")
    assert words == "mean # ± # of # draws, w[#]: lr=#, #"
    values, units = zip(*numbers, strict=True)
    assert values[:5] == (-1.2, 3e-5, 4154, 3, 0.5)
    assert units == pytest.approx((0.01, 1e-5, 1, 1, 0.1, 1))


def test_what_the_machine_decides_is_left_out():
    assert not list(_lines("BAOA: 45 s\nmemory: 1.3 GB\nall in all 3.0 seconds"))
    table = {"columns": ["seconds", "ess_per_second", "ess"], "index": ["a"], "data": [[1, 2, 3.5]]}
    assert list(_cells(table)) == [("ess | a", [(3.5, 0.1)])]


def test_a_table_gives_the_unit_that_its_columns_are_rounded_to():
    table = {
        "columns": ["rounded", ["of", "words"], "full"],
        "index": [0.1, 0.2],
        "data": [[1.25, "0.1 to 0.22", 1 / 3], [1.5, "none", None]],
    }
    cells = dict(_cells(table))
    assert cells["rounded | 0.2"] == [(1.5, 0.01)]
    assert cells["of, words | 0.1: # to #"] == [(0.1, 0.1), (0.22, 0.01)]
    assert cells["of, words | 0.2: none"] == []
    assert cells["full | 0.1"] == [(1 / 3, 0.0)]


def test_tolerances_follow_the_spread_and_what_runs_disagree_about_is_left_out():
    def run(first, second, word, p):
        return {"x | 1": [(first, 0.1)], "x | 2": [(second, 0.1)], word: [], "p": [(p, 0.0)]}

    runs = [run(1.0, 5.0, "YES", 1e-9), run(2.0, 5.0, "YES", 1e-5), run(3.0, 5.0, "NO", 0.1)]
    kept = _tolerances(runs)
    assert set(kept) == {"x | 1", "x | 2"}
    assert kept["x | 1"] == [(2.0, 8.1)]
    assert kept["x | 2"] == [(5.0, 0.1)]


@pytest.mark.parametrize(
    ("shown", "told"),
    [
        ({"x | 1": [(1.3, 0.1)], "# draws": [(40.0, 1.0)], "YES": []}, []),
        ({"x | 1": [(9.0, 0.1)], "# draws": [(40.0, 1.0)], "YES": []}, ["x | 1: 9 instead of 1.2"]),
        (
            {"x | 1": [(float("nan"), 0.1)], "# draws": [(42.0, 1.0)], "YES": []},
            ["x | 1: nan", "# draws: 42"],
        ),
        ({"x | 1": [(1.3, 0.1)], "YES": []}, ["# draws: not shown"]),
        ({}, ["x | 1: not shown", "# draws: not shown", "YES: not shown"]),
    ],
)
def test_a_difference_is_named(shown, told, tmp_path, monkeypatch):
    runs = [
        {"cell 2": {"x | 1": [(x, 0.1)], "# draws": [(40.0, 1.0)], "YES": []}}
        for x in (1.1, 1.2, 1.3)
    ]
    book = tmp_path / "book.ipynb"
    monkeypatch.setattr(notebook_results, "STORED", tmp_path)
    monkeypatch.setattr(notebook_results, "results", lambda path, seeds: [{"cell 2": shown}])
    _write(book, runs)
    assert json.loads((tmp_path / "book.json").read_text())["cell 2"]["# draws"] == [[40.0, 1.0]]
    found = differences(book)
    assert len(found) == len(told)
    for line, start in zip(found, told, strict=True):
        assert line.startswith(f"cell 2: {start}")


def test_a_difference_by_chance_is_none(tmp_path, monkeypatch):
    runs = [{"cell 2": {"x": [(x, 0.1)], "y": [(x, 0.1)]}} for x in (1.1, 1.2, 1.3)]
    at = {0: [(9.0, 0.1)], 5: [(1.2, 0.1)]}
    monkeypatch.setattr(notebook_results, "STORED", tmp_path)
    monkeypatch.setattr(
        notebook_results,
        "results",
        lambda path, seeds: [{"cell 2": {"x": at[seeds[0]], "y": [(9.0, 0.1)]}}],
    )
    _write(tmp_path / "book.ipynb", runs)
    assert differences(tmp_path / "book.ipynb") == ["cell 2: y: 9 instead of 1.2 within 0.9"]
