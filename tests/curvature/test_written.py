"""The curvature of one likelihood, however its model is written, scaled or masked."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from curvatures import (
    CELLS,
    CLASSES,
    COUNTS,
    EYE,
    NOISE,
    REAL,
    ROWS,
    TIGHT,
    B,
    M,
    N,
    V,
    W,
    X,
    Z,
    check,
    gauss_newton,
    logits_of,
    of,
    of_cells,
    of_classes,
    outer,
    poisson,
    poisson_by_hand,
    weights,
)
from dtypes import default_dtype
from pyro import poutine
from reference import batches, close, double, normals
from torch.distributions import transforms

from pyro_scale.curvature.prior_hessian import prior_precision
from pyro_scale.errors import SiteError

pytestmark = pytest.mark.usefixtures("float64", "store")


# ------------------------------------------------------------------ however it is written


def three(x):
    return x @ weights(2, 3, name="m")


def by_plates_rows_first(x, z):
    loc = three(x)
    with pyro.plate("outputs", 3, dim=-1), pyro.plate("data", len(x), dim=-2):
        pyro.sample("z", dist.Normal(loc, NOISE), obs=z)


def by_plates_rows_last(x, z):
    loc = three(x)
    with pyro.plate("outputs", 3, dim=-2), pyro.plate("data", len(x), dim=-1):
        pyro.sample("z", dist.Normal(loc.T, NOISE[:, None]), obs=z.T)


def by_event(x, z):
    loc = three(x)
    with pyro.plate("data", len(x)):
        pyro.sample("z", dist.Normal(loc, NOISE).to_event(1), obs=z)


def by_event_further_left(x, z):
    loc = three(x)
    with pyro.plate("data", len(x), dim=-2):
        pyro.sample("z", dist.Normal(loc[:, None], NOISE).to_event(1), obs=z[:, None])


def by_event_without_plate(x, z):
    pyro.sample("z", dist.Normal(three(x), NOISE).to_event(1), obs=z)


def without_plate(x, z):
    pyro.sample("z", dist.Normal(three(x), NOISE), obs=z)


def rows_in_the_event(x, z):
    pyro.sample("z", dist.Normal(three(x), NOISE).to_event(2), obs=z)


def rows_last_in_the_event(x, z):
    pyro.sample("z", dist.Normal(three(x).T, NOISE[:, None]).to_event(2), obs=z.T)


def rows_in_an_event_in_an_event(x, z):
    pyro.sample("z", dist.Normal(three(x), NOISE).to_event(1).to_event(1), obs=z)


def scaled_by_pyro(x, z):
    loc = three(x)
    with pyro.plate("data", N, subsample_size=len(x)):
        pyro.sample("z", dist.Normal(loc, NOISE).to_event(1), obs=z)


def scaled_by_hand(x, z):
    loc = three(x)
    with pyro.plate("data", len(x)), poutine.scale(scale=N / len(x)):
        pyro.sample("z", dist.Normal(loc, NOISE).to_event(1), obs=z)


def by_covariance(x, z):
    loc = three(x)
    with pyro.plate("data", len(x)):
        pyro.sample("z", dist.MultivariateNormal(loc, torch.diag(NOISE**2)), obs=z)


def by_precision(x, z):
    loc = three(x)
    with pyro.plate("data", len(x)):
        fn = dist.MultivariateNormal(loc, precision_matrix=torch.diag(NOISE**-2))
        pyro.sample("z", fn, obs=z)


def by_covariance_further_left(x, z):
    loc = three(x)
    with pyro.plate("one", 1, dim=-1), pyro.plate("data", len(x), dim=-2):
        fn = dist.MultivariateNormal(loc[:, None], scale_tril=torch.diag(NOISE))
        pyro.sample("z", fn, obs=z[:, None])


def covariance_rows_in_the_event(x, z):
    fn = dist.MultivariateNormal(three(x), scale_tril=torch.diag(NOISE))
    pyro.sample("z", fn.to_event(1), obs=z)


def site_by_site(x, z):
    loc = three(x)
    with pyro.plate("data", len(x)):
        for i in range(3):
            pyro.sample(f"z_{i}", dist.Normal(loc[:, i], NOISE[i]), obs=z[:, i])


def plate_by_plate(x, z):
    loc = three(x)
    for i in range(3):
        with pyro.plate(f"data_{i}", len(x)):
            pyro.sample(f"z_{i}", dist.Normal(loc[:, i], NOISE[i]), obs=z[:, i])


def in_other_units(x, z):
    loc = three(x)
    with pyro.plate("data", len(x)):
        base = dist.Normal(loc, NOISE).to_event(1)
        fn = dist.TransformedDistribution(base, [transforms.AffineTransform(1.0, 3.0, event_dim=1)])
        pyro.sample("z", fn, obs=z)


def conditioned(x, z):
    def inner(x):
        loc = three(x)
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(loc, NOISE).to_event(1))

    poutine.condition(inner, {"z": z})(x)


def observed_one_value_for_three_outputs(x, z):
    """The distribution has one loc for three values: as many terms, by broadcasting."""
    loc = three(x)
    for i in range(3):
        fn = dist.Normal(loc[:, i : i + 1], NOISE[i] * math.sqrt(3)).to_event(1)
        with pyro.plate(f"data_{i}", len(x)):
            pyro.sample(f"z_{i}", fn, obs=z)


WRITTEN = [
    by_plates_rows_first,
    by_plates_rows_last,
    by_event,
    by_event_further_left,
    by_event_without_plate,
    without_plate,
    rows_in_the_event,
    rows_last_in_the_event,
    rows_in_an_event_in_an_event,
    scaled_by_pyro,
    scaled_by_hand,
    by_covariance,
    by_precision,
    by_covariance_further_left,
    covariance_rows_in_the_event,
    site_by_site,
    plate_by_plate,
    in_other_units,
    conditioned,
    observed_one_value_for_three_outputs,
]
#: Of M, element by element: x'x / noise^2, outputs apart.
OF_THREE = torch.einsum("bi,bj,kl->ikjl", X, X, torch.diag(NOISE**-2)).reshape(6, 6)


@pytest.mark.parametrize(
    "model",
    [m for m in WRITTEN if m is not observed_one_value_for_three_outputs],
)
def test_the_same_however_it_is_written(model):
    check(of(model), {"m": M}, (X, Z), OF_THREE)


def test_an_event_that_is_not_its_values_is_refused():
    with pytest.raises(SiteError, match=r"site .*: its value has the shape"):
        of(observed_one_value_for_three_outputs).dense({"m": M}, (X, Z))


@pytest.mark.parametrize("model", WRITTEN)
def test_the_same_squares_however_it_is_written(model):
    """Gradients of rows, of all three outputs together; in other units, of other densities."""

    def log_lik(p):
        return -0.5 * ((Z - X @ p["m"]) / NOISE).square().sum(-1)

    if model is in_other_units:
        log_lik = lambda p: -0.5 * (((Z - 1) / 3 - X @ p["m"]) / NOISE).square().sum(-1)  # noqa: E731
    if model is observed_one_value_for_three_outputs:
        log_lik = lambda p: (  # noqa: E731
            -((Z[:, None] - (X @ p["m"])[..., None]) / NOISE[:, None]).square().sum((1, 2)) / 6
        )
    check(of(model, "empirical_fisher"), {"m": M}, (X, Z), outer(log_lik, {"m": M}))


def two_arguments_by_event(x, z, v):
    loc = three(x)
    with pyro.plate("data", len(x)):
        fn = dist.Normal(loc, (x @ v).exp()[:, None] * NOISE).to_event(1)
        pyro.sample("z", fn, obs=z)


def two_arguments_rows_last(x, z, v):
    loc = three(x)
    with pyro.plate("outputs", 3, dim=-2), pyro.plate("data", len(x), dim=-1):
        pyro.sample("z", dist.Normal(loc.T, (x @ v).exp() * NOISE[:, None]), obs=z.T)


def two_arguments_in_the_event(x, z, v):
    fn = dist.Normal(three(x), (x @ v).exp()[:, None] * NOISE)
    pyro.sample("z", fn.to_event(2), obs=z)


def matrices_of_outputs(x, z, v):
    """Multivariate normals of one element."""
    loc = three(x)[..., None].expand(len(x), 3, 1)
    tril = ((x @ v).exp()[:, None] * NOISE)[..., None, None]
    with pyro.plate("outputs", 3, dim=-1), pyro.plate("data", len(x), dim=-2):
        pyro.sample("z", dist.MultivariateNormal(loc, scale_tril=tril), obs=z[..., None])


@pytest.mark.parametrize(
    "write",
    [
        two_arguments_by_event,
        two_arguments_rows_last,
        two_arguments_in_the_event,
        matrices_of_outputs,
    ],
)
def test_several_elements_of_several_arguments(write):
    """Three outputs a row, each with a loc and a scale of params."""

    def model(x, z):
        write(x, z, weights(2, name="v"))

    def outputs(p):
        scale = (X @ p["v"]).exp()[:, None] * NOISE
        return torch.cat([X @ p["m"], scale], 1)

    def information(o):
        return torch.diag_embed(torch.cat([o[:, 3:] ** -2, 2 * o[:, 3:] ** -2], 1))

    params = {"v": V, "m": M}
    check(of(model), params, (X, Z), gauss_newton(outputs, information, params))


def many_classes(rows_last, x, v):
    """Two categorical observations a row, of three classes each."""
    logits = torch.stack([logits_of(x, v, -v), logits_of(x, 2 * v, v)], 1)
    return logits.transpose(0, 1) if rows_last else logits


@pytest.mark.parametrize("rows_last", [True, False])
@pytest.mark.parametrize("kind", ["ggn", "empirical_fisher"])
def test_several_elements_with_events_of_their_own(rows_last, kind):
    y = torch.stack([CLASSES, CLASSES.flip(0)], 1)

    def model(x, y):
        v = weights(2, name="v")
        dims = (-2, -1) if rows_last else (-1, -2)
        outputs, data = (
            pyro.plate(name, size, dim=dim)
            for name, size, dim in zip(("outputs", "data"), (2, len(x)), dims, strict=True)
        )
        with outputs, data:
            fn = dist.Categorical(logits=many_classes(rows_last, x, v))
            pyro.sample("y", fn, obs=y.T if rows_last else y)

    def log_lik(p):
        log_probs = many_classes(False, X, p["v"]).log_softmax(-1)
        return log_probs.gather(-1, y[..., None]).sum((1, 2))

    exact = sum(
        gauss_newton(lambda p, i=i: many_classes(False, X, p["v"])[:, i], of_classes, {"v": V})
        for i in range(2)
    )
    check(of(model, kind), {"v": V}, (X, y), exact if kind == "ggn" else outer(log_lik, {"v": V}))


def in_a_plate(w, s, y):
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(w, s), obs=y)


def expanded_in_a_plate(w, s, y):
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(w, s).expand([len(y)]), obs=y)


def expanded(w, s, y):
    pyro.sample("y", dist.Normal(w, s).expand([len(y)]), obs=y)


def expanded_event(w, s, y):
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(w, s).expand([1]).to_event(1), obs=y[:, None])


def expanded_and_masked(w, s, y):
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(w, s).mask(True).expand([len(y)]), obs=y)


def by_tensors(w, s, y):
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(w.expand(len(y)), s.expand(len(y))), obs=y)


def in_a_column(w, s, y):
    with pyro.plate("data", len(y), dim=-2):
        pyro.sample("y", dist.Normal(w, s), obs=y[:, None])


@pytest.mark.parametrize(
    "write",
    [
        in_a_plate,
        expanded_in_a_plate,
        expanded,
        expanded_event,
        expanded_and_masked,
        by_tensors,
        in_a_column,
    ],
)
@pytest.mark.parametrize("kind", ["ggn", "empirical_fisher"])
def test_scalars_for_all_rows(write, kind):
    def model(y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        v = pyro.sample("v", dist.Normal(0.0, 1.0))
        write(w, v.exp(), y)

    params = {"w": torch.tensor(0.4), "v": torch.tensor(-0.3)}
    sd = math.exp(-0.3)

    def log_lik(p):
        return -p["v"] - 0.5 * ((REAL - p["w"]) / p["v"].exp()) ** 2

    exact = torch.diag(double(B / sd**2, 2 * B))
    check(of(model, kind), params, (REAL,), exact if kind == "ggn" else outer(log_lik, params))


@pytest.mark.parametrize("kind", ["empirical_fisher", "ggn"])
@pytest.mark.parametrize("shape", [(), (2,)])
def test_one_distribution_for_all_rows(shape, kind):
    """Neither a plate nor `expand`: the observation alone says how many rows there are."""

    def model(y):
        w = pyro.sample("w", dist.Normal(torch.zeros(shape), 1.0).to_event(len(shape)))
        pyro.sample("y", dist.Normal(w, 0.5).to_event(len(shape)), obs=y)

    params, y = {"w": normals(2).sum() if not shape else normals(2)}, normals(B, *shape, seed=6)
    slopes = (4 * (y - params["w"])).reshape(B, -1)
    expected = 4 * B * torch.eye(slopes.shape[1]) if kind == "ggn" else slopes.T @ slopes
    check(of(model, kind), params, (y,), expected)


# ------------------------------------------------------------------ scales and masks


KEPT = torch.tensor([1, 0, 1, 1, 0, 1, 1]).bool()


KEPT_CELLS = normals(B, 3, seed=11) > -0.5


def scaled_by_a_number(x, z, r, k, c, kc):
    with poutine.scale(scale=0.3):
        by_event(x, z)


def scaled_twice(x, z, r, k, c, kc):
    with poutine.scale(scale=0.5), poutine.scale(scale=torch.tensor(0.6)):
        rows_in_the_event(x, z)


def scaled_by_rows(x, z, r, k, c, kc):
    m = weights(2, 3, name="m")
    with pyro.plate("data", len(x)), poutine.scale(scale=r):
        pyro.sample("z", dist.Normal(x @ m, NOISE).to_event(1), obs=z)


def scaled_by_cells(x, z, r, k, c, kc):
    m = weights(2, 3, name="m")
    with (
        pyro.plate("outputs", 3, dim=-1),
        pyro.plate("data", len(x), dim=-2),
        poutine.scale(scale=c),
    ):
        pyro.sample("z", dist.Normal(x @ m, NOISE), obs=z)


def scaled_by_cells_rows_last(x, z, r, k, c, kc):
    m = weights(2, 3, name="m")
    with (
        pyro.plate("outputs", 3, dim=-2),
        pyro.plate("data", len(x), dim=-1),
        poutine.scale(scale=c.T),
    ):
        pyro.sample("z", dist.Normal((x @ m).T, NOISE[:, None]), obs=z.T)


def scaled_by_outputs(x, z, r, k, c, kc):
    m = weights(2, 3, name="m")
    outputs, data = pyro.plate("outputs", 3, dim=-1), pyro.plate("data", len(x), dim=-2)
    with outputs, poutine.scale(scale=NOISE), data:
        pyro.sample("z", dist.Normal(x @ m, NOISE), obs=z)


def scaled_and_scaled_by_pyro(x, z, r, k, c, kc):
    m = weights(2, 3, name="m")
    with pyro.plate("data", N, subsample_size=len(x)), poutine.scale(scale=r):
        pyro.sample("z", dist.Normal(x @ m, NOISE).to_event(1), obs=z)


def masked_by_poutine(x, z, r, k, c, kc):
    m = weights(2, 3, name="m")
    with pyro.plate("data", len(x)), poutine.mask(mask=k):
        pyro.sample("z", dist.Normal(x @ m, NOISE).to_event(1), obs=z)


def masked_by_method(x, z, r, k, c, kc):
    m = weights(2, 3, name="m")
    with pyro.plate("data", len(x)):
        pyro.sample("z", dist.Normal(x @ m, NOISE).to_event(1).mask(k), obs=z)


def masked_inside(x, z, r, k, c, kc):
    m = weights(2, 3, name="m")
    with pyro.plate("data", len(x)):
        pyro.sample("z", dist.Normal(x @ m, NOISE).mask(kc).to_event(1), obs=z)


def masked_inside_rows_in_the_event(x, z, r, k, c, kc):
    m = weights(2, 3, name="m")
    pyro.sample("z", dist.Normal((x @ m).T, NOISE[:, None]).mask(kc.T).to_event(2), obs=z.T)


def masked_multivariate(x, z, r, k, c, kc):
    m = weights(2, 3, name="m")
    with pyro.plate("data", len(x)):
        fn = dist.MultivariateNormal(x @ m, scale_tril=torch.diag(NOISE)).mask(k)
        pyro.sample("z", fn, obs=z)


def masked_everywhere_and_scaled(x, z, r, k, c, kc):
    m = weights(2, 3, name="m")
    with pyro.plate("data", len(x)), poutine.scale(scale=r), poutine.mask(mask=k):
        pyro.sample("z", dist.Normal(x @ m, NOISE).mask(kc).to_event(1), obs=z)


WEIGHTED = {
    scaled_by_a_number: torch.full((B, 3), 0.3, dtype=torch.float64),
    scaled_twice: torch.full((B, 3), 0.3, dtype=torch.float64),
    scaled_by_rows: ROWS[:, None].expand(B, 3),
    scaled_by_cells: CELLS,
    scaled_by_cells_rows_last: CELLS,
    scaled_by_outputs: NOISE.expand(B, 3),
    scaled_and_scaled_by_pyro: ROWS[:, None].expand(B, 3),
    masked_by_poutine: KEPT[:, None].expand(B, 3).double(),
    masked_by_method: KEPT[:, None].expand(B, 3).double(),
    masked_inside: KEPT_CELLS.double(),
    masked_inside_rows_in_the_event: KEPT_CELLS.double(),
    masked_multivariate: KEPT[:, None].expand(B, 3).double(),
    masked_everywhere_and_scaled: ROWS[:, None] * KEPT[:, None] * KEPT_CELLS,
}
WEIGHTS = (ROWS, KEPT, CELLS, KEPT_CELLS)


@pytest.mark.parametrize("kind", ["ggn", "empirical_fisher"])
@pytest.mark.parametrize("model", WEIGHTED)
def test_scales_and_masks(model, kind):
    """Of a row's terms they are factors; of its squared gradient, squared factors."""

    def log_lik(p):
        return -0.5 * (WEIGHTED[model] * ((Z - X @ p["m"]) / NOISE) ** 2).sum(-1)

    expected = of_cells(WEIGHTED[model]) if kind == "ggn" else outer(log_lik, {"m": M})
    check(of(model, kind), {"m": M}, (X, Z, *WEIGHTS), expected)
    found = of(model, kind)
    parts = [found.dense({"m": M}, part) for part in batches((X, Z, *WEIGHTS), 3)]
    close(sum(parts), expected, TIGHT)


def test_scales_keep_their_digits():
    """0.3 is not its float32, whatever torch's default dtype."""

    def model(x, y):
        w = pyro.sample("w", dist.Normal(double(0.0, 0.0), 1.0).to_event(1))
        with pyro.plate("data", len(x)), poutine.scale(scale=0.3):
            pyro.sample("y", dist.Normal(x @ w, double(1.0)), obs=y)

    with default_dtype(torch.float32):
        check(of(model), {"w": W}, (X, REAL), 0.3 * X.T @ X)


def test_observations_outside_the_plate_are_the_priors():
    def model(x, y):
        w = weights(2)
        pyro.sample("total", dist.Normal(w.sum(), 0.5), obs=torch.tensor(1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Poisson((x @ w).exp()), obs=y)

    for kind in ("ggn", "monte_carlo", "empirical_fisher"):
        found = of(model, kind)
        close(found.dense({"w": W}, (X, COUNTS)), of(poisson, kind).dense({"w": W}, (X, COUNTS)))
    check(of(model), {"w": W}, (X, COUNTS), poisson_by_hand(W, X))
    found = prior_precision(of(model).log_posterior, {"w": W}, (X, COUNTS), None, True)
    close(found, EYE + 4 * torch.ones(2, 2), TIGHT)
