"""The folder of data sets: $PYRO_SCALE_DATA, ../shared/data beside the repository by default."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

DATA = Path(
    os.environ.get("PYRO_SCALE_DATA", Path(__file__).resolve().parents[3] / "shared" / "data")
)


def loader() -> Any | None:
    """The folder's own `load.py`, which has a function for each set; None where there is none."""
    path = DATA / "load.py"
    if not path.exists():
        return None
    spec = importlib.util.spec_from_file_location("load", path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found
