"""Compiles graphs of tensor operations with Inductor, without Dynamo; builds C++.

This is the only file that depends on Inductor's internals.  It sets options around its own calls.
"""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, fx

from pyro_scale.compile import cache
from pyro_scale.core.exclusive import exclusive

T = TypeVar("T")

#: Number of elements per thread from which a C++ kernel uses several threads.  Inductor's default,
#: 512 elements, take less than 1 us; synchronizing threads takes several, or hundreds where cores
#: are busy.
_WORTH_A_THREAD = 2**13
#: Without `errno`, roots are SIMD instructions; without fused products and sums, rounding is as in
#: torch.
_FLAGS = "-O3", "-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"
#: Flags that enable all instructions of this processor; some compilers know neither.
_PROCESSOR = ("-march=native",), ("-mcpu=native",), ()


class CppKernel:
    """A C++ function that Inductor has written for some operations of a graph (a "kernel"). It is
    compiled when it is first called.

    Args:
        argument_types: C++ type of each argument.
        source: C++ source.
    """

    def __init__(self, argument_types: list[str], source: str):
        self.argument_types, self.source = argument_types, source
        self._built: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        """Calls the kernel on tensors and numbers, as Inductor's Python source does; builds the
        kernel first if that has not happened yet.
        """
        return self.built()(*args)

    def built(self) -> Callable[..., Any]:
        """The compiled kernel as a Python function of tensors and numbers; builds the kernel now if
        that has not happened yet.
        """
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
    """A graph that Inductor has compiled.

    Attributes:
        call: Python function of the list of inputs; a call empties the list.
        source: Python source by Inductor, which allocates buffers and calls kernels.
        names: kernels and constants that the source uses, by name.
    """

    call: Callable[[list[Tensor]], Any]
    source: str
    names: Mapping[str, Any]

    def build(self) -> None:
        """Builds the C++ kernels that the compiled graph calls. They would otherwise be built at
        the first call; built now, their errors are raised here.

        Raises:
            Exception: there is no C++ compiler, or the compiler rejects a kernel.
        """
        for kernel in self.names.values():
            if isinstance(kernel, CppKernel):
                kernel.built()


def compile_graph(module: fx.GraphModule, examples: list[Tensor], threads: int | None) -> Compiled:
    """Compiles a graph with Inductor, for inputs like the examples.

    Args:
        module: graph of aten operations.
        examples: inputs of the shapes, strides, dtypes and devices that all calls will have.
        threads: number of threads that kernels on the CPU use; None for torch's number.

    Raises:
        Exception: whatever Inductor raises on a graph that it cannot compile.
    """
    graphs: list[Any] = []
    options: dict[str, Any] = {"cpp.min_chunk_size": _WORTH_A_THREAD}
    if threads is not None:
        options["cpp.threads"] = threads
    with exclusive, warnings.catch_warnings(), _in_our_cache(), _kernels_built_on_demand():
        warnings.simplefilter("ignore")  # Inductor's imports warn of what users cannot change
        import torch._functorch.config as functorch_config
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        def inner(*args: Any, **kwargs: Any) -> Any:
            graphs.append(compile_fx_inner(*args, **kwargs))
            return graphs[-1]

        with functorch_config.patch(enable_autograd_cache=False):  # the cache would bypass `inner`
            compile_fx(module, list(examples), inner_compile=inner, config_patches=options)
    (compiled,) = graphs
    names = getattr(compiled.current_callable, "__globals__", {})
    if threads is None and any(_may_abort(kernel) for kernel in names.values()):
        return compile_graph(module, examples, threads=1)
    return Compiled(compiled, compiled.source_code, names)


@contextmanager
def _vectors_as_in_torch() -> Iterator[None]:
    """Context in which Inductor uses vectors of the width that torch's own kernels use here.
    Without it, Inductor compiles up to six trials first, which take longer than the library that
    users wait for."""
    from torch._inductor import codecache, cpu_vec_isa

    widths = {"AVX512": cpu_vec_isa.VecAVX512, "AVX2": cpu_vec_isa.VecAVX2}
    width: Any = widths.get(torch.backends.cpu.get_cpu_capability())
    if width is None:  # not x86: there is no trial, or a single one
        yield
        return

    class AsInTorch(width):
        def __bool__(self) -> bool:
            return True

        __hash__ = width.__hash__

    def pick() -> AsInTorch:
        return AsInTorch()

    with (
        mock.patch.object(codecache, "pick_vec_isa", pick),
        mock.patch.object(cpu_vec_isa, "pick_vec_isa", pick),
    ):
        yield


def _may_abort(kernel: object) -> bool:
    """Whether an object is a C++ kernel that checks indices in several threads: if such a check
    fails, the process is aborted and no exception is raised.
    """
    if not isinstance(kernel, CppKernel):
        return False
    return "#pragma omp" in kernel.source and "out of bounds" in kernel.source


@contextmanager
def _kernels_built_on_demand() -> Iterator[None]:
    """Context in which Inductor writes the source of C++ kernels and leaves building them to their
    first call. Most are never called: their source becomes part of a larger C++ loop."""
    from torch._inductor.async_compile import AsyncCompile

    def on_demand(self: Any, argument_types: list[str], source: str) -> CppKernel:
        return CppKernel(argument_types, source)

    with exclusive, mock.patch.object(AsyncCompile, "cpp_pybinding", on_demand):
        yield


def build_library(source: str) -> str:
    """Builds a C++ library with Inductor's flags and headers.  Returns the path of the library's
    file.

    Raises:
        Exception: there is no C++ compiler, or the compiler rejects the source.
    """

    def build() -> str:
        from torch._inductor.codecache import CppCodeCache

        class LoopCache(CppCodeCache):
            # the file of a library that this process has loaded may have been deleted since
            cache: dict[str, Callable[[], Any]] = {}  # noqa: RUF012

            @classmethod
            def _get_uncompiled_header(cls, device: str) -> str | None:
                return "torch/csrc/inductor/cpp_prefix.h"

        return LoopCache.load(source)._name

    return _load(build)


def build_plain(source: str) -> str:
    """Builds a C++ library from source that includes no headers of torch (for others, see
    `build_library`). Returns the path of the library's file.

    Raises:
        Exception: there is no C++ compiler, or the compiler rejects the source.
    """
    compiler = cpp_compiler()
    place = Path(tempfile.mkdtemp(dir=cache.for_this_process(os.getpid())))
    code, built = place / "source.cpp", place / "library.so"
    code.write_text(source)
    for processor in _PROCESSOR:
        command = [compiler, *_FLAGS, *processor, "-shared", "-fPIC", str(code), "-o", str(built)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return str(built)
    raise OSError(f"{compiler}: {done.stderr}")


@contextmanager
def _headers_precompiled_in_time() -> Iterator[None]:
    """Context in which Inductor precompiles headers, unless this is the machine's first library.

    Precompiled headers reduce the time of building a library to a third, and take as long as two
    libraries; the first one, which users wait for, is built without them.  Inductor calls openssl
    for the headers' hash.
    """
    from torch._inductor import config

    has_another = any(_inductor_directory().glob("*/*.main.so"))
    precompile = has_another and shutil.which("openssl") is not None
    with config.patch(
        cpp_cache_precompile_headers=precompile and config.cpp_cache_precompile_headers
    ):
        yield


def _load(build: Callable[[], T]) -> T:
    """Calls `build`, which makes a library with Inductor or finds it in Inductor's cache, and
    returns its result.  An incomplete library, left by a process that was killed, is built
    again."""
    with _in_our_cache(), _headers_precompiled_in_time():
        try:
            return build()
        except (OSError, ImportError) as error:
            library = Path(str(error).partition(": ")[0])
            if library.suffix != ".so" or not library.is_relative_to(_inductor_directory()):
                raise
            library.unlink(missing_ok=True)
            return build()


def cpp_compiler() -> str:
    """The command of the C++ compiler that Inductor would use.

    Raises:
        Exception: there is no C++ compiler.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler

    compiler: str = get_cpp_compiler()
    return compiler


@contextmanager
def _in_our_cache() -> Iterator[None]:
    """Context in which Inductor writes its files into this library's cache directory, unless the
    user chose another directory.

    Inductor's default is a predictable path in the temporary directory, where others could write
    first.
    """
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
            with (
                _vectors_as_in_torch(),
                mock.patch.multiple(
                    codecache, _HEADER_DIR=headers, _HEADER_LOCK_DIR=os.path.join(headers, "locks")
                ),
            ):
                yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _inductor_directory() -> Path:
    """Directory of Inductor's files: the user's choice, or one in this library's cache directory.
    If this directory cannot be written, or cannot be part of a compiler's command line, a temporary
    directory of this process.
    """
    chosen = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    # Inductor writes its default into this variable, too
    is_default = Path(chosen).name.startswith("torchinductor_")
    path = Path(chosen).absolute() if chosen and not is_default else cache.directory() / "inductor"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        usable = os.access(path, os.W_OK | os.X_OK) and shlex.quote(str(path)) == str(path)
    except OSError:
        usable = False
    return path if usable else cache.for_this_process(os.getpid())
