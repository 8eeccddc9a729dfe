"""Methods that are loaded from a file: they have results, and cannot be run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Never

from pyro_scale.errors import ArgumentError, FileError, NotRunError
from pyro_scale.storage import files


class Saved:
    """What comes before a method's own class in an object that `load` gives."""

    _read: Mapping[str, Any]

    def run(self, *args: Any, **kwargs: Any) -> Never:
        """Refuses: the file has no hyperparameters to run with.

        Raises:
            NotRunError: always.
        """
        name = type(self).__name__
        raise NotRunError(
            f"this {name} was loaded from a file, which holds results only, so it cannot be run: "
            f"make a new one, {name}(model, ...). To start from a loaded fit, pass it as "
            "init_strategy, or its as_prior() as the model"
        )

    step = run
    update = run
    step_size_bias = run

    def _contents(self) -> dict[str, Any]:
        return dict(self._read)

    def _data(self, data: Any) -> Any:
        if data is None:
            raise ArgumentError("a file keeps no data: pass the whole data as data=")
        return super()._data(data)  # type: ignore[misc]


def open_results(path: files.FilePath, cls: type) -> tuple[Any, Mapping[str, Any]]:
    """(An object of the class, or one below it, that the file is of, which its constructor has not
    seen; what is in the file).

    Raises:
        FileError: the file cannot be read, or is of another method.
    """
    contents = files.read(path)
    with check_contents(path):
        name = contents["method"]
        if contents.get("store"):
            contents["store"]["path"] = _beside(contents["store"]["path"], files.as_path(path))
    kind = next((kind for kind in _family(cls) if kind.__name__ == name), None)
    if kind is None:
        raise FileError(
            f"'{path}' holds the results of {name}, not of {cls.__name__}: call "
            f"{name}.load(path, model)"
        )
    namespace = {"__doc__": kind.__doc__, "__module__": kind.__module__}
    loaded: Any = object.__new__(type(kind.__name__, (Saved, kind), namespace))
    loaded._read = contents
    return loaded, contents


@contextmanager
def check_contents(path: files.FilePath) -> Iterator[None]:
    """Our error for contents that are not those of a method's results."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise FileError(
            f"'{path}' does not hold results as Pyro Scale writes them "
            f"({type(error).__name__}: {error}): save them again"
        ) from error


def _beside(store: str, file: Path) -> str:
    """Where a store is that may have been moved together with the file."""
    moved = file.parent / Path(store).name
    return str(moved) if moved.exists() and not Path(store).exists() else store


def _family(kind: type) -> Iterator[type]:
    """A class and all below it."""
    yield kind
    below: type
    for below in kind.__subclasses__():
        if not issubclass(below, Saved):
            yield from _family(below)
