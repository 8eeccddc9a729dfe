"""The samplers as users call them: laws, seeds, chains, steps, starts, points, failures.

Statistical tests have fixed seeds; were those drawn anew, a z beyond 4.4 would come once in
90,000 comparisons.
"""

import inspect
import math
import warnings
from itertools import product

import gaussian
import pyro
import pyro.distributions as dist
import pytest
import torch
from densities import normal_mean
from methods import STOCHASTIC
from models import of_network, of_rows
from pyro.infer.autoguide import initialization
from pyro.nn import PyroModule, PyroSample
from reference import close_to_largest, double, normals, z_of_variance
from repetitions import long_but
from row_datasets import RowByRow
from runs import EVERY_STEP, ONE_CHAIN
from torch import nn
from torch.distributions import constraints
from torch.utils.data import DataLoader

import pyro_scale as ps
from pyro_scale.errors import ArgumentError, NonFiniteError, NotRunError, PyroScaleError, SiteError

SAMPLERS = [ps.BAOA, ps.SGHMC, ps.SGLD]  # with a law in closed form
METHODS = [row.sampler for row in STOCHASTIC]
QUIET = {"progress": False}


# ------------------------------------------------------------------ stationary laws

PRIOR = 4.0  # the prior's precision


def centered_draws(draws, y, num_data):
    """Draws about the exact posterior mean when y stands for `num_data` rows."""
    return draws - num_data * y.mean(0) / (PRIOR + num_data)


def stationary_factor(method, lr, over_n):
    """The stationary variance over T / Lambda in closed form, at friction 1."""
    if method is ps.BAOA:
        return 1.0
    if method is ps.SGLD:
        return 1 / (1 - lr * over_n / 2)
    return (4 - 2 * lr) / (4 - 2 * lr - lr**2 * over_n)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "num_data", "temperature"),
    long_but(
        product(SAMPLERS, [None, 200], [1.0, 0.3]),
        *[(ps.BAOA, None, 0.3), (ps.SGHMC, 200, 0.3), (ps.SGLD, 200, 0.3)],
    ),
)
def test_stationary_variance_on_the_whole_data(method, num_data, temperature):
    """2000 columns are as many independent chains; draws 15 steps apart are independent to
    e^-6.  The steps are large: the factors are 1, 1.5 and 2 (N = 20) or 1, 1.4 and 1.7."""
    y, lr = normals(20, 2000), 0.8
    model = normal_mean(sd=PRIOR**-0.5)
    sampler = method(model, lr=lr, temperature=temperature, num_data=num_data)
    sampler.run(y, num_samples=10, warmup_steps=60, thinning=15, seed=1, num_chains=1, **QUIET)
    size = num_data or len(y)
    precision = PRIOR + size
    expected = temperature / precision * stationary_factor(method, lr, precision / size)
    centered = centered_draws(sampler.get_samples()["w"], y, size)
    assert abs(z_of_variance(centered, expected)) < 4.4
    assert abs(centered.mean()) < 4.4 * (expected / centered.numel()) ** 0.5


@pytest.mark.parametrize("method", long_but(SAMPLERS, ps.SGLD))
def test_a_model_without_arguments_samples_its_prior(method):
    def model():
        pyro.factor("no data", torch.zeros(()))
        pyro.sample("w", dist.Normal(torch.ones(3000).double(), 0.5).to_event(1))

    lr = 0.3
    sampler = method(model, lr=lr)
    sampler.run(None, num_samples=6, warmup_steps=60, thinning=25, seed=1, num_chains=1, **QUIET)
    expected = 0.25 * stationary_factor(method, lr, 4.0)
    assert abs(z_of_variance(sampler.get_samples()["w"] - 1, expected)) < 4.4


def test_from_function_is_a_log_posterior_per_datum():
    """Per datum -w^2/2 and N = 50: the posterior's variance is 1/50."""
    start = {"w": torch.zeros(3000).double()}
    density = ps.LogPosterior.from_function(
        lambda params, batch: -0.5 * params["w"].square().sum(), start, num_data=50
    )
    sampler = ps.BAOA(density, lr=0.8)
    sampler.run(None, num_samples=6, warmup_steps=60, thinning=15, seed=1, num_chains=1, **QUIET)
    assert abs(z_of_variance(sampler.get_samples()["w"], 1 / 50)) < 4.4


RUNS = {
    "BAOA": lambda model, data: ps.BAOA(model, lr=0.8).run(data, num_samples=20, seed=0, **QUIET),
    "Laplace": lambda model, data: ps.Laplace(model).run(data, seed=0, **QUIET),
    "VI": lambda model, data: ps.VI(model).run(data, num_steps=5, seed=0, **QUIET),
}
ASKED = {
    "predict": lambda fit, x: fit.predict(x),
    "predict: reduce": lambda fit, x: fit.predict(x, reduce="mean"),
    "predict: interval": lambda fit, x: fit.predict(x, interval=0.9),
    "log_likelihood": lambda fit, x: fit.log_likelihood(),
    "log_likelihood: to_arviz": lambda fit, x: fit.to_arviz(log_likelihood=True),
    "posterior_predictive": lambda fit, x: fit.to_arviz(posterior_predictive=True),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pyro_scale.errors.PyroScaleWarning")
@pytest.mark.parametrize("method", RUNS)
def test_a_function_has_no_model_to_predict_with(method):
    x, y = normals(20, seed=1), normals(20, seed=2)

    def per_datum(params, batch):
        x, y = batch
        return -0.5 * ((y - x * params["w"]).square().mean() + params["w"].square() / 20)

    start = {"w": torch.zeros((), dtype=x.dtype)}
    density = ps.LogPosterior.from_function(per_datum, start, num_data=20)
    fit = RUNS[method](density, (x, y))
    for asked, ask in ASKED.items():
        name = asked.partition(":")[0]
        with pytest.raises(ArgumentError, match=f"{name}: a log posterior made from a function"):
            ask(fit, x)
    assert "posterior" in fit.to_arviz().groups()


one_column = of_rows(
    lambda w: dist.Normal(w, 1.0),
    w=lambda: dist.Normal(torch.zeros((), dtype=torch.float64), PRIOR ** (-0.5)),
)


@pytest.mark.parametrize(
    ("method", "temperature"),
    long_but(product(SAMPLERS, [1.0, 0.5]), (ps.BAOA, 0.5), (ps.SGLD, 0.5)),
)
class TestGradientNoise:
    """A normal mean with N = 40, half of the rows at +2 and half at -2, so that V = 4."""

    y = 2.0 * (-1.0) ** torch.arange(40).double()
    size, batch, lr, chains = 40, 10, 0.4, 400

    def run(self, method, temperature, sampling, **steps):
        sampler = method(one_column, lr=self.lr, temperature=temperature)
        return sampler.run(
            self.y,
            batch_size=self.batch,
            num_chains=self.chains,
            sampling=sampling,
            seed=2,
            **{**EVERY_STEP, **steps},
            **QUIET,
        )

    @pytest.mark.slow
    def test_minibatches_widen_the_posterior_as_the_linear_recursion_says(
        self, method, temperature
    ):
        """Drawn with replacement, the gradient over N has noise of variance V / B."""
        steps = {"num_samples": 8, "warmup_steps": 60, "thinning": 20}
        sampler = self.run(method, temperature, "replacement", **steps)
        kernel = gaussian.bound(sampler.kernel, self.size)
        precision = torch.full((1, 1), (PRIOR + self.size) / self.size).double()
        exact = gaussian.stationary(kernel, precision, gradient_noise=4.0 / self.batch)[0, 0]
        clean = gaussian.stationary(kernel, precision)[0, 0]
        assert exact > 2 * clean
        assert abs(z_of_variance(sampler.get_samples()["w"], exact)) < 4.4

    @pytest.mark.parametrize("sampling", ["replacement", "shuffle"])
    def test_diagnostics_say_by_how_much(self, method, temperature, sampling):
        """1 + lr N V / (2 friction B T); 1 - B/N times that for batches of different rows,
        whose V has N - 1 below.  V's estimate from 400 batches of 10 has an error of 0.75%."""
        sampler = self.run(method, temperature, sampling, num_samples=4)
        added = self.lr * self.size * 4.0 / (2 * self.batch * temperature)
        if sampling == "shuffle":
            added *= (1 - self.batch / self.size) * self.size / (self.size - 1)
        with pytest.warns(UserWarning, match=r"hotter than it should be.*lower lr"):
            table = sampler.diagnostics()
        factor = table.loc["w", "minibatch_heating"]
        assert factor - 1 == pytest.approx(added, rel=4.4 * 0.0075)


@pytest.mark.parametrize(
    ("data", "kwargs", "num_data"),
    [
        (TestGradientNoise.y, {}, None),
        (TestGradientNoise.y, {"batch_size": 40}, None),
        (TestGradientNoise.y, {"sampling": "replacement"}, None),
        (TestGradientNoise.y, {}, 400),
    ],
    ids=["whole", "batch_size=N", "replacement", "num_data"],
)
def test_the_whole_data_every_step_has_no_gradient_noise(data, kwargs, num_data):
    sampler = ps.BAOA(one_column, lr=0.1, num_data=num_data)
    sampler.run(data, num_samples=10, seed=0, **ONE_CHAIN, **kwargs, **QUIET)
    assert sampler.diagnostics().loc["w", "minibatch_heating"] == 1.0


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_no_warning_and_no_inflation_where_there_is_none(temperature, recwarn):
    sampler = ps.BAOA(one_column, lr=0.01, temperature=temperature)
    sampler.run(TestGradientNoise.y, num_samples=30, batch_size=39, seed=0, **ONE_CHAIN, **QUIET)
    table = sampler.diagnostics()
    assert not [w for w in recwarn if "temperature" in str(w.message)]
    if temperature == 0:
        assert "minibatch_heating" not in table


# ------------------------------------------------------------------ seeds and chains


def noise_of(seed, num_chains=3, num_samples=20, size=4000):
    """SGLD of a standard normal at lr = 1 forgets everything: its draws are sqrt(2) times the
    steps' noise, `[chains, draws, size]`."""

    def model():
        pyro.factor("no data", torch.zeros(()))
        pyro.sample("w", dist.Normal(torch.zeros(size).double(), 1.0).to_event(1))

    sampler = ps.SGLD(model, lr=1.0)
    sampler.run(
        None, num_samples=num_samples, num_chains=num_chains, seed=seed, **EVERY_STEP, **QUIET
    )
    return sampler.get_samples(group_by_chain=True)["w"] / 2**0.5


def test_noise_is_white_over_steps_chains_and_seeds():
    """7140 pairs of vectors of 4000 normals: a correlation beyond 5.5 standard errors would
    come once in 3,700 seeds.  20 steps are more than one block of the noise columns."""
    vectors = torch.cat([noise_of(seed).flatten(0, 1) for seed in (0, 1)])
    size = vectors.shape[1]
    correlation = vectors @ vectors.T / size
    off = correlation - torch.diag(torch.diag(correlation))
    assert float(off.abs().max()) * size**0.5 < 5.5
    assert abs(z_of_variance(vectors, 1.0)) < 4.4
    assert float(vectors.pow(4).mean()) == pytest.approx(
        3.0, abs=4.4 * (96 / vectors.numel()) ** 0.5
    )


ROWS = normals(30, 2, seed=5)


def with_scale(x):
    w = pyro.sample("w", dist.Normal(torch.zeros(2).double(), 1.0).to_event(1))
    s = pyro.sample("s", dist.HalfNormal(torch.ones(()).double()))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, s), obs=x.sum(1))


def grouped(method, num_chains=4, data=ROWS, model=with_scale, **kwargs):
    settings = {"num_samples": 12, "batch_size": 7, "seed": 3, **EVERY_STEP, **QUIET, **kwargs}
    sampler = method(model, lr={ps.SGLD: 0.002, ps.pSGLD: 0.01}.get(method, 0.1))
    return sampler.run(data, num_chains=num_chains, **settings).get_samples(group_by_chain=True)


@pytest.mark.parametrize(
    ("method", "sampling"),
    long_but(
        [(method, "shuffle") for method in METHODS]
        + [(ps.BAOA, "replacement"), (ps.BAOA, "symmetric")],
        *[(ps.SGNHT, "shuffle"), (ps.UBU, "shuffle"), (ps.BAOA, "symmetric")],
    ),
)
def test_chain_i_is_the_same_whatever_the_number_of_chains(method, sampling):
    """Same start, noise and batches: vmapped chains are those of runs one by one."""
    together = grouped(method, 4, sampling=sampling)
    for num_chains in (1, 3):
        fewer = grouped(method, num_chains, sampling=sampling)
        for name in ("w", "s"):
            close_to_largest(fewer[name], together[name][:num_chains], rtol=1e-11)
    assert not torch.allclose(together["w"][0], together["w"][1])


def test_chain_i_is_the_same_with_a_loader():
    loader = DataLoader(RowByRow(ROWS), 7, shuffle=True)
    for name, draws in grouped(ps.BAOA, 2, loader, batch_size=None).items():
        close_to_largest(draws, grouped(ps.BAOA, 4)[name][:2], rtol=1e-11)


@pytest.mark.parametrize("method", long_but(METHODS, ps.BAOA, ps.SGNHT))
def test_same_seed_same_draws(method):
    first, second, other = grouped(method), grouped(method), grouped(method, seed=4)
    for name in ("w", "s"):
        assert torch.equal(first[name], second[name])
        assert not torch.equal(first[name], other[name])


def test_no_seed_draws_one_from_torchs_generator_and_records_it():
    def run(seed=None):
        sampler = ps.BAOA(with_scale, lr=0.1).run(
            ROWS, num_samples=3, seed=seed, **ONE_CHAIN, **QUIET
        )
        return sampler.get_samples()["w"], sampler.to_arviz().attrs["seed"]

    pyro.set_rng_seed(5)
    first, seed = run()
    second, other_seed = run()
    pyro.set_rng_seed(5)
    again, _ = run()
    assert seed != other_seed
    assert not torch.equal(first, second)
    assert torch.equal(first, again)
    assert torch.equal(first, run(seed)[0])


def test_a_run_leaves_torchs_generator_and_pyros_store_alone():
    pyro.clear_param_store()
    torch.manual_seed(8)
    before = torch.get_rng_state()
    sampler = ps.BAOA(with_scale, lr=0.5)
    sampler.run(ROWS, num_samples=4, num_chains=2, batch_size=7, seed=0, **EVERY_STEP, **QUIET)
    sampler.get_samples()
    sampler.to_arviz()
    with pytest.warns(UserWarning, match="minibatches"):
        sampler.diagnostics()
    assert torch.equal(torch.get_rng_state(), before)
    assert not list(pyro.get_param_store())


def test_a_second_run_starts_afresh():
    sampler = ps.BAOA(with_scale, lr=0.1)
    runs = [
        sampler.run(ROWS, num_samples=5, batch_size=7, seed=3, **ONE_CHAIN, **QUIET).get_samples()[
            "w"
        ]
        for _ in range(2)
    ]
    assert torch.equal(*runs)


def test_shared_batches_are_chain_zeros():
    """The first chain is the one it would be; the others follow its batches, so that at
    temperature 0 chains from one start are one."""
    sampler = ps.SGLD(one_column, lr=0.1, temperature=0, init_strategy={"w": torch.ones(3)})
    settings = {"num_samples": 9, "num_chains": 3, "batch_size": 4, "seed": 0, **QUIET}
    y = normals(20)
    own = sampler.run(y, **EVERY_STEP, **settings).get_samples(group_by_chain=True)["w"]
    shared = sampler.run(y, share_batches=True, **EVERY_STEP, **settings).get_samples(
        group_by_chain=True
    )["w"]
    close_to_largest(shared, own[:1].expand(3, -1))
    assert (own[0] - own[1]).abs().max() > 0.01


# ------------------------------------------------------------------ steps


@pytest.mark.parametrize(
    ("method", "warmup", "thinning"),
    long_but(
        [(method, *steps) for method in METHODS for steps in [(0, 3), (5, 1), (4, 3), (1, 7)]],
        *[(ps.BAOA, 0, 3), (ps.BAOA, 5, 1), (ps.SGNHT, 4, 3), (ps.UBU, 4, 3)],
    ),
)
def test_exactly_the_right_states_are_kept(method, warmup, thinning):
    every = grouped(method, 2, num_samples=warmup + 4 * thinning)
    kept = grouped(method, 2, num_samples=4, warmup_steps=warmup, thinning=thinning)
    for name in ("w", "s"):
        assert torch.equal(kept[name], every[name][:, warmup:][:, thinning - 1 :: thinning])


def test_schedules_see_step_numbers_from_zero_with_warmup_included():
    """w' = w - lr(step) w at temperature 0, for a standard normal without data."""

    def model():
        pyro.factor("no data", torch.zeros(()))
        pyro.sample("w", dist.Normal(torch.zeros(()).double(), 1.0))

    def lr(step):
        return 1 / (3 + step)

    start = {"w": double(2.0)}
    sampler = ps.SGLD(model, lr=lr, temperature=0, init_strategy=start)
    sampler.run(None, num_samples=4, warmup_steps=3, thinning=2, seed=0, num_chains=1, **QUIET)
    path = torch.cumprod(double(*(1 - lr(step) for step in range(11))), 0) * 2.0
    close_to_largest(sampler.get_samples()["w"], path[[4, 6, 8, 10]])
    stats = sampler.to_arviz().sample_stats
    assert stats.step.values.tolist() == [[4, 6, 8, 10]]
    assert stats.lr.values.tolist() == [[lr(4), lr(6), lr(8), lr(10)]]


def test_a_temperature_schedule_switches_the_noise_off():
    """Noise until step 5, then w' = w / 2."""

    def model():
        pyro.factor("no data", torch.zeros(()))
        pyro.sample("w", dist.Normal(torch.zeros(()).double(), 1.0))

    sampler = ps.SGLD(model, lr=0.5, temperature=lambda step: 1.0 if step < 5 else 0.0)
    sampler.run(None, num_samples=10, seed=0, **ONE_CHAIN, **QUIET)
    w = sampler.get_samples()["w"]
    close_to_largest(w[5:], w[4:-1] / 2)
    assert (w[1:5] - w[:4] / 2).abs().min() > 1e-3


@pytest.mark.parametrize("method", [ps.BAOA, ps.SGHMC])
def test_temperature_zero_is_an_ensemble_of_sgd_with_momentum(method):
    """On the mean of the negative log joint over N, Jacobian included, for every chain."""
    lr, friction, size = 0.3, 0.8, 30
    decay = math.exp(-lr * friction) if method is ps.BAOA else 1 - lr * friction
    rate = lr**2 * (1 + decay) / 2 if method is ps.BAOA else lr**2
    starts = {"w": normals(3, 2, seed=1), "s": double(0.5, 1.0, 2.0)}
    sampler = method(
        with_scale, lr=lr, friction=friction, temperature=0, num_data=90, init_strategy=starts
    )
    sampler.run(ROWS, num_samples=12, num_chains=3, seed=0, **EVERY_STEP, **QUIET)
    draws = sampler.get_samples(group_by_chain=True)

    def loss(w, log_s):
        likelihood = dist.Normal(ROWS @ w, log_s.exp()).log_prob(ROWS.sum(1)).mean() * 90
        prior = dist.Normal(0.0, 1.0).log_prob(w).sum()
        prior = prior + dist.HalfNormal(1.0).log_prob(log_s.exp()) + log_s
        return -(likelihood + prior) / 90

    assert size == len(ROWS)
    for chain in range(3):
        w = nn.Parameter(starts["w"][chain].clone())
        log_s = nn.Parameter(starts["s"][chain].log())
        sgd = torch.optim.SGD([w, log_s], lr=rate, momentum=decay)
        for step in range(12):
            sgd.zero_grad()
            loss(w, log_s).backward()
            sgd.step()
            close_to_largest(draws["w"][chain, step], w.detach(), rtol=1e-11)
            close_to_largest(draws["s"][chain, step], log_s.exp().detach(), rtol=1e-11)


@pytest.mark.slow
def test_warmup_under_five_relaxation_times_is_warned_of():
    """N = 20 and precision 24 over N: lr 0.05 relaxes in 2 / lr = 40 steps, so 200 are needed."""
    y = normals(20)
    sampler = ps.BAOA(one_column, lr=0.05)
    settings = {"num_samples": 30, "thinning": 5, "num_chains": 4, "seed": 0, **QUIET}
    with pytest.warns(UserWarning, match=r"warm-up of 150 steps.*about 40 steps.*warmup_steps=200"):
        sampler.run(y, warmup_steps=150, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        sampler.run(y, warmup_steps=200, **settings)


# ------------------------------------------------------------------ step()


def log_joint(w, y, num_data):
    likelihood = dist.Normal(w, 1.0).log_prob(y).mean() * num_data
    return float(dist.Normal(0.0 * w, PRIOR**-0.5).log_prob(w) + likelihood)


def test_step_returns_the_log_joint_before_it_and_moves_the_chain():
    y, lr = normals(6), 0.2
    sampler = ps.SGLD(one_column, lr=lr, temperature=0, num_data=60, init_strategy={"w": double(2)})
    w = torch.tensor(2.0).double()
    for _ in range(5):
        assert sampler.step(y) == pytest.approx(log_joint(w, y, 60), rel=1e-12)
        w = w + lr * (-PRIOR * w + 60 * (y.mean() - w)) / 60
        close_to_largest(sampler.get_samples()["w"], w[None])


@pytest.mark.parametrize("method", long_but(METHODS, ps.BAOA, ps.SGNHT))
def test_steps_are_a_run(method):
    """Same seed, whole data: seven steps end where a run of seven does."""
    sampler = method(with_scale, lr=0.1)
    torch.manual_seed(4)
    seed = int(torch.randint(2**31, ()).item())
    torch.manual_seed(4)
    stepped = method(with_scale, lr=0.1, num_data=len(ROWS))
    values = [stepped.step(ROWS) for _ in range(7)]
    sampler.run(ROWS, num_samples=7, seed=seed, **ONE_CHAIN, **QUIET)
    for name, value in sampler.get_samples().items():
        close_to_largest(stepped.get_samples()[name], value[-1:])
    close_to_largest(torch.tensor(sampler.to_arviz().sample_stats.lp.values[0]), double(*values))


def test_step_takes_n_from_the_plate_or_from_num_data_but_never_from_the_batch():
    def plated(y):
        w = pyro.sample("w", dist.Normal(torch.zeros(()).double(), PRIOR**-0.5))
        with pyro.plate("data", 60, subsample_size=len(y)):
            pyro.sample("y", dist.Normal(w, 1.0), obs=y)

    y, start = normals(6), {"w": double(0.5)}
    expected = pytest.approx(log_joint(double(0.5)[0], y, 60), rel=1e-12)
    assert ps.SGLD(one_column, lr=0.1, init_strategy=start, num_data=60).step(y=y) == expected
    assert ps.SGLD(plated, lr=0.1, init_strategy=start).step(y) == expected
    with pytest.raises(ArgumentError, match="num_data"):
        ps.SGLD(one_column, lr=0.1, init_strategy=start).step(y)


def test_step_names_the_failure():
    sampler = ps.SGLD(one_column, lr=1e200, num_data=10)
    sampler.step(normals(10))
    with pytest.raises(NonFiniteError, match=r"chain 0 at step 1, site 'w'"):
        sampler.step(normals(10))


# ------------------------------------------------------------------ starts


def starts(model, init_strategy, num_chains=3, data=None, seed=0):
    """Where chains start: after one step too small to matter, without noise."""
    sampler = ps.SGLD(model, lr=1e-15, temperature=0, init_strategy=init_strategy)
    sampler.run(data, num_samples=1, num_chains=num_chains, seed=seed, **EVERY_STEP, **QUIET)
    return {k: v[:, 0] for k, v in sampler.get_samples(group_by_chain=True).items()}


def constrained():
    pyro.factor("no data", torch.zeros(()))
    one = torch.ones(3, dtype=torch.float64)
    pyro.sample("w", dist.Normal(5 * one, 1.0).to_event(1))
    pyro.sample("s", dist.LogNormal(one[0], 0.5))
    pyro.sample("p", dist.Dirichlet(one))


def test_default_start_is_uniform_in_unconstrained_space_and_new_for_each_chain():
    """400 chains of 3 + 1 numbers: in (-2, 2), mean 0 and variance 4/3 by a z of 4.4."""
    values = starts(constrained, None, num_chains=400)
    drawn = torch.cat([values["w"], values["s"].log()[:, None]], dim=1)
    assert float(drawn.abs().max()) < 2
    assert float(drawn.abs().max()) > 1.9
    assert abs(drawn.mean()) < 4.4 * (4 / 3 / drawn.numel()) ** 0.5
    # the variance of a square, 16/5 - 16/9, over its mean squared
    spread = (0.8 / drawn.numel()) ** 0.5
    assert abs(drawn.square().mean() / (4 / 3) - 1) < 4.4 * spread
    assert len(drawn[:, 0].unique()) == 400


@pytest.mark.parametrize(
    ("strategy", "w", "s"),
    [
        (initialization.init_to_mean, 5.0, math.exp(1 + 0.125)),
        (initialization.init_to_value(values={"w": 2 * torch.ones(3).double()}), 2.0, None),
        (initialization.init_to_feasible, 0.0, 1.0),
    ],
    ids=["mean", "value", "feasible"],
)
def test_pyros_own_strategies(strategy, w, s):
    values = starts(constrained, strategy)
    torch.testing.assert_close(values["w"], torch.full_like(values["w"], w), rtol=1e-12, atol=1e-14)
    if s is not None:
        close_to_largest(values["s"], s)


def without_a_gradient_below_zero():
    w = pyro.sample("w", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0))
    pyro.factor("c", torch.where(w > 0, w, 0 * w).sqrt())  # whose gradient is 0 * inf there


def test_starts_without_a_finite_gradient_are_drawn_anew_and_the_others_kept():
    """Half of the starts are below zero, so that of 40 about 20 stay as they are."""

    def without_a_limit():
        w = pyro.sample("w", dist.Normal(torch.zeros(()).double(), 1.0))
        pyro.factor("c", 0 * w)

    drawn = starts(without_a_limit, None, 40)
    values = starts(without_a_gradient_below_zero, None, 40)
    usable = drawn["w"] > 0
    assert 10 < usable.sum() < 30
    assert (values["w"] > 0).all()
    close_to_largest(values["w"][usable], drawn["w"][usable])
    assert len(values["w"].unique()) == 40


def test_a_given_start_without_a_finite_gradient_is_not_replaced():
    with pytest.raises(NonFiniteError, match="chain 1 at step 0"):
        starts(without_a_gradient_below_zero, {"w": double(1.0, -1.0, 1.0)})


def test_pyros_random_strategies_are_drawn_for_each_chain():
    values = starts(constrained, initialization.init_to_sample, num_chains=300)["w"]
    assert abs(z_of_variance(values - 5, 1.0)) < 4.4
    near = starts(constrained, initialization.init_to_uniform(radius=0.01))["w"]
    assert 0 < near.abs().max() < 0.01
    assert len(near[:, 0].unique()) == 3


def test_a_dict_of_starts_is_taken_as_it_is_and_the_rest_drawn():
    given = {"s": double(0.1, 1.0, 7.0), "p": dist.Dirichlet(torch.ones(3).double()).sample((3,))}
    values = starts(constrained, given)
    close_to_largest(values["s"], given["s"])
    close_to_largest(values["p"], given["p"])
    close_to_largest(values["w"], starts(constrained, None)["w"])


@pytest.mark.parametrize("given", [torch.float64, torch.float32, torch.float16, torch.int64])
@pytest.mark.parametrize("own", [torch.float64, torch.float32])
def test_starts_of_another_dtype_become_the_sites(own, given):
    """A matrix product with the data refuses two dtypes, so the start must have the site's."""

    def model(x):
        w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=own), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=x[:, 0])

    value = torch.tensor([[2, -1]] * 3, dtype=given)
    drawn = starts(model, {"w": value}, data=ROWS.to(own))["w"]
    assert drawn.dtype == own
    close_to_largest(drawn, value, rtol=1e-7)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"q": double(1, 1, 1)}, r"'q' is not a latent site.*'w', 's', 'p'"),
        ({"s": double(1, 1)}, r"\['s'\] has shape \[2\].*num_chains=3"),
        ({"s": torch.tensor(1.0)}, r"\['s'\] has shape \[\].*num_chains=3"),
        ({"w": torch.zeros(3, 4).double()}, r"\['w'\].*shape"),
        ({"w": torch.zeros(3).double()}, r"\['w'\].*shape"),
        ({"w": torch.zeros(3, 1, 3).double()}, r"\['w'\].*shape"),
        ({"s": 1.0}, r"\['s'\].*tensor"),
        ({"s": [1.0, 1.0, 1.0]}, r"\['s'\].*tensor"),
        ({"s": double(1, 1, 1).numpy()}, r"\['s'\].*tensor"),
    ],
)
def test_a_dict_of_starts_that_does_not_fit_is_refused(given, message):
    with pytest.raises(ArgumentError, match=rf"init_strategy.*{message}"):
        starts(constrained, given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"s": double(1, 0, 1)}, r"site 's': chain 1 starts.*init_strategy"),
        ({"s": double(1, 1, -1)}, r"site 's': chain 2 starts.*init_strategy"),
        ({"w": torch.full((3, 3), math.nan).double()}, r"site 'w': chain 0 starts"),
    ],
)
def test_a_start_off_its_support_is_refused(given, message):
    with pytest.raises(SiteError, match=message):
        starts(constrained, given)


class TestBayesianized:
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    names = ("0.weight", "0.bias", "2.weight", "2.bias")

    def model(self):
        bayesian = ps.bayesianize(self.net, prior=dist.Normal(0.0, 1.0))

        return of_network(bayesian, lambda f: dist.Normal(f.squeeze(-1), 1.0))

    data = (torch.randn(5, 2), torch.randn(5))

    def test_chain_0_starts_at_the_module_and_the_others_at_reset_parameters(self):
        before = {name: value.clone() for name, value in self.net.state_dict().items()}
        torch.manual_seed(0)
        values = starts(self.model(), None, num_chains=50, data=self.data)
        assert set(values) == set(self.names)
        for name, own in before.items():
            torch.testing.assert_close(values[name][0], own)
            fan_in = 2 if name.startswith("0") else 3
            others = values[name][1:]
            # nn.Linear draws uniformly within 1/sqrt(fan in): variance a third of 1/fan in
            assert float(others.abs().max()) <= fan_in**-0.5
            count = others.numel()
            assert float(others.var() * 3 * fan_in) == pytest.approx(1, abs=4.4 / count**0.5)
            assert len(others.flatten().unique()) == count
            assert torch.equal(self.net.state_dict()[name], own)

    def test_init_to_module_starts_all_there(self):
        values = starts(self.model(), ps.init_to_module, data=self.data)
        for name, own in self.net.state_dict().items():
            torch.testing.assert_close(values[name], own.expand(3, *own.shape))


# ------------------------------------------------------------------ points


def test_points_move_by_their_mean_gradient_at_temperature_zero():
    """s > 0 is a point in log space without a Jacobian; w are two chains' latents."""
    y, lr = normals(10, seed=2), 0.1

    def model(y):
        s = pyro.param("s", torch.tensor(2.0).double(), constraint=constraints.positive)
        w = pyro.sample("w", dist.Normal(torch.zeros(()).double(), 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(w, s), obs=y)

    pyro.clear_param_store()
    start = {"w": double(-1.0, 3.0)}
    sampler = ps.SGHMC(model, lr=lr, temperature=0, num_data=40, init_strategy=start)
    sampler.run(y, num_samples=8, num_chains=2, seed=0, **EVERY_STEP, **QUIET)

    w = start["w"].clone().requires_grad_()
    u = torch.tensor(2.0).double().log().requires_grad_()
    sgd = torch.optim.SGD([w, u], lr=lr**2, momentum=1 - lr)
    for _ in range(8):
        sgd.zero_grad()
        likelihood = dist.Normal(w[:, None], u.exp()).log_prob(y).sum(1) * 40 / 10
        chains = (likelihood + dist.Normal(0.0, 1.0).log_prob(w)) / 40
        chains.sum().backward()
        u.grad /= 2  # the mean over chains
        w.grad.neg_()
        u.grad.neg_()
        sgd.step()
    close_to_largest(sampler.params["s"], u.detach().exp())
    close_to_largest(sampler.get_samples(group_by_chain=True)["w"][:, -1], w.detach())
    assert "s" not in sampler.get_samples()
    assert not list(pyro.get_param_store())
    sampler.write_params()
    close_to_largest(pyro.param("s").detach(), u.detach().exp())
    pyro.clear_param_store()


@pytest.mark.parametrize("method", long_but(METHODS, ps.BAOA, ps.SGHMC))
def test_points_have_no_noise_at_any_temperature(method):
    """A point that no latent touches goes its noiseless way while the latent is sampled."""

    def model():
        p = pyro.param("p", torch.zeros(2, dtype=torch.float64))
        pyro.factor("f", -0.5 * (p - 3).square().sum())
        pyro.sample("w", dist.Normal(torch.zeros(()).double(), 1.0))

    def run(temperature):
        pyro.clear_param_store()
        sampler = method(model, lr=0.1, temperature=temperature)
        sampler.run(None, num_samples=10, num_chains=3, seed=0, **EVERY_STEP, **QUIET)
        return sampler.params["p"]

    close_to_largest(run(temperature=1.0), run(temperature=0.0))
    assert (run(temperature=1.0) > 0.05).all()


def test_param_starts_at_the_stores_value():
    def model(y):
        s = pyro.param("s", torch.tensor(2.0).double(), constraint=constraints.positive)
        w = pyro.sample("w", dist.Normal(torch.zeros(()).double(), 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(w, s), obs=y)

    pyro.clear_param_store()
    pyro.param("s", torch.tensor(0.7, dtype=torch.float64), constraint=constraints.positive)
    sampler = ps.SGLD(model, lr=1e-15).run(normals(10), num_samples=1, seed=0, **ONE_CHAIN, **QUIET)
    close_to_largest(sampler.params["s"], 0.7)
    pyro.clear_param_store()


def test_weights_of_a_module_are_points_unless_they_are_frozen():
    class Net(PyroModule):
        def __init__(self):
            super().__init__()
            self.linear = PyroModule[nn.Linear](2, 1)
            self.linear.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 2]).to_event(2))
            self.scale = nn.Parameter(torch.tensor(1.5), requires_grad=False)

        def forward(self, x, y=None):
            mean = self.linear(x).squeeze(-1) * self.scale
            with pyro.plate("data", len(x)):
                return pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    pyro.clear_param_store()
    torch.manual_seed(0)
    net = Net()
    bias = net.linear.bias.detach().clone()
    x, y = torch.randn(20, 2), torch.full((20,), 9.0)
    sampler = ps.BAOA(net, lr=0.2).run(
        (x, y), num_samples=40, num_chains=2, seed=0, **EVERY_STEP, **QUIET
    )
    assert list(sampler.params) == ["linear.bias"]
    assert torch.equal(net.linear.bias.detach(), bias)
    sampler.write_params()
    assert torch.equal(net.linear.bias.detach(), sampler.params["linear.bias"])
    assert float(net.linear.bias.detach()) == pytest.approx(6, abs=1.0)
    assert float(net.scale) == 1.5
    assert not net.scale.requires_grad
    assert not list(pyro.get_param_store())


# ------------------------------------------------------------------ broken chains


def quartic(y):
    """Stable near zero; a start of 1000 is out of reach for any step size used here."""
    w = pyro.sample("w", dist.Normal(torch.zeros(()).double(), 1.0))
    v = pyro.sample("v", dist.Normal(torch.zeros(()).double(), 1.0))
    pyro.factor("wall", -(v**4))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(w, 1.0), obs=y)


def run_quartic(num_samples=20, second=1e3, num_chains=3, **kwargs):
    given = {"w": torch.zeros(3).double()[:num_chains], "v": double(0.1, second, 0.3)[:num_chains]}
    sampler = ps.BAOA(quartic, lr=0.4, init_strategy=given)
    settings = {"num_samples": num_samples, "num_chains": num_chains, "seed": 1, **EVERY_STEP}
    settings |= {**QUIET, **kwargs}
    try:
        return sampler.run(normals(8), **settings), None
    except NonFiniteError as error:
        return sampler, str(error)


@pytest.mark.parametrize(
    "kwargs", [{}, {"batch_size": 3}, {"batch_size": 3, "share_batches": True}]
)
def test_a_broken_chain_stops_and_the_others_finish(kwargs):
    broken, message = run_quartic(**kwargs)
    healthy, none = run_quartic(second=0.2, **kwargs)
    assert none is None
    assert "chain 1 at step" in message
    assert "site 'v'" in message
    assert "Finished, and in get_samples(): chains 0, 2." in message
    assert "try lr=0.13 instead of 0.4" in message
    kept = broken.get_samples(group_by_chain=True)
    every = healthy.get_samples(group_by_chain=True)
    for name in ("w", "v"):
        close_to_largest(kept[name], every[name][[0, 2]], rtol=1e-9)
    assert broken.to_arviz().posterior.sizes["chain"] == 2
    assert broken.summary().shape[0] == 2


def test_the_step_that_is_named_is_the_one_that_broke_it():
    _, message = run_quartic()
    step = int(message.split("at step ")[1].split(",")[0])
    assert run_quartic(num_samples=step)[1] is None  # steps 0 ... step - 1
    assert f"at step {step}," in run_quartic(num_samples=step + 1)[1]


@pytest.mark.slow
def test_the_only_chain_breaks_at_once():
    calls = []

    def model(y):
        calls.append(1)
        quartic(y)

    given = {"w": double(0.0), "v": double(1e3)}
    sampler = ps.BAOA(model, lr=0.4, init_strategy=given)
    with pytest.raises(NonFiniteError, match=r"chain 0 at step \d, site 'v'.*init_strategy"):
        sampler.run(normals(8), num_samples=10_000, seed=1, **ONE_CHAIN, **QUIET)
    assert len(calls) < 100
    with pytest.raises(NotRunError, match="BAOA has no draws: all chains of the run stopped"):
        sampler.get_samples()
    with pytest.raises(PyroScaleError):  # before a step was taken
        sampler.run(normals(8), batch_size=9, num_samples=3, **ONE_CHAIN, **QUIET)


def test_a_failed_run_forgets_the_run_before():
    sampler = ps.BAOA(quartic, lr=0.1).run(normals(8), num_samples=3, seed=0, **ONE_CHAIN, **QUIET)
    with pytest.raises(PyroScaleError):
        sampler.run(normals(8), batch_size=9, num_samples=3, **ONE_CHAIN, **QUIET)
    sampler.kernel = ps.kernels.BAOA(lr=1e200)
    with pytest.raises(NonFiniteError):
        sampler.run(normals(8), num_samples=3, seed=0, **ONE_CHAIN, **QUIET)
    with pytest.raises(NotRunError):
        sampler.get_samples()


# ------------------------------------------------------------------ bad arguments


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ps.BAOA(), r"BAOA: missing a required argument: 'model'"),
        (
            lambda: ps.BAOA(one_column, step_size=0.1),
            r"no hyperparameter .step_size.; it has .*: here it is lr=",
        ),
        (lambda: ps.BAOA(one_column, lr=0.1, options={}), r"no hyperparameter .options.; it has"),
        (lambda: ps.BAOA(one_column, lr=0), r"lr=0: pass a number > 0"),
        (lambda: ps.BAOA(one_column, lr=-0.1), r"lr=-0\.1: pass a number > 0"),
        (lambda: ps.SGHMC(one_column, lr=0.1, friction=0.0), r"friction=0\.0: pass a number > 0"),
        (lambda: ps.SGLD(one_column, lr=0.1, temperature=-1), r"temperature=-1: .* >= 0"),
        (lambda: ps.SGLD(one_column, lr=0.1, friction=1.0), r"no hyperparameter 'friction'.*'lr'"),
        (lambda: ps.BAOA(one_column, lr=0.1, temprature=1.0), r"no hyperparameter 'temprature'"),
        (lambda: ps.BAOA(one_column, lr=0.1, init_strategy="uniform"), r"init_strategy='uniform'"),
        (lambda: ps.BAOA(one_column, lr=0.1, init_strategy=[1.0]), r"init_strategy=\[1\.0\]"),
        (lambda: ps.BAOA(one_column, lr=0.1, num_data=0), r"num_data=0: .*int >= 1"),
        (lambda: ps.BAOA(one_column, lr=0.1, num_data=2.5), r"num_data=2\.5"),
        (lambda: ps.BAOA(None, lr=0.1), r"model=None is not callable"),
        (lambda: ps.BAOA(ps.LogPosterior(one_column, 5), lr=0.1, num_data=5), r"has its own"),
    ],
)
def test_bad_constructor_arguments_are_refused(make, message):
    with pytest.raises(ArgumentError, match=message):
        make()


@pytest.mark.slow
def test_a_step_size_that_is_left_out_is_chosen():
    """Left out, or named: all arguments of the constructor are "auto"."""
    names = ("lr", "friction", "precondition", "control_variates", "init_strategy")
    samplers = [ps.BAOA(one_column, **given) for given in ({}, dict.fromkeys(names, "auto"))]
    draws = [
        sampler.run(normals(20), num_samples=20, seed=0, **QUIET).get_samples()["w"]
        for sampler in samplers
    ]
    assert torch.equal(*draws)
    assert samplers[0].kernel.lr == samplers[1].kernel.lr


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "3", None])
@pytest.mark.parametrize("name", ["num_samples", "thinning", "num_chains", "warmup_steps"])
def test_bad_counts_are_refused(name, value):
    if (name, value) == ("warmup_steps", 0):
        return
    sampler = ps.BAOA(one_column, lr=0.1)
    also = ", or 'auto'" if name in ("thinning", "warmup_steps") else ""
    with pytest.raises(ArgumentError, match=rf"^{name}={value!r}: pass an int >= [01]{also}$"):
        sampler.run(normals(5), **{**ONE_CHAIN, "num_samples": 3, name: value, **QUIET})


@pytest.mark.parametrize("seed", [-1, 1.5, "a", True, 2**63])
def test_bad_seeds_are_refused(seed):
    sampler = ps.BAOA(one_column, lr=0.1)
    with pytest.raises(ArgumentError, match=rf"seed={seed!r}: pass an int"):
        sampler.run(normals(5), num_samples=3, seed=seed, **ONE_CHAIN, **QUIET)


def test_a_schedule_out_of_range_is_refused_before_any_step():
    calls = []

    def model(y):
        calls.append(1)
        one_column(y)

    sampler = ps.BAOA(model, lr=lambda step: 0.5 - 0.1 * step)
    with pytest.raises(ArgumentError, match=r"lr=.* at step 5: pass a number > 0"):
        sampler.run(normals(5), num_samples=3, warmup_steps=7, thinning=1, num_chains=1, **QUIET)
    assert not calls


def test_results_before_a_run_are_refused():
    sampler = ps.BAOA(one_column, lr=0.1)
    for ask in (
        sampler.get_samples,
        sampler.summary,
        sampler.diagnostics,
        sampler.log_likelihood,
        sampler.to_arviz,
        sampler.predict,
        sampler.write_params,
        lambda: sampler.params,
    ):
        with pytest.raises(NotRunError, match=r"BAOA has no draws yet: call run\(data"):
            ask()


def test_a_log_posterior_takes_n_from_the_data():
    sampler = ps.BAOA(ps.LogPosterior(one_column), lr=0.1)
    sampler.run(normals(20), batch_size=5, num_samples=2, seed=0, **ONE_CHAIN, **QUIET)
    plain = ps.BAOA(one_column, lr=0.1)
    plain.run(normals(20), batch_size=5, num_samples=2, seed=0, **ONE_CHAIN, **QUIET)
    assert torch.equal(sampler.get_samples()["w"], plain.get_samples()["w"])


def test_the_signature_shows_the_kernels_hyperparameters():
    own = ["model", "lr", "friction", "mass", "temperature"]
    assert list(inspect.signature(ps.SGHMC).parameters)[: len(own)] == own
    assert "Chen, Fox and Guestrin" in ps.SGHMC.__doc__


def test_the_inflation_is_known_for_batches_of_one_row():
    y = normals(200, seed=5)

    model = of_rows(
        lambda w: dist.Normal(w, 1.0),
        w=lambda: dist.Normal(torch.zeros((), dtype=torch.float64), 10.0),
    )
    sampler = ps.BAOA(model, lr=0.1)
    data, kwargs = y, {"batch_size": 1, "sampling": "replacement", "num_samples": 50}
    sampler.run(data, warmup_steps=50, thinning=1, num_chains=1, seed=0, **kwargs, **QUIET)
    with pytest.warns(UserWarning, match="multiplies the temperature"):
        reported = float(sampler.diagnostics()["minibatch_heating"].iloc[0])
    expected = 1 + 0.1 * 200 * float(y.var()) / 2
    # of 256 rows in four groups: the variance is known to a relative 9%
    assert abs(reported - expected) < 4 * 0.09 * expected
