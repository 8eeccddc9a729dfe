"""The layers import one way, and `import pyro_scale` is light."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pyro_scale

ROOT = Path(pyro_scale.__file__).parent
#: The layers from the lowest to the uppermost: each imports from those below alone, and those of
#: one line know nothing of each other.
LAYERS = [
    {"errors"},
    {"core"},
    {"compile"},
    {"rng", "distributed"},
    {"metrics", "storage", "data", "kernels", "model"},
    {"engine", "curvature"},
    {"marginal"},
    {"run"},
    {"tuning", "exact"},
    {"posterior"},
    {"diagnostics"},
    {"results"},
    {"calibration"},
    {"infer"},
    {"__init__"},
]
#: What may be imported by those that know less than their layer would let them.
NARROW = {
    "metrics": {"errors"},
    "engine": {"errors", "core", "compile", "rng", "storage", "data"},
}
#: Libraries that Pyro Scale is measured against, which it must not lean on.
PEERS = {"posteriors", "blackjax", "numpyro", "jax", "optax", "laplace", "curvlinops", "pymc"}
MODULES = sorted(ROOT.rglob("*.py"))
DOTTED = {".".join(("pyro_scale", *p.relative_to(ROOT).with_suffix("").parts)): p for p in MODULES}


def name_of(path):
    return str(path.relative_to(ROOT))


def layer_of(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def allowed(path):
    """The packages that a file may import from, besides its own."""
    layer = layer_of(path)
    height = next(height for height, layers in enumerate(LAYERS) if layer in layers)
    folder = path.parent.relative_to(ROOT).as_posix()
    return NARROW.get(folder) or NARROW.get(layer) or set().union(*LAYERS[:height])


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


def imported_modules(path):
    """Modules that a file imports when it is loaded, submodules named after `import` included."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_file_is_in_a_layer():
    assert {layer_of(path) for path in MODULES} == set().union(*LAYERS)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_one_way(path):
    own = [name.split(".") for name in imports(path) if name.split(".")[0] == "pyro_scale"]
    assert all(len(parts) > 1 for parts in own), "imports the package itself"
    assert {parts[1] for parts in own} - {layer_of(path)} <= allowed(path)


@pytest.mark.parametrize("path", sorted((ROOT / "compile").glob("*.py")), ids=name_of)
def test_the_compiler_knows_nothing_of_the_engine(path):
    own = {name for name in imports(path) if name.startswith("pyro_scale.engine")}
    assert all(name.startswith("pyro_scale.compile") for name in own)


@pytest.mark.parametrize(
    "package", sorted({path.parent for path in MODULES}), ids=lambda package: package.name
)
def test_every_package_says_in_a_line_what_it_holds(package):
    assert ast.get_docstring(ast.parse((package / "__init__.py").read_text()))


def test_no_circles():
    """Among modules, even inside of a package."""
    below = {
        name: {each for each in imported_modules(path) if each in DOTTED and each != name}
        for name, path in DOTTED.items()
    }
    while below:
        free = {name for name, needs in below.items() if not needs & below.keys()}
        assert free, f"a circle among {sorted(below)}"
        below = {name: needs for name, needs in below.items() if name not in free}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_peer_is_imported(path):
    assert not {name.split(".")[0] for name in imports(path)} & PEERS


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").glob("*.py")), ids=name_of)
def test_kernels_know_no_pyro_and_no_data(path):
    outside = {name for name in imports(path) if not name.startswith("pyro_scale")}
    assert not {name for name in outside if name.startswith(("pyro", "torch.utils"))}


def test_importing_the_package_is_light():
    """ArviZ and what it brings are a second's import, needed for results alone; others for a few
    methods."""
    heavy = ["torchmetrics", "arviz", "xarray", "pandas", "matplotlib", "sklearn", "scipy"]
    heavy += ["torchopt", "filelock", "pyro.contrib"]
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
