"""Hyperparameters through the samplers: by site, cyclical and decreasing step sizes, SGD's own."""

import itertools
import math
from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import reference
import torch
from densities import normal_mean
from gaussian import Bound
from methods import STOCHASTIC, by_name
from reference import double, normals
from repetitions import each_once, long_but
from runs import EVERY_STEP, ONE_CHAIN
from torch import nn

import pyro_scale as ps
from pyro_scale.core.layout import Layout
from pyro_scale.core.schedules import Cyclical, polynomial_decay
from pyro_scale.data.row_sampler import RowIndices
from pyro_scale.engine.step import Engine
from pyro_scale.errors import ArgumentError
from pyro_scale.rng.seeds import Purpose
from pyro_scale.rng.streams import NoiseStream

QUIET = {"progress": False}
ROWS = normals(30, 2, seed=5)
SIZE = len(ROWS)
close = partial(reference.close, tolerance=1e-11)


def noisy_sums(x):
    w = pyro.sample("w", dist.Normal(torch.zeros(2).double(), 1.0).to_event(1))
    s = pyro.sample("s", dist.HalfNormal(torch.ones(()).double()))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, s), obs=x.sum(1))


STARTS = {"w": normals(3, 2, seed=1), "s": double(0.5, 1.0, 2.0)}


def loss(w, log_s, x=ROWS):
    """The negative log joint over N, estimated from some rows."""
    likelihood = dist.Normal(x @ w, log_s.exp()).log_prob(x.sum(1)).mean() * SIZE
    prior = dist.Normal(0.0, 1.0).log_prob(w).sum()
    prior = prior + dist.HalfNormal(1.0).log_prob(log_s.exp()) + log_s
    return -(likelihood + prior) / SIZE


def optimized(chain, make, steps, rows=None):
    """The paths of w and s under a torch optimizer; rows `[steps, B]` are its batches."""
    w = [nn.Parameter(element.clone()) for element in STARTS["w"][chain]]
    log_s = nn.Parameter(STARTS["s"][chain].log())
    optimizer, path = make(w, log_s), []
    for step in range(steps):
        optimizer.zero_grad()
        loss(torch.stack(w), log_s, ROWS if rows is None else ROWS[rows[step]]).backward()
        optimizer.step()
        path.append(torch.stack([*w, log_s.exp()]).detach())
    path = torch.stack(path)
    return {"w": path[:, :2], "s": path[:, 2]}


# ------------------------------------------------------------------ SGD's own

BATCHED = {"num_samples": 25, "num_chains": 3, "seed": 4, "batch_size": 7, **QUIET}


@pytest.mark.parametrize("momentum", [0.9, 0.3, None])
@pytest.mark.parametrize("row", [row for row in STOCHASTIC if row.sgd], ids=by_name)
def test_from_sgd_at_temperature_zero_is_an_ensemble_of_sgd_runs(row, momentum):
    """Chains are as many runs of torch's SGD, each on its own minibatches."""
    given = {} if momentum is None else {"momentum": momentum}
    if momentum is None and row.name == "BAOA":
        with pytest.raises(ArgumentError, match=r"momentum=0.0: BAOA needs one inside \(0, 1\)"):
            row.sampler.from_sgd(noisy_sums, lr=0.05)
        return
    sampler = row.sampler.from_sgd(
        noisy_sums, lr=0.02, **given, temperature=0, init_strategy=STARTS
    )
    assert type(sampler) is row.sampler
    draws = sampler.run(ROWS, **EVERY_STEP, **BATCHED).get_samples(group_by_chain=True)
    rows = RowIndices(4, range(3), SIZE, 7, "shuffle").span(0, 25)
    for chain in range(3):
        expected = optimized(
            chain,
            lambda w, log_s: torch.optim.SGD([*w, log_s], lr=0.02, **given),
            25,
            rows[chain],
        )
        close(draws["w"][chain], expected["w"])
        close(draws["s"][chain], expected["s"])
    assert (draws["w"][:, -1] - STARTS["w"]).abs().min() > 0.01


def test_from_sgd_takes_the_constructors_other_arguments():
    sampler = ps.SGHMC.from_sgd(noisy_sums, lr=0.01, momentum=0.9, temperature=0.25, num_data=70)
    assert sampler.kernel.lr == pytest.approx(0.1, rel=1e-14)
    assert sampler.kernel.friction == pytest.approx(1.0, rel=1e-14)
    assert sampler.kernel.temperature == 0.25
    sampler.run(ROWS, num_samples=2, seed=0, **ONE_CHAIN, **QUIET)
    assert sampler.to_arviz().attrs["num_data"] == 70


@pytest.mark.parametrize("row", [row for row in STOCHASTIC if not row.sgd], ids=by_name)
def test_from_sgd_is_refused_where_temperature_zero_is_not_sgd(row):
    with pytest.raises(ArgumentError, match=rf"{row.name} at temperature 0 is not SGD.*BAOA"):
        row.sampler.from_sgd(noisy_sums, lr=0.1, momentum=0.9)


# ------------------------------------------------------------------ by site

LAYOUT = Layout.from_tensors({"w": torch.zeros(2, 2).double(), "s": torch.zeros(()).double()})


class Nothing:
    num_data = 1


def as_vector(row, name, given, step=0):
    kernel = row.of(**{name: given})
    engine = Engine(kernel, Nothing(), LAYOUT, LAYOUT.size)
    return engine.kernel_values(kernel.values(step))[name]


@pytest.mark.parametrize(
    ("row", "name"),
    [
        pytest.param(row, name, id=f"{row.name}-{name}")
        for row in STOCHASTIC
        for name in row.kernel.per_site
    ],
)
def test_a_dict_is_a_vector(row, name):
    """Sites in the position's order, whatever the dict's; tensors element by element; numbers,
    0-d tensors and schedules for all of a site."""
    matrix = double([0.1, 0.2], [0.3, 0.4])
    vector = as_vector(row, name, {"s": 0.7, "w": matrix})
    assert torch.equal(vector, double(0.1, 0.2, 0.3, 0.4, 0.7))
    falling = {"s": torch.tensor(0.5).double(), "w": lambda step: 1 / (1 + step)}
    assert torch.equal(as_vector(row, name, falling, step=3), double(0.25, 0.25, 0.25, 0.25, 0.5))
    single = as_vector(row, name, {"s": 0.7, "w": matrix.float()})
    assert single.dtype == torch.float64


EACH = {
    "lr": {"s": 0.1, "w": double(0.2, 0.3)},
    "friction": {"s": 0.5, "w": 1.5},
    "mass": {"w": double(0.5, 2.0), "s": 3.0},
}


def test_sites_are_parameter_groups():
    """SGHMC at temperature 0: each element with its own learning rate and momentum."""
    sampler = ps.SGHMC(noisy_sums, temperature=0, init_strategy=STARTS, **EACH)
    sampler.run(ROWS, num_samples=15, num_chains=3, seed=0, **EVERY_STEP, **QUIET)
    draws = sampler.get_samples(group_by_chain=True)

    def make(w, log_s):
        values = [(w[0], 0.2, 1.5, 0.5), (w[1], 0.3, 1.5, 2.0), (log_s, 0.1, 0.5, 3.0)]
        groups = [
            {"params": [p], "lr": e * e / mass, "momentum": 1 - e * friction}
            for p, e, friction, mass in values
        ]
        return torch.optim.SGD(groups, lr=1.0)

    for chain in range(3):
        expected = optimized(chain, make, 15)
        close(draws["w"][chain], expected["w"])
        close(draws["s"][chain], expected["s"])


def short_run(row, **hyperparameters):
    values = {"lr": row.lr / 4, **row.others, **hyperparameters}
    sampler = row.sampler(noisy_sums, init_strategy=STARTS, **values)
    return sampler.run(
        ROWS, num_samples=12, num_chains=3, batch_size=7, seed=2, **EVERY_STEP, **QUIET
    )


@pytest.mark.slow
@pytest.mark.parametrize("row", long_but(STOCHASTIC, *STOCHASTIC[:2]), ids=by_name)
def test_sites_alike_are_one_value_for_all(row):
    plain = short_run(row).get_samples()
    values = {name: row.others.get(name, row.lr / 4) for name in row.kernel.per_site}
    numbers = {name: {"w": value, "s": value} for name, value in values.items()}
    others = {
        name: {"s": lambda step, v=value: v, "w": double(value, value)}
        for name, value in values.items()
    }
    for given in (numbers, others):
        alike = short_run(row, **given).get_samples()
        for site, draws in plain.items():
            close(alike[site], draws)
    for name, value in values.items():
        apart = short_run(row, **{name: {"w": 0.7 * value, "s": value}}).get_samples()
        assert (apart["w"] - plain["w"]).abs().max() > 1e-4


@pytest.mark.parametrize("row", [r for r in STOCHASTIC if r.has_momentum], ids=by_name)
def test_sites_left_out_have_the_default(row):
    names = [name for name in row.kernel.per_site if name != "lr"]
    given = short_run(row, **{name: {"s": 0.4} for name in names}).get_samples()
    expected = short_run(row, **{name: {"w": 1.0, "s": 0.4} for name in names}).get_samples()
    assert all(torch.equal(given[site], expected[site]) for site in given)


def test_what_a_run_says_of_its_sites():
    sampler = ps.SGHMC(noisy_sums, temperature=0.5, **EACH)
    sampler.run(ROWS, num_samples=4, num_chains=2, seed=0, **EVERY_STEP, **QUIET)
    stats = sampler.to_arviz().sample_stats
    columns = {f"{name}_{site}" for name in EACH for site in ("w", "s")}
    assert set(stats) == {"lp", "step", "temperature", *columns}
    assert (stats.friction_w.values == 1.5).all()
    assert (stats.lr_s.values == 0.1).all()
    assert (stats.lr_w.values == 1).all()  # times the tensor


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lr": {"w": 0.1}}, r"^lr: no value for site \['s'\]; it has no default"),
        ({"lr": {"w": 0.1, "s": 0.1, "q": 0.1}}, r"^lr: there is no site \['q'\].*'w', 's'"),
        ({"mass": {"q": 2.0}}, r"^mass: there is no site \['q'\]"),
        ({"friction": {"w": double(1, 1, 1)}}, r"^friction\['w'\] has shape \[3\].*\[2\]"),
        ({"mass": {"s": double(1)}}, r"^mass\['s'\] has shape \[1\].*\[\]"),
        ({"mass": {"w": double([1, 1])}}, r"^mass\['w'\] has shape \[1, 2\].*\[2\]"),
    ],
)
def test_dicts_that_do_not_fit_the_model_are_refused(given, message):
    sampler = ps.BAOA(noisy_sums, **{"lr": 0.1, **given})
    with pytest.raises(ArgumentError, match=message):
        sampler.run(ROWS, num_samples=2, **ONE_CHAIN, **QUIET)


@pytest.mark.parametrize("row", STOCHASTIC, ids=by_name)
def test_temperatures_by_site_are_refused(row):
    with pytest.raises(ArgumentError, match=r"^temperature is one number for all sites"):
        row.sampler(noisy_sums, lr=0.1, temperature={"w": 1.0, "s": 0.0})


# ------------------------------------------------------------------ cyclical steps

PRIOR = 4.0
two_means = normal_mean(sd=PRIOR**-0.5)


class MeanOf:
    """The gradient of `normal_mean`'s log joint over N on some rows."""

    def __init__(self, y):
        self.y = y

    def grad(self, w):
        return (SIZE * (self.y.mean(0) - w) - PRIOR * w) / SIZE, None


def walked(row, values, steps, seed, chains, start, batch):
    """All positions, `[chains, steps, 2]`, step by step; values: step -> hyperparameters."""
    noise = NoiseStream(
        seed, range(chains), (row.kernel.normals, 2), torch.float64, torch.device("cpu")
    )
    momentum_noise = NoiseStream(
        seed, range(chains), (2,), torch.float64, torch.device("cpu"), Purpose.MOMENTUM
    ).at(0)
    rows = RowIndices(seed, range(chains), SIZE, batch, row.kernel.sampling)
    paths = []
    for chain in range(chains):
        state, path = None, []
        for step in range(steps):
            kernel = row.of(**values(step))
            bound = Bound(kernel, kernel.values(0))
            if state is None:
                state = bound.init(start[chain], momentum_noise[chain])
            target = MeanOf(ROWS[rows.at(step)[chain]])
            state, _ = bound.update(state, target, noise.at(step)[chain])
            path.append(state.position)
        paths.append(torch.stack(path))
    return torch.stack(paths)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "steps"), each_once(STOCHASTIC, [(0, 1, 0.5), (9, 3, 0.7)]), ids=by_name
)
def test_a_cycle_explores_without_noise_and_samples_with_it(row, steps):
    """Against a loop over steps: 10 steps a cycle, of which the first 5, or 7, are at temperature
    0; of the others, those after warm-up, every thinning-th is kept."""
    warmup, thinning, exploration = steps
    cycle = Cyclical(row.lr, cycle_steps=10, exploration=exploration, settling=0.0)
    exploring = round(10 * exploration)
    start = {"w": STARTS["w"]}
    sampler = row.sampler(two_means, lr=cycle, **row.others, init_strategy=start)
    kwargs = {"num_samples": 8, "warmup_steps": warmup, "thinning": thinning}
    sampler.run(ROWS, batch_size=7, num_chains=3, seed=6, **kwargs, **QUIET)
    draws = sampler.get_samples(group_by_chain=True)["w"]
    sampling = [step for step in range(100) if step >= warmup and step % 10 >= exploring]
    kept = sampling[thinning - 1 :: thinning][:8]

    def values(step):
        own = {} if row.name != "pSGLD" else {"forgetting": row.others["forgetting"]}
        lr = row.lr / 2 * (1 + math.cos(math.pi * (step % 10) / 10))
        return {**own, "lr": lr, "temperature": (step % 10 >= exploring) / SIZE}

    path = walked(row, values, kept[-1] + 1, 6, 3, STARTS["w"], 7)
    close(draws, path[:, kept])
    stats = sampler.to_arviz().sample_stats
    assert stats.step.values.tolist() == [kept] * 3
    assert (stats.temperature.values == 1).all()
    np.testing.assert_allclose(stats.lr.values, [[values(step)["lr"] for step in kept]] * 3)
    assert draws.shape == (3, 8, 2)


def test_a_first_exploration_is_the_path_at_temperature_zero():
    """Up to the first draw that is kept, whose step brings the first noise."""
    cycle = Cyclical(0.3, cycle_steps=20, exploration=0.75, settling=0.0)

    def first(**given):
        sampler = ps.SGLD(two_means, init_strategy={"w": STARTS["w"]}, **given)
        settings = {"batch_size": 7, "num_chains": 3, "seed": 6, **QUIET}
        return sampler, settings

    sampler, settings = first(lr=cycle)
    sampler.run(ROWS, num_samples=1, **EVERY_STEP, **settings)
    cold, settings = first(lr=cycle.__call__, temperature=0)
    cold.run(ROWS, num_samples=16, **EVERY_STEP, **settings)
    drawn = sampler.get_samples(group_by_chain=True)["w"][:, 0]
    quiet = cold.get_samples(group_by_chain=True)["w"][:, 15]
    noise = NoiseStream(6, range(3), (1, 2), torch.float64, torch.device("cpu")).at(15)[:, 0]
    close(drawn - quiet, noise * math.sqrt(2 * cycle(15) / SIZE), tolerance=1e-12)


# ------------------------------------------------------------------ decreasing steps


def decreasing(lr, model=two_means, method=ps.SGLD, **kwargs):
    sampler = method(model, lr=lr)
    settings = {"num_samples": 40, "warmup_steps": 3, "thinning": 2, "num_chains": 2, "seed": 0}
    return sampler.run(ROWS, **settings, **kwargs, **QUIET)


FALLING = polynomial_decay(0.5, power=1.0, delay=5.0)
STEPS = [3 + 2 * i + 1 for i in range(40)]


@pytest.mark.parametrize("method", [ps.SGLD, ps.BAOA, ps.pSGLD])
def test_draws_count_by_their_step_sizes(method):
    stats = decreasing(lambda step: FALLING(step) / 5, method=method).to_arviz().sample_stats
    lr = np.array([FALLING(step) for step in STEPS])
    assert stats.step.values.tolist() == [STEPS] * 2
    np.testing.assert_allclose(stats.weight.values, [lr / lr.mean()] * 2, rtol=1e-12)


def test_weights_of_step_sizes_by_site_are_their_mean():
    lr = {"w": FALLING, "s": lambda step: 0.001 * FALLING(step) ** 2}
    stats = decreasing(lr, model=noisy_sums).to_arviz().sample_stats
    falling = np.array([FALLING(step) for step in STEPS])
    each = falling / falling.mean(), falling**2 / (falling**2).mean()
    np.testing.assert_allclose(stats.weight.values, [sum(each) / 2] * 2, rtol=1e-12)


@pytest.mark.slow
def test_draws_at_one_step_size_have_no_weights():
    constant = [
        decreasing(0.1),
        decreasing(lambda step: 0.1),
        decreasing({"w": 0.1}),
        ps.SGLD(two_means, lr=0.1, temperature=lambda step: 1 / (1 + step)).run(
            ROWS, num_samples=9, seed=0, **ONE_CHAIN, **QUIET
        ),
        # warm restarts sample every cycle anew
        ps.SGLD(two_means, lr=Cyclical(0.2, 4, 0.5, 0.0)).run(
            ROWS, num_samples=9, seed=0, **ONE_CHAIN, **QUIET
        ),
    ]
    assert all("weight" not in sampler.to_arviz().sample_stats for sampler in constant)


def test_the_summary_is_weighted():
    sampler = decreasing(FALLING)
    table, plain = sampler.summary(), decreasing(lambda step: 0.5 - 0.0 * step).summary()
    draws = sampler.get_samples()["w"].numpy()
    weights = np.array([FALLING(step) for step in STEPS] * 2)
    mean = np.average(draws, axis=0, weights=weights)
    sd = np.average((draws - mean) ** 2, axis=0, weights=weights) ** 0.5
    np.testing.assert_allclose(table["mean"], mean, atol=6e-4)
    np.testing.assert_allclose(table["sd"], sd, atol=6e-4)
    assert abs(draws.mean(0) - mean).max() > 2e-3  # unweighted it would be another
    assert list(table.columns) == list(plain.columns)
    assert table.notna().all().all()


@pytest.mark.parametrize("num_samples", [None, 40])
def test_predictions_are_from_draws_in_proportion_to_their_weights(num_samples):
    """Predictions say which draw they are of: each of 80 has its share of them, to within one."""
    sampler = decreasing(FALLING)
    y = sampler.predict(ROWS[:1], num_samples=num_samples, return_sites=["w"])["w"]
    draws = sampler.get_samples()["w"]
    counts = (y[:, None] == draws).all(-1).double().sum(0)
    total = num_samples or 80
    assert y.shape == (total, 2)
    assert counts.sum() == total
    lr = double(*(FALLING(step) for step in STEPS)).repeat(2)
    assert (counts - total * lr / lr.sum()).abs().max() < 1
    assert counts.max() > 2 * total / 80


def test_equal_weights_are_left_as_they_are():
    sampler = decreasing(0.1)
    y = sampler.predict(ROWS[:1], return_sites=["w"])["w"]
    assert torch.equal(y, sampler.get_samples()["w"])
    chosen = sampler.predict(ROWS[:1], num_samples=20, return_sites=["w"])["w"]
    places = [int((draw == sampler.get_samples()["w"]).all(-1).nonzero()[0]) for draw in chosen]
    assert all(3 <= b - a <= 5 for a, b in itertools.pairwise(places))
