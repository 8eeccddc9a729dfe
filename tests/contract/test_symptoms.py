"""Errors and warnings have codes, each a section of the page of symptoms."""

import ast
import copy
import importlib
import pickle
import pkgutil
import re
import traceback
import warnings
from pathlib import Path
from typing import get_args

import pyro
import pyro.distributions as dist
import pytest
import torch
from runs import ONE_CHAIN, QUIET
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import pyro_scale as ps
from pyro_scale import errors
from pyro_scale.core.warn import warn

ROOT = Path(ps.__file__).parent
PAGE = (ROOT.parent / "docs" / "symptoms.md").read_text()
CODES = set(get_args(errors.Code))
#: Sections that no message leads to: what people type into a search box.
PHRASES = {
    "arviz-1",
    "chains-hang",
    "cuda-memory",
    "jupyter",
    "missed-modes",
    "new-group",
    "params",
    "prediction-shape",
    "reproducible",
    "row-order",
    "slow",
}
LINK = "\nSee https://pyro-scale.github.io/pyro-scale/symptoms.html#"

for module in pkgutil.walk_packages([str(ROOT)], "pyro_scale."):
    importlib.import_module(module.name)  # whose errors are subclasses


def family(kind):
    return {kind}.union(*(family(each) for each in kind.__subclasses__()))


ERRORS, WARNINGS = (
    sorted(family(kind), key=lambda each: each.__name__)
    for kind in (errors.PyroScaleError, errors.PyroScaleWarning)
)


# ------------------------------------------------------------------ the page


def given_codes(tree):
    """The strings that `code` is set to, by calls and classes, and that return annotations of
    codes allow."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword | ast.Assign):
            names = [node.arg] if isinstance(node, ast.keyword) else map(ast.unparse, node.targets)
            given = [node.value] if "code" in names else []
        elif isinstance(node, ast.FunctionDef) and node.returns is not None:
            is_code = re.search(r"\bCode$|^Literal", ast.unparse(node.returns))
            given = node.body if is_code else []
        else:
            given = []
        for each in (part for value in given for part in ast.walk(value)):
            if isinstance(each, ast.Constant) and each.value in CODES:
                yield each.value


def test_every_code_is_used():
    files = ROOT.rglob("*.py")
    used = {code for file in files for code in given_codes(ast.parse(file.read_text()))}
    assert used == CODES


def test_sections_are_the_codes_and_what_people_search_for():
    headings = re.findall(r"^###\s.*$", PAGE, re.MULTILINE)
    anchors = [re.search(r" \{ #([a-z0-9-]+) \}$", heading)[1] for heading in headings]
    assert len(anchors) == len(set(anchors))
    assert not CODES & PHRASES
    assert set(anchors) == CODES | PHRASES


def test_the_contents_list_every_group_and_section_in_their_order():
    headings = re.findall(r"^###? (.*?)(?: \{ #([a-z0-9-]+) \})?$", PAGE, re.MULTILINE)
    anchors = [code or re.sub(r"\W+", "-", title.lower()) for title, code in headings]
    assert re.findall(r"\]\(#([a-z0-9-]+)\)", PAGE[: PAGE.index("\n## ")]) == anchors


def test_groups_and_sections_are_headings_of_two_levels():
    without_code = re.sub(r"^```.*?^```", "", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert {len(marks) for marks in re.findall(r"^(#+) ", without_code, re.MULTILINE)} == {1, 2, 3}


# ------------------------------------------------------------------ errors and warnings


@pytest.mark.parametrize("kind", ERRORS + WARNINGS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("code", [None, "memory"])
def test_a_copy_of_an_error_says_the_same(kind, code):
    error = kind("argument=3: pass 4", code=code)
    again = [copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))]
    for each in again:
        assert type(each) is kind
        assert each.args == ("argument=3: pass 4",)
        assert each.code == (code or kind.code)
        assert str(each) == str(error)


@pytest.mark.parametrize("kind", ERRORS + WARNINGS, ids=lambda kind: kind.__name__)
def test_the_link_ends_what_is_shown(kind):
    plain = "argument=3: pass 4"
    assert str(kind(plain, code="memory")) == f"{plain}{LINK}memory"
    assert str(kind(plain)) == (plain if kind.code is None else f"{plain}{LINK}{kind.code}")
    (shown,) = traceback.format_exception_only(kind(plain, code="memory"))
    assert shown.endswith(f": {plain}{LINK}memory\n")


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_an_error_within_a_message_has_no_link(kind):
    plain = "argument=3: pass 4"
    outer = kind(f"rank 1: {kind(plain, code='memory')}", code="plate")
    assert outer.args == (f"rank 1: {plain}",)
    assert str(outer) == f"rank 1: {plain}{LINK}plate"


def test_classes_without_a_symptom_have_no_link():
    for kind in (errors.ArgumentError, errors.DataError, errors.FileError, errors.NotRunError):
        assert str(kind("lr=-1: pass a number above 0")) == "lr=-1: pass a number above 0"


def test_the_code_of_an_error_is_not_that_of_its_class():
    errors.SiteError("site 'z': ...", code="local-latent")
    assert errors.SiteError.code is None
    assert errors.SiteError("site 'z': ...").code is None


def test_warnings_have_a_link_and_can_be_filtered_by_their_message():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn(errors.BiasWarning, "the chains have exploded: ...", code="exploded")
        warn(errors.BiasWarning, "too hot")
        warn(errors.PyroScaleWarning, "interrupted")
        warnings.filterwarnings("ignore", "the chains have", errors.BiasWarning)
        warn(errors.BiasWarning, "the chains have exploded: ...", code="exploded")
    assert [each.category for each in caught] == [
        errors.BiasWarning,
        errors.BiasWarning,
        errors.PyroScaleWarning,
    ]
    assert [str(each.message) for each in caught] == [
        f"the chains have exploded: ...{LINK}exploded",
        f"too hot{LINK}minibatch-heat",
        "interrupted",
    ]
    shown = warnings.formatwarning(caught[0].message, errors.BiasWarning, "program.py", 3, "run()")
    assert f"BiasWarning: the chains have exploded: ...{LINK}exploded\n  run()" in shown


def test_warnings_that_are_turned_into_errors_keep_their_code():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(errors.BiasWarning) as raised:
            warn(errors.BiasWarning, "the chains have exploded: ...", code="exploded")
    assert raised.value.code == "exploded"


# ------------------------------------------------------------------ what the page quotes

X = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1)
HOW = {**ONE_CHAIN, **QUIET, "num_samples": 2}


def model(x, y=None, size=None, latent=None, noise=0.0, net=None, likelihood=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    mean = x @ w if net is None else net(x)[:, 0]
    with pyro.plate("data", size or len(x)):
        if latent is not None:
            mean = mean + pyro.sample(*latent)
        mean = mean + noise * torch.randn_like(mean) if noise else mean
        pyro.sample("y", likelihood(mean) if likelihood else dist.Normal(mean, 1.0), obs=y)


def of_net(layer):
    net = ps.bayesianize(nn.Sequential(nn.Linear(3, 4), layer, nn.Linear(4, 1)))
    return lambda x, y=None: model(x, y, net=net)


def with_local(*latent):
    return lambda x, y=None: model(x, y, latent=latent)


def four_a_row(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(torch.zeros(4), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(x @ w + z.sum(-1), 1.0), obs=y)


def wide():
    pyro.factor("no data", torch.zeros(()))
    pyro.sample("w", dist.Normal(torch.zeros(1_000_000), 1.0).to_event(1))


def yes_or_no(x, y=None):
    model(x, y, likelihood=lambda logits: dist.Bernoulli(logits=logits))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


#: By code: the model, the data, and what `run` is called with besides.
REFUSED = {
    "plate": (lambda x, y=None: model(x, y, size=200), (X, Y), {"batch_size": 20}),
    "local-latent": (four_a_row, (X, Y), {"batch_size": 20}),
    "discrete-latent": (with_local("k", dist.Bernoulli(0.5)), (X, Y), {"batch_size": 20}),
    "batchnorm": (of_net(nn.BatchNorm1d(4)), (X, Y), {}),
    "dropout": (of_net(nn.Dropout(0.2)), (X, Y), {}),
    "random-likelihood": (lambda x, y=None: model(x, y, noise=0.1), (X, Y), {}),
    "no-observation": (model, (X,), {}),
    "observed-value": (yes_or_no, (X, Y), {}),
    "no-length": (model, DataLoader(Stream(), 20), {}),
    "not-rows": (model, (X, Y[:100]), {}),
    "memory": (wide, None, {"num_samples": 10_000, "num_chains": 4, "memory_budget": 2**30}),
    "not-finite": (model, (torch.where(X > 2, torch.nan, X), Y), {}),
}


@pytest.mark.parametrize("code", REFUSED)
def test_the_page_quotes_what_is_said(code):
    program, data, more = REFUSED[code]
    with pytest.raises(errors.PyroScaleError) as raised:
        ps.BAOA(program, lr=0.1).run(data, **HOW | more)
    assert raised.value.code == code
    assert str(raised.value).endswith(f"{LINK}{code}")
    section = PAGE[PAGE.index(f"{{ #{code} }}") :].partition("\n### ")[0]
    block = re.search(r"^```text\n(.*?)\n```$", section, re.MULTILINE | re.DOTALL)[1]
    quoted = re.split(r"^(\w+Error): ", block, flags=re.MULTILINE)[1:3]
    assert quoted[0] == type(raised.value).__name__
    pieces = re.sub(r"\s+", " ", quoted[1]).split("...")
    assert [piece for piece in pieces if piece.strip() not in raised.value.args[0]] == []


def test_an_error_within_another_one_leaves_its_link_behind(tmp_path):
    laplace = ps.Laplace(model).run((X, Y), progress=False)
    laplace.save(tmp_path / "fit")
    with pytest.raises(errors.FileError, match="the model does not run on the file's batch") as it:
        ps.Laplace.load(tmp_path / "fit", of_net(nn.Dropout(0.2)))
    assert "call .eval()): pass the model that was run" in str(it.value)
    assert "See https" not in str(it.value)
