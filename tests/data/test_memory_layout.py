"""Rows side by side in memory are the same rows, and runs that read them the same runs."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from reference import normals
from repetitions import long_but

import pyro_scale as ps
from pyro_scale.data import memory_layout
from pyro_scale.data.memory_layout import pack, store_by_column

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
        assert torch.equal(view, old)
        assert torch.equal(table, old)
        assert view.dtype == old.dtype
        assert not view.requires_grad
        assert view[0].is_contiguous()
        assert view.data_ptr() % view.itemsize == 0
    first = [view[0].data_ptr() for view in packed if view.numel()]
    of_row = [view.stride(0) * view.itemsize for view in packed if view.numel()]
    assert first == sorted(first)
    assert len(set(of_row)) == 1
    assert first[-1] + packed[-2][0].nbytes <= first[0] + of_row[0]


@pytest.mark.parametrize("change", ["long rows", "little memory"])
def test_what_gains_nothing_or_does_not_fit_stays(change, monkeypatch):
    given = tables()
    if change == "long rows":
        given.append(normals(N, 200))
    else:
        monkeypatch.setattr(memory_layout, "bytes_of", lambda device: 8 * N)
    assert all(one is other for one, other in zip(pack(given), given, strict=True))


def model(x, group, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(7), 1.0).to_event(1))
    b = pyro.sample("b", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x.float() @ w + b[group], 1.0), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", long_but([torch.float16, torch.float32], torch.float16))
def test_a_run_is_the_same_bit_for_bit(dtype, monkeypatch):
    x = normals(N, 9).to(dtype)[:, 1:8]
    data = {"y": normals(N, seed=2).float(), "group": torch.arange(N) % 3, "x": x}

    def positions():
        sampler = ps.BAOA(model, lr=0.1, friction=1.0, compile=True)
        chosen = {"num_samples": 60, "warmup_steps": 0, "thinning": 1, "num_chains": 2}
        sampler.run(data, batch_size=13, seed=0, progress=False, **chosen)
        assert sampler.posterior.draws.attrs["program"] == "compiled loop"
        return sampler.posterior.draws.positions

    side_by_side = positions()
    monkeypatch.setattr(memory_layout, "bytes_of", lambda device: 0)  # no room for a copy
    assert torch.equal(positions(), side_by_side)


@pytest.mark.parametrize(("num_rows", "columns"), [(N, 20), (1, 3), (N, 300)])
def test_columns_hold_the_same_rows(num_rows, columns):
    table, wide = normals(num_rows, columns).float(), normals(num_rows, 5, 2)
    before = table.clone()
    stored = store_by_column({"table": table, "wide": wide, "number": 3})
    assert torch.equal(stored["table"], before)
    assert torch.equal(table, before)
    assert stored["wide"] is wide
    assert stored["number"] == 3
    if columns == 300:
        assert stored["table"] is table
    else:
        assert stored["table"].mT.is_contiguous()


@pytest.mark.slow
def test_a_run_on_all_rows_is_the_same_by_column_to_rounding(monkeypatch):
    x = normals(N, 20)
    data = {"y": normals(N, seed=2), "x": x}

    def linear(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(20, dtype=x.dtype), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    def positions():
        sampler = ps.BAOA(linear, lr=0.1, friction=1.0, compile=True)
        chosen = {"num_samples": 40, "warmup_steps": 0, "thinning": 1, "num_chains": 1}
        sampler.run(data, batch_size=None, seed=0, progress=False, **chosen)
        assert sampler.posterior.draws.attrs["program"] == "compiled loop"
        return sampler.posterior.draws.positions

    by_column = positions()
    monkeypatch.setattr(memory_layout, "bytes_of", lambda device: 0)
    torch.testing.assert_close(positions(), by_column, rtol=0, atol=1e-12)
