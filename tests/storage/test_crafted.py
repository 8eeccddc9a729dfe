"""Files and stores that someone made to do harm, and runs whose numbers are extreme."""

import errno
import io
import json
import os
import zipfile
from pathlib import Path

import pyro.distributions as dist
import pytest
import torch
from damage import crafted, saved
from densities import prior_only
from runs import EVERY_STEP, QUIET

import pyro_scale as ps
from pyro_scale.errors import FileError, NonFiniteError, NotRunError
from pyro_scale.storage import files
from pyro_scale.storage.zarr_store import DrawStore

HOW = {**EVERY_STEP, **QUIET, "num_samples": 40, "num_chains": 2}


normal = prior_only(lambda: dist.Normal(0.0, 1.0), name="w")


def test_records_that_are_compressed_are_refused(tmp_path):
    plain, packed = zipfile.ZipFile(io.BytesIO(saved({"a": torch.zeros(10**6)}))), io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as bomb:
        for name in plain.namelist():
            bomb.writestr(name, plain.read(name))
    with pytest.raises(FileError, match="compressed records"):
        files.read(crafted(tmp_path / "bomb", packed.getvalue()))


@pytest.mark.parametrize(
    "tensor", [torch.zeros(1).expand(10**12), torch.empty(10**12, device="meta")]
)
def test_tensors_that_declare_more_than_is_there_are_refused(tensor, tmp_path):
    with pytest.raises(FileError, match=r"declares a tensor \[1000000000000\]"):
        files.read(crafted(tmp_path / "large", saved({"a": [tensor]})))


def test_stores_with_other_codecs_are_refused(tmp_path):
    path = tmp_path / "draws.zarr"
    ps.SGLD(normal, lr=0.1, compile=False).run(None, **HOW, store=path)
    assert DrawStore.open(path).count == 40
    for name in ("posterior/w/.zarray", ".zmetadata"):
        found = json.loads((path / name).read_text())
        array = found["metadata"]["posterior/w/.zarray"] if "metadata" in found else found
        array["filters"] = [{"id": "pickle"}]
        (path / name).write_text(json.dumps(found))
    with pytest.raises(FileError, match="codec that Pyro Scale does not write"):
        DrawStore.open(path)


SPOILED = {
    "no draws": lambda contents: contents.pop("positions"),
    "elements": lambda contents: contents.update(positions=contents["positions"][..., :0]),
    "dims": lambda contents: contents.update(positions=contents["positions"][0]),
    "no tensor": lambda contents: contents.update(positions="draws"),
    "stats": lambda contents: contents["sample_stats"].update(lp=torch.zeros(3)),
    "chains": lambda contents: contents.update(chains=[0]),
    "layout": lambda contents: contents.update(shapes=[[2]]),
    "a dtype": lambda contents: contents.update(dtypes=["nn"]),
    "the method": lambda contents: contents.pop("method"),
    "a start": lambda contents: contents.update(start=[]),
}


def spoiled(run, spoil, path):
    """The path of the run's results, changed."""
    run.save(path)
    contents = files.read(path)
    spoil(contents)
    crafted(path, saved(contents))
    return path


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED.keys())
def test_results_whose_parts_do_not_belong_together_are_refused(spoil, tmp_path):
    run = ps.SGLD(normal, lr=0.1, compile=False).run(None, **HOW)
    path = spoiled(run, spoil, tmp_path / "run")
    with pytest.raises(FileError, match=r"save them again|pass the model|does not hold"):
        ps.SGLD.load(path, normal)


SPOILED_FITS = {
    "a mean": lambda contents: contents["gaussians"][0].update(mean=torch.zeros(2, 2)),
    "a scale": lambda contents: contents["gaussians"][0].update(scale_tril=torch.zeros(3)),
    "centers": lambda contents: contents.update(centers=torch.zeros(1, 3)),
    "sites": lambda contents: contents.update(sites=["v"]),
    "no gaussian": lambda contents: contents.update(gaussians=[{}]),
}


@pytest.mark.parametrize("spoil", SPOILED_FITS.values(), ids=SPOILED_FITS.keys())
def test_fits_whose_parts_do_not_belong_together_are_refused(spoil, tmp_path):
    path = spoiled(ps.Laplace(normal).run(None, seed=0), spoil, tmp_path / "fit")
    with pytest.raises(FileError, match="save them again"):
        ps.Laplace.load(path, normal)


def test_a_step_that_rounds_to_none_ends_with_results():
    sampler = ps.SGHMC(normal, lr=1e-30, compile=False).run(None, **HOW)
    assert sampler.get_samples()["w"].isfinite().all()


def test_why_there_are_no_draws_and_where_the_last_steps_are():
    told = []
    for _ in range(10):
        sampler = ps.SGLD(normal, lr=1e9, compile=False)
        with pytest.raises(NonFiniteError) as error:
            sampler.run(None, **HOW)
        told.append(f"{error.value}")  # without its link
    with pytest.raises(NotRunError) as none:
        sampler.get_samples()
    assert told[-1] in str(none.value)
    there = [Path(each.split("ps.replay('")[1].split("'")[0]).exists() for each in told]
    assert there == [False, False] + 8 * [True]


def test_a_full_disk_is_named_and_leaves_the_file_that_was_there(monkeypatch, tmp_path):
    files.write(tmp_path / "a", {"b": 1})

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileError, match="free some space, or pass a file on another disk"):
        files.write(tmp_path / "a", {"b": 2})
    assert files.read(tmp_path / "a") == {"b": 1}
    assert os.listdir(tmp_path) == ["a"]
