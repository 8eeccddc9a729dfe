"""Simulation-based calibration with local latents summed out, against closed forms: random
intercepts with normal noise, in groups of unlike lengths whose labels have gaps."""

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_scale as ps
from pyro_scale.calibration.chains import Sampled
from pyro_scale.errors import ArgumentError, PlateError, SiteError
from pyro_scale.infer import sbc

GROUPS = 8
LENGTHS = torch.tensor([1, 2, 3, 12] * 2)
#: Groups of which latents are ranked, of 8.
RANKED = [0, 2, 4, 5, 7]
QUIET = {"seed": 0, "progress": False}
#: Values of the globals of every draw.
KNOWN = {"b": 0.3, "tau": 1.2, "s": 0.7}


def model(x, group, y=None):
    b = pyro.sample("b", dist.Normal(0.0, 2.0))
    tau, s = (pyro.sample(name, dist.LogNormal(0.0, 0.3)) for name in ("tau", "s"))
    with pyro.plate("groups", GROUPS):
        z = pyro.sample("z", dist.Normal(0.0, tau))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(b * x + z[group], s), obs=y)


def with_known_scales(x, group, y):
    b = pyro.sample("b", dist.Normal(0.0, 2.0))
    with pyro.plate("groups", GROUPS):
        z = pyro.sample("z", dist.Normal(0.0, KNOWN["tau"]))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(b * x + z[group], KNOWN["s"]), obs=y)


def of_rows(y):
    b = pyro.sample("b", dist.Normal(0.0, 2.0))
    with pyro.plate("rows", len(y)):
        z = pyro.sample("z", dist.LogNormal(0.0, 1.0))
        pyro.sample("y", dist.Normal(b + z.log(), KNOWN["s"]), obs=y)


@pytest.fixture(scope="module")
def rows():
    source = torch.Generator().manual_seed(0)
    group = torch.arange(GROUPS).repeat_interleave(LENGTHS)
    group = group[torch.randperm(len(group), generator=source)]
    return torch.randn(len(group), generator=source), 10 * group, torch.zeros(len(group))


class AtKnownGlobals:
    """A fitter all of whose draws are the known globals."""

    has_lengths = False

    def fit(self, stack, lengths):
        values = {name: torch.tensor(KNOWN[name]) for name in stack.layout.names}
        position = stack.layout.flatten(stack.log_posterior.unconstrain(values))
        count = stack.num_chains
        positions = position.expand(count, 100, -1).clone()
        return Sampled(positions, torch.full((count,), 100.0), 0, {})


def ranks_at_known_globals(monkeypatch, model, data, **settings):
    monkeypatch.setattr(sbc, "_FEWEST_SIMULATIONS", 3)
    monkeypatch.setattr(sbc, "fitter_for", lambda *_: AtKnownGlobals())
    method = ps.NUTS(ps.marginalize(model, "z"))
    return ps.sbc(method, data, num_simulations=3, **settings, **QUIET)


def check_draws(found, name, number, mean, sd):
    """100 draws have a mean and an sd, and the true value has its rank among them."""
    assert abs(float(found.mean[name][number]) - float(mean)) < 5 * float(sd) / 10
    assert abs(float(found.sd[name][number]) / float(sd) - 1) < 5 / 200**0.5
    below = dist.Normal(mean, sd).cdf(found.true[name][number])
    assert abs(float(found.ranks[name][number]) / 100 - float(below)) < 0.25


def test_latents_are_those_of_each_group_given_its_data_set(monkeypatch, rows):
    found = ranks_at_known_globals(monkeypatch, model, ps.Grouped(rows, by=1))
    assert set(found.ranks) == {"b", "tau", "s", "loglik", *(f"z[{g}]" for g in RANKED)}
    b, tau, s = KNOWN.values()
    for number in range(3):
        x, group, y = found.data(number).rows
        for g in RANKED:
            own = group == g
            precision = own.sum() / s**2 + tau**-2
            mean = (y - b * x)[own].sum() / s**2 / precision
            check_draws(found, f"z[{g}]", number, mean, precision.rsqrt())
            # the true value is that of the group's rows
            true = {name: float(found.true[name][number]) for name in found.true}
            off = (y - true["b"] * x)[own].mean() - true[f"z[{g}]"]
            assert abs(float(off)) < 5 * true["s"] / float(own.sum()) ** 0.5


def test_latents_of_rows_whose_support_is_not_the_real_line(monkeypatch):
    found = ranks_at_known_globals(
        monkeypatch, of_rows, torch.zeros(9), quantities={"log z": lambda s, _: s["z"].log()}
    )
    assert {"z[0]", "z[2]", "z[4]", "z[6]", "z[8]"} < set(found.ranks)
    precision = torch.tensor(1 + KNOWN["s"] ** -2)
    for number in range(3):
        (y,) = found.data(number)
        means = (y - KNOWN["b"]) / KNOWN["s"] ** 2 / precision
        for row, mean in enumerate(means):
            drawn = float(found.mean["log z"][number, row] - mean)
            assert abs(drawn) < 5 * float(precision.rsqrt()) / 10


def test_what_is_refused(rows):
    grouped = ps.Grouped(rows, by=1)
    summed = ps.NUTS(ps.marginalize(model, "z"))
    for settings in ({"resample": True}, {"method": "posterior"}):
        with pytest.raises(ArgumentError, match="latents summed out"):
            ps.sbc(summed, grouped, **settings, **QUIET)
    with pytest.raises(ArgumentError, match="marginalize"):
        ps.sbc(ps.BAOA(of_rows, lr=0.1), torch.zeros(40), batch_size=10, **QUIET)
    few = rows[1] > 0  # the plate has a group more than the rows
    with pytest.raises(PlateError, match="7 groups"):
        ps.sbc(summed, ps.Grouped(tuple(column[few] for column in rows), by=1), **QUIET)

    def with_a_fact(y):
        pyro.sample("fact", dist.Normal(pyro.sample("m", dist.Normal(0.0, 1.0)), 1.0), obs=FACT)
        of_rows(y)

    with pytest.raises(SiteError, match="fact"):
        ps.sbc(ps.NUTS(ps.marginalize(with_a_fact)), torch.zeros(9), **QUIET)


FACT = torch.tensor(1.3)


@pytest.mark.slow
def test_ranks_against_the_exact_posterior(rows):
    count = 20
    method = ps.NUTS(ps.marginalize(with_known_scales, "z"))
    found = ps.sbc(method, ps.Grouped(rows, by=1), num_simulations=count, **QUIET)
    assert found.verdict == "calibrated"
    assert not found.failed
    tau, s = KNOWN["tau"], KNOWN["s"]
    scores, ratios = [], []
    for number in range(count):
        x, group, y = (column.double() for column in found.data(number).rows)
        design = torch.cat([x[:, None], torch.nn.functional.one_hot(group.long(), GROUPS)], 1)
        prior = torch.diag(torch.tensor([2.0**-2] + [tau**-2] * GROUPS).double())
        covariance = torch.linalg.inv(design.mT @ design / s**2 + prior)
        mean, sd = covariance @ design.mT @ y / s**2, covariance.diagonal().sqrt()
        for name, place in {"b": 0, **{f"z[{g}]": 1 + g for g in RANKED}}.items():
            scores.append((found.mean[name][number] - mean[place]) / (sd[place] / 10))
            ratios.append((found.sd[name][number] / sd[place]).log())
    scores, ratios = torch.stack(scores), torch.stack(ratios)
    assert float(scores.abs().max()) < 5  # 100 draws that are almost independent
    assert float(scores.square().mean()) < 1.7
    assert float(ratios.abs().max()) < 5 / 200**0.5
    assert abs(float(ratios.mean())) < 0.04
