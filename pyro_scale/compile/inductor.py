"""A graph of tensor operations -> kernels, by Inductor without Dynamo.

The only file that touches Inductor's insides.  Its options are set around our own call.
"""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from torch import Tensor, fx

from pyro_scale.compile import cache_directory
from pyro_scale.core.exclusive import exclusive

T = TypeVar("T")

#: Elements for each thread from which a kernel is shared out.  Inductor's 512 take less than a
#: microsecond, and threads that meet take several, or hundreds where others use the cores.
_WORTH_A_THREAD = 2**13


class CppKernel:
    """A C++ kernel as Inductor wrote it, built when it is first called."""

    def __init__(self, argument_types: list[str], source: str):
        self.argument_types, self.source = argument_types, source
        self._built: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        """Runs it on tensors."""
        return self.built()(*args)

    def built(self) -> Callable[..., Any]:
        """The kernel as machine code."""
        if self._built is None:
            self._built = _load(self._build)
        return self._built

    def _build(self) -> Callable[..., Any]:
        from torch._inductor.codecache import CppPythonBindingsCodeCache

        function: Callable[..., Any] = CppPythonBindingsCodeCache.load_pybinding(
            self.argument_types, self.source
        )
        return function


@dataclass(frozen=True)
class Compiled:
    """A compiled graph.

    Attributes:
        call: list of inputs -> outputs; it empties the list.
        source: the Python that allocates buffers and calls kernels.
        names: what the source's names stand for: kernels and constants.
    """

    call: Callable[[list[Tensor]], Any]
    source: str
    names: Mapping[str, Any]

    def build(self) -> None:
        """Builds the kernels, if there are some in C++.

        Raises:
            Exception: there is no C++ compiler, or it refuses one.
        """
        for kernel in self.names.values():
            if isinstance(kernel, CppKernel):
                kernel.built()


def compile_graph(module: fx.GraphModule, examples: list[Tensor], threads: int | None) -> Compiled:
    """Compiles a graph for inputs like the examples.

    Args:
        module: a graph of aten operations.
        examples: inputs of the shapes, strides, dtypes and devices that all calls will have.
        threads: for kernels on the processor; None for torch's number.

    Raises:
        Exception: whatever Inductor raises on a graph that it cannot compile.
    """
    graphs: list[Any] = []
    options: dict[str, Any] = {"cpp.min_chunk_size": _WORTH_A_THREAD}
    if threads is not None:
        options["cpp.threads"] = threads
    with exclusive, warnings.catch_warnings(), _in_our_cache(), _kernels_built_on_demand():
        warnings.simplefilter("ignore")  # what Inductor's imports warn of is nobody's to mend
        import torch._functorch.config as functorch_config
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        def inner(*args: Any, **kwargs: Any) -> Any:
            graphs.append(compile_fx_inner(*args, **kwargs))
            return graphs[-1]

        with functorch_config.patch(enable_autograd_cache=False):  # it would pass `inner` by
            compile_fx(module, list(examples), inner_compile=inner, config_patches=options)
    (compiled,) = graphs
    names = getattr(compiled.current_callable, "__globals__", {})
    if threads is None and any(_may_abort(kernel) for kernel in names.values()):
        return compile_graph(module, examples, threads=1)
    return Compiled(compiled, compiled.source_code, names)


def _may_abort(kernel: object) -> bool:
    """Whether a kernel checks indices among threads, where a failed check ends the process."""
    if not isinstance(kernel, CppKernel):
        return False
    return "#pragma omp" in kernel.source and "out of bounds" in kernel.source


@contextmanager
def _kernels_built_on_demand() -> Iterator[None]:
    """Inductor would build every kernel by itself; most are built within a loop instead."""
    from torch._inductor.async_compile import AsyncCompile

    def on_demand(self: Any, argument_types: list[str], source: str) -> CppKernel:
        return CppKernel(argument_types, source)

    with exclusive, mock.patch.object(AsyncCompile, "cpp_pybinding", on_demand):
        yield


def build_library(source: str) -> str:
    """Builds C++ with Inductor's flags and headers; the path of the library.

    Raises:
        Exception: there is no C++ compiler, or it refuses the source.
    """

    def build() -> str:
        from torch._inductor.codecache import CppCodeCache

        class LoopCache(CppCodeCache):
            # a library that this process has loaded may have been dropped from the disk since
            cache: dict[str, Callable[[], Any]] = {}  # noqa: RUF012

            @classmethod
            def _get_uncompiled_header(cls, device: str) -> str | None:
                return "torch/csrc/inductor/cpp_prefix.h"

        return LoopCache.load(source)._name

    return _load(build)


@contextmanager
def _headers_precompiled_in_time() -> Iterator[None]:
    """Precompiled headers save two thirds of a library's time, and take as long as two: a machine's
    first one, with which most begin, does not wait for them.  Inductor calls openssl for their
    hash."""
    from torch._inductor import config

    has_another = any(_inductor_directory().glob("*/*.main.so"))
    precompile = has_another and shutil.which("openssl") is not None
    with config.patch(
        cpp_cache_precompile_headers=precompile and config.cpp_cache_precompile_headers
    ):
        yield


def _load(build: Callable[[], T]) -> T:
    """What Inductor builds or finds in its cache, where a killed process may have left half of a
    library: that is built again."""
    with _in_our_cache(), _headers_precompiled_in_time():
        try:
            return build()
        except (OSError, ImportError) as error:
            half = Path(str(error).partition(": ")[0])
            if half.suffix != ".so" or not half.is_relative_to(_inductor_directory()):
                raise
            half.unlink(missing_ok=True)
            return build()


def cpp_compiler() -> str:
    """The C++ compiler that Inductor would use.

    Raises:
        Exception: there is none.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler

    compiler: str = get_cpp_compiler()
    return compiler


@contextmanager
def _in_our_cache() -> Iterator[None]:
    """Inductor's files beside ours, unless the user says where: by default they are at a path
    below the temporary directory that anybody can foresee."""
    with exclusive:
        settings = {"TORCHINDUCTOR_CACHE_DIR": str(_inductor_directory())}
        try:
            getpass.getuser()
        except (KeyError, OSError, ImportError):  # no entry in passwd; Inductor asks for a name
            settings["LOGNAME"] = f"uid_{os.getuid()}"
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            from torch._inductor import codecache

            headers = str(_inductor_directory() / "precompiled_headers")
            with mock.patch.multiple(
                codecache, _HEADER_DIR=headers, _HEADER_LOCK_DIR=os.path.join(headers, "locks")
            ):
                yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _inductor_directory() -> Path:
    """The user's choice or one in our cache; for this process alone where a compiler's command
    line cannot name it or nothing can be written there."""
    chosen = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    # once asked for it, Inductor puts its default there, too
    is_default = Path(chosen).name.startswith("torchinductor_")
    kept = (
        Path(chosen).absolute()
        if chosen and not is_default
        else cache_directory.directory() / "inductor"
    )
    try:
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        usable = os.access(kept, os.W_OK | os.X_OK) and shlex.quote(str(kept)) == str(kept)
    except OSError:
        usable = False
    return kept if usable else cache_directory.for_this_process(os.getpid())
