"""What the bar of a run shows."""

import pytest

from pyro_scale.engine.progress import Progress


@pytest.mark.parametrize("total", [None, 20])
def test_what_is_going_on_is_behind_the_title(total, capsys):
    with Progress(total, "BAOA, warm-up", show=True) as bar:
        bar.say("compiling")
        bar.update(20)
    last = capsys.readouterr().err.strip().rpartition("\r")[-1]
    assert last.startswith("BAOA, warm-up, compiling: ")
    assert ": :" not in last
    assert "20" in last
