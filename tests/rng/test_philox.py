"""Philox, and the numbers made of it: published vectors, exact arithmetic, and statistics."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from pyro_scale.rng import native as native_module
from pyro_scale.rng import philox
from pyro_scale.rng.native import native
from pyro_scale.rng.philox import Streams
from pyro_scale.rng.streams import fill_epochs, fill_integers, fill_normals, fill_permutations

quick = settings(max_examples=40, deadline=None, derandomize=True)
words = st.integers(0, 2**32 - 1)
streams = st.builds(
    Streams.from_seed, st.integers(0, 2**63 - 1), st.lists(words, min_size=1, max_size=3), words
)
firsts = st.one_of(st.integers(0, 200), st.integers(2**31 - 99, 2**35), st.integers(2**60, 2**61))
FLOATS = [torch.float32, torch.float64]

#: Salmon et al. 2011, Random123's known answers for philox4x32 with 10 rounds: counter, key, words.
KNOWN = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.fixture
def compiled():
    built = native()
    if built is None:
        pytest.skip("there is no C++ compiler")
    return built


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_published_vectors(counter, key, words):
    found = philox.philox(key[1] << 32 | key[0], [torch.tensor([word]) for word in counter])
    assert [int(word) for word in found] == words


def test_a_streams_counter_holds_place_chain_and_purpose():
    """Each in words of its own, so that no two numbers of a run share a counter."""
    key, place = 9 << 32 | 4, 5 << 32 | 2
    found = torch.stack(philox.words(Streams.from_seed(key, [7, 8], 3), place, 1))
    for i, chain in enumerate((7, 8)):
        expected = philox.philox(key, [torch.tensor([word]) for word in (2, 5, chain, 3)])
        assert torch.equal(found[:, i], torch.stack(expected))


# ------------------------------------------------------------------ exact arithmetic


def normals_by_hand(stream, count, dtype):
    """Box and Muller with numpy's functions in long double, from the same words."""
    a, b, c, d = (np.asarray(word[0], dtype=np.uint64) for word in philox.words(stream, 0, count))
    full = np.longdouble
    pi = full("3.14159265358979323846264338327950288")
    if dtype == torch.float32:
        pairs = [(a, b, 0), (c, d, 0)]
        uniforms = [np.float32(u.astype(np.float32) + np.float32(0.5)) for u, _, _ in pairs]
        radii = [np.sqrt(-2 * np.log(u.astype(full) * full(2.0) ** -32)) for u in uniforms]
        angles = [
            (((v & 0x3FFFFFFF).astype(full) - 2**29 + full(0.5)) / 2**30 + (v >> 30)) * pi / 2
            for _, v, _ in pairs
        ]
    else:
        u = ((b << np.uint64(32) | a) >> np.uint64(12)).astype(full)
        v = d << np.uint64(32) | c
        low = (v & np.uint64(2**62 - 1)) >> np.uint64(10)
        radii = [np.sqrt(-2 * np.log((u + full(0.5)) * full(2.0) ** -52))]
        quadrant = (v >> np.uint64(62)).astype(full)
        angles = [((low.astype(full) - full(2**51) + full(0.5)) / full(2**52) + quadrant) * pi / 2]
    parts = [f(t) * r for r, t in zip(radii, angles, strict=True) for f in (np.cos, np.sin)]
    return np.stack(parts, -1).reshape(-1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.float64, 4e-15)])
def test_normals_are_box_and_mullers(dtype, tolerance):
    """Of 20,000 counters, beside long double: the error is absolute, as angles are rounded."""
    stream = Streams.from_seed(123, [4], 1)
    expected = normals_by_hand(stream, 20_000, dtype)
    out = torch.empty(1, len(expected), dtype=dtype)
    fill_normals(stream, 0, out)
    assert np.abs(out[0].numpy() - expected.astype(np.float64)).max() < tolerance


@quick
@given(streams, firsts, st.integers(0, 300), st.sampled_from(FLOATS))
def test_cpp_gives_torchs_normals_bit_for_bit(stream, first, count, dtype):
    built = native()
    if built is None:
        pytest.skip("there is no C++ compiler")
    ours = torch.empty(len(stream.chains), count, dtype=dtype)
    theirs = torch.empty_like(ours)
    built.normals(stream, first, ours)
    philox.normals(stream, first, theirs)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_million_normals_of_cpp_are_torchs(compiled, dtype):
    streams = Streams.from_seed(2**61, [5, 99], 1)
    ours, theirs = (torch.empty(2, 10**6 // 2 + 7, dtype=dtype) for _ in range(2))
    compiled.normals(streams, 3, ours)
    philox.normals(streams, 3, theirs)
    assert torch.equal(ours, theirs)


@quick
@given(streams, firsts, st.integers(1, 300), st.integers(1, 2**32))
def test_integers_are_upper_halves_of_products(stream, first, count, bound):
    """Python's integers, from the words; C++ and torch alike."""
    expected = []
    for words in zip(*philox.words(stream, first // 2, count // 2 + 2), strict=True):
        a, b, c, d = (word.tolist() for word in words)
        numbers = [n for i in range(len(a)) for n in (b[i] << 32 | a[i], d[i] << 32 | c[i])]
        expected.append([number * bound >> 64 for number in numbers[first % 2 :][:count]])
    for fill in (fill_integers, philox.integers):
        out = torch.empty(len(expected), count, dtype=torch.int64)
        fill(stream, first, bound, out)
        assert out.tolist() == expected


@quick
@given(streams, st.integers(0, 2**40), st.integers(1, 200))
def test_permutations_of_cpp_are_torchs(stream, index, size):
    ours = torch.empty(len(stream.chains), size, dtype=torch.int32)
    theirs = torch.empty_like(ours)
    fill_permutations(stream, index, ours)
    philox.permutations(stream, index, theirs)
    assert torch.equal(ours, theirs)
    assert torch.equal(ours.sort().values, torch.arange(size).expand_as(ours))


@quick
@given(
    streams,
    st.integers(0, 2**20),
    st.integers(1, 40),
    st.integers(1, 9),
    st.booleans(),
    st.lists(st.integers(1, 90), min_size=1, max_size=3),
)
def test_epochs_are_permutations_one_after_another(stream, first, rows, batch, mirrored, counts):
    """In whichever spans they are asked for, in C++ and in torch: each row once an epoch; mirrored,
    whole batches forwards and then backwards."""
    batch = min(batch, rows) if mirrored else 0
    last = first + sum(counts)
    period = 2 * (rows // batch * batch) if mirrored else rows
    expected = []
    for epoch in range(first // period, (last - 1) // period + 1):
        order = torch.empty(len(stream.chains), rows, dtype=torch.int32)
        philox.permutations(stream, epoch, order)
        batches = list(order.split(batch or rows, 1))
        if mirrored:
            batches = batches[: rows // batch]
            batches += batches[::-1]
        expected += batches
    expected = torch.cat(expected, 1)[:, first % period :][:, : last - first]
    for fill in (fill_epochs, philox.epochs):
        orders = torch.empty(len(stream.chains), rows, dtype=torch.int32)
        held, begin, found = -1, first, []
        for count in counts:
            out = torch.empty(len(orders), count, dtype=torch.int64)
            held = fill(stream, begin, batch, held, orders, out)
            begin += count
            found.append(out)
        assert torch.equal(torch.cat(found, 1), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_float32_rounded(dtype):
    out, full = torch.empty(2, 50, dtype=dtype), torch.empty(2, 50)
    fill_normals(Streams.from_seed(1, [2, 4], 3), 11, out)
    fill_normals(Streams.from_seed(1, [2, 4], 3), 11, full)
    assert torch.equal(out, full.to(dtype))


@pytest.mark.slow
def test_a_library_whose_numbers_are_others_is_not_used(monkeypatch):
    """As of a compiler that does not round as IEEE says."""
    native_module._native.cache_clear()
    fused = native_module.source().replace("t * t;", "std::fma(t, t, T(1e-12));")
    monkeypatch.setattr(native_module, "source", lambda: fused)
    assert native() is None
    out, expected = torch.empty(2, 9), torch.empty(2, 9)
    fill_normals(Streams.from_seed(1, [2, 4], 3), 0, out)
    philox.normals(Streams.from_seed(1, [2, 4], 3), 0, expected)
    assert torch.equal(out, expected)
    native_module._native.cache_clear()


def test_without_a_compiler_the_numbers_are_the_same(monkeypatch, tmp_path):
    stream, with_it = Streams.from_seed(5, [6], 1), torch.empty(1, 99, dtype=torch.float64)
    fill_normals(stream, 7, with_it)
    native_module._native.cache_clear()
    monkeypatch.setenv("PYRO_SCALE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setattr(native_module, "build_plain", lambda source: 1 / 0)
    assert native() is None
    without = torch.empty(1, 99, dtype=torch.float64)
    fill_normals(stream, 7, without)
    assert torch.equal(with_it, without)
    native_module._native.cache_clear()


def test_what_a_stream_holds_never_changes():
    """A release that changed these would change every published run."""
    out = torch.empty(1, 3, dtype=torch.float64)
    rows = torch.empty(1, 6, dtype=torch.int32)
    fill_normals(Streams.from_seed(0, [0], 1), 0, out)
    fill_permutations(Streams.from_seed(0, [0], 2), 0, rows)
    assert out[0].tolist() == [-2.269761116116283, -0.14112072969199152, -1.5022970395408228]
    assert rows[0].tolist() == [4, 5, 3, 1, 0, 2]


# ------------------------------------------------------------------ statistics


def p_of_chi_square(counts):
    expected = counts.sum() / len(counts)
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return stats.chi2.sf(statistic, len(counts) - 1)


def p_of_z(z):
    return 2 * stats.norm.sf(abs(float(z)))


def p_values(seed, size, pieces):
    """Of size x pieces normals: cells, tails, runs, the spectrum, and other keys, chains and
    purposes, each a p-value (or two sides of one)."""
    edges = torch.tensor(stats.norm.ppf(np.arange(1, 1024) / 1024))
    cells, tails = torch.zeros(1024, dtype=torch.int64), np.zeros(3)
    ups, other = 0, {"key": 0.0, "next key": 0.0, "chain": 0.0, "purpose": 0.0, "square": 0.0}
    bits, power, lagged = torch.zeros(256, dtype=torch.int64), [], 0.0
    out, beside = torch.empty(size, dtype=torch.float64), torch.empty(size, dtype=torch.float64)
    for piece in range(pieces):
        fill_normals(Streams.from_seed(seed, [0], 1), piece * size, out[None])
        cells += torch.bincount(torch.bucketize(out, edges), minlength=1024)
        tails += [float((out.abs() > at).sum()) for at in (4, 5, 6)]
        ups += int(((out > 0)[1:] != (out > 0)[:-1]).sum())
        lagged += float((out[1:] * out[:-1]).sum())
        spectrum = torch.fft.rfft(out)[1:-1].abs().square() / size
        power.append(spectrum.view(-1)[: len(spectrum) // 64 * 64].view(64, -1).mean(1))
        for name, stream in {
            "key": Streams.from_seed(seed ^ 1 << 40, [0], 1),
            "next key": Streams.from_seed(seed + 1, [0], 1),
            "chain": Streams.from_seed(seed, [1], 1),
            "purpose": Streams.from_seed(seed, [0], 2),
        }.items():
            fill_normals(stream, piece * size, beside[None])
            other[name] += float(out @ beside)
            if name == "next key":
                other["square"] += float((out.square() - 1) @ (beside.square() - 1)) / 2
        words = torch.stack(
            philox.words(Streams.from_seed(seed, [3], 1), piece * 4096, 4096)
        ).flatten()
        for shift in (0, 8, 16, 24):
            bits += torch.bincount((words >> shift) & 255, minlength=256)
    count, changes = size * pieces, (size - 1) * pieces
    found = {
        "cells": p_of_chi_square(cells.double()),
        "bytes": p_of_chi_square(bits.double()),
        "runs": p_of_z((ups - changes / 2) / math.sqrt(changes / 4)),
        "lag 1": p_of_z(lagged / math.sqrt(changes)),
    }
    for number, at in zip(tails, (4, 5, 6), strict=True):
        mean = count * 2 * stats.norm.sf(at)
        sides = stats.poisson.cdf(number, mean), stats.poisson.sf(number - 1, mean)
        found[f"beyond {at}"] = min(1.0, 2 * min(sides))
    bands = torch.stack(power).mean(0)
    per_band = (size // 2 - 1) // 64 * pieces  # exponentials of mean 1
    statistic = float(((bands - 1).square() * per_band).sum())
    found["spectrum"] = stats.chi2.sf(statistic, 64)
    for name, total in other.items():
        found[f"another {name}"] = p_of_z(total / math.sqrt(count))
    return found


def assert_likely(found):
    """One p-value in 10^4 of a right generator is below 10^-4; fourteen of them, one in 700."""
    assert all(p > 1e-4 for p in found.values()), found


def test_five_million_normals():
    assert_likely(p_values(seed=11, size=2**20, pieces=5))


@pytest.mark.long
def test_a_billion_normals():
    assert_likely(p_values(seed=2**60 + 3, size=2**24, pieces=60))


@pytest.mark.parametrize("dtype", FLOATS)
def test_normals_have_the_normal_distribution(dtype):
    out = torch.empty(2 * 10**6, dtype=dtype)
    fill_normals(Streams.from_seed(17, [0], 1), 0, out[None])
    statistic, p = stats.kstest(out.double().numpy(), "norm")
    assert p > 1e-4, statistic


@pytest.mark.slow
@pytest.mark.long
def test_every_order_of_four_rows_is_as_likely():
    """120,000 permutations of 4 rows: chi squared of 23 degrees; p below 1e-4 once in 10,000."""
    rows = torch.empty(120_000, 4, dtype=torch.int32)
    for index, row in enumerate(rows):
        fill_permutations(Streams.from_seed(5, [0], 2), index, row[None])
    codes = rows.long() @ torch.tensor([64, 16, 4, 1])
    _, counts = codes.unique(return_counts=True)
    assert len(counts) == 24
    assert p_of_chi_square(counts.double()) > 1e-4


def test_chains_with_seeds_of_their_own_have_those_seeds_streams():
    """In C++ and in torch, of whole and of partial groups of numbers."""
    seeds, together = [3, 2**62 + 5, 2**33], torch.empty(3, 37)
    streams = Streams.from_seed(seeds, [0, 7, 0], 1)
    fill_normals(streams, 5, together)
    in_torch = torch.empty_like(together)
    philox.normals(streams, 5, in_torch)
    assert torch.equal(together, in_torch)
    for seed, chain, own in zip(seeds, [0, 7, 0], together, strict=True):
        alone = torch.empty(1, 37)
        fill_normals(Streams.from_seed(seed, [chain], 1), 5, alone)
        assert torch.equal(alone[0], own)
