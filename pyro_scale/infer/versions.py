"""The versions that a bug report should name."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch

#: Packages whose versions matter.
_PACKAGES = (
    *("pyro-scale", "torch", "pyro-ppl", "torchopt", "arviz", "arviz-stats", "xarray"),
    *("zarr", "numpy", "scipy", "pandas", "matplotlib"),
)


def show_versions() -> None:
    """Prints the versions of Python, of the packages that this one stands on and of the C++
    compiler, and what the machine is.

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
    """The first line that the compiler of compiled steps says of itself."""
    name = os.environ.get("CXX", "g++")
    path = shutil.which(name)
    if path is None:
        return f"none ({name} is not there): steps run eagerly"
    output = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    return output.partition("\n")[0] or path


__version__ = _version_of("pyro-scale")
