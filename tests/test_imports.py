"""The layers import one way, and `import pyro_scale` is light."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pyro_scale

ROOT = Path(pyro_scale.__file__).parent
#: What each layer may import from the package, besides itself.
ALLOWED = {
    "errors": set(),
    "core": {"errors"},
    "model": {"errors", "core"},
    "kernels": {"errors", "core"},
    "drive": {"errors", "core"},
    "metrics": {"errors"},
    "infer": {"errors", "core", "model", "kernels", "drive", "metrics"},
    "__init__": {"errors", "core", "model", "kernels", "drive", "metrics", "infer"},
}
#: Libraries that Pyro Scale is measured against, which it must not lean on.
PEERS = {"posteriors", "blackjax", "numpyro", "jax", "optax", "laplace", "curvlinops", "pymc"}
MODULES = sorted(ROOT.rglob("*.py"))


def name_of(path):
    return str(path.relative_to(ROOT))


def layer_of(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path):
    """Every module that a file imports, in functions too; relative ones made absolute."""
    package = ["pyro_scale", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            if origin == "pyro_scale":  # from pyro_scale import kernels
                yield from (f"{origin}.{alias.name}" for alias in node.names)
            else:
                yield origin


def test_every_file_is_in_a_layer():
    assert {layer_of(path) for path in MODULES} <= ALLOWED.keys()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_one_way(path):
    layer = layer_of(path)
    own = [name.split(".") for name in imports(path) if name.split(".")[0] == "pyro_scale"]
    assert all(len(parts) > 1 for parts in own), "imports the package itself"
    assert {parts[1] for parts in own} <= ALLOWED[layer] | {layer}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_peer_is_imported(path):
    assert not {name.split(".")[0] for name in imports(path)} & PEERS


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").glob("*.py")), ids=name_of)
def test_kernels_know_no_pyro_and_no_data(path):
    outside = {name for name in imports(path) if not name.startswith("pyro_scale")}
    assert not {name for name in outside if name.startswith(("pyro", "torch.utils"))}


def test_importing_the_package_is_light():
    """ArviZ and what it brings are a second's import, needed for results alone."""
    heavy = ["torchmetrics", "arviz", "xarray", "pandas", "matplotlib", "sklearn", "scipy"]
    code = f"import sys, pyro_scale; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_one_module_alone_speaks_to_arviz():
    """Of which there are two lines with other names and signs."""
    found = [
        path.name
        for path in MODULES
        if re.search(r"^\s*(import|from) arviz", path.read_text(), re.MULTILINE)
    ]
    assert found == ["arviz_api.py"]
