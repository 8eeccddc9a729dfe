"""The Fisher information of each family, against the mean of its scores' squares: by quadrature
or by enumeration, the scores by autograd of the density itself."""

import itertools
import math

import mpmath
import pyro.distributions as dist
import pytest
import torch
from reference import close, double, normals

from pyro_scale.curvature.fisher import (
    NoInformation,
    base_of,
    information,
    mask_of,
    own_arguments,
)
from pyro_scale.curvature.fisher_families import CLOSED_FORMS

# ------------------------------------------------------------------ the truth


def mean_of_squares(log_density, theta, values, weights):
    """E[s s'], s the derivative of log_density(theta, value), value by value.

    Args:
        log_density: (theta `[K, m]`, values `[K, ...]`) -> `[K]`.
        theta: `[m]`.
        values: `[K, ...]`.
        weights: of the quadrature, `[K]`.
    """
    rows = theta.expand(len(values), -1).clone().requires_grad_()
    log_prob = log_density(rows, values)
    (scores,) = torch.autograd.grad(log_prob.sum(), rows)
    probs = weights * log_prob.detach().exp()
    keep = probs > 0
    close(probs.sum(), 1.0, 1e-8)  # the quadrature itself
    return torch.einsum("k,ki,kj->ij", probs[keep], scores[keep], scores[keep])


def half_lines(middle, scale, directions=(-1, 1)):
    """Nodes and weights on both sides of a point, by the exp-sinh rule."""
    t = torch.arange(-4.5, 4.5, 1 / 64, dtype=torch.float64)
    far = scale * torch.exp(math.pi / 2 * torch.sinh(t))
    weights = far * math.pi / 2 * torch.cosh(t) / 64
    nodes = torch.cat([middle + sign * far for sign in directions])
    return nodes, weights.repeat(len(directions))


def interval(low, high):
    """Nodes and weights inside an interval, by the tanh-sinh rule."""
    t = torch.arange(-3.0, 3.0, 1 / 64, dtype=torch.float64)
    z = math.pi * torch.sinh(t)
    inside = torch.sigmoid(z)
    weights = inside * torch.sigmoid(-z) * math.pi * torch.cosh(t) / 64
    return low + (high - low) * inside, (high - low) * weights


def count_grid(limit):
    return torch.arange(limit, dtype=torch.float64), torch.ones(limit, dtype=torch.float64)


def von_mises(loc, concentration):
    """With a density to all digits, which torch's own has not."""

    class Exact(dist.VonMises):
        def log_prob(self, value):
            bessel = torch.special.i0e(self.concentration).log() + self.concentration
            return self.concentration * torch.cos(value - self.loc) - bessel - math.log(2 * math.pi)

    return Exact(loc, concentration)


def by(family, *names, **constants):
    """A family as a function of the named arguments, and the names."""
    return lambda *values: family(**dict(zip(names, values, strict=True)), **constants), names


POSITIVE = half_lines(0.0, 1.0, (1,))
UNIVARIATE = {
    "normal": (*by(dist.Normal, "loc", "scale"), (0.4, 1.7), half_lines(0.4, 1.0)),
    "half normal": (*by(dist.HalfNormal, "scale"), (1.7,), POSITIVE),
    "cauchy": (*by(dist.Cauchy, "loc", "scale"), (0.4, 1.7), half_lines(0.4, 1.0)),
    "half cauchy": (*by(dist.HalfCauchy, "scale"), (1.7,), POSITIVE),
    "student": (*by(dist.StudentT, "df", "loc", "scale"), (2.6, 0.4, 1.7), half_lines(0.4, 1.0)),
    "laplace": (*by(dist.Laplace, "loc", "scale"), (0.4, 1.7), half_lines(0.4, 1.0)),
    "gumbel": (*by(dist.Gumbel, "loc", "scale"), (0.4, 1.7), half_lines(0.4, 1.0)),
    "weibull": (*by(dist.Weibull, "scale", "concentration"), (1.7, 2.4), POSITIVE),
    "exponential": (*by(dist.Exponential, "rate"), (1.7,), POSITIVE),
    "gamma": (*by(dist.Gamma, "concentration", "rate"), (2.4, 1.7), POSITIVE),
    "chi2": (*by(dist.Chi2, "df"), (3.4,), POSITIVE),
    "inverse gamma": (*by(dist.InverseGamma, "concentration", "rate"), (2.4, 1.7), POSITIVE),
    "lognormal": (*by(dist.LogNormal, "loc", "scale"), (0.4, 0.7), POSITIVE),
    "beta": (
        *by(dist.Beta, "concentration1", "concentration0"),
        (2.4, 1.7),
        interval(0.0, 1.0),
    ),
    "continuous bernoulli, probs": (
        *by(dist.ContinuousBernoulli, "probs"),
        (0.3,),
        interval(0.0, 1.0),
    ),
    "continuous bernoulli, logits": (
        *by(dist.ContinuousBernoulli, "logits"),
        (0.9,),
        interval(0.0, 1.0),
    ),
    "von mises": (von_mises, ("loc", "concentration"), (0.4, 1.7), interval(-math.pi, math.pi)),
    "poisson": (*by(dist.Poisson, "rate"), (3.4,), count_grid(80)),
    "bernoulli, probs": (*by(dist.Bernoulli, "probs"), (0.3,), count_grid(2)),
    "bernoulli, logits": (*by(dist.Bernoulli, "logits"), (0.9,), count_grid(2)),
    "binomial, probs": (*by(dist.Binomial, "probs", total_count=7), (0.3,), count_grid(8)),
    "binomial, logits": (*by(dist.Binomial, "logits", total_count=7), (0.9,), count_grid(8)),
    "geometric, probs": (*by(dist.Geometric, "probs"), (0.3,), count_grid(200)),
    "geometric, logits": (*by(dist.Geometric, "logits"), (-0.9,), count_grid(200)),
    "negative binomial, probs": (
        *by(dist.NegativeBinomial, "total_count", "probs"),
        (2.4, 0.3),
        count_grid(200),
    ),
    "negative binomial, logits": (
        *by(dist.NegativeBinomial, "total_count", "logits"),
        (2.4, 0.9),
        count_grid(400),
    ),
    "gamma-poisson": (*by(dist.GammaPoisson, "concentration", "rate"), (2.4, 0.7), count_grid(400)),
    "beta-binomial": (
        *by(dist.BetaBinomial, "concentration1", "concentration0", total_count=7),
        (2.4, 1.7),
        count_grid(8),
    ),
}


@pytest.mark.parametrize(("make", "names", "at", "rule"), UNIVARIATE.values(), ids=UNIVARIATE)
def test_univariate_families(make, names, at, rule):
    def log_density(theta, value):
        fn = make(*theta.unbind(-1))
        return type(fn).log_prob(without_checks(fn), value)

    expected = mean_of_squares(log_density, double(*at), *rule)
    # the exact von Mises has a density of its own, and so no closed form
    base = dist.VonMises(*double(*at)) if make is von_mises else base_of(make(*double(*at)))
    close(information(base, names), expected, 1e-8)
    for name, of in zip(names, expected.diagonal(), strict=True):
        close(information(base, [name]), [[of]], 1e-8)
    if len(names) > 1:  # in the order that was asked for
        close(information(base, names[::-1]), expected.flip(0, 1), 1e-8)


def without_checks(fn):
    fn._validate_args = False
    return fn


def test_every_closed_form_is_tested():
    multivariate = (
        dist.Dirichlet,
        dist.Categorical,
        dist.OneHotCategorical,
        dist.Multinomial,
        dist.MultivariateNormal,
        dist.DirichletMultinomial,  # in tests/posterior/test_cannot_draw.py
    )
    tested = {type(base_of(make(*double(*at)))) for make, _, at, _ in UNIVARIATE.values()}
    families = {parent for of in tested.union(multivariate) for parent in of.__mro__}
    assert set(CLOSED_FORMS) <= families


@pytest.mark.parametrize("size", [0.3, 1.0, 4.0, 50.0])
@pytest.mark.parametrize("probs", [0.01, 0.4, 0.95])
def test_the_total_count_of_a_negative_binomial(size, probs):
    def log_density(theta, value):
        return dist.NegativeBinomial(theta[:, 0], theta[:, 1], validate_args=False).log_prob(value)

    theta = double(size, probs)
    expected = mean_of_squares(log_density, theta, *count_grid(4000))
    found = information(dist.NegativeBinomial(*theta), ["total_count", "probs"])
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=0)


@pytest.mark.parametrize("size", [1e-3, 0.3, 7.0, 1e3, 1e5])
@pytest.mark.parametrize("probs", [1e-8, 1e-3, 0.5, 0.999])
def test_total_counts_of_any_size(size, probs):
    """The series sum over k of p^k B(k, r) / k, which is p/r 3F2(1, 1, 1; 2, r + 1; p)."""
    fn = dist.NegativeBinomial(*double(size, probs))
    expected = mpmath.mpf(probs) / size * mpmath.hyp3f2(1, 1, 1, 2, size + 1, probs)
    found = information(fn, ["total_count"]) / float(expected)
    close(found, [[1.0]], 1e-12)


@pytest.mark.parametrize("df", [0.5, 5.0, 39.9, 40.1, 300.0, 1e5])
def test_degrees_of_freedom_of_any_size(df):
    with mpmath.workdps(50):
        n = mpmath.mpf(df)
        trigammas = (mpmath.psi(1, n / 2) - mpmath.psi(1, (n + 1) / 2)) / 4
        expected = float(trigammas - (n + 5) / (2 * n * (n + 1) * (n + 3)))
    found = information(dist.StudentT(double(df), 0.0, 1.0), ["df"]) / expected
    close(found, [[[1.0]]], 1e-11)


@pytest.mark.parametrize("concentration", [1e-3, 3.0, 199.0, 201.0, 1e6])
def test_concentrations_of_any_size(concentration):
    with mpmath.workdps(60):
        k = mpmath.mpf(concentration)
        ratio = mpmath.besseli(1, k) / mpmath.besseli(0, k)
        expected = float(1 - ratio / k - ratio**2)
    found = information(dist.VonMises(*double(0.0, concentration)), ["concentration"]) / expected
    close(found, [[1.0]], 1e-10)


@pytest.mark.parametrize("logits", [0.0, 1e-4, 0.249, 0.251, -3.0])
def test_continuous_bernoullis_near_a_half(logits):
    """An exponential family's information in its natural parameter is its variance."""
    x, weights = interval(0.0, 1.0)
    weights = weights * torch.exp(logits * x)
    weights = weights / weights.sum()
    variance = (weights * (x - (weights * x).sum()) ** 2).sum()
    close(information(dist.ContinuousBernoulli(logits=double(logits)), ["logits"]), [[[variance]]])


# ------------------------------------------------------------------ vectors and matrices


CLASSES = double(0.4, -0.8, 1.1)


def one_of_three(name):
    """(One category's log density, the argument itself)."""
    if name == "logits":
        return lambda theta: theta.log_softmax(-1), CLASSES.log_softmax(0)
    return lambda theta: (theta / theta.sum(-1, keepdim=True)).log(), CLASSES.softmax(0)


@pytest.mark.parametrize("name", ["probs", "logits"])
def test_categories(name):
    log_probs, argument = one_of_three(name)
    once = torch.eye(3, dtype=torch.float64)
    expected = mean_of_squares(lambda t, v: (log_probs(t) * v).sum(-1), argument, once, double(1.0))
    for family in (dist.Categorical, dist.OneHotCategorical, dist.OneHotCategoricalStraightThrough):
        close(information(family(**{name: argument}), [name]), expected)
    fn = dist.Multinomial(3, **{name: argument})
    close(information(fn, [name]), 3 * expected)
    draws = torch.tensor([v for v in itertools.product(range(4), repeat=3) if sum(v) == 3]).double()
    orders = 6 / torch.exp(torch.lgamma(draws + 1).sum(-1))
    of_counts = mean_of_squares(lambda t, v: (log_probs(t) * v).sum(-1), argument, draws, orders)
    close(information(fn, [name]), of_counts)


def test_dirichlet():
    (u, wu), (v, wv) = interval(0.0, 1.0), interval(0.0, 1.0)
    first, second = u[:, None].expand(-1, len(v)), (1 - u)[:, None] * v
    x = torch.stack([first, second, 1 - first - second], -1).flatten(0, 1)
    weights = (wu[:, None] * wv * (1 - u)[:, None]).flatten()
    keep = (x > 0).all(-1)

    def log_density(theta, value):
        return dist.Dirichlet(theta, validate_args=False).log_prob(value)

    alpha = double(2.4, 1.7, 3.2)
    expected = mean_of_squares(log_density, alpha, x[keep], weights[keep])
    close(information(dist.Dirichlet(alpha), ["concentration"]), expected, 1e-8)


def gauss_hermite(fn, mean, covariance):
    """Nodes and weights that have moments of a normal distribution up to the ninth exactly, with
    its density divided out."""
    angle = torch.arange(1, 5, dtype=torch.float64).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(angle, 1) + torch.diag(angle, -1))
    n = len(mean)
    grid = double(*itertools.product(nodes.tolist(), repeat=n))
    weights = double(*itertools.product((vectors[0] ** 2).tolist(), repeat=n)).prod(-1)
    values = mean + grid @ torch.linalg.cholesky(covariance).T
    return values, weights / fn.log_prob(values).exp()


def normal_and_information(family, arguments):
    """(The family of these arguments, the mean of their scores' squares by Gauss-Hermite)."""
    names, parts = list(arguments), list(arguments.values())
    sizes = [part.numel() for part in parts]

    def made(theta):
        split = theta.split(sizes, -1)
        arguments = {
            name: piece.reshape(*theta.shape[:-1], *part.shape)
            for name, piece, part in zip(names, split, parts, strict=True)
        }
        return family(**arguments, validate_args=False)

    theta = torch.cat([part.reshape(-1) for part in parts])
    fn = made(theta)
    rule = gauss_hermite(fn, fn.mean, made(theta).covariance_matrix)
    return fn, mean_of_squares(lambda t, x: made(t).log_prob(x), theta, *rule)


def a_covariance(n):
    root = normals(n, n, seed=1)
    return root @ root.T + torch.eye(n, dtype=torch.float64)


MATRICES = {
    "covariance_matrix": lambda c: c,
    "precision_matrix": torch.linalg.inv,
    "scale_tril": torch.linalg.cholesky,
}


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("name", MATRICES)
def test_multivariate_normals(name, n):
    arguments = {"loc": normals(n), name: MATRICES[name](a_covariance(n))}
    fn, expected = normal_and_information(dist.MultivariateNormal, arguments)
    close(information(fn, ["loc", name]), expected)
    close(information(fn, ["loc"]), expected[:n, :n])
    close(information(fn, [name]), expected[n:, n:])
    assert list(own_arguments(fn)) == ["loc", name]


def test_low_rank_normals():
    arguments = {
        "loc": normals(3),
        "cov_factor": normals(3, 2, seed=1),
        "cov_diag": double(0.4, 1.0, 1.7),
    }
    fn, expected = normal_and_information(dist.LowRankMultivariateNormal, arguments)
    close(information(fn, list(arguments)), expected)
    close(information(fn, ["cov_diag"]), expected[9:, 9:])
    batch = fn.expand([2])
    close(information(batch, list(arguments)), expected.expand(2, -1, -1))


# ------------------------------------------------------------------ the same model, written twice


def pulled(make, theta):
    """The information in a model's own params, through the Jacobian of the arguments."""

    def arguments(theta):
        base = base_of(make(theta))
        given = own_arguments(base).values()
        return torch.cat([value.reshape(*base.batch_shape, -1) for value in given], -1)

    base = base_of(make(theta))
    jacobian = torch.func.jacrev(arguments)(theta)
    between = information(base, list(own_arguments(base)))
    return torch.einsum("...ia,...ij,...jb->ab", jacobian, between, jacobian)


def matrix(theta):
    """Some positive definite matrix [2, 2] of three numbers."""
    a, b, c = theta
    return torch.stack([a.exp(), b, b, c.exp() + 1]).reshape(2, 2)


def normal_by(name):
    return lambda theta: dist.MultivariateNormal(
        theta[:2], **{name: MATRICES[name](matrix(theta))}, validate_args=False
    )


SAME = {
    "bernoulli": [
        lambda t: dist.Bernoulli(logits=t),
        lambda t: dist.Bernoulli(probs=t.sigmoid()),
    ],
    "geometric": [
        lambda t: dist.Geometric(logits=t),
        lambda t: dist.Geometric(probs=t.sigmoid()),
    ],
    "continuous bernoulli": [
        lambda t: dist.ContinuousBernoulli(logits=t),
        lambda t: dist.ContinuousBernoulli(probs=t.sigmoid()),
    ],
    "categorical": [
        lambda t: dist.Categorical(logits=t),
        lambda t: dist.Categorical(probs=t.exp()),
        lambda t: dist.OneHotCategorical(logits=t),
        lambda t: dist.Multinomial(1, probs=t.softmax(0)),
    ],
    "gamma-poisson": [
        lambda t: dist.GammaPoisson(t[0].exp(), t[1].exp()),
        lambda t: dist.NegativeBinomial(t[0].exp(), logits=-t[1]),
        lambda t: dist.NegativeBinomial(t[0].exp(), probs=1 / (1 + t[1].exp())),
    ],
    "chi2": [
        lambda t: dist.Chi2(t[0].exp()),
        lambda t: dist.Gamma(t[0].exp() / 2, 0.5),
        lambda t: dist.InverseGamma(t[0].exp() / 2, 0.5),
    ],
    "weibull": [
        lambda t: dist.Weibull(t[0].exp(), t[1].exp()),
        lambda t: dist.TransformedDistribution(
            dist.Gumbel(-t[0], (-t[1]).exp()),
            [dist.transforms.AffineTransform(0.0, -1.0), dist.transforms.ExpTransform()],
        ),
    ],
    "beta": [
        lambda t: dist.Beta(t[0].exp(), t[1].exp()),
        lambda t: dist.Dirichlet(t[:2].exp()),
    ],
    "student": [
        lambda t: dist.StudentT(1.0, t[0], t[1].exp()),
        lambda t: dist.Cauchy(t[0], t[1].exp()),
    ],
    "multivariate normal": [normal_by(name) for name in MATRICES],
}


@pytest.mark.parametrize("models", SAME.values(), ids=SAME)
def test_information_does_not_depend_on_how_a_model_is_written(models):
    theta = double(0.4, -0.3, 0.9)
    first, *others = [pulled(model, theta) for model in models]
    assert first.abs().max() > 0.01
    for other in others:
        close(other, first, 1e-10)


# ------------------------------------------------------------------ finite supports


def test_enumeration_where_elements_have_other_supports():
    a, b, n = double(0.7, 2.4), double(1.2, 1.7), double(5.0, 2.0)
    fn = dist.BetaBinomial(a, b, n)
    found = information(fn, ["concentration1", "concentration0"])
    for i in range(2):
        alone = dist.BetaBinomial(a[i], b[i], n[i])
        close(found[i], information(alone, ["concentration1", "concentration0"]))
        assert found[i].diagonal().min() > 0.01


def test_ordered_logistic():
    predictor, cutpoints = double(0.3, -0.4), double(-1.0, 0.2, 1.1)
    fn = dist.OrderedLogistic(predictor, cutpoints)
    assert {name: a.shape for name, a in own_arguments(fn).items()} == {
        "predictor": (2,),
        "cutpoints": (2, 3),
    }

    def log_density(theta, value):
        edges = torch.sigmoid(theta[:, 1:] - theta[:, :1])
        ones = torch.ones_like(edges[:, :1])
        probs = torch.diff(torch.cat([0 * ones, edges, ones], -1), dim=-1)
        return probs.log().gather(-1, value.long()[:, None])[:, 0]

    found = information(fn, ["predictor", "cutpoints"])
    for i in range(2):
        theta = torch.cat([predictor[i : i + 1], cutpoints])
        close(found[i], mean_of_squares(log_density, theta, *count_grid(4)))


# ------------------------------------------------------------------ shapes and wrappers


def test_batches():
    loc, scale = normals(2, 3), normals(2, 3, seed=1).exp()
    found = information(dist.Normal(loc, scale), ["loc", "scale"])
    assert found.shape == (2, 3, 2, 2)
    for i, j in itertools.product(range(2), range(3)):
        alone = dist.Normal(loc[i, j], scale[i, j])
        close(found[i, j], information(alone, ["loc", "scale"]))
    assert information(dist.Normal(loc, scale), []).shape == (2, 3, 0, 0)
    alpha = normals(4, 2, 3).exp()
    assert information(dist.Dirichlet(alpha), ["concentration"]).shape == (4, 2, 3, 3)
    close(
        information(dist.Dirichlet(alpha), ["concentration"])[3, 1],
        information(dist.Dirichlet(alpha[3, 1]), ["concentration"]),
    )
    student = dist.StudentT(3.0, loc[0], 1.5)
    assert information(student, ["df", "scale"]).shape == (3, 2, 2)
    shared = dist.MultivariateNormal(normals(5, 2), scale_tril=a_covariance(2).tril())
    assert information(shared, ["loc", "scale_tril"]).shape == (5, 6, 6)


def test_arguments_are_over_the_batch_and_keep_their_graph():
    scale = torch.tensor(2.0, requires_grad=True)
    fn = dist.Normal(torch.zeros(2, 3), scale).to_event(1)
    arguments = own_arguments(base_of(fn))
    assert list(arguments) == ["loc", "scale"]
    assert arguments["scale"].shape == (2, 3)
    (gradient,) = torch.autograd.grad(arguments["scale"].sum(), scale)
    assert gradient == 6
    found = information(base_of(fn), ["scale"])
    assert not found.requires_grad
    assert found.dtype == torch.float32
    close(found, torch.full((2, 3, 1, 1), 0.5))


@pytest.mark.parametrize("fn", [dist.StudentT(1e3, 0.0, 1.0), dist.Gamma(1e4, 1.0)])
def test_float32_has_the_digits_of_float64(fn):
    names = [name for name in own_arguments(fn) if name != "loc"]
    twice = type(fn)(**{name: value.double() for name, value in own_arguments(fn).items()})
    found, expected = information(fn, names), information(twice, names)
    assert (found.dtype, expected.dtype) == (torch.float32, torch.float64)
    torch.testing.assert_close(found, expected.float(), rtol=1e-6, atol=0)


AFFINE, EXP = dist.transforms.AffineTransform, dist.transforms.ExpTransform
LOC = double(0.1, 0.2, 0.3)
WRAPPED = {
    "independent": (dist.Normal(LOC, 2.0).to_event(1), (3,)),
    "torch's independent": (
        torch.distributions.Independent(torch.distributions.Normal(LOC, 2.0), 1),
        (3,),
    ),
    "expanded": (dist.Normal(LOC, 2.0).expand([4, 3]).to_event(1), (4, 3)),
    "expanded by Pyro": (dist.ExpandedDistribution(dist.Normal(LOC, 2.0), [4, 3]), (4, 3)),
    "expanded around to_event": (
        dist.ExpandedDistribution(dist.Normal(LOC, 2.0).to_event(1), [4]),
        (4, 3),
    ),
    "masked": (dist.Normal(LOC, 2.0).mask(torch.tensor([True, False, True])), (3,)),
    "lognormal": (dist.LogNormal(LOC, 2.0), (3,)),
    "transformed": (dist.TransformedDistribution(dist.Normal(LOC, 2.0), [EXP()]), (3,)),
    "composed": (
        dist.TransformedDistribution(
            dist.Normal(LOC, 2.0),
            dist.transforms.ComposeTransform([EXP(), AFFINE(double(1.0), double(3.0))]).inv.inv,
        ),
        (3,),
    ),
    "transformed to a larger batch": (
        dist.TransformedDistribution(dist.Normal(LOC, 2.0), [AFFINE(torch.zeros(4, 3), 3.0)]),
        (4, 3),
    ),
    "independent transform": (
        dist.TransformedDistribution(
            dist.Normal(LOC, 2.0), [dist.transforms.IndependentTransform(EXP(), 1)]
        ),
        (3,),
    ),
    "stick-breaking": (dist.LogisticNormal(LOC, torch.full_like(LOC, 2.0)), (3,)),
    "transformed as a matrix": (
        dist.TransformedDistribution(
            dist.Normal(LOC[0], 2.0).expand([2, 2]).to_event(2),
            [dist.transforms.CholeskyTransform()],
        ),
        (2, 2),
    ),
}


@pytest.mark.parametrize(("fn", "shape"), WRAPPED.values(), ids=WRAPPED)
def test_wrappers(fn, shape):
    base = base_of(fn)
    assert isinstance(base, torch.distributions.Normal)
    assert base.batch_shape == shape
    expected = torch.diag(double(0.25, 0.5))
    close(information(base, ["loc", "scale"]), expected.expand(*shape, 2, 2))
    for name, value in own_arguments(base).items():
        assert value.shape == shape, name


def test_masks():
    mask = torch.tensor([True, False])
    inner = torch.tensor([[True, True, False], [True, False, True]])
    fn = dist.Normal(torch.zeros(2, 3), 1.0).mask(inner).to_event(1).mask(mask)
    assert torch.equal(mask_of(fn), mask[:, None] & inner)
    expanded = dist.ExpandedDistribution(fn, [4, 2])
    assert mask_of(expanded).expand(base_of(expanded).batch_shape).shape == (4, 2, 3)
    assert torch.equal(mask_of(dist.Normal(0.0, 1.0)), torch.tensor(True))
    assert not mask_of(dist.Normal(torch.zeros(3), 1.0).mask(False).to_event(1))


def test_it_goes_through_vmap_and_functional_derivatives():
    """A fixed transform too, which is tried out."""

    def scaled(x):
        fn = dist.TransformedDistribution(dist.Normal(x, x**2).to_event(1), [EXP()]).mask(True)
        return own_arguments(base_of(fn))["scale"]

    x = normals(4, 3)
    found = torch.vmap(torch.func.jacrev(scaled))(x)
    close(found, torch.diag_embed(2 * x))


def test_arguments_of_one_row_may_stand_beside_shared_ones():
    """As in rows' own derivatives, where a shared argument comes first."""
    shape, rates = torch.tensor(1.7), normals(4).exp()

    def of_row(rate):
        return information(dist.Gamma(shape, rate), ["concentration", "rate"])

    close(torch.vmap(of_row)(rates), torch.stack([of_row(rate) for rate in rates]))


# ------------------------------------------------------------------ which arguments are the user's


GIVEN = {
    "bernoulli": (lambda **a: dist.Bernoulli(**a), ("probs", "logits")),
    "binomial": (lambda **a: dist.Binomial(5, **a), ("probs", "logits")),
    "negative binomial": (lambda **a: dist.NegativeBinomial(5, **a), ("probs", "logits")),
    "categorical": (lambda **a: dist.Categorical(**a), ("probs", "logits")),
    "one-hot": (lambda **a: dist.OneHotCategorical(**a), ("probs", "logits")),
    "multinomial": (lambda **a: dist.Multinomial(5, **a), ("probs", "logits")),
}


@pytest.mark.parametrize(("make", "names"), GIVEN.values(), ids=GIVEN)
def test_what_was_computed_from_an_argument_is_not_one(make, names):
    for name in names:
        argument = double(0.2, 0.3, 0.5).requires_grad_()
        fn = make(**{name: argument})
        before = set(own_arguments(fn))
        assert {name} == before & set(names)
        read = [getattr(fn, each) for each in names]
        assert all(value.requires_grad for value in read)
        assert set(own_arguments(fn)) == before
        assert own_arguments(fn)[name] is getattr(fn, name)
        again = own_arguments(fn.expand((4, *fn.batch_shape)))  # either is right
        assert len(again.keys() & set(names)) == 1


@pytest.mark.parametrize("name", MATRICES)
def test_any_matrix_that_was_read_has_the_same_information(name):
    def read(theta):
        fn = normal_by(name)(theta)
        for each in MATRICES:
            getattr(fn, each)
        return fn

    theta = double(0.4, -0.3, 0.9)
    close(pulled(read, theta), pulled(normal_by(name), theta), 1e-10)


def test_families_with_other_arguments_than_the_one_they_derive_from():
    assert list(own_arguments(dist.Chi2(double(3.0)))) == ["df"]
    assert list(own_arguments(base_of(dist.HalfNormal(double(3.0))))) == ["scale"]
    assert list(own_arguments(dist.Delta(torch.zeros(2, 3), event_dim=1))) == ["v", "log_density"]
    assert own_arguments(dist.Delta(torch.zeros(2, 3), event_dim=1))["v"].shape == (2, 3)
    omt = dist.OMTMultivariateNormal(normals(2), a_covariance(2).tril())
    assert own_arguments(omt)["loc"].shape == (2,)
    assert own_arguments(normal_mixture()) == {}


# ------------------------------------------------------------------ none


def normal_mixture():
    return dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), dist.Normal(torch.zeros(2), 1.0))


class Doubled(dist.Normal):
    """A density of its own."""

    def log_prob(self, value):
        return 2 * super().log_prob(value)


class Steep(dist.BetaBinomial):
    """Makes other arguments of those that it is given."""

    def __init__(self, concentration1, concentration0, total_count=1, validate_args=None):
        super().__init__(concentration1**2, concentration0, total_count, validate_args)


REFUSED = {
    "Uniform": (dist.Uniform(*double(0.0, 1.0)), ["low", "high"]),
    "Pareto": (torch.distributions.Pareto(*double(1.0, 2.0)), ["alpha", "scale"]),
    "MixtureSameFamily": (normal_mixture(), []),
    "ZeroInflatedPoisson": (dist.ZeroInflatedPoisson(double(2.0), gate=double(0.2)), ["gate"]),
    "Delta": (dist.Delta(double(2.0)), ["v"]),
    "Unit": (dist.Unit(double(2.0)), ["log_factor"]),
    "Kumaraswamy": (dist.Kumaraswamy(*double(1.0, 2.0)), ["concentration1"]),
    "Logistic": (dist.Logistic(*double(1.0, 2.0)), ["loc"]),
    "Binomial": (dist.Binomial(double(3.0), double(0.2)), ["total_count"]),
    "BetaBinomial": (dist.BetaBinomial(*double(1.0, 2.0, 3.0)), ["total_count"]),
    "BetaBinomial of many": (dist.BetaBinomial(*double(1.0, 2.0, 2e4)), ["concentration1"]),
    "Doubled": (Doubled(*double(0.0, 1.0)), ["loc"]),
    "Steep": (Steep(*double(2.0, 1.0, 3.0)), ["concentration1"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_no_information(name):
    fn, names = REFUSED[name]
    with pytest.raises(NoInformation, match=f"^{type(fn).__name__}$"):
        information(fn, names)


def test_transforms_that_are_not_fixed_or_lose_something():
    normal, free = dist.Normal(torch.zeros(3), 2.0), torch.ones((), requires_grad=True)
    moved = dist.transforms.ComposeTransform([EXP(), AFFINE(0.0, free)])
    module = dist.transforms.affine_autoregressive(3)
    closure = dist.transforms.conditional_planar(3, 2).condition(torch.ones(2))
    for transform in (
        AFFINE(free, 1.0),
        moved,
        moved.inv,
        dist.transforms.IndependentTransform(AFFINE(free, 1.0), 1),
        module,
        closure,
        dist.transforms.AbsTransform(),
    ):
        with pytest.raises(NoInformation, match=r"^TransformedDistribution$"):
            base_of(dist.TransformedDistribution(normal, [transform]))
    with pytest.raises(NoInformation, match=r"^FoldedDistribution$"):
        base_of(dist.FoldedDistribution(normal))
    with pytest.raises(NoInformation, match=r"^Kumaraswamy$"):
        base_of(dist.Kumaraswamy(free, double(2.0)))
    with pytest.raises(NoInformation, match=r"^NoExpand$"):
        base_of(dist.ExpandedDistribution(NoExpand(), [3]))


class NoExpand(dist.TorchDistribution):
    """Of a shape that it cannot change."""


def test_pareto_of_a_fixed_scale_is_an_exponential():
    alpha = double(1.7)
    base = base_of(torch.distributions.Pareto(double(2.0), alpha))
    close(information(base, ["rate"]), [[[1 / 1.7**2]]])
    assert own_arguments(base)["rate"].shape == (1,)
