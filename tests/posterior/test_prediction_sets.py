"""Prediction intervals and sets of classes, against closed forms, numpy and the exact law of
conformal coverage.

Statistical tests have fixed seeds; were those drawn anew, a z beyond 4 would come once in 16,000
comparisons.
"""

import importlib.util
import math
import os
import statistics
from pathlib import Path

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import torchopt
from models import normal, of_rows
from reference import double, normals
from repetitions import long_but
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_scale as ps
from pyro_scale.errors import ArgumentError, DataError, NotRunError

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.filterwarnings("ignore")]
DATA = Path(os.environ.get("PYRO_SCALE_DATA", Path(__file__).parents[2].parent / "shared" / "data"))
SLOPE = double(1.0, -2.0)
SIZE = 40  # rows that a fit sees
HELD = 39  # that calibrate: the 36th of 39 scores has a coverage of 36/40
LEVEL = 0.88  # whose rank is that of 0.9


def with_noise(noise, outputs=None):
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 3.0).to_event(1))
        mean = x @ w
        with pyro.plate("rows", len(x)):
            if outputs is None:
                return pyro.sample("y", dist.Normal(mean, noise), obs=y)
            several = dist.Normal(mean[:, None] * torch.arange(1.0, 1 + outputs), noise)
            return pyro.sample("y", several.to_event(1), obs=y)

    return model


def rows_of(count, seed, sd=1.0):
    x = normals(count, 2, seed=seed)
    return x, x @ SLOPE + sd * normals(count, seed=seed + 10**6)


def laplace_fit(model, *data):
    return ps.Laplace(model).run(data, seed=0, progress=False)


def inside(interval, y):
    lower, upper = interval
    return (lower <= y) & (y <= upper)


def z_of(values, expected):
    return (statistics.mean(values) - expected) / statistics.stdev(values) * len(values) ** 0.5


@pytest.fixture
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.fixture
def fit():
    return laplace_fit(with_noise(1.0), *rows_of(SIZE, seed=0))


# ------------------------------------------------------------------ without calibration


def test_interval_of_a_linear_model_is_that_of_its_normal_distribution(fit, seeded):
    x, _ = rows_of(SIZE, seed=0)
    new, y = rows_of(400, seed=1)
    covariance = (x.T @ x + torch.eye(2) / 9).inverse()
    sd = (1 + (new @ covariance * new).sum(1)).sqrt()
    mean = new @ covariance @ (x.T @ rows_of(SIZE, seed=0)[1])
    interval = fit.predict(new, interval=0.9)["y"]
    error = sd * math.sqrt(0.05 * 0.95 / 1000) / 0.10314  # a quantile's, of 1,000 draws
    for end, quantile in zip(interval, (-1.6449, 1.6449), strict=True):
        z = (end - (mean + quantile * sd)) / error
        assert z.abs().max() < 4.5
        assert abs(z.mean()) < 1
    draws_inside = ps.metrics.coverage(fit.predict(new)["y"], y, 0.9)
    assert abs(inside(interval, y).double().mean() - draws_inside) < 0.03


def test_of_one_draw_of_the_posterior_it_is_the_noise(seeded):
    x, y = rows_of(SIZE, seed=0)
    fit = ps.MAP(with_noise(2.0), optimizer=torchopt.adam(0.1))
    fit.run((x, y), num_steps=20, seed=0, progress=False)
    mean = fit.predict(x, reduce="mean")["y"]
    lower, upper = fit.predict(x, interval=0.9)["y"]
    for z in ((lower - mean + 3.29) / 0.134, (upper - mean - 3.29) / 0.134):
        assert z.abs().max() < 4
        assert abs(z.mean()) * SIZE**0.5 < 4  # draws of the rows are independent


def of_counts(x, y=None, z=None):  # of two sites, each posterior draw has one observation
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("rows", len(x)):
        pyro.sample("z", dist.Normal(x @ w, 1.0), obs=z)
        return pyro.sample("y", dist.Poisson((x @ w).exp()), obs=y)


@pytest.mark.parametrize("case", ["right", "too low", "zero", "too wide"])
def test_counts_have_whole_numbers(seeded, case):
    x, w = normals(1200, 2, seed=0), double(0.7, -0.7)
    rate, z = (x @ w).exp(), x @ w + normals(1200, seed=1)
    fit = laplace_fit(of_counts, x[:80], torch.poisson(rate[:80]), z[:80])
    if case == "too wide":  # held out are rows of large rates, which have the narrowest intervals
        order = torch.cat([torch.arange(80), 80 + rate[80:].argsort(descending=True)])
        x, rate, z = x[order], rate[order], z[order]
    y = rate.round() if case == "too wide" else torch.poisson(rate)
    y = y * {"too low": 8, "zero": 0}.get(case, 1)
    chosen = {"return_sites": ["y"], "num_samples": 100}
    held, new, new_y = (x[80:200], y[80:200], z[80:200]), x[200:], y[200:]
    torch.manual_seed(1)
    plain = fit.predict(new, interval=0.8, **chosen)["y"]
    torch.manual_seed(1)
    draws = fit.predict(new, **chosen)["y"].numpy()
    low, high = np.quantile(draws, [0.1, 0.9], axis=0, method="weibull")
    assert plain.lower.tolist() == np.floor(low).tolist()
    assert plain.upper.tolist() == np.ceil(high).tolist()

    torch.manual_seed(1)
    lower, upper = fit.predict(new, interval=0.8, calibrate=held, **chosen)["y"]
    torch.manual_seed(1)
    drawn = [fit.predict(rows, **chosen)["y"].numpy() for rows in (x[80:200], new)]
    (low, high), (new_low, new_high) = (
        np.quantile(draws, [0.1, 0.9], axis=0, method="weibull") for draws in drawn
    )
    scores = np.maximum(low - held[1].numpy(), held[1].numpy() - high) / (high - low + 1)
    threshold = np.sort(scores)[math.ceil(121 * 0.8) - 1]
    assert (lower <= upper).all()
    for count in range(int(upper.max()) + 3):
        score = np.maximum(new_low - count, count - new_high) / (new_high - new_low + 1)
        own = ((lower <= count) & (count <= upper)).numpy()
        assert own[score <= threshold].all()
        middle = np.floor((new_low + new_high) / 2) == count
        assert (score <= threshold)[own & ~middle].all()
    if case != "too wide":
        assert inside((lower, upper), new_y).double().mean() > 0.8 - 4 * math.sqrt(0.16 / 120)


def classifier_of(family=None):
    return of_rows(lambda x, w: (family or dist.Categorical)(logits=x @ w), w=normal(2, 4, sd=3.0))


def labels_of(x, seed, sharpness=1.0):
    logits = sharpness * x @ normals(2, 4, seed=7)
    uniform = torch.rand(len(x), 4, generator=torch.Generator().manual_seed(seed))
    return (logits - (-uniform.double().log()).log()).argmax(-1)  # Gumbel's trick


def test_set_of_classes_is_the_smallest_of_that_probability():
    x = normals(200, 2, seed=0)
    fit = laplace_fit(classifier_of(), x, labels_of(x, seed=1))
    probs = fit.predict(x, reduce="mean")["y"]
    for level in (0.5, 0.9, 0.99):
        sets = fit.predict(x, interval=level)["y"]
        assert sets.dtype == torch.bool
        for of_row, p in zip(sets, probs, strict=True):
            wanted, total = [], 0.0
            for k in p.argsort(descending=True).tolist():
                if total < level:
                    wanted.append(k)
                    total += float(p[k])
            assert of_row.nonzero()[:, 0].tolist() == sorted(wanted)


def test_probabilities_that_add_up_to_the_level_in_decimals_are_enough():
    def model(x, y=None):
        pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(x)):
            probs = torch.tensor([0.1, 0.2, 0.7]).expand(len(x), 3)
            return pyro.sample("y", dist.Categorical(probs), obs=y)

    x = torch.zeros(8)
    sets = laplace_fit(model, x, torch.arange(8) % 3).predict(x, interval=0.9)["y"]
    assert sets.tolist() == 8 * [[False, True, True]]


# ------------------------------------------------------------------ conformal


def test_conformal_interval_is_that_of_numpy(fit, seeded):
    held, y = rows_of(60, seed=2, sd=3.0)
    new, _ = rows_of(50, seed=3)
    torch.manual_seed(1)
    interval = fit.predict(new, interval=0.8, calibrate=(held, y))["y"]
    torch.manual_seed(1)
    drawn = [fit.predict(x)["y"].numpy() for x in (held, new)]
    ends = [np.quantile(draws, [0.1, 0.9], axis=0, method="weibull") for draws in drawn]
    (low, high), (new_low, new_high) = ends
    scores = np.maximum(low - y.numpy(), y.numpy() - high) / (high - low)
    margin = np.sort(scores)[math.ceil(61 * 0.8) - 1] * (new_high - new_low)
    torch.testing.assert_close(interval.lower, torch.as_tensor(new_low - margin))
    torch.testing.assert_close(interval.upper, torch.as_tensor(new_high + margin))


def coverages(fit, draw, hold, repetitions=60, **how):
    """Shares of 40 new rows that are in their sets, of held-out rows drawn anew each time."""
    shares = []
    for seed in range(repetitions):
        x, y = draw(HELD + 40, seed=100 + seed)
        held, new = (x[:HELD], y[:HELD]), x[HELD:]
        predicted = fit.predict(new, interval=LEVEL, calibrate=held, **how)["y"]
        shares.append(float(hold(predicted, y[HELD:]).double().mean()))
    return shares


@pytest.mark.slow
@pytest.mark.parametrize("sd", long_but([1.0, 3.0, 0.3], 3.0))
def test_conformal_intervals_cover_where_plain_ones_miss(fit, seeded, sd):
    covered = coverages(fit, lambda count, seed: rows_of(count, seed, sd), inside)
    assert abs(z_of(covered, 0.9)) < 4
    x, y = rows_of(4000, seed=5, sd=sd)
    plain = float(inside(fit.predict(x, interval=0.9)["y"], y).double().mean())
    known = math.erf(1.6449 / sd / math.sqrt(2))  # up to what the posterior adds to the noise
    assert plain == pytest.approx(known, abs=0.04)
    assert (abs(plain - 0.9) > 0.08) == (sd != 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    long_but(
        [{"linearized": True}, {"linearized": True, "num_samples": 30}, {"num_samples": 30}],
        {"linearized": True, "num_samples": 30},
    ),
)
def test_conformal_intervals_cover_however_they_are_predicted(fit, seeded, how):
    covered = coverages(fit, lambda n, seed: rows_of(n, seed, 2.0), inside, **how)
    assert abs(z_of(covered, 0.9)) < 4


@pytest.mark.long
def test_conformal_intervals_cover_with_noise_that_the_model_has_not(fit, seeded):
    def draw(count, seed):
        x, y = rows_of(count, seed, sd=0.1)
        return x, y + x[:, 0].exp() * normals(count, seed=seed + 7).square()

    assert abs(z_of(coverages(fit, draw, inside), 0.9)) < 4


@pytest.mark.slow
def test_a_box_covers_all_elements_of_a_row_at_once(seeded):
    def draw(count, seed):
        x, y = rows_of(count, seed, sd=0.0)
        return x, y[:, None] * torch.arange(1.0, 4) + 2 * normals(count, 3, seed=seed)

    fit = laplace_fit(with_noise(1.0, outputs=3), *draw(SIZE, seed=0))
    covered = coverages(fit, draw, lambda box, y: inside(box, y).all(1), 40)
    assert abs(z_of(covered, 0.9)) < 4


def test_rows_may_be_in_any_dimension(seeded):
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("outputs", 2, dim=-2), pyro.plate("rows", len(x), dim=-1):
            return pyro.sample("y", dist.Normal(w * x, 1.0), obs=None if y is None else y.T)

    x, y = normals(90, seed=0), normals(90, 2, seed=1)
    fit = laplace_fit(model, x[:50], y[:50])
    box = fit.predict(x[79:], interval=0.9, calibrate=(x[50:79], y[50:79]))["y"]
    assert box.lower.shape == (2, 11)
    alike = fit.predict(x[50:79], interval=0.9, calibrate=(x[50:79], y[50:79]))["y"]
    joint = inside(alike, y[50:79].T).all(0).sum()
    assert abs(int(joint) - 27) <= 2  # the 27th of 29 scores, but for the intervals' draws


@pytest.mark.slow
@pytest.mark.parametrize("sharpness", long_but([1.0, 0.2, 8.0], 0.2))
def test_conformal_sets_of_classes_cover(seeded, sharpness):
    def draw(count, seed):
        x = normals(count, 2, seed=seed)
        return x, labels_of(x, seed, sharpness)

    x, y = draw(100, seed=1)
    fit = laplace_fit(classifier_of(), x, labels_of(x, seed=1))  # of sharpness 1

    def hold(sets, labels):
        return sets.gather(1, labels[:, None])[:, 0]

    assert abs(z_of(coverages(fit, draw, hold), 0.9)) < 4
    x, y = draw(4000, seed=2)
    plain = float(hold(fit.predict(x, interval=0.9)["y"], y).double().mean())
    assert (plain < 0.8) == (sharpness == 0.2)
    tuned = fit.predict(x[2000:], interval=0.9, calibrate=(x[:2000], y[:2000]))["y"]
    probs = fit.predict(x[2000:], reduce="mean")["y"]  # a set has the most probable classes
    least_in = probs.masked_fill(~tuned, 1.0).amin(1)
    assert (least_in >= probs.masked_fill(tuned, 0.0).amax(1)).all()
    if sharpness == 8:
        assert tuned.sum() < fit.predict(x[2000:], interval=0.9)["y"].sum()


def test_classes_that_are_hot_or_binary_are_those_of_numbers(seeded):
    x = normals(300, 2, seed=0)
    y = labels_of(x, seed=1)
    held = x[100:200]
    numbers = laplace_fit(classifier_of(), x[:100], y[:100])
    hot = laplace_fit(classifier_of(dist.OneHotCategorical), x[:100], torch.eye(4)[y[:100]])
    torch.manual_seed(0)
    expected = numbers.predict(x[200:], interval=0.9, calibrate=(held, y[100:200]))["y"]
    torch.manual_seed(0)
    found = hot.predict(x[200:], interval=0.9, calibrate=(held, torch.eye(4)[y[100:200]]))["y"]
    assert found.shape == (100, 4)
    # the same but for a random part of a class, whose numbers follow draws of either family
    assert (found == expected).double().mean() > 0.85

    binary = of_rows(lambda x, w: dist.Bernoulli(logits=x @ w), w=normal(2, sd=3.0))

    def draw(count, seed):
        x = normals(count, 2, seed=seed)
        return x, (labels_of(x, seed) > 1).double()

    fit = laplace_fit(binary, *draw(100, seed=0))

    def hold(sets, y):
        return sets.gather(1, y.long()[:, None])[:, 0]

    assert abs(z_of(coverages(fit, draw, hold, 30), 0.9)) < 4


def test_every_observed_site_has_a_threshold_of_its_own(seeded):
    def model(x, y=None, k=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Normal(w * x, 1.0), obs=y)
            pyro.sample("k", dist.Bernoulli(logits=w * x), obs=k)
            pyro.deterministic("mean", w * x)

    x = normals(2200, seed=0)
    y, k = 3 * normals(2200, seed=1), (normals(2200, seed=2) > 0).double()
    data = {"x": x, "y": y, "k": k}
    first, held, new = (
        {name: value[part] for name, value in data.items()}
        for part in (slice(0, 200), slice(200, 1200), slice(1200, None))
    )
    fit = ps.Laplace(model).run(first, seed=0, progress=False)
    both = fit.predict(new["x"], interval=0.9, calibrate=held)
    assert set(both) == {"y", "k"}
    error = math.sqrt(0.9 * 0.1 * (1 / 1000 + 1 / 1000))
    covered = inside(both["y"], new["y"]), both["k"].gather(1, new["k"].long()[:, None])
    for each in covered:
        assert abs(float(each.double().mean()) - 0.9) < 4 * error
    loader = DataLoader(TensorDataset(*held.values()), batch_size=64, shuffle=True)
    as_loader = fit.predict(new["x"], interval=0.9, calibrate=loader, return_sites=["y"])
    assert abs(float(inside(as_loader["y"], new["y"]).double().mean()) - 0.9) < 4 * error
    mean = fit.predict(new["x"], interval=0.9, return_sites=["mean"])["mean"]
    draws = fit.predict(new["x"], return_sites=["mean"])["mean"].numpy()
    ends = torch.as_tensor(np.quantile(draws, [0.05, 0.95], axis=0, method="weibull"))
    torch.testing.assert_close(torch.stack(mean), ends)
    with pytest.raises(ArgumentError, match="site 'mean' has no value a row that is predicted"):
        fit.predict(new["x"], interval=0.9, calibrate=held, return_sites=["mean"])
    with pytest.raises(DataError, match="site 'k' was not observed: pass"):
        fit.predict(new["x"], interval=0.9, calibrate=(held["x"], held["y"]))
    with pytest.raises(ArgumentError, match=r"7 draws resolve levels up to 0\.75"):
        fit.predict(new["x"], interval=0.9, num_samples=7)


def test_intervals_stay_in_the_support(seeded):
    model = of_rows(lambda x, w: dist.LogNormal(w * x, 0.1), w=normal())
    x = normals(200, seed=0)
    y = normals(200, seed=1).exp()
    fit = laplace_fit(model, x[:100], y[:100])
    lower, upper = fit.predict(x[100:], interval=0.9, calibrate=(x[90:100] + 1, y[90:100]))["y"]
    assert (lower == 0).any()
    assert (lower >= 0).all()
    assert upper.isfinite().all()


@pytest.mark.slow
def test_samplers_and_filters_have_them(seeded):
    x, y = rows_of(SIZE, seed=0)
    held, (new, new_y) = rows_of(400, seed=1, sd=2.0), rows_of(400, seed=2, sd=2.0)
    mcmc = ps.BAOA(with_noise(1.0), lr=0.05, friction=1.0)
    mcmc.run(
        (x, y), num_samples=100, warmup_steps=200, thinning=5, num_chains=2, seed=0, progress=False
    )
    ekf = ps.EKF(with_noise(1.0))
    assert ekf.predict(new, interval=0.9)["y"].lower.shape == (400,)  # the prior's
    with pytest.raises(NotRunError, match="calibrate: EKF has no fit yet"):
        ekf.predict(new, interval=0.9, calibrate=held)
    ekf.run((x, y), batch_size=20, seed=0, progress=False)
    for method in (mcmc, ekf):
        covered = inside(method.predict(new, interval=0.9, calibrate=held)["y"], new_y)
        assert abs(float(covered.double().mean()) - 0.9) < 4 * math.sqrt(0.09 * 2 / 400)


# ------------------------------------------------------------------ refused


def test_refuses_what_contradicts_itself(fit):
    x, y = rows_of(30, seed=4)
    for level in (0, 1, 0.0, 1.0, 1.5, -0.1, math.nan, "0.9", True):
        with pytest.raises(ArgumentError, match=r"pass a probability in \(0, 1\)"):
            fit.predict(x, interval=level)
    with pytest.raises(ArgumentError, match=r"reduce='mean': pass one of them"):
        fit.predict(x, interval=0.9, reduce="mean")
    with pytest.raises(ArgumentError, match="pass interval= too"):
        fit.predict(x, calibrate=(x, y))
    for count in (0, -1, 2000, 1.5):
        with pytest.raises(ArgumentError, match="num_samples="):
            fit.predict(x, interval=0.9, num_samples=count)
    with pytest.raises(ArgumentError, match="no site 'z'"):
        fit.predict(x, interval=0.9, return_sites=["z"])
    with pytest.raises(ArgumentError, match=r"1000 draws resolve levels up to 0\.998"):
        fit.predict(x, interval=0.999)


def test_refuses_held_out_rows_that_calibrate_nothing(fit):
    x, y = rows_of(30, seed=4)
    seen = fit.fit.data.arguments
    masked = y.clone()
    masked[3] = math.nan
    for held, said in {
        "seen": "rows that the fit has seen",
        "few": "8 rows, and interval=0.9 takes at least 9",
        "bare": "site 'y' was not observed",
        "nan": "site 'y' has NaN or infinite values",
    }.items():
        data = {"seen": seen, "few": (x[:8], y[:8]), "bare": x, "nan": (x, masked)}[held]
        with pytest.raises((ArgumentError, DataError), match=said):
            fit.predict(x, interval=0.9, calibrate=data)
    assert fit.predict(x, interval=0.9, calibrate=(x[:9], y[:9]))["y"].lower.isfinite().all()


def test_refuses_masks_and_joint_densities():
    def masked(x, keep, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(x)), pyro.poutine.mask(mask=keep):
            return pyro.sample("y", dist.Normal(w * x, 1.0), obs=y)

    x, keep = normals(30, seed=0), torch.arange(30) % 3 > 0
    fit = laplace_fit(masked, x[:15], keep[:15], x[:15])
    with pytest.raises(DataError, match="site 'y' has a mask"):
        fit.predict(x, keep, interval=0.9, calibrate=(x[15:], keep[15:], x[15:]))
    all_kept = x[15:], keep[15:] | True, x[15:]
    assert fit.predict(x, keep, interval=0.9, calibrate=all_kept)["y"].lower.shape == (30,)

    def process(x, y=None):
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        kernel = scale * (-(x[:, None] - x).square()).exp() + torch.eye(len(x))
        return pyro.sample("y", dist.MultivariateNormal(torch.zeros(len(x)), kernel), obs=y)

    fit = laplace_fit(process, x[:15], x[:15].sin())
    with pytest.raises(ArgumentError, match="site 'y' has no value a row that is predicted apart"):
        fit.predict(x[:15], interval=0.9, calibrate=(x[15:], x[15:].sin()))


# ------------------------------------------------------------------ real data


def with_softplus_scale(inputs):
    net = nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, 2))
    net = ps.bayesianize(net)

    def model(x, y=None):
        mean, scale = net(x).unbind(-1)
        with pyro.plate("rows", len(x)):
            of_row = dist.Normal(mean, 0.01 + nn.functional.softplus(scale))
            return pyro.sample("y", of_row, obs=y)

    return model


@pytest.mark.long
@pytest.mark.parametrize("name", ["boston", "concrete", "energy", "wine_red", "yacht"])
def test_networks_on_uci_splits_cover(name):
    """A trained network's plain intervals cover what they like; its conformal ones 90%.

    Splits are drawn independently, so their coverages are independent given the data set.
    """
    file = DATA / "load.py"
    if not file.exists():
        pytest.skip(f"no data: {DATA} has no load.py; set PYRO_SCALE_DATA")
    spec = importlib.util.spec_from_file_location("load", file)
    loader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loader)
    conformal, plain = [], []
    for split in range(20):
        with torch.random.fork_rng():
            torch.manual_seed(split)
            x, y, x_test, y_test = (torch.tensor(a) for a in loader.load_uci(name, split))
            order = torch.randperm(len(x))
            held, kept = order[: len(x) // 5], order[len(x) // 5 :]
            x_test, held_x = ((a - x.mean(0)) / x.std(0) for a in (x_test, x[held]))
            x_kept = (x[kept] - x.mean(0)) / x.std(0)
            y_test, held_y, y_kept = ((a - y.mean()) / y.std() for a in (y_test, y[held], y[kept]))
            fit = ps.MAP(
                with_softplus_scale(x.shape[1]), optimizer=torchopt.adam(0.01), compile=True
            )
            fit.run((x_kept, y_kept), num_steps=2000, batch_size=100, seed=split, progress=False)
            sets = fit.predict(x_test, interval=0.9)["y"]
            plain.append(float(inside(sets, y_test).double().mean()))
            sets = fit.predict(x_test, interval=0.9, calibrate=(held_x, held_y))["y"]
            conformal.append(float(inside(sets, y_test).double().mean()))
    count = len(held)
    expected = math.ceil(round(0.9 * (count + 1), 9)) / (count + 1)
    z = z_of(conformal, expected)
    print(
        f"\n{name}: conformal {statistics.mean(conformal):.4f}, of {expected:.4f} (z = {z:.2f}); "
        f"plain {statistics.mean(plain):.4f}"
    )
    assert abs(z) < 3
