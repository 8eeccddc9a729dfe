"""The curvature of likelihoods by family, in closed form or drawn, against information matrices by
hand, by quadrature or by enumeration."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from curvatures import (
    CELLS,
    CLASSES,
    COUNTS,
    KINDS,
    NOISE,
    PARAMS,
    POSITIVE,
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
    diagonals,
    flat_hessian,
    gamma,
    gamma_outputs,
    gauss_newton,
    logits_of,
    observed,
    of,
    of_cells,
    of_classes,
    of_gamma,
    outer,
    poisson,
    weights,
)
from pyro import poutine
from reference import close, double, normals
from repetitions import each_once, long_but
from torch.distributions import transforms

import pyro_scale as ps
from pyro_scale.curvature import observed as observed_module
from pyro_scale.errors import ArgumentError, ModelError, SiteError

pytestmark = pytest.mark.usefixtures("float64", "store")


# ------------------------------------------------------------------ likelihoods


def expected_squares(log_density, nodes, weights):
    """Outputs `[B, K]` -> E[s s'], s the derivative of log_density(theta [K], value)."""

    def of_row(theta):
        score = torch.func.jacfwd(lambda t: torch.vmap(log_density, (None, 0))(t, nodes))(theta)
        probs = weights * torch.vmap(log_density, (None, 0))(theta, nodes).exp()
        return torch.einsum("q,qi,qj->ij", probs, score, score)

    return lambda outputs: torch.stack([of_row(row) for row in outputs])


def real_line(scale=1.0):
    """Nodes and weights for heavy tails: the sinh-sinh rule."""
    t = torch.arange(-4.5, 4.5, 1 / 64, dtype=torch.float64)
    inner = math.pi / 2 * torch.sinh(t)
    weights = math.pi / 2 * torch.cosh(t) * torch.cosh(inner) / 64
    return scale * torch.sinh(inner), scale * weights


def lower(v):
    """A lower triangular matrix of two numbers."""
    return torch.stack([torch.stack([v[0].exp(), 0 * v[0]]), torch.stack([v[1], 1 + v[0] ** 2])])


def kl_to(tril, other):
    """KL(N(0, tril tril') || N(0, other other')) with the other's upper triangle ignored."""
    other = other.tril()
    ratio = torch.linalg.solve_triangular(other, tril, upper=False)
    return 0.5 * ratio.square().sum() + other.diagonal().log().sum()


def of_multivariate_normal(outputs):
    """Of the mean and the Cholesky factor: the divergence's second derivatives."""
    found = outputs.new_zeros(len(outputs), 6, 6)
    for i, row in enumerate(outputs):
        tril = row[2:].reshape(2, 2)
        found[i, :2, :2] = torch.linalg.inv(tril @ tril.T)
        curved = torch.func.hessian(lambda a, b=tril: kl_to(b, a.reshape(2, 2)))(row[2:])
        found[i, 2:, 2:] = curved
    return found


def of_negative_binomial(outputs):
    def log_density(theta, value):
        r, logit = theta
        binomial = torch.lgamma(value + r) - torch.lgamma(r) - torch.lgamma(value + 1)
        log_p, log_q = (torch.nn.functional.logsigmoid(sign * logit) for sign in (1, -1))
        return binomial + value * log_p + r * log_q

    values = torch.arange(400, dtype=torch.float64)
    return expected_squares(log_density, values, torch.ones(400))(outputs)


def of_student(outputs):
    def log_density(theta, value):
        loc, scale = theta
        z = (value - loc) / scale
        constant = math.lgamma(3) - math.lgamma(2.5) - 0.5 * math.log(5 * math.pi)
        return constant - scale.log() - 3 * torch.log1p(z**2 / 5)

    return expected_squares(log_density, *real_line())(outputs)


def success(x, w):
    return torch.sigmoid(x @ w)


TIMES = 3 + COUNTS.flip(0)


BITS = COUNTS % 2


# name: (distribution of x, w, v; y; outputs of x, w, v `[B, K]`; their information; minus the log
# likelihood of x, w, v where the link is canonical and the outputs linear)
LIKELIHOODS = {
    "normal, sd known": (
        lambda x, w, v: dist.Normal(x @ w, 0.7),
        REAL,
        lambda x, w, v: (x @ w)[:, None],
        lambda o: diagonals(0 * o[:, 0] + 0.7**-2),
        lambda x, w, v: 0.5 * ((REAL - x @ w) / 0.7).square().sum(),
    ),
    "normal, sd of params": (
        lambda x, w, v: dist.Normal(x @ w, (x @ v).exp()),
        REAL,
        lambda x, w, v: torch.stack([x @ w, (x @ v).exp()], -1),
        lambda o: diagonals(o[:, 1] ** -2, 2 * o[:, 1] ** -2),
        None,
    ),
    "normal, sd shared": (
        lambda x, w, v: dist.Normal(x @ w, v[0].exp()),
        REAL,
        lambda x, w, v: torch.stack([x @ w, v[0].exp().expand(len(x))], -1),
        lambda o: diagonals(o[:, 1] ** -2, 2 * o[:, 1] ** -2),
        None,
    ),
    "bernoulli, logits": (
        lambda x, w, v: dist.Bernoulli(logits=x @ w),
        BITS,
        lambda x, w, v: (x @ w)[:, None],
        lambda o: diagonals(torch.sigmoid(o[:, 0]) * torch.sigmoid(-o[:, 0])),
        lambda x, w, v: -(BITS * (x @ w) - torch.log1p((x @ w).exp())).sum(),
    ),
    "bernoulli, probs": (
        lambda x, w, v: dist.Bernoulli(success(x, w)),
        BITS,
        lambda x, w, v: success(x, w)[:, None],
        lambda o: diagonals(1 / (o[:, 0] * (1 - o[:, 0]))),
        lambda x, w, v: -(BITS * (x @ w) - torch.log1p((x @ w).exp())).sum(),
    ),
    "poisson": (
        lambda x, w, v: dist.Poisson((x @ w).exp()),
        COUNTS,
        lambda x, w, v: (x @ w).exp()[:, None],
        lambda o: diagonals(1 / o[:, 0]),
        lambda x, w, v: ((x @ w).exp() - COUNTS * (x @ w)).sum(),
    ),
    "poisson, rate linear": (
        lambda x, w, v: dist.Poisson(3 + x.abs() @ (w + 1)),
        COUNTS,
        lambda x, w, v: (3 + x.abs() @ (w + 1))[:, None],
        lambda o: diagonals(1 / o[:, 0]),
        None,
    ),
    "categorical, logits": (
        lambda x, w, v: dist.Categorical(logits=logits_of(x, w, v)),
        CLASSES,
        logits_of,
        of_classes,
        lambda x, w, v: torch.nn.functional.cross_entropy(
            logits_of(x, w, v), CLASSES, reduction="sum"
        ),
    ),
    "categorical, probs": (
        lambda x, w, v: dist.Categorical(logits_of(x, w, v).softmax(-1)),
        CLASSES,
        logits_of,
        of_classes,
        None,
    ),
    "exponential": (
        lambda x, w, v: dist.Exponential((x @ w).exp()),
        POSITIVE,
        lambda x, w, v: (x @ w).exp()[:, None],
        lambda o: diagonals(o[:, 0] ** -2),
        None,
    ),
    "gamma": (
        gamma,
        POSITIVE,
        gamma_outputs,
        of_gamma,
        None,
    ),
    "negative binomial": (
        lambda x, w, v: dist.NegativeBinomial((1 + x @ v).exp(), logits=x @ w - 1),
        COUNTS,
        lambda x, w, v: torch.stack([(1 + x @ v).exp(), x @ w - 1], -1),
        of_negative_binomial,
        None,
    ),
    "student": (
        lambda x, w, v: dist.StudentT(5.0, x @ w, (x @ v).exp()),
        REAL,
        lambda x, w, v: torch.stack([x @ w, (x @ v).exp()], -1),
        of_student,
        None,
    ),
    "multivariate normal": (
        lambda x, w, v: dist.MultivariateNormal(
            torch.stack([x @ w, (x @ w) ** 2], -1), scale_tril=lower(v)
        ),
        normals(B, 2, seed=7),
        lambda x, w, v: torch.cat(
            [x @ w[:, None], (x @ w[:, None]) ** 2, lower(v).reshape(1, 4).expand(len(x), 4)], 1
        ),
        of_multivariate_normal,
        None,
    ),
    "lognormal": (
        lambda x, w, v: dist.LogNormal(x @ w, (x @ v).exp()),
        POSITIVE,
        lambda x, w, v: torch.stack([x @ w, (x @ v).exp()], -1),
        lambda o: diagonals(o[:, 1] ** -2, 2 * o[:, 1] ** -2),
        None,
    ),
    "a fixed transform": (
        lambda x, w, v: dist.TransformedDistribution(
            dist.Normal(x @ w, (x @ v).exp()),
            [transforms.AffineTransform(0.3, 2.0), transforms.ExpTransform()],
        ),
        POSITIVE,
        lambda x, w, v: torch.stack([x @ w, (x @ v).exp()], -1),
        lambda o: diagonals(o[:, 1] ** -2, 2 * o[:, 1] ** -2),
        None,
    ),
}


@pytest.mark.parametrize(
    ("make", "y", "outputs", "information", "nll"), LIKELIHOODS.values(), ids=LIKELIHOODS
)
def test_likelihoods(make, y, outputs, information, nll):
    expected = gauss_newton(lambda p: outputs(X, p["w"], p["v"]), information, PARAMS)
    check(of(observed(make)), PARAMS, (X, y), expected)
    if nll is not None:
        close(expected, flat_hessian(lambda p: nll(X, p["w"], p["v"]), PARAMS), TIGHT)


def test_binomial_counts_are_data():
    """Each row has a total count of its own, an argument without a gradient."""

    def model(x, n, y):
        w = weights(2)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Binomial(n, logits=x @ w), obs=y)

    def nll(p):
        return (TIMES * torch.log1p((X @ p["w"]).exp()) - COUNTS * (X @ p["w"])).sum()

    check(of(model), {"w": W}, (X, TIMES, COUNTS.clamp(max=3)), flat_hessian(nll, {"w": W}))


def test_row_by_row_sites_of_any_shape():
    """[], [1], [2] and [2, 3]: y ~ N(a + b x_0 + c'x + sum(x' m), exp(a))."""

    def model(x, y):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        b, c, m = weights(1, name="b"), weights(2, name="c"), weights(2, 3, name="m")
        with pyro.plate("data", len(x)):
            loc = a + b * x[:, 0] + x @ c + (x @ m).sum(-1)
            pyro.sample("y", dist.Normal(loc, a.exp()), obs=y)

    params = {
        "a": double(0.3).squeeze(),
        "b": double(0.4),
        "c": double(0.1, 0.2),
        "m": normals(2, 3),
    }

    def outputs(p):
        loc = p["a"] + p["b"] * X[:, 0] + X @ p["c"] + (X @ p["m"]).sum(-1)
        return torch.stack([loc, p["a"].exp().expand(B)], -1)

    def information(o):
        return diagonals(o[:, 1] ** -2, 2 * o[:, 1] ** -2)

    check(of(model), params, (X, REAL), gauss_newton(outputs, information, params))
    backwards = dict(reversed(params.items()))
    check(of(model), backwards, (X, REAL), gauss_newton(outputs, information, backwards))


def test_constrained_params_go_by_unconstrained_ones():
    """s = exp(u): d s / d u = s, so that the information in u is 2 a row."""

    def model(y):
        s = pyro.sample("s", dist.LogNormal(torch.zeros(1), 1.0).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(0.0, s), obs=y)

    check(of(model), {"s": double(0.7)}, (REAL,), double([2.0 * B]))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_one_matrix(kind):
    """Its diagonal, and its product with a vector, are the dense one's."""
    found = of(observed(gamma), kind, num_draws=3, seed=5)
    check(found, PARAMS, (X, POSITIVE), found.dense(PARAMS, (X, POSITIVE)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numbers", [1, 40, 2**22])
def test_however_many_rows_at_once(kind, numbers, monkeypatch):
    found = of(observed(gamma), kind, num_draws=3, seed=5)
    expected = found.dense(PARAMS, (X, POSITIVE))
    monkeypatch.setattr(observed_module, "_BLOCK_NUMBERS", numbers)
    close(found.dense(PARAMS, (X, POSITIVE)), expected, 1e-12)
    parts = found.diagonal(PARAMS, (X, POSITIVE))
    close(torch.cat([parts["w"], parts["v"]]), expected.diagonal(), 1e-12)


# ------------------------------------------------------------------ empirical Fisher, Monte Carlo


def test_the_empirical_fisher_is_of_the_users_scaled_rows():
    def model(x, y, c):
        w = weights(2)
        with pyro.plate("data", len(x)), poutine.scale(scale=c):
            pyro.sample("y", dist.Poisson((x @ w).exp()), obs=y)

    gradients = ROWS[:, None] * (COUNTS - (X @ W).exp())[:, None] * X
    found = of(model, "empirical_fisher")
    check(found, {"w": W}, (X, COUNTS, ROWS), gradients.T @ gradients)
    rows = found.log_posterior.row_gradients({"w": W}, (X, COUNTS, ROWS))["w"]
    close(rows, gradients, TIGHT)


def test_the_empirical_fisher_takes_any_likelihood():
    """A factor, and a sum over an enumerated site."""

    def model(x, y):
        w = weights(2)
        with pyro.plate("data", len(x)):
            pyro.factor("f", -((y - x @ w) ** 4))
            z = pyro.sample("z", dist.Bernoulli(0.3), infer={"enumerate": "parallel"})
            pyro.sample("y", dist.Normal(x @ w + 2 * z, 1.0), obs=y)

    def log_lik(p):
        m = X @ p["w"]
        parts = [
            math.log(c) - 0.5 * (REAL - m - shift) ** 2 for c, shift in ((0.7, 0.0), (0.3, 2.0))
        ]
        return -((REAL - m) ** 4) + torch.logsumexp(torch.stack(parts), 0)

    check(of(model, "empirical_fisher"), {"w": W}, (X, REAL), outer(log_lik, {"w": W}))


def z_scores(found, params, batch, expected, seeds):
    """(mean over seeds - expected) / its standard error, of every entry of the triangle; and
    that error over the expected diagonal, which says what would be seen."""
    log_posterior, kind, draws = found.log_posterior, found.kind, found.num_draws
    dense = torch.stack(
        [
            ps.Curvature(log_posterior, kind, num_draws=draws, seed=seed).dense(params, batch)
            for seed in range(seeds)
        ]
    )
    error = dense.std(0) / math.sqrt(seeds)
    lower = torch.ones_like(expected).tril().bool()
    power = (error.diagonal() / expected.diagonal()).max()
    return ((dense.mean(0) - expected) / error)[lower], float(power)


def cells_with_scales(x, z, c):
    m = weights(2, 3, name="m")
    outputs, data = pyro.plate("outputs", 3, dim=-2), pyro.plate("data", len(x), dim=-1)
    with outputs, data, poutine.scale(scale=c.T):
        pyro.sample("z", dist.Normal((x @ m).T, NOISE[:, None]), obs=z.T)


def covariances(x, z, c):
    m = weights(2, 3, name="m")
    fn = dist.MultivariateNormal(x @ m, scale_tril=torch.diag(NOISE)).mask(c[:, 0] > 0.5)
    with poutine.scale(scale=0.3):
        pyro.sample("z", fn.to_event(1), obs=z)


MONTE_CARLO = {
    "categorical": (
        observed(LIKELIHOODS["categorical, logits"][0]),
        PARAMS,
        (X, CLASSES),
        lambda: gauss_newton(lambda p: logits_of(X, p["w"], p["v"]), of_classes, PARAMS),
    ),
    "lognormal": (
        observed(LIKELIHOODS["lognormal"][0]),
        PARAMS,
        (X, POSITIVE),
        lambda: gauss_newton(
            lambda p: torch.stack([X @ p["w"], (X @ p["v"]).exp()], -1),
            LIKELIHOODS["lognormal"][3],
            PARAMS,
        ),
    ),
    "outputs with scales": (cells_with_scales, {"m": M}, (X, Z, CELLS), lambda: of_cells(CELLS)),
    "multivariate, masked": (
        covariances,
        {"m": M},
        (X, Z, CELLS),
        lambda: of_cells(0.3 * (CELLS[:, :1] > 0.5).double().expand(B, 3)),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("case", "num_draws"), each_once(MONTE_CARLO, [1, 5]))
def test_monte_carlo_is_unbiased(case, num_draws):
    """|z| < 4.5 for each of up to 21 entries: a right one fails once in 7,000 sets of seeds, and
    these are fixed.  Off by 0.35 of it, a diagonal entry would be seen."""
    model, params, batch, expected = MONTE_CARLO[case]
    found = of(model, "monte_carlo", num_draws=num_draws)
    scores, power = z_scores(found, params, batch, expected(), 300)
    assert power < 0.08
    assert float(scores.abs().max()) < 4.5
    assert float(scores.abs().max()) > 0.1  # there is noise


def two_lines(x, y):
    w, v = weights(2), weights(2, name="v")
    parts = dist.Normal(torch.stack([x @ w, x @ v + 1], -1), 0.8)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.MixtureSameFamily(dist.Categorical(double(0.3, 0.7)), parts), obs=y)


def of_mixture(params):
    def log_density(theta, value):
        z = (value - theta) / 0.8
        parts = double(0.3, 0.7).log() - 0.5 * z**2 - math.log(0.8 * math.sqrt(2 * math.pi))
        return torch.logsumexp(parts, 0)

    nodes = torch.linspace(-20, 20, 2001, dtype=torch.float64)  # trapezoidal: to all digits
    return gauss_newton(
        lambda p: torch.stack([X @ p["w"], X @ p["v"] + 1], -1),
        expected_squares(log_density, nodes, torch.full((2001,), 0.02)),
        params,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", long_but(["ggn", "monte_carlo"], "ggn"))
def test_a_family_without_a_closed_form_is_drawn(kind):
    """|z| < 4.5 for each of 10 entries: a right one fails once in 15,000 sets of seeds."""
    draws = {"ggn": 1, "monte_carlo": 20}[kind]
    scores, power = z_scores(
        of(two_lines, kind, num_draws=draws), PARAMS, (X, REAL), of_mixture(PARAMS), 200
    )
    assert power < (0.02 if kind == "ggn" else 0.05)  # the GGN draws a hundred at the least
    assert float(scores.abs().max()) < 4.5


@pytest.mark.slow
def test_more_draws_where_they_are_asked_for():
    """Standard errors over 20 seeds are those of 10,000 draws and not of 2,000."""
    expected = of_mixture(PARAMS)
    _, power = z_scores(of(two_lines, num_draws=500), PARAMS, (X, REAL), expected, 20)
    _, of_fewer = z_scores(of(two_lines), PARAMS, (X, REAL), expected, 20)
    assert power < 0.65 * of_fewer  # 0.45, but for 0.16 of it


@pytest.mark.slow
def test_a_transform_with_params_is_drawn():
    """y = x'w + 0.5 e is a normal, though its base says nothing of w."""

    def model(x, y):
        w = weights(2)
        base = dist.Normal(torch.zeros(len(x)), 0.5)
        with pyro.plate("data", len(x)):
            fn = dist.TransformedDistribution(base, [transforms.AffineTransform(x @ w, 1.0)])
            pyro.sample("y", fn, obs=y)

    scores, power = z_scores(of(model), {"w": W}, (X, REAL), 4 * X.T @ X, 100)
    assert power < 0.05
    assert float(scores.abs().max()) < 4.5


def test_seeds():
    model = observed(gamma)
    torch.manual_seed(1)
    first = of(model, "monte_carlo", seed=4).dense(PARAMS, (X, POSITIVE))
    torch.manual_seed(2)
    again = of(model, "monte_carlo", seed=4).dense(PARAMS, (X, POSITIVE))
    assert torch.equal(first, again)
    other = of(model, "monte_carlo", seed=5).dense(PARAMS, (X, POSITIVE))
    assert float((first - other).abs().max()) > 1e-3
    found = of(model, "monte_carlo", seed=4)
    assert torch.equal(found.dense(PARAMS, (X, POSITIVE)), found.dense(PARAMS, (X, POSITIVE)))


@pytest.mark.parametrize("kind", ["ggn", "monte_carlo"])
def test_observed_values_do_not_matter(kind):
    """Neither to the GGN nor to what is drawn."""
    model = observed(LIKELIHOODS["lognormal"][0])
    both = [of(model, kind).dense(PARAMS, (X, y)) for y in (POSITIVE, POSITIVE.flip(0) + 1)]
    assert torch.equal(*both)


# ------------------------------------------------------------------ what has none


def with_a_factor(x, y):
    w = weights(2)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Poisson((x @ w).exp()), obs=y)
        pyro.factor("penalty", -((x @ w) ** 4))


def with_an_enumerated_site(x, y):
    w = weights(2)
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Bernoulli(0.3), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(x @ w + 2 * z, 1.0), obs=y)


def with_two_sites_in_a_sum(x, y):
    w = weights(2)
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Bernoulli(0.3), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(x @ w + 2 * z, 1.0), obs=y)
        pyro.sample("r", dist.Normal(x @ w - z, 1.0), obs=y)


REFUSALS = {
    "factor": (with_a_factor, "penalty"),
    "enumerated": (with_an_enumerated_site, r"(y|z)"),
    "two in a sum": (with_two_sites_in_a_sum, r"(y\+r|z)"),
}


@pytest.mark.parametrize("kind", ["ggn", "monte_carlo"])
@pytest.mark.parametrize(
    ("model", "site"),
    REFUSALS.values(),
    ids=REFUSALS,
)
@pytest.mark.parametrize("way", ["dense", "diagonal", "product", "natural_gradient"])
def test_what_has_no_distribution_is_refused(model, site, kind, way):
    more = ({"w": V},) if way == "product" else ()
    wanted = rf"site '{site}': .*curvature='empirical_fisher' or 'hessian'"
    with pytest.raises(SiteError, match=wanted):
        getattr(of(model, kind), way)({"w": W}, (X, COUNTS), *more)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_without_rows_is_refused(kind):
    log_posterior = ps.LogPosterior.from_function(
        lambda params, batch: -params["w"].square().sum(), {"w": W}, num_data=N
    )
    found = ps.Curvature(log_posterior, kind)
    for act in (found.dense, found.diagonal, found.natural_gradient):
        with pytest.raises(ModelError, match=r"curvature='hessian'"):
            act({"w": W}, (X,))


@pytest.mark.parametrize("kwargs", [{"kind": "fisher"}, {"kind": "monte_carlo", "num_draws": 0}])
def test_kinds_and_draws_that_are_none_are_refused(kwargs):
    with pytest.raises(ArgumentError, match=list(kwargs)[-1]):
        of(poisson, **kwargs).dense({"w": W}, (X, COUNTS))
