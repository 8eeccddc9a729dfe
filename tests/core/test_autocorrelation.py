"""Autocorrelation times and R-hat against ArviZ, and against a process whose times are known."""

import arviz
import pytest
import torch
from reference import normals

from pyro_scale.core.autocorrelation import autocorrelation_time, mixing_of, split_r_hat


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


def test_it_is_near_arviz():
    draws = torch.stack(
        [stationary_paths(rho, 4, 1000, seed) for seed, rho in enumerate([0.2, 0.8])]
    )
    ours = 4000 / autocorrelation_time(draws.permute(1, 2, 0))
    for place, own in enumerate(ours.tolist()):
        assert own == pytest.approx(float(arviz.ess(draws[place].numpy(), method="mean")), rel=0.05)
        r_hat = float(split_r_hat(draws[place][..., None]))
        assert r_hat == pytest.approx(
            float(arviz.rhat(draws[place].numpy(), method="split")), abs=1e-3
        )


def test_chains_that_disagree_are_one_draw_each():
    draws = normals(4, 500, 1, seed=3).double() * 1e-3 + torch.arange(4.0)[:, None, None]
    assert float(4 * 500 / autocorrelation_time(draws)) < 8
    assert float(split_r_hat(draws)) > 100


def test_what_does_not_move_is_no_trouble():
    still = torch.full((4, 100, 2), 0.1, dtype=torch.float64)
    assert autocorrelation_time(still).tolist() == [1.0, 1.0]
    assert split_r_hat(still).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("kind", ["normal", "heavy", "ties", "drifting"])
def test_mixing_is_arvizs(kind):
    draws = stationary_paths(0.6, 4, 500, seed=5)
    draws = {
        "normal": draws,
        "heavy": draws.sinh() ** 3,
        "ties": (2 * draws).round(),
        "drifting": draws + torch.linspace(0, 1, 500),
    }[kind]
    r_hat, bulk, tail = (float(each) for each in mixing_of(draws[..., None]))
    assert r_hat == pytest.approx(float(arviz.rhat(draws.numpy())), abs=2e-3)
    assert bulk == pytest.approx(float(arviz.ess(draws.numpy(), method="bulk")), rel=0.05)
    assert tail == pytest.approx(float(arviz.ess(draws.numpy(), method="tail")), rel=0.05)
