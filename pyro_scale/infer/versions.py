"""The versions that belong in a bug report."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch

#: Packages whose versions are printed.
_PACKAGES = (
    *("pyro-scale", "torch", "pyro-ppl", "torchopt", "arviz", "arviz-stats", "xarray"),
    *("zarr", "numpy", "scipy", "pandas", "matplotlib"),
)


def show_versions() -> None:
    """Prints the versions of Python, of this package and its dependencies, and of the C++ compiler,
    and describes the machine, for bug reports.

    Examples:
        >>> import pyro_scale as ps
        >>> ps.show_versions()  # doctest: +ELLIPSIS
        pyro-scale...
    """
    versions = {name: _version_of(name) for name in _PACKAGES}
    versions |= {
        "Python": platform.python_version(),
        "C++ compiler": _compiler(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "CUDA": str(torch.version.cuda) if torch.cuda.is_available() else "none",
    }
    width = max(map(len, versions))
    for name, value in versions.items():
        print(f"{name:{width}}  {value}")


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _compiler() -> str:
    """First line of the version text of the C++ compiler (`$CXX` or g++), which compiles steps; if
    there is no compiler, a text that says so."""
    name = os.environ.get("CXX", "g++")
    path = shutil.which(name)
    if path is None:
        return f"none ({name} is not there): steps run eagerly"
    output = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    return output.partition("\n")[0] or path


__version__ = _version_of("pyro-scale")
