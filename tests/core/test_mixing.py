"""R-hat and effective draws against ArviZ, and against a process whose times are known."""

import math

import arviz
import pytest
import torch
from reference import normals

from pyro_scale.core.mixing import (
    autocorrelation_time,
    effective_draws,
    mixing_and_chance,
    mixing_of,
    split_r_hat,
    standard_error_of_mean,
)


def stationary_paths(rho, chains=8, draws=4000, seed=0):
    """Stationary, of autocorrelations rho^k: 1 draw in (1 + rho) / (1 - rho) is independent."""
    noise, x = normals(draws, chains, seed=seed).double(), normals(chains, seed=seed + 1).double()
    path = []
    for each in noise:
        x = rho * x + (1 - rho**2) ** 0.5 * each
        path.append(x)
    return torch.stack(path, 1)


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9, -0.4])
def test_a_known_process(rho):
    """To a tenth: of 32,000 draws, the estimate's standard error is 2 to 4%."""
    draws = stationary_paths(rho)[..., None]
    expected = (1 + rho) / (1 - rho)
    assert float(autocorrelation_time(draws)) == pytest.approx(expected, rel=0.1)


def test_chains_that_disagree_are_one_draw_each():
    draws = normals(4, 500, 1, seed=3).double() * 1e-3 + torch.arange(4.0)[:, None, None]
    assert float(4 * 500 / autocorrelation_time(draws)) < 8
    assert float(split_r_hat(draws)) > 100


def test_what_does_not_move_is_no_trouble():
    still = torch.full((4, 100, 2), 0.1, dtype=torch.float64)
    assert autocorrelation_time(still).tolist() == [1.0, 1.0]
    assert split_r_hat(still).tolist() == [1.0, 1.0]


def drawn(kind, chains, count):
    """Draws `[chains, count]` of a kind."""
    draws = stationary_paths(0.6, chains, count, seed=5)
    signs = torch.tensor([1.0, -1.0]).repeat(count)[:count]
    return {
        "normal": draws,
        "heavy": draws.sinh() ** 3,
        "ties": (2 * draws).round(),
        "rare": (draws > 1.3).double(),
        "drifting": draws + torch.linspace(0, 1, count),
        "walk": draws.cumsum(1),
        "antithetic": signs + 0.1 * draws,
        "apart": draws + 10 * torch.arange(chains)[:, None],
    }[kind]


KINDS = ("normal", "heavy", "ties", "rare", "drifting", "walk", "antithetic", "apart")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("chains", "count"), [(4, 500), (3, 101), (2, 25), (1, 100), (5, 11), (2, 4)]
)
def test_mixing_is_arvizs(kind, chains, count):
    """To rounding: odd numbers of draws, ties and antithetic chains too."""
    draws = drawn(kind, chains, count)
    if bool((draws == draws[0, 0]).all()):
        pytest.skip("constant here")
    ess = {method: arviz.ess(draws.numpy(), method=method) for method in ("bulk", "tail", "mean")}
    r_hat = arviz.rhat(draws.numpy()) if chains > 1 else math.nan
    expected = [r_hat, ess["bulk"], ess["tail"]]
    measured = [float(statistic) for statistic in mixing_of(draws[..., None])]
    assert measured == pytest.approx([float(value) for value in expected], rel=1e-12, nan_ok=True)
    effective = float(effective_draws(draws[..., None]))
    assert effective == pytest.approx(float(ess["mean"]), rel=1e-12, nan_ok=True)
    error = float(standard_error_of_mean(draws[..., None]))
    expected_error = float(arviz.mcse(draws.numpy(), method="mean"))
    assert error == pytest.approx(expected_error, rel=1e-12, nan_ok=True)
    if count % 2 == 0:
        split = arviz.rhat(draws.numpy(), method="split") if chains > 1 else None
        assert split is None or float(split_r_hat(draws[..., None])) == pytest.approx(float(split))


def test_elements_are_measured_apart():
    """More elements than are processed at a time, one of them with a NaN, one constant."""
    draws = normals(4, 5000, 9, seed=2)
    draws[..., 3], draws[1, 7, 5] = 2.0, math.nan
    together = torch.stack(mixing_and_chance(draws))
    alone = torch.cat([torch.stack(mixing_and_chance(draws[..., [i]])) for i in range(9)], 1)
    torch.testing.assert_close(together[:3], torch.stack(mixing_of(draws)), equal_nan=True)
    torch.testing.assert_close(together, alone, rtol=0, atol=0, equal_nan=True)
    assert together.isnan().any(0).nonzero()[:, 0].tolist() == [3, 5]


def test_an_element_that_is_not_finite_does_not_agree():
    draws = normals(4, 100, 3, seed=6)
    draws[2, 7, 1], draws[2, 7, 2] = math.nan, math.inf
    assert split_r_hat(draws).isnan().tolist() == [False, True, True]


def test_three_draws_a_chain_measure_nothing():
    draws = normals(4, 3, 2, seed=0)
    assert torch.stack(mixing_of(draws)).isnan().all()
    assert effective_draws(draws).isnan().all()


def test_chains_that_stand_still_apart_do_not_agree():
    apart = torch.arange(4.0)[:, None, None].expand(4, 100, 1)
    assert float(split_r_hat(apart)) == math.inf
    assert float(mixing_of(apart)[0]) == math.inf


# ------------------------------------------------------------------ chains that disagree


def side_by_side(rho, elements, chains=4, draws=1000, seed=0):
    """Stationary draws `[chains, draws, elements]`."""
    paths = stationary_paths(rho, chains * elements, draws, seed)
    return paths.view(chains, elements, draws).transpose(1, 2)


@pytest.mark.parametrize(("rho", "least"), [(-0.4, 0.45), (0.0, 0.45), (2 / 3, 0.5), (0.9, 0.75)])
def test_chance_is_no_more_frequent_than_it_says(rho, least):
    """Of 2,000 elements, at four standard errors; of two independent tests the less likely counts
    twice. It is less frequent, as the larger of two variances and the fewer degrees count."""
    chance = mixing_and_chance(side_by_side(rho, 2000))[3]
    for level in (0.2, 0.05, 0.01):
        share = 1 - (1 - level / 2) ** 2
        error = 4 * (share * (1 - share) / 2000) ** 0.5
        assert least * share - error < float((chance < level).double().mean()) < share + error


@pytest.mark.parametrize(("effective", "is_judged"), [(6, False), (15, True)])
def test_half_chains_of_few_effective_draws_are_not_judged(effective, is_judged):
    """The limit is 12, by estimates that come out up to half too large in so short halves."""
    rho = (500 - effective) / (500 + effective)
    not_judged = mixing_and_chance(side_by_side(rho, 200))[3].isnan().double().mean()
    assert float(not_judged) < 0.1 if is_judged else float(not_judged) > 0.8


def test_chains_of_another_mean_or_scale_are_no_chance():
    """One of four differs by .5 sds, seven of its standard errors; or by half in scale."""
    draws = side_by_side(2 / 3, 3)
    draws[0, :, 0] += 0.5
    draws[0, :, 1] *= 1.5
    chance = mixing_and_chance(draws)[3].tolist()
    assert max(chance[:2]) < 1e-3
    assert chance[2] > 0.01


def test_two_modes_are_no_chance():
    """Which chains never leave, whatever the draws of one of them are worth."""
    draws = side_by_side(0.9, 1) + torch.tensor([0.0, 0.0, 8.0, 8.0])[:, None, None]
    assert float(mixing_and_chance(draws)[3]) < 1e-12


def test_what_cannot_be_judged():
    """A random walk, whose half chains are worth a few draws; a constant; three draws; no
    numbers."""
    draws = side_by_side(0.0, 3)
    draws[..., 0] = draws[..., 0].cumsum(1)
    draws[..., 1] = 0.1
    draws[0, 3, 2] = math.nan
    chance = mixing_and_chance(draws)[3]
    assert chance.isnan().tolist() == [True, False, True]
    assert chance[1] == 1
    assert bool(mixing_and_chance(draws[:, :3])[3].isnan().all())
    assert mixing_and_chance(draws[..., :0])[3].shape == (0,)
