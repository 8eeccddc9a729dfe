"""Whether draws are at every mode that the searches found."""

import dataclasses
import math

import choices
import pyro
import pyro.distributions as dist
import pytest
import torch
from reference import double, normals

import pyro_scale as ps
from pyro_scale.diagnostics.modes import check_modes
from pyro_scale.tuning import geometry

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore"),
]


def mirrored():
    """Two modes of s, which is positive, at exp(-4) and exp(4); w is beside."""
    s = pyro.sample("s", dist.LogNormal(0.0, 10.0))
    pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    pyro.factor("modes", dist.Normal(double(-4.0, 4.0), 0.3).log_prob(s.log()).logsumexp(0))


@pytest.fixture(scope="module")
def mirrored_run(float64):
    # chains that stay in two modes would go on for long
    how = {"num_samples": 100, "seed": 0, "progress": False, "max_rows": 30_000}
    with choices.recorded() as made:
        fit = ps.BAOA(mirrored).run(None, **how)
    return fit.posterior.draws, made[-1].modes


def at(result, centers):
    """The result with every chain's draws at one of two modes."""
    draws = 0.3 * normals(len(centers), 50, 3, seed=1)
    draws[..., :1] += double(*centers)[:, None, None]
    return dataclasses.replace(result, positions=draws)


def checked(result, modes):
    return check_modes(result, modes.worth_visiting, modes.unvisited(result.num_chains))


def with_evidence(modes, *below):
    found_by = (0, 2), (1, 3)
    ranked = [
        mode._replace(log_evidence=-nats, searches=searches)
        for mode, nats, searches in zip(modes.modes, below, found_by, strict=True)
    ]
    return dataclasses.replace(modes, modes=tuple(ranked))


def test_modes_are_told_by_site_and_value(mirrored_run):
    result, modes = mirrored_run
    (finding,) = checked(at(result, (-4, 4, -4, 4)), modes)
    assert (finding.site, finding.verdict) == ("s", "yes")
    told = [float(part.strip(",;")) for part in finding.told.split()[3:5]]
    assert sorted(told) == pytest.approx([math.exp(-4), math.exp(4)], rel=1e-2)


@pytest.mark.parametrize(
    ("below", "verdict"),
    [(0.0, "no"), (2.8, "no"), (3.2, "unknown"), (3.6, "unknown"), (3.8, "yes"), (9.0, "yes")],
)
def test_a_mode_without_draws_is_missed_by_what_it_is_worth(mirrored_run, below, verdict):
    """Of 200 draws, exp(-3.7) / (1 + exp(-3.7)) are 5; exp(-2.94) is a share of 5%."""
    result, modes = mirrored_run
    best = float(modes.best.gaussian.mean[0])
    (finding,) = checked(at(result, [best] * 4), with_evidence(modes, 0.0, below))
    assert finding.verdict == verdict
    assert ("no draw" in finding.told) == (verdict != "yes")


def test_one_draw_is_enough(mirrored_run):
    """Chains' shares are for R-hat to judge."""
    result, modes = mirrored_run
    draws = at(result, [-4.0] * 4)
    draws.positions[2, 17, 0] = 4.0
    assert checked(draws, modes)[0].verdict == "yes"


def test_what_is_not_worth_a_draw_is_no_mode(mirrored_run):
    result, modes = mirrored_run
    assert not checked(result, with_evidence(modes, 0.0, 10.5))


def test_a_mode_that_no_chain_started_from_may_be_missed(mirrored_run):
    """Of one chain's 50 draws, a mode that is 6 nats below need not have any; but it may have more
    than its Gaussian says."""
    result, modes = mirrored_run
    best = float(modes.best.gaussian.mean[0])
    (finding,) = checked(at(result, [best]), with_evidence(modes, 0.0, 6.0))
    assert finding.verdict == "unknown"
    assert "no chain started from 1 of them" in finding.told
    assert checked(at(result, [best] * 2), with_evidence(modes, 0.0, 6.0))[0].verdict == "yes"


def beside(share):
    """Two modes of a latent, far apart, of which the one at 5 has this share of the posterior."""

    def model(signs=(-1.0, 1.0)):
        x = pyro.sample("x", dist.Normal(0.0, 50.0))
        parts = dist.Normal(5 * double(*signs), 0.5).log_prob(x) + double(1 - share, share).log()
        pyro.factor("modes", parts.logsumexp(0))

    return model


def report_from(model, start="auto", precondition="auto"):
    starts = start if start == "auto" else {"x": start + normals(4, seed=3) / 2}
    fit = ps.BAOA(model, init_strategy=starts, precondition=precondition)
    return fit.run(None, seed=0, progress=False).report()


@pytest.mark.parametrize("precondition", ["auto", "diag"])
def test_a_mode_from_which_the_user_starts_no_chain_is_missed(precondition):
    """The advice is a model with one mode: that has a yes from the same starts."""
    report = report_from(beside(0.5), 5.0, precondition)
    assert report.headline.startswith("NO: site 'x': 2 modes, at ")
    assert report.headline.endswith("try: a model without the other modes (an order, a sign)")
    assert report_from(lambda: beside(0.5)((1.0, 1.0)), 5.0, precondition).verdict == "yes"


@pytest.mark.parametrize(("start", "verdict"), [(5.0, "no"), (-5.0, "yes")])
def test_a_mode_without_mass_is_no_place_for_all_chains(start, verdict):
    """The advice is to leave starts to the library: that has a yes."""
    report = report_from(beside(1e-7), start)
    assert report.verdict == verdict
    if verdict == "no":
        assert report.headline.endswith("no draw at 1 of them; try: init_strategy='auto'")
        assert report_from(beside(1e-7)).verdict == "yes"


def test_searches_from_elsewhere_change_no_draw(monkeypatch):
    """They are for the report alone."""

    def draws():
        fit = ps.BAOA(beside(0.5), init_strategy={"x": 5 + normals(4, seed=3) / 2})
        return fit.run(None, seed=0, progress=False, num_samples=100).get_samples()["x"]

    with_searches = draws()
    monkeypatch.setattr(geometry, "_with_elsewhere", lambda modes, *others: modes)
    assert torch.equal(with_searches, draws())


def test_a_model_that_fails_elsewhere_is_searched_from_the_users_starts():
    """Its correlation matrix is no correlation matrix where the library starts."""

    def model(y):
        r = pyro.sample("r", dist.Normal(0.0, 0.3))
        one = torch.ones_like(r)
        matrix = torch.stack([torch.stack([one, r], -1), torch.stack([r, one], -1)], -2)
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.MultivariateNormal(torch.zeros(2), matrix), obs=y)

    fit = ps.BAOA(model, init_strategy={"r": torch.zeros(4)})
    fit.run(normals(15, 2, seed=1), num_samples=50, seed=0, progress=False)
    assert bool(fit.get_samples()["r"].abs().max() < 1)
