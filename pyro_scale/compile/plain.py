"""C++ that needs no headers of torch's, built with flags of our own."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from pyro_scale.compile import cache_directory

#: Roots that need not set `errno` are SIMD instructions; products and sums that are not fused
#: round as torch's do.
_FLAGS = "-O3", "-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"
#: How compilers are told to use all of this processor; some know none of them.
_PROCESSOR = ("-march=native",), ("-mcpu=native",), ()


def build_plain(source: str) -> str:
    """Builds C++; the path of the library.

    Raises:
        Exception: there is no C++ compiler, or it refuses the source.
    """
    from pyro_scale.compile.inductor import cpp_compiler

    compiler = cpp_compiler()
    place = Path(tempfile.mkdtemp(dir=cache_directory.for_this_process(os.getpid())))
    code, built = place / "source.cpp", place / "library.so"
    code.write_text(source)
    for processor in _PROCESSOR:
        command = [compiler, *_FLAGS, *processor, "-shared", "-fPIC", str(code), "-o", str(built)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return str(built)
    raise OSError(f"{compiler}: {done.stderr}")
