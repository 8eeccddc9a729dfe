"""Moments, mixing and quantiles of draws that are added up, against those of all draws at once."""

import copy
from itertools import product

import arviz
import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from reference import double, normals
from repetitions import long_but

from pyro_scale.core.online_moments import OnlineMoments
from pyro_scale.core.tdigest import QuantileSketch

LEVELS = [0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99]


def added_up(draws, sizes=(), num_draws=None):
    """Draws `[chains, draws, size]`, in blocks of the sizes given and a last one of the rest."""
    sums = OnlineMoments(draws.shape[0], draws.shape[2], num_draws or draws.shape[1])
    sizes = list(sizes)
    for block in draws.split([*sizes, draws.shape[1] - sum(sizes)], 1):
        sums.add(block)
    return sums


def moments(draws, sizes=(), **kwargs):
    return totals(added_up(draws, sizes, **kwargs), range(len(draws)))


def totals(sums, chains, levels=LEVELS):
    return sums.totals(chains).moments(levels)


def same_bits(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one.nan_to_num(-7.5), other.nan_to_num(-7.5))


def close_in_ratio(actual, expected, rtol=1e-11):
    expected = torch.as_tensor(np.asarray(expected, dtype=float))
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=0.0, equal_nan=True)


@some.composite
def parts(draw, most=120):
    """(Draws of some chains, sizes of blocks)."""
    chains, count, size = (draw(some.integers(1, n)) for n in (3, most, 4))
    cuts = sorted(draw(some.lists(some.integers(0, count), max_size=12)))
    sizes = np.diff([0, *cuts]).tolist()
    offset = draw(some.sampled_from([0.0, -3.0, 1e4, 1e8]))
    scale = draw(some.sampled_from([1e-3, 1.0, 1e6]))
    draws = offset + scale * normals(chains, count, size, seed=draw(some.integers(0, 2**30)))
    return draws, sizes


def split_r_hat(draws):
    """Gelman et al. 2013, 11.4, on halves, where the halves are of one length."""
    chains, count = draws.shape[:2]
    halves = np.asarray(draws).reshape(chains * 2, count // 2, -1)
    within = halves.var(1, ddof=1).mean(0)
    between = halves.mean(1).var(0, ddof=1)
    return np.sqrt((count // 2 - 1) / (count // 2) + between / within)


# ------------------------------------------------------------------ sums


@pytest.mark.slow
@given(parts())
@settings(max_examples=150, deadline=None)
def test_mean_and_sd_do_not_depend_on_how_draws_come(case):
    draws, sizes = case
    found = moments(draws, sizes)
    flat = np.asarray(draws, dtype=np.longdouble).reshape(-1, draws.shape[2])
    largest = float(abs(flat).max())
    torch.testing.assert_close(
        found.mean, torch.as_tensor(flat.mean(0).astype(float)), rtol=0.0, atol=1e-14 * largest
    )
    if len(flat) > 1:
        # numbers of 1e8 have eight digits behind those that their sd is of
        digits = float((abs(flat).max(0) / flat.std(0)).max())
        close_in_ratio(found.sd, flat.std(0, ddof=1), rtol=1e-12 + 1e-15 * digits)
    else:
        assert found.sd.isnan().all()


@pytest.mark.slow
@given(parts())
@settings(max_examples=100, deadline=None)
def test_mixing_does_not_depend_on_how_draws_come(case):
    draws, sizes = case
    found, whole = moments(draws, sizes), moments(draws)
    # means are of 16 digits, of which those of an offset are lost
    lost = float((draws.abs().amax((0, 1)) / draws.flatten(0, 1).std(0)).nan_to_num().max())
    rtol = 1e-11 + 1e-14 * lost
    for one, other in ((found.r_hat, whole.r_hat), (found.ess, whole.ess)):
        torch.testing.assert_close(one, other, rtol=rtol, atol=0.0, equal_nan=True)
    if draws.shape[1] % 2 == 0 and draws.shape[1] >= 4:
        close_in_ratio(found.r_hat, split_r_hat(draws - draws[0, 0]), rtol=rtol)


@pytest.mark.parametrize("chains", [2, 5])  # of one, ArviZ says nothing
@pytest.mark.parametrize("count", [8, 10, 100, 1000])
def test_r_hat_is_arvizs_of_split_chains(chains, count):
    drift = torch.linspace(0, 1.5, count)[:, None] + torch.arange(chains)[:, None, None] / 3
    draws = normals(chains, count, 5, seed=count) + drift
    found = moments(draws, [1] * (count // 3)).r_hat
    expected = [arviz.rhat(draws[..., i].numpy(), method="split") for i in range(5)]
    close_in_ratio(found, expected)


def test_halves_of_an_odd_number_of_draws_nearly_are():
    draws = normals(3, 301, 4, seed=1) + torch.linspace(0, 2, 301)[:, None]
    expected = [arviz.rhat(draws[..., i].numpy(), method="split") for i in range(4)]
    close_in_ratio(moments(draws).r_hat, expected, rtol=3 / 300)


def test_single_precision_is_added_up_in_double():
    draws = (1000 + normals(2, 20_000, 3, seed=2)).float()
    found = moments(draws, [7000, 1])
    flat = draws.double().flatten(0, 1)
    close_in_ratio(found.mean, flat.mean(0), rtol=1e-13)
    close_in_ratio(found.sd, flat.std(0), rtol=1e-12)
    assert {part.dtype for part in found} == {torch.float64}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_draws_have_the_moments_that_they_can_have(count):
    draws = normals(2, count, 3, seed=4)
    found = moments(draws)
    close_in_ratio(found.mean, draws.flatten(0, 1).mean(0), rtol=1e-13)
    close_in_ratio(found.sd, draws.flatten(0, 1).std(0), rtol=1e-13)
    one = moments(draws[:1])
    close_in_ratio(one.mean, draws[0].mean(0), rtol=1e-13)
    assert bool(one.sd.isnan().all()) == (count == 1)


def test_chains_that_disagree_show():
    draws = normals(4, 400, 2, seed=5) + torch.tensor([3.0, 0.0]) * torch.arange(4)[:, None, None]
    found = moments(draws)
    assert found.r_hat[0] > 2
    assert found.ess[0] < 20  # ArviZ's is 5
    assert abs(found.r_hat[1] - 1) < 0.02


def test_elements_are_apart_however_many_are_filled_at_once():
    draws = torch.arange(5000.0) + normals(2, 90, 5000, seed=6)
    together = moments(draws, [30, 30])
    for part in (slice(7), slice(2044, 2052), slice(4090, 5000)):
        same_bits(moments(draws[..., part], [30, 30]), [each[..., part] for each in together])


# ------------------------------------------------------------------ effective draws


@pytest.mark.slow
@pytest.mark.parametrize("rho", long_but([0.0, 0.5, 0.9, -0.5], 0.9, -0.5))
def test_effective_draws_of_an_autoregression(rho):
    """A draw is worth (1 - rho) / (1 + rho); the variance of a mean is known from 99 degrees of
    freedom, in each of 300 independent elements, so to 0.8%."""
    chains, count, size = 4, 10_000, 300
    noise = normals(chains, count + 200, size, seed=7)
    states, state = [], noise[:, 0] / (1 - rho**2) ** 0.5
    for t in range(count + 200):
        state = rho * state + noise[:, t]
        states.append(state)
    draws = torch.stack(states[200:], 1)
    found = moments(draws, [3333, 3333])
    truth = chains * count * (1 - rho) / (1 + rho)
    ratio = (truth / found.ess).mean()
    assert abs(ratio - 1) < 4.4 * (2 / (99 * size)) ** 0.5 + 0.003
    spread = (truth / found.ess).std()
    assert abs(spread / (2 / 99) ** 0.5 - 1) < 4.4 / (2 * size) ** 0.5 + 0.05
    assert abs(found.r_hat - 1).max() < 0.05


def test_short_runs_do_not_pass_for_independent_draws():
    """Batches of a few draws do not say how far apart independent ones are."""
    draws = normals(1, 240, 50, seed=8).cumsum(1)
    assert moments(draws).ess.isnan().all()


# ------------------------------------------------------------------ going on


@pytest.mark.slow
@given(parts(most=200), some.integers(0, 200))
@settings(max_examples=60, deadline=None)
def test_another_one_goes_on_from_the_state(case, stop):
    draws, _ = case
    stop = min(stop, draws.shape[1])
    first, second = draws[:, :stop], draws[:, stop:]
    whole = added_up(draws, [stop])
    begun = OnlineMoments(draws.shape[0], draws.shape[2], draws.shape[1])
    begun.add(first)
    state = begun.state()
    held = copy.deepcopy(state)
    begun.add(second)  # which changes nothing of the state
    going_on = OnlineMoments(draws.shape[0], draws.shape[2], draws.shape[1])
    going_on.add(normals(draws.shape[0], 1, draws.shape[2]))  # forgotten
    going_on.go_on_from(state)
    assert going_on.count == stop
    going_on.add(second)
    chains = range(len(draws))
    same_bits(totals(going_on, chains), totals(whole, chains))
    again = OnlineMoments(draws.shape[0], draws.shape[2], draws.shape[1])
    again.go_on_from(held)
    again.add(second)
    same_bits(totals(again, chains), totals(whole, chains))


def test_a_state_is_written_as_it_is(tmp_path):
    from pyro_scale.storage import files

    sums = added_up(normals(2, 300, 3, seed=9), [100])
    files.write(tmp_path / "state", {"state": sums.state()})
    other = OnlineMoments(2, 3, 300)
    other.go_on_from(files.read(tmp_path / "state")["state"])
    same_bits(totals(other, [0, 1]), totals(sums, [0, 1]))


# ------------------------------------------------------------------ broken chains


@pytest.mark.parametrize("broken", [[1], [0, 3], [2]])
def test_chains_that_broke_do_not_count(broken):
    draws = normals(4, 500, 3, seed=10) + torch.arange(4)[:, None, None]
    lost = draws.clone()
    lost[broken, 200:] = torch.nan
    good = [chain for chain in range(4) if chain not in broken]
    sums = added_up(lost, [100, 100, 150])
    found = totals(sums, good)
    alone = moments(draws[good], [100, 100, 150])
    for one, other in zip(found, alone, strict=True):
        close_in_ratio(one, other, rtol=1e-12)


# ------------------------------------------------------------------ quantiles


@pytest.mark.slow
@given(parts(most=21))
@settings(max_examples=100, deadline=None)
def test_quantiles_of_few_draws_are_exact(case):
    draws, sizes = case  # at most 3 x 21 = 63 numbers
    flat = draws.flatten(0, 1)
    wanted = double(0.0, *LEVELS, 1.0)
    found = totals(added_up(draws, sizes), range(len(draws)), wanted.tolist()).quantiles
    torch.testing.assert_close(found, flat.quantile(wanted, dim=0), rtol=1e-12, atol=0.0)


def drifting(count):
    return torch.linspace(0, 500, count)[:, None] + normals(count, 8, seed=11)


STREAMS = {
    "normal": lambda n: normals(n, 8, seed=12),
    "skewed": lambda n: normals(n, 8, seed=13).exp(),
    "very skewed": lambda n: (2.5 * normals(n, 8, seed=13)).exp(),
    "heavy tails": lambda n: normals(n, 8, seed=14) / normals(n, 8, seed=15).abs(),
    "bimodal": lambda n: (
        torch.where(normals(n, 8, seed=16) > 0.3, 5.0, -5.0) + 0.3 * normals(n, 8, seed=17)
    ),
    "a second mode later": lambda n: (
        torch.where(torch.arange(n)[:, None] > n / 2, 40.0, 0.0) + normals(n, 8, seed=18)
    ),
    "a narrow start": lambda n: (
        torch.where(torch.arange(n)[:, None] < 100, 1e-6, 1.0) * normals(n, 8, seed=19)
    ),
    "constant": lambda n: torch.full((n, 8), 3.7, dtype=torch.float64),
    "constant at first": lambda n: (torch.arange(n)[:, None] > 80) * normals(n, 8, seed=20),
    "zeros": lambda n: torch.zeros(n, 8, dtype=torch.float64),
    "drifting": drifting,
    "drifting down": lambda n: -drifting(n),
    "a huge offset": lambda n: 1e8 + 1e-3 * normals(n, 8, seed=21),
    "few values": lambda n: normals(n, 8, seed=22).round(),
    "huge numbers": lambda n: 1e200 * normals(n, 8, seed=23),
    "small numbers": lambda n: 1e-200 * normals(n, 8, seed=24),
    "single precision": lambda n: normals(n, 8, seed=25).float(),
}
#: Of numbers that differ.
UNEQUAL = sorted({*STREAMS} - {"constant", "zeros", "few values"})


def sketched(stream, block):
    sketch = QuantileSketch(stream.shape[1])
    for part in stream.split(block):
        sketch.add(part)
    return sketch


def bin_of(level):
    """Share of all numbers that a cluster at a level is of: (1 + sin(theta))/2 has this slope."""
    level = torch.as_tensor(level, dtype=torch.float64)
    return torch.pi / 128 * (level * (1 - level)).sqrt()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "block"),
    long_but(
        product(STREAMS, [1, 64, 333, 10**6]),
        *product(STREAMS, [64]),
        *product(["normal", "drifting"], [1, 10**6]),
    ),
)
def test_quantiles_are_right_to_within_two_clusters(kind, block):
    stream = STREAMS[kind](5000)
    found, exact = sketched(stream, block).quantiles(LEVELS), stream.double()
    wanted, error = double(*LEVELS), 2 * bin_of(LEVELS)
    limits = (wanted - error, "lower"), (wanted + error, "higher")
    below, above = (
        torch.stack([exact.quantile(q, dim=0, interpolation=how) for q in levels])
        for levels, how in limits
    )
    rounding = 1e-14 * exact.abs().amax(0)  # of 40 merges
    assert (found >= below - rounding).all()
    assert (found <= above + rounding).all()
    assert (found.diff(dim=0) >= 0).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "block"),
    long_but(
        product(UNEQUAL, [50, 1000]),
        *product(UNEQUAL, [1000]),
        *product(["normal", "a second mode later", "a narrow start", "drifting"], [50]),
    ),
)
def test_clusters_are_narrow(kind, block):
    """At most two, of 128, of the arc sine's, however often they are merged: their centers are in
    one.  (Equal numbers are clustered by chance, which does not matter.)"""
    sketch = sketched(STREAMS[kind](20_000), block)
    ends = sketch.sizes.cumsum(1)
    shares = torch.stack([ends - sketch.sizes, ends]) / ends[:, -1:]
    begin, end = (2 * shares.double() - 1).asin() / torch.pi * 128
    several = sketch.sizes > 3  # centers by rank are those by arc sine
    assert several.any()
    assert ((end - begin)[several] < 2 + 1e-6).all()


@pytest.mark.parametrize("kind", STREAMS)
def test_all_numbers_are_counted_once(kind):
    sketch = sketched(STREAMS[kind](3000), 77)
    assert (sketch.sizes.sum(1) + sketch.held.shape[1] == 3000).all()


FAMILIES = {
    "normal": scipy.stats.norm(),
    "uniform": scipy.stats.uniform(),
    "Cauchy": scipy.stats.cauchy(),
    "half-Cauchy": scipy.stats.halfcauchy(),
    "t2": scipy.stats.t(2),
    "inverse gamma": scipy.stats.invgamma(1),
    "log-normal": scipy.stats.lognorm(2),
    "gamma": scipy.stats.gamma(0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", long_but(FAMILIES, "normal", "uniform", "Cauchy", "inverse gamma")
)
def test_quantiles_of_a_family_by_the_closed_form(family):
    """The rank of what is found, on average over 40 streams of 100,000 numbers each: each has a
    standard error of sqrt(q(1 - q)/1e5), and the sketch's own error is below a bin."""
    truth, levels = FAMILIES[family], LEVELS
    numbers = truth.rvs((100_000, 40), random_state=np.random.default_rng(3))
    found = sketched(torch.as_tensor(numbers), 999).quantiles(levels)
    error = torch.as_tensor(truth.cdf(found.numpy())) - double(*levels)[:, None]
    standard_error = (bin_of(levels) * 128 / torch.pi) / 100_000**0.5
    assert (error.abs().amax(1) < bin_of(levels) + 4.5 * standard_error).all()
    assert (error.mean(1).abs() < 0.5 * bin_of(levels) + 4.5 * standard_error / 40**0.5).all()


def test_the_least_and_the_most():
    stream = normals(40_000, 20, seed=26)
    found = sketched(stream, 100).quantiles([0.0, 1.0])
    torch.testing.assert_close(
        found, torch.stack([stream.amin(0), stream.amax(0)]), rtol=1e-12, atol=0.0
    )
