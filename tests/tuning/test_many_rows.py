"""What a posterior given many rows takes: control variates of second order, their noise in every
direction, and modes that are followed from some rows to all."""

import dataclasses

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from densities import density_of_all_rows, prepare_run
from reference import close, double, normals
from repetitions import long_but

import pyro_scale as ps
from pyro_scale import kernels
from pyro_scale.core.whitening import DenseWhitening
from pyro_scale.curvature.control_variates import AnchorCurvature
from pyro_scale.curvature.gauss_newton import anchored, with_gauss_newton
from pyro_scale.engine.draws import Steps
from pyro_scale.engine.reuse import Earlier
from pyro_scale.run.run import RunPlan
from pyro_scale.tuning import heat as heating
from pyro_scale.tuning.control_variates import with_control_variates, with_curvature
from pyro_scale.tuning.heat import Cooled, Heat, cool, most_noise, stays_cool, typical_places
from pyro_scale.tuning.many_rows import find_modes_of_many_rows
from pyro_scale.tuning.modes import find_modes
from pyro_scale.tuning.policy import NOISE, ManyRows, Noise

pytestmark = pytest.mark.usefixtures("float64")

N, B, GROUPS = 240, 12, 4
X = normals(N, 2, seed=1)
GROUP = torch.arange(N) % GROUPS
SHARES = torch.sigmoid(X @ double(0.7, -1.2) + double(-1.0, 0.0, 0.5, 1.0)[GROUP])
Y = (normals(N, seed=2).sigmoid() < SHARES).double()


def grouped_logistic(x, group, y):
    """A hierarchical logistic regression."""
    s = pyro.sample("s", dist.HalfNormal(1.0))
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    with pyro.plate("groups", GROUPS):
        a = pyro.sample("a", dist.Normal(0.0, s))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=a[group] + x @ w), obs=y)


def scaled_line(x, group, y):
    """Linear and Gaussian, with a known sd: rows' gradients are linear."""
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    with pyro.plate("data", len(x)), poutine.scale(scale=0.5):
        pyro.sample("y", dist.Normal(x @ w, 0.7), obs=y)


def curved(x, group, y):
    """Not canonical, two sites a row, one of them masked."""
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    s = pyro.sample("s", dist.LogNormal(0.3, 0.6))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal((x @ w).tanh(), s), obs=y)
        pyro.sample("z", dist.Poisson((x @ w).exp()).mask(group == 0), obs=group.double())


def problem_of(model, data=(X, GROUP, Y), batch_size=B, chains=1):
    kernel = kernels.BAOA(lr=0.1)
    return prepare_run(model, data, kernel=kernel, chains=chains, seed=3, batch_size=batch_size)


def second_order(model, anchor=None):
    """The problem with control variates of second order."""
    problem = problem_of(model)
    density = density_of_all_rows(problem)
    place = normals(problem.engine.layout.size, seed=7) / 3 if anchor is None else anchor
    return with_curvature(with_control_variates(problem, density, place), density)


def away_from(problem, distance, seed=8):
    layout = problem.engine.layout
    anchor = layout.flatten(problem.engine.density.anchor)
    return layout.unflatten(anchor + distance * normals(layout.size, seed=seed))


def partition():
    return [(X[rows], GROUP[rows], Y[rows]) for rows in torch.arange(N).split(B)]


def gradients(density, params, way="grad"):
    """Of each batch of a partition, by site."""
    parts = [getattr(density, way)(params, batch)[0] for batch in partition()]
    return {name: torch.stack([part[name] for part in parts]) for name in params}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["grad", "plain_grad"])
@pytest.mark.parametrize("model", [grouped_logistic, scaled_line, curved])
def test_the_mean_over_a_partition_is_the_whole_gradient(model, way):
    """Anywhere, and whatever the curvature is worth there."""
    problem = second_order(model)
    for distance in (0.0, 0.1, 2.0):
        params = away_from(problem, distance)
        whole, _ = problem.log_posterior.grad(params, (X, GROUP, Y))
        for name, each in gradients(problem.engine.density, params, way).items():
            close(each.mean(0), whole[name], 1e-11)


def test_a_quadratic_log_likelihood_has_no_noise_left():
    """Far from the anchor, too: every batch has the gradient of all rows."""
    problem = second_order(scaled_line)
    params = away_from(problem, 5.0)
    whole, _ = problem.log_posterior.grad(params, (X, GROUP, Y))
    for each in gradients(problem.engine.density, params)["w"]:
        close(each, whole["w"], 1e-10)
    first = dataclasses.replace(problem.engine.density, curvature=None)
    assert float(gradients(first, params)["w"].std(0).min()) > 10


def test_what_is_left_of_the_noise_is_of_second_order():
    """Half as far from the anchor it is a quarter; of the first order, a half."""
    problem = second_order(grouped_logistic)
    density = problem.engine.density
    for each, power in ((density, 2), (dataclasses.replace(density, curvature=None), 1)):
        far, near = (
            gradients(each, away_from(problem, d))["a"].std(0).norm() for d in (0.02, 0.01)
        )
        assert float(far / near) == pytest.approx(2**power, rel=0.03)


def test_what_is_left_of_each_row_is_known():
    """g_i(theta) - g_i(a) + p_i (1 - p_i) x_i x_i' (theta - a), by hand."""
    problem = second_order(grouped_logistic)
    density = problem.engine.density
    params = away_from(problem, 0.5)
    left = density.row_gradients(params, (X[:20], GROUP[:20], Y[:20]))
    one_hot = torch.nn.functional.one_hot(GROUP, GROUPS).double()
    features = torch.cat([one_hot, X], 1)[:20]

    def of(params):
        coefficients = torch.cat([params["a"], params["w"]])
        return coefficients, torch.sigmoid(features @ coefficients)

    (here, p), (there, q) = of(params), of(density.anchor)
    rows = (q - p + q * (1 - q) * (features @ (here - there)))[:, None] * features
    close(left["a"], rows[:, :GROUPS], 1e-12)
    close(left["w"], rows[:, GROUPS:], 1e-12)
    close(left["s"], torch.zeros(20))


@pytest.mark.slow
def test_chains_move_with_them_compiled_as_eager():
    problem = second_order(grouped_logistic)
    problem = dataclasses.replace(problem, positions=problem.positions.repeat(2, 1) / 4)
    columns, draws = problem.engine.kernel.columns(60), []
    for compile in (True, False):
        plan = RunPlan(problem, columns, Steps(60), "shuffle", False, compile, False, Earlier())
        draws.append(plan.execute("").draws)
    assert "compiled" in draws[0].program
    assert draws[1].program == "eager"
    close(draws[0].positions, draws[1].positions, 1e-10)


def factor_of_rows(x, group, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.factor("y", -((y - x @ w) ** 2))


def test_models_without_a_distribution_of_their_rows_have_none():
    assert second_order(factor_of_rows) is None


# ------------------------------------------------------------------ the noise that is left


def test_the_noise_is_that_of_the_noisiest_direction():
    """The largest eigenvalue of the rows' second moments, by dense arithmetic."""
    problem = second_order(grouped_logistic)
    size = problem.engine.layout.size
    factor = normals(size, size, seed=4).tril() + 3 * torch.eye(size)
    place = problem.engine.layout.flatten(away_from(problem, 0.3))
    for each in (problem, without_curvature(problem)):
        whitened = each.with_engine(whitening=DenseWhitening(place, factor))
        by_site = each.engine.density.row_gradients(away_from(problem, 0.3), (X, GROUP, Y))
        rows = torch.cat([by_site[name].reshape(N, -1) for name in problem.engine.layout.names], 1)
        second = factor.T @ rows.T @ rows @ factor / N
        largest = float(torch.linalg.eigvalsh(second)[-1])
        for sampling, share in (("replacement", 1.0), ("shuffle", 1 - B / N)):
            noise = most_noise(whitened, place[None], sampling, 0)
            assert noise.variance == pytest.approx(share * largest / B, rel=1e-9)
            assert noise.largest == pytest.approx(float((rows @ factor).norm(dim=1).max()))


def without_curvature(problem):
    return problem.with_engine(density=dataclasses.replace(problem.engine.density, curvature=None))


def with_a_rare_row(sd, count):
    """The problem of two groups' effects of this prior sd; one row is a group by itself."""
    group = torch.zeros(count, dtype=torch.long)
    group[12_345] = 1

    def rare(group, y):
        with pyro.plate("groups", 2):
            a = pyro.sample("a", dist.Normal(0.0, sd))
        with pyro.plate("data", len(group)):
            pyro.sample("y", dist.Poisson(a[group].exp()), obs=y)

    problem = problem_of(rare, (group, torch.ones(count)), 50)
    return with_control_variates(problem, density_of_all_rows(problem), torch.zeros(2))


def test_one_row_of_many_is_seen():
    """A group of one row has a direction that no sample of rows is likely to show."""
    count = 20_000
    problem = with_a_rare_row(1.0, count)
    scales = torch.tensor([1.0, count**0.5])  # of one's own prior, and of many rows
    problem = problem.with_engine(whitening=DenseWhitening(torch.zeros(2), torch.diag(scales)))
    noise = most_noise(problem, double(0.0, 0.5)[None], "replacement", 0).variance
    assert noise == pytest.approx((1 - double(0.5).exp().item()) ** 2 / 50, rel=1e-6)


@pytest.mark.parametrize("width", long_but([0.1, 1.0, 20.0], 0.1, 20.0))
def test_steps_are_as_long_as_the_noise_allows(width):
    """Longer than the noise of first order would have them, where that is too much."""
    first, whole = whitened_at_the_mode(grouped_logistic, width)
    found = cool(first, "shuffle", whole, 0.0)

    chosen = found.problem.engine.kernel.lr
    assert found.heat.added == pytest.approx(heat(found.problem, "shuffle"), rel=1e-9)
    assert found.heat.added <= 0.04 * (1 + 1e-9)
    assert (chosen == 0.5) == (found.heat.added < 0.04 * (1 - 1e-9))
    if heat(first, "shuffle") <= 0.04:
        assert found.problem.engine.density.curvature is None
    else:
        assert chosen >= 0.5 * 0.04 / heat(first, "shuffle") * (1 - 1e-9)


def heat(problem, sampling):
    """What minibatches add to the temperature, over it."""
    values = problem.engine.kernel_values(problem.engine.kernel.values(0))
    noise = torch.tensor(most_noise(problem, typical_places(problem), sampling, 0).variance)
    added = problem.engine.kernel.theory.added_temperature(values, noise)
    return float((added / values["temperature"]).max())


def whitened_at_the_mode(model, width=1.0, lr=0.5, batch_size=B):
    """(The problem with control variates at the mode, in units of `width` sds, its log density)."""
    problem = problem_of(model, batch_size=batch_size)
    whole, kernel = density_of_all_rows(problem), kernels.BAOA(lr=lr, friction=1.0)
    mode = find_modes(whole, problem.positions, 1.0, 0).best.gaussian
    problem = with_control_variates(problem.with_engine(kernel=kernel), whole, mode.mean)
    whitening = DenseWhitening(mode.mean, width * N**0.5 * mode.scale_tril)
    return problem.with_engine(whitening=whitening), whole


@pytest.mark.parametrize("width", long_but([0.1, 0.5, 0.7], 0.5))
def test_a_batch_has_as_few_rows_as_heat_little(width, monkeypatch):
    """The fewest of powers of two; none is taken where its rows are not for the library to choose,
    and no more than there were."""
    monkeypatch.setattr(heating, "NOISE", Noise(fewest_rows=2))
    problem, whole = whitened_at_the_mode(grouped_logistic, width, batch_size=128)
    assert cool(problem, "replacement", whole, 0.0).problem.batch_size == 128
    found = cool(dataclasses.replace(problem, chooses_batches=True), "replacement", whole, 0.0)
    size, lr = found.problem.batch_size, found.problem.engine.kernel.lr
    assert found.heat.added == pytest.approx(heat(found.problem, "replacement"), rel=1e-9)
    assert size in (2, 4, 8, 16, 32, 64, 128)
    if size < 128:
        assert found.heat.added <= 0.01
        assert lr == 0.5
    if size > 2:
        assert heat(found.problem.in_batches_of(size // 2), "replacement") > 0.01


def test_second_order_is_taken_where_it_needs_fewer_rows(monkeypatch):
    """Even where first order would not shorten the step."""
    monkeypatch.setattr(heating, "NOISE", Noise(fewest_rows=2))
    problem, whole = whitened_at_the_mode(grouped_logistic, 0.7, batch_size=128)
    assert heat(problem, "replacement") < 0.04
    assert cool(problem, "replacement", whole, 0.0).problem.engine.density.curvature is None
    not_canonical, all_rows = whitened_at_the_mode(curved, 0.7, batch_size=128)
    chooses = dataclasses.replace(not_canonical, chooses_batches=True)
    assert cool(chooses, "replacement", all_rows, 0.0).problem.engine.density.curvature is None
    problem = dataclasses.replace(problem, chooses_batches=True)
    found = cool(problem, "replacement", whole, 0.0).problem
    assert found.engine.density.curvature is not None
    of_first = min(128, 128 * heat(problem, "replacement") / 0.01)
    assert 4 * found.batch_size < 2 * of_first


def test_all_rows_are_taken_where_minibatches_save_nothing():
    """A batch's gradients times what its noise shortens the step by, against one gradient a row."""
    problem, whole = whitened_at_the_mode(grouped_logistic, 2.0, batch_size=64)
    found = cool(problem, "replacement", whole, 0.0)
    share = found.problem.engine.kernel.lr / 0.5
    assert 2 * 64 / share > N  # not for it to choose: as it was asked for
    assert found.problem.data.batch_size == 64
    chooses = dataclasses.replace(problem, chooses_batches=True)
    found = cool(chooses, "replacement", whole, 0.0)
    assert found.problem.data.batch_size is None
    assert found.problem.batch_size == N
    assert found.problem.engine.density is problem.log_posterior
    assert (found.problem.engine.kernel.lr, found.heat) == (0.5, Heat(0.0, 0.0))


def test_noise_along_a_direction_grows_with_the_length_of_the_way_to_the_center():
    """Of rows along one direction of two: 2-norms count, not the largest element."""
    problem, _ = whitened_at_the_mode(scaled_line)
    engine = problem.engine
    factor, center = engine.whitening.factor, engine.whitening.center
    way = factor @ double(1.0, 1.0) / N**0.5  # one sd along both axes
    after = problem.with_engine(whitening=DenseWhitening(center + way, factor))
    edge = 0.01 / (1 + 2**0.5) ** 2
    assert stays_cool(Cooled(problem, 0.0, Heat(0.99 * edge, 0.0), NOISE.far_at_first), after)
    assert not stays_cool(Cooled(problem, 0.0, Heat(1.01 * edge, 0.0), NOISE.far_at_first), after)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("grown", [1.0, 1.5, 3.0])
@pytest.mark.parametrize("away", [0.0, 0.7, 2.0])
def test_what_stays_cool_is_known_without_a_look(order, grown, away):
    """Of one element whose rows' gradients are exactly of first or second order in it, the heat in
    a new geometry is what the rule has it: it says yes up to the very threshold."""
    x = normals(N, seed=8)

    def model(x):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.factor("y", -(x.abs() + 1) * a.square() / 2 if order == 1 else x * a**3 / 6)

    problem = problem_of(model, (x,))
    problem = problem.with_engine(kernel=kernels.BAOA(lr=0.5, friction=1.0))
    problem = with_control_variates(problem, density_of_all_rows(problem), torch.zeros(1))
    if order == 2:  # the rows have no curvature at the anchor
        anchor = AnchorCurvature(torch.zeros(1, 1), ())
        curved = dataclasses.replace(problem.engine.density, curvature=anchor)
    else:
        curved = problem.engine.density

    def at(center, scale, density):
        whitening = DenseWhitening(double(center), double(scale)[None])
        return problem.with_engine(whitening=whitening, density=density)

    before = at(0.0, 1.0, curved)
    after = at(away / N**0.5, grown, curved)
    # typical places are signs, so that the furthest is `grown + away` sds from the anchor
    further = grown + away
    for start in (0.9, 1.1):
        more = grown * further**order
        for edge in (Heat(start * 0.01 / more**2, 0.0), Heat(0.0, start * 2.0 * 2**order / more)):
            assert stays_cool(Cooled(before, 0.0, edge, NOISE.far_at_first), after) == (start < 1)
    plain = at(0.0, 1.0, problem.engine.density)
    places = double(1.0, further)[:, None, None] / N**0.5
    with_heat = torch.tensor([most_noise(plain, place, "replacement", 0) for place in places])
    variance, largest = with_heat[1] / with_heat[0]
    assert float(variance) == pytest.approx(further ** (2 * order), rel=1e-9)
    assert float(largest) == pytest.approx(further**order, rel=1e-9)


def test_nothing_is_known_to_stay_cool_without_control_variates():
    """Nor where the first look told nothing."""
    problem, _ = whitened_at_the_mode(grouped_logistic)
    plain = problem.with_engine(density=problem.log_posterior)
    assert stays_cool(Cooled(problem, 0.0, Heat(1e-9, 0.0), NOISE.far_at_first), problem)
    assert not stays_cool(Cooled(problem, 0.0, None, NOISE.far_at_first), problem)
    assert not stays_cool(Cooled(plain, 0.0, Heat(1e-9, 0.0), NOISE.far_at_first), plain)


@pytest.mark.parametrize("curved", [False, True])
def test_the_noise_of_a_rare_row_does_not_hang_on_luck(curved):
    """One row of 20,000 has a direction to itself.  At places of any seed the noise there is that
    of draws on average, to the leading order."""
    count, sd = 20_000, 0.1
    problem = with_a_rare_row(sd, count)
    if curved:
        problem = with_curvature(problem, density_of_all_rows(problem))
    scales = double(count**-0.5, sd) * count**0.5
    problem = problem.with_engine(whitening=DenseWhitening(torch.zeros(2), torch.diag(scales)))
    # exp(a) - 1 = a + a^2 / 2: E a^2 = sd^2, E a^4 / 4 = 3 sd^4 / 4
    square = 3 * sd**4 / 4 if curved else sd**2
    for seed in range(8):
        noise = most_noise(
            problem, typical_places(dataclasses.replace(problem, seed=seed)), "replacement", 0
        )
        assert noise.variance == pytest.approx(square * sd**2 / 50, rel=0.15)


# ------------------------------------------------------------------ rows that come seldom


def rare_rows(count, sd, num_groups=10, each=3):
    """A few rows in each of some groups, and many in one more: (problem, log density)."""
    group = torch.zeros(count, dtype=torch.long)
    group[: num_groups * each] = torch.arange(num_groups).repeat_interleave(each) + 1
    y = (normals(count, seed=3) > 1.0).double()

    def model(group, y):
        with pyro.plate("groups", num_groups + 1):
            a = pyro.sample("a", dist.Normal(-1.6, sd))
        with pyro.plate("data", len(group)):
            pyro.sample("y", dist.Bernoulli(logits=a[group]), obs=y)

    problem = problem_of(model, (group, y), 1024, chains=4)
    whole, kernel = density_of_all_rows(problem), kernels.BAOA(lr=0.5, friction=1.0)
    mode = find_modes(whole, problem.positions, 1.0, 0).best.gaussian
    problem = with_control_variates(problem.with_engine(kernel=kernel), whole, mode.mean)
    whitening = DenseWhitening(mode.mean, count**0.5 * mode.scale_tril)
    problem = problem.with_engine(whitening=whitening)
    problem = dataclasses.replace(problem, positions=mode.mean.repeat(4, 1))
    return with_curvature(problem, whole), whole


@pytest.mark.parametrize("far", [1.0, 3.0])
def test_a_kick_is_that_of_the_row_that_kicks_most(far):
    """lr N/B times a row's gradient is what it adds to the momentum of chains in units of sds: by
    hand, of the row whose element it tells most of, `far` sds from the anchor."""
    problem, _ = rare_rows(20_000, 0.05)
    anchor, factor = problem.engine.whitening.tensors
    sds, kicks = factor.diagonal() / 20_000**0.5, []
    for sign in (-1.0, 1.0):
        place = anchor + sign * far * sds
        p, q = place.sigmoid(), anchor.sigmoid()
        rows = q - p + q * (1 - q) * (place - anchor)  # what control variates leave of a row
        kicks.append(0.5 * 20_000 / 1024 * (rows * sds).abs().max())
    kick = heating._measure_heat(problem, "replacement", far).kick
    assert kick == pytest.approx(float(torch.stack(kicks).max()), rel=0.1)


@pytest.mark.long
def test_rows_that_come_seldom_throw_no_chain_out():
    """Three rows of 200,000 for an element heat it by a few percent only, yet throw it 10 to 20 sds
    out.  By quadrature an element is further than 7.5 of its Gaussian's sds with a probability of
    5e-13 at most, and one of the 2,640,000 numbers of a call with 2e-6 at most."""
    problem, whole = rare_rows(200_000, 0.6)
    latents = problem.engine.num_latents

    def furthest(far):
        cooled = cool(problem, "replacement", whole, far).problem
        steps, most = Steps(20_000), 0.0
        columns = cooled.engine.kernel.columns(steps.total)
        for seed in range(3):
            own = dataclasses.replace(cooled, seed=seed)
            plan = RunPlan(own, columns, steps, "replacement", False, True, False, Earlier())
            params = plan.execute("").draws.positions[..., :latents]
            z = cooled.engine.whitening.to_whitened(params) * 200_000**0.5
            most = max(most, float(z.abs().max()))
        return most

    assert furthest(0.0) > 9
    assert furthest(NOISE.far) < 7.5


# ------------------------------------------------------------------ the curvature of some rows


def test_some_rows_stand_for_all():
    """Their Gauss-Newton matrix is that of a quadratic log likelihood's Hessian."""
    density = density_of_all_rows(problem_of(scaled_line)).of_some_rows(40, 1)
    place = double(0.3, -0.2)
    close(with_gauss_newton(density).hessian(place), density.hessian(place), 1e-12)
    (x, _, _), expected = density.data.arguments, 0.5 * N / 40 / 0.7**2
    close(-N * density.hessian(place), expected * x.T @ x + torch.eye(2) / 4, 1e-12)


def test_a_model_without_such_a_matrix_has_its_hessian():
    density = density_of_all_rows(problem_of(factor_of_rows))
    assert with_gauss_newton(density) is density


def test_an_anchored_density_has_the_curvature_of_all_rows_at_its_anchor():
    whole = density_of_all_rows(problem_of(grouped_logistic))
    place = normals(whole.layout.size, seed=5) / 3
    some = whole.of_some_rows(60, 1)
    density = anchored(some, place, -N * whole.hessian(place))
    close(density.hessian(place), whole.hessian(place), 1e-12)
    other = place + 0.1
    expected = some.hessian(other) - some.hessian(place) + whole.hessian(place)
    close(density.hessian(other), expected, 1e-12)
    vector = normals(whole.layout.size, seed=6)
    close(density.hessian_times(other, vector), expected @ vector, 1e-11)
    close(density.hessian_diagonal(other), expected.diagonal(), 1e-11)


def branching(x, group, y):
    """Its Python asks for a latent's value, which `torch.vmap` does not support."""
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    rate = 0.7 if w.sum().item() < 100 else 7.0
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Poisson((x @ w).exp() * rate), obs=y)


@pytest.mark.parametrize("model", [grouped_logistic, branching])
def test_anchored_hessians_are_those_one_by_one(model):
    """Also where `torch.vmap` does not support the model, so that they are computed one by one."""
    whole = density_of_all_rows(problem_of(model))
    places = normals(2, whole.layout.size, seed=5) / 3
    density = anchored(whole.of_some_rows(60, 1), places[0], -N * whole.hessian(places[0]))
    one_by_one = torch.stack([density.hessian(place) for place in places])
    close(density.hessians(places), one_by_one, 1e-12)
    each = [density.derivatives(place) for place in places]
    for together, alone in zip(
        density.derivatives_at(places), zip(*each, strict=True), strict=True
    ):
        close(together, torch.stack(alone), 1e-12)


def test_matrices_of_gauss_newton_are_those_one_by_one():
    """The Hessian is another matrix here, as the likelihood is not canonical."""
    density = with_gauss_newton(density_of_all_rows(problem_of(curved)))
    places = normals(2, density.layout.size, seed=5) / 3
    one_by_one = torch.stack([density.hessian(place) for place in places])
    close(density.hessians(places), one_by_one, 1e-12)


# ------------------------------------------------------------------ modes


@pytest.mark.parametrize("model", [grouped_logistic, scaled_line, curved])
def test_modes_are_those_of_all_rows(model):
    """Followed from 20 rows to 240, they end where a search through all rows ends."""
    problem = problem_of(model, chains=4)
    whole = density_of_all_rows(problem)
    exact = find_modes(whole, problem.positions, 1.0, 0)
    policy = ManyRows(most_rows=20, growth=4)
    found = find_modes_of_many_rows(whole, problem.positions, 1.0, 0, policy=policy)
    assert found.are_modes
    assert len(found.modes) == len(exact.modes) == 1
    away = found.best.gaussian.mean - exact.best.gaussian.mean
    sds = exact.best.gaussian.covariance.diagonal().sqrt()
    assert float((away / sds).norm()) < 0.1 * whole.layout.size**0.5
    matrix = -N * with_gauss_newton(whole).hessian(found.best.gaussian.mean)
    close(found.best.gaussian.precision, matrix, 1e-8)


def test_all_modes_are_followed():
    def two(y):
        x = pyro.sample("x", dist.Normal(0.0, 3.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(x.square(), 2.0), obs=y)

    problem = problem_of(two, (1 + normals(N, seed=3),), chains=4)
    whole = density_of_all_rows(problem)
    starts, policy = double([-2.0], [-1.0], [1.5], [2.0]), ManyRows(most_rows=20)
    found = find_modes_of_many_rows(whole, starts, 1.0, 0, policy=policy)
    assert found.are_modes
    assert {frozenset(mode.searches) for mode in found.modes} == {
        frozenset({0, 1}),
        frozenset({2, 3}),
    }
    ends = sorted(float(mode.gaussian.mean) for mode in found.modes)
    assert len(ends) == 2
    assert ends[0] == pytest.approx(-ends[1], abs=1e-2)


def test_where_there_is_no_mode_a_gaussian_stands_for_it_given_all_rows_too():
    """Groups that are alike: the log density grows without bounds where their sd is 0."""

    def funnel(group, y):
        s = pyro.sample("s", dist.HalfNormal(1.0))
        with pyro.plate("groups", GROUPS):
            a = pyro.sample("a", dist.Normal(0.0, s))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(a[group], 1.0), obs=y)

    y = normals(N, seed=3)
    y = y - torch.stack([y[each == GROUP].mean() for each in range(GROUPS)])[GROUP]
    problem = problem_of(funnel, (GROUP, y), chains=4)
    how = {"policy": ManyRows(most_rows=60)}
    found = find_modes_of_many_rows(density_of_all_rows(problem), problem.positions, 1.0, 0, **how)
    assert not found.are_modes
    sds = found.best.gaussian.covariance.diagonal().sqrt()
    assert 0.1 < float(sds[0]) < 3  # of log s
    assert float(sds[1:].min()) > 0.2 * (GROUPS / N) ** 0.5  # not of the funnel's neck


# ------------------------------------------------------------------ runs


@pytest.mark.long
def test_a_hierarchy_of_rare_groups_is_right_from_minibatches():
    """30,000 rows in 40 groups, of 2 to 8,000 rows: means and sds are those of exact draws, and
    draws are not bought with tiny steps."""
    count, num_groups = 30_000, 40
    sizes = torch.logspace(0.4, 3.9, num_groups).long()
    group = torch.repeat_interleave(torch.arange(num_groups), sizes)
    group = torch.cat([group, torch.full((max(0, count - len(group)),), num_groups - 1)])
    offsets = normals(num_groups, seed=5) / 2
    y = (normals(len(group), seed=6).sigmoid() < torch.sigmoid(offsets[group] - 1)).double()

    def model(group, y):
        m = pyro.sample("m", dist.Normal(0.0, 2.0))
        s = pyro.sample("s", dist.HalfNormal(1.0))
        with pyro.plate("groups", num_groups):
            a = pyro.sample("a", dist.Normal(m, s))
        with pyro.plate("data", len(group)):
            pyro.sample("y", dist.Bernoulli(logits=a[group]), obs=y)

    mcmc = ps.BAOA(model).run((group, y), seed=0, progress=False)
    assert mcmc.report().verdict == "yes"
    assert mcmc.posterior.draws.attrs["batch_size"] < count
    assert mcmc.posterior.draws.attrs["thinning"] <= 30
    exact = ps.NUTS(model).run((group, y), seed=0, progress=False)
    for name, draws in exact.get_samples().items():
        mine = mcmc.get_samples()[name]
        assert float(((mine.mean(0) - draws.mean(0)) / draws.std(0)).abs().max()) < 0.15
        assert float((mine.std(0) / draws.std(0) - 1).abs().max()) < 0.1
