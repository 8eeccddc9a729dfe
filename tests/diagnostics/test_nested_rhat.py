"""Nested R-hat against its definition, and chains that share their starts."""

import dataclasses
import math
import warnings
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
import warned
from reference import close, double, normals
from runs import QUIET

import pyro_scale as ps
from pyro_scale.diagnostics.convergence import warn_of_remembered_starts
from pyro_scale.errors import ArgumentError, FileError, NonFiniteError
from pyro_scale.metrics import nested_r_hat
from pyro_scale.run.measurements import Measurements, VirialTemperature

pytestmark = pytest.mark.usefixtures("float64", "compiled_early")

run = warned.quiet_runs(num_chains=8, superchains=2, warmup_steps=0, thinning=1, **QUIET)
#: (The table, what it said of starts).
remembered = partial(warned.told, about="remember their starts")


def by_definition(draws, superchains):
    """Margossian et al. (2024), for scalars `[chains, draws]`, in loops."""

    def mean(values):
        return math.fsum(values) / len(values)

    def variance(values):
        center = mean(values)
        squares = math.fsum((value - center) ** 2 for value in values)
        return squares / (len(values) - 1) if len(values) > 1 else 0.0

    each = len(draws) // superchains
    groups = [draws[k * each : (k + 1) * each] for k in range(superchains)]
    between = variance([mean([mean(chain) for chain in group]) for group in groups])
    within = mean(
        [
            variance([mean(chain) for chain in group]) + mean([variance(chain) for chain in group])
            for group in groups
        ]
    )
    return math.sqrt(1 + between / within)


# ------------------------------------------------------------------ the metric


@pytest.mark.parametrize(
    ("chains", "draws", "superchains"), [(6, 5, 2), (6, 5, 3), (6, 5, 6), (6, 1, 3), (4, 2, 2)]
)
def test_it_is_the_definition(chains, draws, superchains):
    values = normals(chains, draws, 2, 3) * (1 + torch.arange(3)) + normals(chains, 1, 2, 3, seed=1)
    found = nested_r_hat(values, superchains)
    expected = [
        [by_definition(values[:, :, i, j].tolist(), superchains) for j in range(3)]
        for i in range(2)
    ]
    close(found, expected, 1e-12)


@pytest.mark.parametrize(("each", "draws"), [(4, 1), (4, 10), (1, 10)])
def test_of_independent_draws(each, draws):
    """B is about 1 over the draws of a superchain, W the variance of a draw and of a mean."""
    values = normals(200 * each, draws, 50)
    within = (draws > 1) + (each > 1) / draws
    gap = (nested_r_hat(values, 200) ** 2 - 1) * each * draws * within - 1
    # the relative error of B: a variance of 200 normal means, over 50 elements
    assert abs(gap.mean()) < 4 * math.sqrt(2 / 199 / 50) + 2 / 200


@pytest.mark.parametrize(
    ("draws", "superchains", "message"),
    [
        (torch.zeros(4, 3), 3, "superchains=3 of 4 chains"),
        (torch.zeros(4, 3), 1, "superchains=1"),
        (torch.zeros(4, 3), 2.0, r"superchains=2\.0"),
        (torch.zeros(4, 1), 4, "one draw of one chain"),
        (torch.zeros(4), 2, r"draws has shape \[4\]"),
        (torch.zeros(4, 3).long(), 2, "torch.int64"),
        (torch.full((4, 3), torch.nan), 2, "NaN"),
    ],
)
def test_what_it_refuses(draws, superchains, message):
    with pytest.raises(ArgumentError, match=message):
        nested_r_hat(draws, superchains)


# ------------------------------------------------------------------ of a run


def flat():
    pyro.factor("no data", torch.zeros(()))
    pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))


def hundred_elements():
    pyro.factor("no data", torch.zeros(()))
    pyro.sample("w", dist.Normal(torch.zeros(100), 1.0).to_event(1))


def two_modes():
    """At -4 and 4, each of sd 1/2."""
    w = pyro.sample("w", dist.Normal(0.0, 100.0))
    pyro.factor("modes", dist.Normal(double(-4.0, 4.0), 0.5).log_prob(w).logsumexp(0))


def test_chains_of_a_superchain_share_their_start_alone():
    fit = run(ps.SGLD(flat, lr=1e-300), num_samples=1)
    starts = fit.get_samples(group_by_chain=True)["w"][:, 0]
    alone = run(ps.SGLD(flat, lr=1e-300), num_samples=1, superchains=None)
    firsts = alone.get_samples(group_by_chain=True)["w"][:, 0]
    assert torch.equal(starts, firsts[[0, 0, 0, 0, 4, 4, 4, 4]])
    assert len(firsts.unique(dim=0)) == 8
    moving = run(ps.BAOA(flat, lr=0.1), num_samples=1)
    assert len(moving.get_samples()["w"].unique(dim=0)) == 8
    assert remembered(fit.diagnostics)[0].attrs["superchains"] == 2
    assert "superchains" not in remembered(alone.diagnostics)[0].attrs


def test_batches_stay_their_own():
    x = normals(64)

    def model(x):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Normal(w, 1.0), obs=x)

    fit = run(ps.SGLD(model, lr=0.1, temperature=0.0), x, num_samples=1, batch_size=4)
    assert len(fit.get_samples()["w"].unique()) == 8


def test_given_starts_must_agree():
    starts = torch.arange(8.0)[:, None].expand(8, 2)
    with pytest.raises(ArgumentError, match=r"init_strategy\['w'\].*share their start"):
        run(ps.SGLD(flat, lr=0.1, init_strategy={"w": starts}), num_samples=1)
    equal = starts[:2].repeat_interleave(4, dim=0)
    fit = run(ps.SGLD(flat, lr=1e-300, init_strategy={"w": equal}), num_samples=1)
    close(fit.get_samples()["w"], equal)


@pytest.mark.parametrize(
    ("chains", "superchains", "message"),
    [(8, 3, "num_chains=9"), (4, 4, "num_chains=8"), (4, 1, "superchains=1"), (8, 2.5, "2.5")],
)
def test_superchains_that_do_not_fit(chains, superchains, message):
    with pytest.raises(ArgumentError, match=message):
        run(ps.SGLD(flat, lr=0.1), num_samples=1, num_chains=chains, superchains=superchains)


@pytest.mark.slow
@pytest.mark.parametrize("num_samples", [1, 100])
def test_the_column_is_the_metric(num_samples):
    fit = run(ps.BAOA(flat, lr=0.3), num_samples=num_samples, warmup_steps=200)
    draws = fit.get_samples(group_by_chain=True)["w"]
    table, said = remembered(fit.diagnostics)
    assert table.nested_r_hat["w"] == pytest.approx(float(nested_r_hat(draws, 2).max()), rel=1e-12)
    assert not said


def test_without_superchains_there_is_none():
    assert (
        "nested_r_hat"
        not in remembered(run(ps.SGLD(flat, lr=0.3), num_samples=5, superchains=None).diagnostics)[
            0
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_samples", [1, 50])
def test_starts_that_are_not_forgotten_are_said(num_samples):
    far = double(-20.0, 20.0)[:, None].expand(2, 2).repeat_interleave(4, dim=0)
    how = {"num_samples": num_samples, "num_chains": 8}
    table, said = remembered(
        run(ps.BAOA(flat, lr=1e-4, init_strategy={"w": far}), **how).diagnostics
    )
    assert table.nested_r_hat["w"] > 2
    assert "site 'w'" in said[0]
    kept = run(ps.BAOA(flat, lr=0.3, init_strategy={"w": far}), warmup_steps=500, **how)
    assert not remembered(kept.diagnostics)[1]


@pytest.mark.slow
def test_chains_in_two_modes_are_said():
    starts = double(-4.0, 4.0).repeat_interleave(4)
    fit = run(ps.BAOA(two_modes, lr=0.02, init_strategy={"w": starts}), num_samples=200)
    assert remembered(fit.diagnostics)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_samples", "each"), [pytest.param(1, 32, marks=pytest.mark.long), (30, 4)]
)
def test_false_alarms_are_rare(num_samples, each):
    """One in a thousand for each site by design; 30 runs of 4 superchains, taken together."""
    how = {"num_samples": num_samples, "num_chains": 120 * each, "superchains": 120}
    fit = run(ps.BAOA(hundred_elements, lr=0.5), warmup_steps=60, **how)
    whole, said = fit.posterior.draws, 0
    some = {"attrs": {**whole.attrs, "num_chains": 4 * each, "superchains": 4}, "chains": None}
    for positions in whole.positions.split(4 * each):
        few = dataclasses.replace(whole, positions=positions, measurements=Measurements(), **some)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warn_of_remembered_starts(few)
        said += len(caught)
    assert said <= 1


def test_at_temperature_0_nothing_is_said():
    fit = run(ps.SGLD(flat, lr=1e-3, temperature=0.0), num_samples=5)
    assert not remembered(fit.diagnostics)[1]


@pytest.mark.parametrize("hot", [False, True])
def test_what_is_said_of_them_does_not_contradict_itself(hot):
    """Chains on their way look hot, and a longer step is no advice to those that are."""
    fit = run(ps.SGLD(flat, lr=0.001), num_samples=30)
    size = fit.posterior.draws.positions.shape[-1]
    positions = normals(8, 30, size) + 9 * (torch.arange(8) // 4)[:, None, None]
    virial = 1 + 8 * hot + 0.01 * normals(8, 30, len(fit.posterior.draws.log_posterior.latents), 2)
    virial = VirialTemperature(virial)
    measurements = dataclasses.replace(fit.posterior.draws.measurements, virial=virial)
    changed = dataclasses.replace(
        fit.posterior.draws, positions=positions, measurements=measurements
    )
    _, said = warned.told(ps.Posterior(changed).diagnostics)
    (remembered,) = [each for each in said if "remember their starts" in each]
    assert ("a larger lr" in remembered) is not hot
    found = [each for each in said if "is hotter" in each]
    assert len(found) == hot
    assert all("take a longer warm-up first; if it stays, lower lr" in each for each in found)


def broken(*starts):
    """A run of superchains of two of which chains break that come above 1.5."""

    def cliff():
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.factor("cliff", w * torch.where(w > 1.5, torch.nan, 0.0))

    each = torch.tensor(starts).repeat_interleave(2)
    sampler = ps.SGLD(cliff, lr=1e-6, init_strategy={"w": each})
    with pytest.raises(NonFiniteError):
        run(sampler, num_samples=20, num_chains=len(each), superchains=len(starts))
    return sampler


def test_superchains_that_lost_a_chain_are_left_out():
    sampler = broken(0.0, 1.4999, -1.0, 1.0)
    draws = sampler.get_samples(group_by_chain=True)["w"].double()
    whole = [chain // 2 != 1 for chain in sampler.posterior.draws.chains]
    assert sum(whole) == 6
    expected = float(nested_r_hat(draws[whole], 3))
    table, said = remembered(sampler.diagnostics)
    assert table.nested_r_hat["w"] == pytest.approx(expected, rel=1e-12)
    assert f"(nested R-hat {expected:.3g})" in said[0]


def test_one_whole_superchain_has_no_column_and_is_told():
    sampler = broken(0.0, 1.4999)
    table, said = warned.told(sampler.diagnostics)
    assert "nested_r_hat" not in table
    assert any("no nested R-hat: only 1 of the 2 superchains" in each for each in said)


def test_they_are_part_of_a_runs_identity(tmp_path):
    def sampler():
        return ps.SGLD(flat, lr=0.1)

    whole = run(sampler(), num_samples=20)
    run(sampler(), num_samples=10, checkpoint=tmp_path / "run")
    with pytest.raises(FileError, match="superchains was 2"):
        run(sampler(), num_samples=20, superchains=None, resume=tmp_path / "run")
    again = run(sampler(), num_samples=20, resume=tmp_path / "run")
    assert torch.equal(again.get_samples()["w"], whole.get_samples()["w"])
