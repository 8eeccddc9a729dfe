"""`lr="auto"`: what it refuses, what it says, and how near it comes to the best step size."""

import functools
import math
import re
import warnings
from itertools import product

import pyro
import pyro.distributions as dist
import pytest
import torch
from densities import density_of_all_rows, linear_regression, normal_mean, prepare_run
from gaussian import Field
from logistic import PRIOR_SD, Logistic, Problem
from methods import METHODS, STOCHASTIC
from models import normal, of_rows
from reference import double, normals
from repetitions import long_but
from runs import EVERY_STEP, ONE_CHAIN

import pyro_scale as ps
from pyro_scale import kernels
from pyro_scale.curvature.modes import find_mode
from pyro_scale.data.row_sampler import RowIndices
from pyro_scale.engine.draws import Steps
from pyro_scale.errors import ArgumentError, NonFiniteError
from pyro_scale.tuning import step_size

pytestmark = pytest.mark.usefixtures("float64", "store")

QUIET = {"progress": False}
#: Latents as they are, moved by the gradients of batches as they are.
PLAIN = {"precondition": None, "control_variates": False}
SEEDS = range(5)
#: 10^-4 ... 10 in half decades.
GRID = [10 ** (-4 + i / 2) for i in range(11)]
linear = linear_regression(sd=PRIOR_SD)


# ------------------------------------------------------------------ two posteriors


class Linear(Problem):
    """500 rows of five correlated columns, condition number 300, B = 32."""

    model, batch_size = staticmethod(linear), 32

    def __init__(self):
        turn, _ = torch.linalg.qr(normals(5, 5, seed=1))
        self.x = normals(500, 5, seed=2) * torch.logspace(0, -math.log10(300) / 2, 5) @ turn.T
        self.y = self.x @ torch.ones(5) + normals(500, seed=3)
        self.precision = self.x.T @ self.x + torch.eye(5) / PRIOR_SD**2
        self.mean = torch.linalg.solve(self.precision, self.x.T @ self.y)
        self.sd = torch.linalg.inv(self.precision).diagonal().sqrt()

    def residual(self, y, fit):
        return y - fit


PROBLEMS = {"logistic": functools.cache(Logistic), "linear": functools.cache(Linear)}


def set_up_for(problem, kernel, seed, num_chains=1):
    how = {"kernel": kernel, "chains": num_chains, "seed": seed}
    return prepare_run(problem.model, (problem.x, problem.y), batch_size=problem.batch_size, **how)


def chosen(problem, kernel, steps, seed):
    """(What `lr="auto"` chooses, the error that it predicts, the chain's start)."""
    problem = set_up_for(problem, kernel, seed)
    density = density_of_all_rows(problem)
    mode = find_mode(density, problem.positions[0])
    choice = step_size.choose_step_size(problem, density, mode, steps, kernel.sampling)
    return choice, problem.positions[0]


def errors(problem, kernel, lrs, starts, steps, seed=5):
    """The root mean square errors of means and log sds (in sds) of one chain for each lr and
    start, `[chains]`, of all the states after warm-up.

    The kernel is the package's, and all else is written out here: the gradient, the noise and
    what is kept.
    """
    source = torch.Generator().manual_seed(seed)
    chains, (size, dim) = len(lrs), problem.x.shape
    indices = RowIndices(seed, range(chains), size, problem.batch_size, kernel.sampling)
    columns = kernel.columns(steps.total)
    columns["temperature"] = columns["temperature"] / size

    def init(values, lr, start, noise):
        return kernel.init(start, {**values, "lr": lr}, noise)

    def update(values, lr, state, noise, batch):
        target = Field(lambda w: problem.gradient(w[None], *(part[None] for part in batch))[0])
        return kernel.update(state, target, {**values, "lr": lr}, noise)[0]

    at_first = {name: column[0] for name, column in columns.items()}
    draw = functools.partial(torch.randn, generator=source)
    state = torch.vmap(init, (None, 0, 0, 0))(at_first, lrs, starts, draw(chains, dim))
    moved = torch.vmap(update, (None, 0, 0, 0, 0))
    total, square = torch.zeros(chains, dim), torch.zeros(chains, dim)
    for step in range(steps.total):
        rows = indices.at(step)
        values = {name: column[step] for name, column in columns.items()}
        noise = draw(chains, kernel.normals, dim)
        state = moved(values, lrs, state, noise, (problem.x[rows], problem.y[rows]))
        if step >= steps.warmup_steps:
            off = (state.position - problem.mean) / problem.sd
            total, square = total + off, square + off.square()
    count = steps.total - steps.warmup_steps
    mean = total / count
    log_sd = (square / count - mean.square()).log() / 2
    error = (mean.square().mean(1) + log_sd.square().mean(1)).sqrt()
    return error.nan_to_num(nan=torch.inf, posinf=torch.inf)


def steps_of(problem, rows):
    """A fifth of the budget is warm-up."""
    total = rows // problem.batch_size
    return Steps(total - total // 5, total // 5, 1)


def compare(problem, kernel, rows, grid=GRID, seeds=SEEDS):
    """(Choices by seed, what they predict, their errors; the grid's errors `[lr, seed]`)."""
    steps = steps_of(problem, rows)
    found = [chosen(problem, kernel, steps, seed) for seed in seeds]
    starts = torch.stack([start for _, start in found])
    lrs = torch.tensor([choice.lr for choice, _ in found] + [lr for lr in grid for _ in seeds])
    error = errors(problem, kernel, lrs, starts.repeat(1 + len(grid), 1), steps)
    predicted = [
        math.hypot(*(float(word) for word in numbers_of(choice.reason))) for choice, _ in found
    ]
    count = len(found)
    return lrs[:count], predicted, error[:count], error[count:].view(len(grid), count)


def numbers_of(reason):
    """The two parts of the predicted error."""
    words = reason.split("predicted at the mode: ")[1].split(" ")
    return words[0], words[4]


def test_the_moments_of_the_logistic_regression_are_converged():
    problem = PROBLEMS["logistic"]()
    mean, sd = problem.moments(order=13)
    assert float(((mean - problem.mean) / problem.sd).abs().max()) < 1e-4
    assert float((sd / problem.sd - 1).abs().max()) < 1e-3


QUICK = [("logistic", "BAOA")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "row"),
    [
        pytest.param(
            name,
            row,
            id=f"{name}-{row.name}",
            marks=() if (name, row.name) in QUICK else pytest.mark.long,
        )
        for name in PROBLEMS
        for row in STOCHASTIC
    ],
)
def test_it_is_within_twice_the_best_of_a_grid(name, row):
    """At 10^5 rows' gradients, by the medians of five chains."""
    _, _, mine, grid = compare(PROBLEMS[name](), row.kernel(lr=1.0), 10**5)
    assert float(mine.median()) < 2 * float(grid.median(1).values.min())


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "row"),
    [pytest.param(name, row, id=f"{name}-{row.name}") for name in PROBLEMS for row in STOCHASTIC],
)
def test_it_is_within_twice_the_best_of_a_grid_at_a_million_gradients(name, row):
    _, _, mine, grid = compare(PROBLEMS[name](), row.kernel(lr=1.0), 10**6)
    assert float(mine.median()) < 2 * float(grid.median(1).values.min())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows"),
    long_but(
        product(["BAOA", "SGHMC", "SGLD", "UBU", "pSGLD"], [2 * 10**4, 2 * 10**5]),
        ("BAOA", 2 * 10**4),
    ),
)
def test_the_error_is_as_predicted(name, rows):
    """Within a factor of 1.5 on a Gaussian, over 60 chains from four starts, which the shorter
    budget remembers."""
    problem, kernel = PROBLEMS["linear"](), METHODS[name].kernel(lr=1.0)
    steps = steps_of(problem, rows)
    found = [chosen(problem, kernel, steps, seed) for seed in range(4)]
    predicted = [math.hypot(*map(float, numbers_of(choice.reason))) for choice, _ in found]
    lrs = torch.tensor([choice.lr for choice, _ in found]).repeat(15)
    starts = torch.stack([start for _, start in found]).repeat(15, 1)
    measured = errors(problem, kernel, lrs, starts, steps).square().mean().sqrt()
    expected = torch.tensor(predicted).square().mean().sqrt()
    assert 1 / 1.5 < float(measured / expected) < 1.5


# ------------------------------------------------------------------ what it is chosen by


PAIRS = normals(96, 2, seed=9) * double(1.0, 3.0)
two_means = normal_mean()


def modes_of(kernel, model=two_means, data=PAIRS, batch_size=8, **kwargs):
    chains = kwargs.pop("num_chains", 3)
    problem = prepare_run(model, data, kernel=kernel, chains=chains, batch_size=batch_size)
    density = density_of_all_rows(problem)
    mode = find_mode(density, problem.positions[0])
    return problem, mode, step_size._modes(problem, density, mode, "replacement")


class TestModes:
    def test_of_a_linear_regression(self):
        target = PROBLEMS["linear"]()
        problem, mode, modes = modes_of(
            kernels.BAOA(lr=1.0), linear, (target.x, target.y), target.batch_size
        )
        exact = torch.linalg.eigvalsh(target.precision) / 500
        torch.testing.assert_close(modes.precision.sort().values, exact, rtol=1e-9, atol=0)
        torch.testing.assert_close(modes.steepest, exact.max(), rtol=1e-9, atol=0)
        variances = modes.loadings @ (1 / 500 / modes.precision)
        torch.testing.assert_close(variances, target.sd.square(), rtol=1e-9, atol=0)
        torch.testing.assert_close(
            modes.starts.norm(dim=1), (problem.positions - mode).norm(dim=1), rtol=1e-9, atol=0
        )

    def test_the_noise_is_that_of_rows_over_the_batch(self):
        """V/B of (y - w), from 2048 rows: 3% for one standard error."""
        _, _, modes = modes_of(kernels.BAOA(lr=1.0))
        exact = PAIRS.var(0, unbiased=False) / 8
        found = modes.loadings.T.round() @ modes.noise  # the coordinates, in some order
        torch.testing.assert_close(found.sort().values, exact.sort().values, rtol=0.14, atol=0)

    @pytest.mark.parametrize("name", ["BAOA", "SGHMC", "UBU", "SGNHT"])
    def test_masses_are_a_change_of_coordinates(self, name):
        """Precisions L/m and noise V/(B m), and elements' variances as ever."""
        mass = double(0.5, 2.5)
        kernel = METHODS[name].kernel(lr=1.0, mass={"w": mass})
        problem, mode, modes = modes_of(kernel)
        precision = (4.0 + 96) / 96 / mass
        torch.testing.assert_close(
            modes.precision.sort().values, precision.sort().values, rtol=1e-9, atol=0
        )
        exact = PAIRS.var(0, unbiased=False) / 8 / mass
        order = modes.precision.argsort(descending=True)  # as that of the masses
        torch.testing.assert_close(modes.noise[order], exact, rtol=0.14, atol=0)
        torch.testing.assert_close(
            modes.loadings @ (1 / 96 / modes.precision),
            torch.full((2,), 1 / 100),
            rtol=1e-9,
            atol=0,
        )
        scaled = (problem.positions - mode) * mass.sqrt()
        torch.testing.assert_close(modes.starts[:, order].abs(), scaled.abs(), rtol=1e-9, atol=0)

    def test_temperature_is_the_draws_own(self):
        """At a place where curvature grows as one goes away, hotter draws see more of it."""

        def quartic(params, batch):
            return -params["w"].square().sum() / 2 - params["w"].pow(4).sum()

        def steepest(temperature):
            function = ps.LogPosterior.from_function(quartic, {"w": torch.zeros(1)}, 100)
            kernel = kernels.BAOA(lr=1.0, temperature=temperature)
            return float(modes_of(kernel, function, None, None)[2].steepest)

        cold, warm, hot = (steepest(temperature) for temperature in (1e-8, 1.0, 4.0))
        assert cold == pytest.approx(1, rel=1e-6)
        assert hot - 1 == pytest.approx(4 * (warm - 1), rel=1e-6)  # 12 w^2, w^2 as T
        assert warm > 1.02


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("BAOA", lambda L, f: 2 / L**0.5),
        ("SGLD", lambda L, f: 2 / L),
        ("SGHMC", lambda L, f: (-f + (f * f + 4 * L) ** 0.5) / L),
        ("SGNHT", lambda L, f: 2 / L**0.5),
    ],
)
@pytest.mark.parametrize("precision", [0.3, 7.0])
def test_the_largest_stable_step(name, limit, precision):
    """Where e^2 L = 4, e L = 2, and 4 - 2 e f - e^2 L = 0, within 1%."""
    others = {} if name == "SGLD" else {"friction": 0.6}
    problem, _, _ = modes_of(METHODS[name].kernel(lr=1.0, **others))
    found = step_size._largest_stable(problem, double(precision)[0])
    assert 0.985 < found / limit(precision, 0.6) <= 1


def test_the_error_of_sgld_in_closed_form():
    """x' = a x + noise, a = 1 - lr L, of one mode, from two starts."""
    problem, _, _ = modes_of(kernels.SGLD(lr=1.0, temperature=0.8), num_chains=2)
    lr, precision, noise, temperature = 0.03, 1.7, 0.4, 0.8 / 96
    starts = double(0.9, 0.4)
    one = step_size.Modes(
        precision=double(precision),
        steepest=double(precision)[0],
        noise=double(noise),
        starts=starts[:, None],
        loadings=double(2.5)[:, None],
        scale=double(1.0)[0],
    )
    steps = Steps(num_samples=150, warmup_steps=40, thinning=2)
    error = step_size._error(problem, one, double(lr)[0], steps, None)
    a, count = 1 - lr * precision, 300
    variance = (2 * lr * temperature + lr**2 * noise) / (1 - a * a)
    exact = temperature / precision
    path = sum(a ** (40 + t) for t in range(count)) / count
    path_square = sum(a ** (2 * (40 + t)) for t in range(count)) / count
    bias = (starts.mean() * path) ** 2 / exact
    log_sd = ((variance + starts.square().mean() * path_square) / exact).log() / 2
    scatter = variance / exact * (1 + a) / (1 - a) / count / 2
    spread = variance / exact * (1 + a * a) / (1 - a * a) / count / 2 / 2
    torch.testing.assert_close(error[0], bias + log_sd**2, rtol=1e-9, atol=0)
    torch.testing.assert_close(error[1], double(scatter + spread)[0], rtol=1e-9, atol=0)


# ------------------------------------------------------------------ runs


def run_on(model=linear, data=None, seed=0, lr="auto", method=ps.BAOA, **kwargs):
    problem = PROBLEMS["linear"]()
    steps = {"num_samples": 400, "batch_size": problem.batch_size}
    steps = ONE_CHAIN | steps | {"warmup_steps": 100}
    options = {k: kwargs.pop(k) for k in OPTIONS & kwargs.keys()}
    sampler = method(model, lr=lr, **PLAIN | options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = (problem.x, problem.y) if data is None else data
        return sampler.run(data, seed=seed, **steps | kwargs, **QUIET)


OPTIONS = {"control_variates", "subtract_noise", "init_strategy", "temperature", "mass"}


def words_of(sampler):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sampler.diagnostics().attrs.get("lr_choice")


@pytest.mark.slow
def test_a_run_says_what_it_chose_and_has_it():
    sampler = run_on()
    words, lr = words_of(sampler), sampler.posterior.attrs["lr"]
    assert isinstance(lr, float)
    assert words.startswith(f"lr={lr:g}, the least error")
    assert bool((sampler.posterior.draws.sample_stats["lr"] == lr).all())
    problem = PROBLEMS["linear"]()
    choice, _ = chosen(problem, kernels.BAOA(lr=1.0), Steps(400, 100, 1), 0)
    assert (choice.lr, choice.reason) == (lr, words)
    lowest, highest = torch.linalg.eigvalsh(problem.precision)[[0, -1]] / 500
    assert words.endswith(f"curvature over N {float(lowest):.2g} to {float(highest):.2g}")
    stable = 2 / float(highest) ** 0.5
    assert float(words.split("stable below about ")[1].split(";")[0]) == pytest.approx(
        stable, rel=0.05
    )


@pytest.mark.slow
def test_a_number_is_no_choice():
    sampler = run_on(lr=0.1)
    assert "lr_choice" not in sampler.posterior.draws.attrs
    assert sampler.posterior.attrs["lr"] == 0.1


@pytest.mark.slow
@pytest.mark.long
def test_the_same_seed_chooses_and_draws_the_same():
    one, two = run_on(seed=3), run_on(seed=3)
    assert one.posterior.attrs["lr"] == two.posterior.attrs["lr"]
    assert words_of(one) == words_of(two)
    assert torch.equal(one.get_samples()["w"], two.get_samples()["w"])


@pytest.mark.slow
@pytest.mark.long
def test_draws_are_those_of_the_number_that_was_chosen():
    auto = run_on(seed=3)
    given = run_on(seed=3, lr=auto.posterior.attrs["lr"])
    assert torch.equal(auto.get_samples()["w"], given.get_samples()["w"])


@pytest.mark.long
def test_a_second_run_chooses_afresh():
    """Longer runs pay for smaller steps; going back gives the first choice back."""
    sampler, found = ps.SGLD(two_means, lr="auto", **PLAIN), []
    steps = {"batch_size": 8, "sampling": "replacement"}
    for count in (60, 1200, 60):
        sampler.run(PAIRS, num_samples=count, seed=0, **ONE_CHAIN, **steps, **QUIET)
        found.append(sampler.posterior.attrs["lr"])
    assert found[0] == found[2]
    assert found[1] < found[0] / 2


@pytest.mark.long
def test_less_noise_lets_steps_be_larger():
    """The rows' gradients of a normal mean differ by constants from the mode's, which leaves
    SGLD's own bias."""
    steps = {"data": PAIRS, "num_samples": 200, "method": ps.SGLD, "sampling": "replacement"}
    found = [
        run_on(two_means, batch_size=size, **steps).posterior.attrs["lr"] for size in (8, 48, None)
    ]
    assert found[0] < found[1] < found[2]
    varied = run_on(two_means, batch_size=8, control_variates=True, **steps).posterior.attrs["lr"]
    assert varied == found[2]
    # where all the noise can be taken off, as much is as of none
    subtracted = run_on(two_means, batch_size=48, subtract_noise=True, **steps).posterior.attrs[
        "lr"
    ]
    assert found[1] < subtracted <= found[2]


@pytest.mark.slow
@pytest.mark.long
def test_float32_and_whole_data_and_no_data():
    problem = PROBLEMS["linear"]()
    x, y = problem.x.float(), problem.y.float()

    def single(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(5).float(), PRIOR_SD).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    assert run_on(single, (x, y)).kernel.lr == pytest.approx(run_on().kernel.lr, rel=0.15)
    whole = run_on(batch_size=None)
    assert whole.get_samples()["w"].shape == (400, 5)
    function = ps.LogPosterior.from_function(
        lambda params, batch: -0.5 * params["w"].square().sum(), {"w": double(0.1)}, 40
    )
    sampler = ps.BAOA(function, lr="auto", **PLAIN).run(
        None, num_samples=500, seed=1, **ONE_CHAIN, **QUIET
    )
    assert float(sampler.get_samples()["w"].std()) == pytest.approx(40**-0.5, rel=0.3)


@pytest.mark.slow
def test_a_run_is_as_good_as_predicted():
    """Four chains through `run` itself, of 2 x 10^4 gradients each."""
    problem = PROBLEMS["linear"]()
    sampler = run_on(num_samples=500, warmup_steps=150, num_chains=4, seed=2)
    draws = sampler.get_samples()["w"]
    off = ((draws.mean(0) - problem.mean) / problem.sd).square().mean()
    log_sd = (draws.std(0) / problem.sd).log().square().mean()
    bias, scatter = map(float, numbers_of(words_of(sampler)))
    assert float((off + log_sd).sqrt()) < 2 * math.hypot(bias, scatter)


# ------------------------------------------------------------------ halving


def walls(params, batch):
    """A mode of curvature 1 between walls: w^4."""
    return -params["w"].square().sum() / 2 - params["w"].pow(4).sum()


def of_cliff(start, method=ps.SGLD, num_chains=1):
    function = ps.LogPosterior.from_function(walls, {"w": torch.zeros(1)}, 10_000)
    starts = torch.full((num_chains, 1), start)
    starts[1:] = 0.0
    sampler = method(function, lr="auto", init_strategy={"w": starts}, **PLAIN)
    return sampler.run(None, num_samples=300, num_chains=num_chains, seed=0, **EVERY_STEP, **QUIET)


@pytest.mark.slow
@pytest.mark.parametrize("method", long_but([ps.SGLD, ps.SGHMC, ps.BAOA], ps.BAOA))
def test_it_is_halved_until_no_chain_diverges(method):
    """At the start the curvature is 12 w^2 times the mode's."""
    at_mode = of_cliff(0.001, method)
    assert "halved" not in words_of(at_mode)
    far = of_cliff(3.0 if method is ps.SGLD else 12.0, method, num_chains=2)
    words = words_of(far)
    times = int(words.split("halved ")[1].split(" times")[0])
    assert times >= 2
    lr = far.posterior.attrs["lr"]
    why = "(a chain diverged|steps threw draws out of the posterior)"
    assert re.match(f"lr={lr:.2g}: halved {times} times, as {why}, from", words)
    assert bool((far.posterior.draws.sample_stats["lr"] == lr).all())
    assert bool(torch.isfinite(far.get_samples()["w"]).all())
    assert far.get_samples(group_by_chain=True)["w"].shape == (2, 300, 1)


def test_it_is_not_halved_for_ever():
    with pytest.raises(NonFiniteError, match="above the stable range"):
        of_cliff(1e5)


def test_a_number_is_not_halved():
    function = ps.LogPosterior.from_function(walls, {"w": torch.zeros(1)}, 10_000)
    sampler = ps.SGLD(function, lr=0.5, init_strategy={"w": double(12.0)[None]})
    with pytest.raises(NonFiniteError):
        sampler.run(None, num_samples=300, seed=0, **ONE_CHAIN, **QUIET)


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("word", ["Auto", "automatic", "0.1", ""])
def test_other_words_are_refused(word):
    with pytest.raises(ArgumentError, match=r"lr='.*': pass a number or 'auto'"):
        ps.BAOA(linear, lr=word)


@pytest.mark.parametrize(
    "hyperparameters",
    [
        {"lr": {"w": "auto"}},
        {"lr": 0.1, "friction": {"w": "auto"}},
        {"lr": 0.1, "mass": "auto"},
        {"lr": 0.1, "temperature": "auto"},
    ],
)
def test_nothing_else_is_chosen(hyperparameters):
    with pytest.raises(ArgumentError, match=r"='auto': pass a number"):
        ps.BAOA(linear, **hyperparameters)


def test_more_than_a_thousand_dimensions_are_refused():
    def wide(size):
        return of_rows(lambda w: dist.Normal(w.sum(), 1.0), w=normal(size))

    y = normals(20, seed=1)
    with pytest.raises(ArgumentError, match=r"room for 1000 dimensions; the model has 1001"):
        ps.BAOA(wide(1001), lr="auto", **PLAIN).run(
            y, batch_size=5, num_samples=2, seed=0, **ONE_CHAIN, **QUIET
        )


def test_parameters_without_a_prior_are_refused():
    def model(y):
        b = pyro.param("b", double(0.2))
        w = pyro.sample("w", dist.Normal(torch.zeros(1), 1.0).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(w + b, 1.0), obs=y)

    sampler = ps.BAOA(model, lr="auto", **PLAIN)
    with pytest.raises(ArgumentError, match=r"all latents: this one has \['b'\]; pass a number"):
        sampler.run(normals(20, seed=1), batch_size=5, num_samples=2, seed=0, **ONE_CHAIN, **QUIET)


def test_models_without_gradients_of_rows_are_refused():
    function = ps.LogPosterior.from_function(
        lambda params, batch: -0.5 * (params["w"] - batch[0].mean()).square().sum(),
        {"w": double(0.0)},
        num_data=20,
    )
    sampler = ps.BAOA(function, lr="auto", **PLAIN)
    with pytest.raises(ArgumentError, match=r"needs the gradient of single rows.*pass a number"):
        sampler.run(
            (normals(20, seed=1),), batch_size=5, num_samples=2, seed=0, **ONE_CHAIN, **QUIET
        )
