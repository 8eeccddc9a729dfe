"""Rows side by side in memory are the same rows, and runs that read them the same runs."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from reference import normals

import pyro_scale as ps
from pyro_scale.data import packed_rows
from pyro_scale.data.packed_rows import pack

N = 101


def tables():
    """Every width of number, none or several dimensions beside rows, rows in one piece or not."""
    numbers = normals(N, 11, seed=1)
    return [
        numbers[:, 0] > 0,
        numbers[:, :7].bfloat16(),
        numbers[:, 3].mul(9).long(),
        numbers.half()[:, 1::3],
        numbers[:, :6].float().view(N, 3, 2).transpose(1, 2),
        numbers[::2].repeat(2, 1)[:N, 5].to(torch.int8),
        numbers[0, :3].expand(N, 3).requires_grad_(),
        numbers[:, :0],
    ]


def test_rows_are_the_same_and_lie_side_by_side():
    given = tables()
    before = [table.detach().clone() for table in given]
    packed = pack(given)
    for table, old, view in zip(given, before, packed, strict=True):
        assert torch.equal(view, old) and torch.equal(table, old)
        assert view.dtype == old.dtype and not view.requires_grad
        assert view[0].is_contiguous() and view.data_ptr() % view.itemsize == 0
    first = [view[0].data_ptr() for view in packed if view.numel()]
    of_row = [view.stride(0) * view.itemsize for view in packed if view.numel()]
    assert first == sorted(first) and len(set(of_row)) == 1
    assert first[-1] + packed[-2][0].nbytes <= first[0] + of_row[0]


@pytest.mark.parametrize("change", ["long rows", "little memory"])
def test_what_gains_nothing_or_does_not_fit_stays(change, monkeypatch):
    given = tables()
    if change == "long rows":
        given.append(normals(N, 200))
    else:
        monkeypatch.setattr(packed_rows, "bytes_of", lambda device: 8 * N)
    assert all(one is other for one, other in zip(pack(given), given, strict=True))


def model(x, group, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(7), 1.0).to_event(1))
    b = pyro.sample("b", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x.float() @ w + b[group], 1.0), obs=y)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_run_is_the_same_bit_for_bit(dtype, monkeypatch):
    x = normals(N, 9).to(dtype)[:, 1:8]
    data = {"y": normals(N, seed=2).float(), "group": torch.arange(N) % 3, "x": x}

    def positions():
        sampler = ps.BAOA(model, lr=0.1, friction=1.0, compile=True)
        chosen = {"num_samples": 60, "warmup_steps": 0, "thinning": 1, "num_chains": 2}
        sampler.run(data, batch_size=13, seed=0, progress=False, **chosen)
        assert sampler._results().attrs["program"] == "compiled loop"
        return sampler._results().positions

    side_by_side = positions()
    monkeypatch.setattr(packed_rows, "_MOST_ROW_BYTES", 0)
    assert torch.equal(positions(), side_by_side)
