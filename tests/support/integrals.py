"""Models with local latents, and their exact log marginals: closed forms, and dense grids."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from torch.nn.functional import logsigmoid

from pyro_scale.core import rows
from pyro_scale.data.sources import TensorData
from pyro_scale.marginal.anchor import find_modes
from pyro_scale.marginal.grouped import Grouped
from pyro_scale.marginal.grouped_data import open_grouped
from pyro_scale.marginal.integrated import Integrated, column_of
from pyro_scale.marginal.local_sites import recognize
from pyro_scale.marginal.summed import _unit_model, sum_out
from pyro_scale.model.log_posterior import LogPosterior


def source_of(data):
    """All rows, or all units of groups, as `sum_out` takes them."""
    if isinstance(data, Grouped):
        return open_grouped(data, None)
    return TensorData(data, rows.count(data))


class Integral:
    """A model with its local latents summed out, its nodes placed at values of the globals.

    Args:
        model: a Pyro model.
        data: its arguments, or `Grouped`.
        at: constrained values of the globals, by site.
    """

    def __init__(self, model, data, at):
        self.source = source_of(data)
        self.units = self.source.arguments
        unit_model, example = _unit_model(model, self.source)
        self.local = recognize(unit_model, example, 0)
        self.at, members = at, self.local.model.members(self.units).count
        start = torch.zeros(members, self.local.num_dims)
        modes, _, _ = find_modes(self.local, at, self.units, start)
        self.modes = column_of(modes, rows.count(self.units))

    def log_marginal(self, values, count):
        """log p(data | globals) with `count` nodes a dimension: of every row, or of every group in
        the order of labels."""
        model = Integrated(self.local, count, is_far=True)
        around = model.gaussians(values, self.units, self.modes)
        result = model.log_marginal(values, self.units, around)
        members = getattr(self.source, "members", None)
        return result if members is None else result[members]

    def errors(self, truth, values, count):
        """(Largest error of a member's log marginal; largest error of the gradient of their sum
        with respect to constrained globals, relative to the largest element of the truth's)."""
        own = self.log_marginal(values, count)
        true = truth(**values)
        assert own.shape == true.shape
        slopes = torch.func.grad(lambda v: self.log_marginal(v, count).sum())(values)
        true_slopes = torch.func.grad(lambda v: truth(**v).sum())(values)
        largest = max(float(slope.abs().max()) for slope in true_slopes.values())
        error = max(float((slopes[n] - true_slopes[n]).abs().max()) for n in values)
        return float((own - true).abs().max()), error / largest


class Searched:
    """A model with its local latents summed out, its nodes placed as in a run.

    Args:
        model: a Pyro model.
        data: its arguments, or `Grouped`.
    """

    def __init__(self, model, data):
        source = source_of(data)
        summed = sum_out(LogPosterior(model, source.num_data), source, 0)
        self.anchor, self.arguments = summed.anchor, summed.data.arguments
        self.num_units = rows.count(self.arguments)

    def log_posterior(self, count=None):
        """The integrated log posterior with `count` nodes a dimension; as in a run by default."""
        local = self.anchor.model.local
        model = self.anchor.model if count is None else Integrated(local, count, is_far=True)
        log_posterior = LogPosterior(model, self.num_units)
        log_posterior.prepare(self.arguments)
        return log_posterior

    def around(self, radius, seed=1):
        """A position some posterior sds away from the anchor, in a random direction."""
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(self.anchor.layout.size, generator=generator)
        return self.anchor.gaussian.sample(radius * noise / noise.norm())

    def errors(self, truth, position, count=None):
        """(Error of the log marginal of all data; of its gradient with respect to unconstrained
        globals, `[D]`, in nats for a posterior sd of each)."""
        log_posterior = self.log_posterior(count)

        def own(position):
            params = self.anchor.layout.unflatten(position)
            return log_posterior(params, self.arguments).log_lik.sum()

        def true(position):
            params = self.anchor.layout.unflatten(position)
            return truth(**log_posterior.constrain(params)).sum()

        error = float(own(position) - true(position))
        slope = torch.func.grad(own)(position) - torch.func.grad(true)(position)
        return error, slope * self.sds

    @property
    def sds(self):
        """Posterior sds of the globals at the anchor, `[D]`."""
        unit = torch.eye(self.anchor.layout.size)
        root = torch.stack([self.anchor.gaussian.sample(row) for row in unit])
        return (root - self.anchor.gaussian.sample(0 * unit[0])).square().sum(0).sqrt()


@dataclass(frozen=True)
class Case:
    """A model with local latents.

    Attributes:
        model: the Pyro model.
        data: its arguments, or `Grouped`.
        at: constrained values of the globals, by site, near the posterior's mode.
        truth: function of constrained globals to the log marginal of every row or group.
    """

    model: Any
    data: Any
    at: dict[str, torch.Tensor]
    truth: Any

    def away(self, factor, shift):
        """Other values of the globals: all that are positive times a factor, the others moved."""
        return {
            name: value * factor if name in ("tau", "s", "a", "t") else value + shift
            for name, value in self.at.items()
        }


# ------------------------------------------------------------------ truth


def over_grid(log_joint, end=12.0, count=2001):
    """log of the integral over u of exp(log_joint(u)) times the standard normal's density, by the
    trapezoid rule.

    Args:
        log_joint: function from u `[count, 1]` to log densities `[count, n]`.
        end: the grid is from -end to end.
    """
    u = torch.linspace(-end, end, count)[:, None]
    log_normal = -(u**2) / 2 - math.log(2 * math.pi) / 2
    return torch.logsumexp(log_joint(u) + log_normal, 0) + math.log(2 * end / (count - 1))


def over_square(log_joint, end=8.0, count=121):
    """The same over two dimensions: log_joint takes two tensors `[count**2, 1]`."""
    line = torch.linspace(-end, end, count)
    u, w = (part.reshape(-1, 1) for part in torch.meshgrid(line, line, indexing="ij"))
    log_normal = -(u**2 + w**2) / 2 - math.log(2 * math.pi)
    return torch.logsumexp(log_joint(u, w) + log_normal, 0) + 2 * math.log(2 * end / (count - 1))


def by_group(values, group, num_groups):
    """Sums over the rows of each group, `[..., num_groups]`."""
    zeros = values.new_zeros(*values.shape[:-1], num_groups)
    return zeros.index_add(-1, group, values)


def groups(count, least, most):
    """Labels of rows in groups of random lengths, shuffled."""
    return of_lengths(torch.randint(least, most + 1, (count,)))


def of_lengths(lengths):
    """Labels of rows in groups of these lengths, shuffled."""
    group = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return group[torch.randperm(len(group))]


def _coefficients(count=2):
    return pyro.sample("b", dist.Normal(torch.zeros(count), 2.5).to_event(1))


def _scale(name="tau"):
    return pyro.sample(name, dist.LogNormal(-0.5, 1.0))


def tensors(**values):
    return {name: torch.tensor(value) for name, value in values.items()}


# ------------------------------------------------------------------ Gaussian models


def eight_schools():
    y = torch.tensor([28.0, 8, -3, 7, -1, 1, 18, 12])
    sd = torch.tensor([15.0, 10, 16, 11, 9, 11, 10, 18])

    def model(y, sd):
        mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = pyro.sample("tau", dist.HalfNormal(5.0))
        with pyro.plate("schools", len(y)):
            theta = pyro.sample("theta", dist.Normal(mu, tau))
            pyro.sample("y", dist.Normal(theta, sd), obs=y)

    def truth(mu, tau):
        return dist.Normal(mu, (tau**2 + sd**2).sqrt()).log_prob(y)

    return Case(model, (y, sd), tensors(mu=4.0, tau=2.0), truth)


def intercepts(count=40, tau=0.4, lengths=None):
    """Gaussian rows in groups with random intercepts, as in radon."""
    torch.manual_seed(0)
    group = groups(count, 1, 12) if lengths is None else of_lengths(lengths)
    x = torch.randn(len(group))
    y = 1 + 0.5 * x + tau * torch.randn(count)[group] + 0.8 * torch.randn(len(group))

    def model(x, group, y=None):
        b, tau, s = _coefficients(), _scale(), _scale("s")
        with pyro.plate("groups", count):
            z = pyro.sample("z", dist.Normal(0.0, tau))
        with pyro.plate("rows", len(x)):
            return pyro.sample("y", dist.Normal(b[0] + b[1] * x + z[group], s), obs=y)

    def truth(b, tau, s):
        """By the inverse and determinant of s^2 I + tau^2 1 1'."""
        rest = y - b[0] - b[1] * x
        n, total, square = (
            by_group(value, group, count) for value in (torch.ones_like(x), rest, rest**2)
        )
        log_det = (n - 1) * (s**2).log() + (s**2 + n * tau**2).log()
        form = (square - total**2 * tau**2 / (s**2 + n * tau**2)) / s**2
        return -(n * math.log(2 * math.pi) + log_det + form) / 2

    at = {"b": torch.tensor([1.0, 0.5]), **tensors(tau=max(tau, 0.1), s=0.8)}
    return Case(model, Grouped((x, group, y), by=1), at, truth)


def slopes():
    """Random intercepts and slopes with a correlation."""
    torch.manual_seed(0)
    count = 30
    group = groups(count, 2, 9)
    x, z = torch.randn(len(group)), torch.randn(count, 2) * torch.tensor([0.7, 0.3])
    y = 1 + 0.5 * x + z[group, 0] + z[group, 1] * x + 0.6 * torch.randn(len(group))

    def model(x, group, y):
        b, s = _coefficients(), _scale("s")
        tau = pyro.sample("tau", dist.LogNormal(torch.zeros(2), 1.0).to_event(1))
        root = pyro.sample("root", dist.LKJCholesky(2, 2.0)).tril()
        with pyro.plate("groups", count):
            fn = dist.MultivariateNormal(torch.zeros(2), scale_tril=tau[:, None] * root)
            z = pyro.sample("z", fn)
        with pyro.plate("rows", len(x)):
            mean = b[0] + b[1] * x + z[group, 0] + z[group, 1] * x
            pyro.sample("y", dist.Normal(mean, s), obs=y)

    def truth(b, tau, s, root):
        root, result = root.tril(), []
        for member in range(count):
            own = group == member
            design = torch.stack([torch.ones(int(own.sum())), x[own]], 1)
            half = design @ (tau[:, None] * root)
            fn = dist.MultivariateNormal(design @ b, half @ half.mT + s**2 * torch.eye(len(half)))
            result.append(fn.log_prob(y[own]))
        return torch.stack(result)

    at = {
        "b": torch.tensor([1.0, 0.5]),
        "tau": torch.tensor([0.7, 0.3]),
        "root": torch.tensor([[1.0, 0.0], [0.6, 0.8]]),
        "s": torch.tensor(0.6),
    }
    return Case(model, Grouped((x, group, y), by=1), at, truth)


def errors_in_variables():
    torch.manual_seed(0)
    true = 0.5 + 1.2 * torch.randn(200)
    x, y = true + 0.6 * torch.randn(200), 1 - 0.7 * true + 0.5 * torch.randn(200)

    def model(x, y):
        m, t = pyro.sample("m", dist.Normal(0.0, 2.0)), _scale("t")
        b, s = _coefficients(), _scale("s")
        with pyro.plate("rows", len(y)):
            x_true = pyro.sample("x_true", dist.Normal(m, t))
            pyro.sample("x", dist.Normal(x_true, 0.6), obs=x)
            pyro.sample("y", dist.Normal(b[0] + b[1] * x_true, s), obs=y)

    def truth(m, t, b, s):
        mean, off = torch.stack([m, b[0] + b[1] * m]), b[1] * t**2
        rows = torch.stack([t**2 + 0.36, off]), torch.stack([off, b[1] ** 2 * t**2 + s**2])
        fn = dist.MultivariateNormal(mean, torch.stack(rows))
        return fn.log_prob(torch.stack([x, y], 1))

    at = {"b": torch.tensor([1.0, -0.7]), **tensors(m=0.5, t=1.2, s=0.5)}
    return Case(model, (x, y), at, truth)


# ------------------------------------------------------------------ counts and coins


def poisson():
    """An effect of every row."""
    torch.manual_seed(0)
    x = torch.randn(200)
    y = torch.poisson((0.5 + 0.5 * x + 0.7 * torch.randn(200)).exp())

    def model(x, y):
        b, tau = _coefficients(), _scale()
        with pyro.plate("rows", len(x)):
            z = pyro.sample("z", dist.Normal(0.0, tau))
            pyro.sample("y", dist.Poisson((b[0] + b[1] * x + z).exp()), obs=y)

    def truth(b, tau):
        return over_grid(lambda u: dist.Poisson((b[0] + b[1] * x + tau * u).exp()).log_prob(y))

    return Case(model, (x, y), {"b": torch.tensor([0.5, 0.5]), **tensors(tau=0.7)}, truth)


def logistic():
    torch.manual_seed(0)
    count = 100
    group = groups(count, 2, 5)
    x = torch.randn(len(group))
    y = torch.bernoulli(torch.sigmoid(0.5 + x + 1.2 * torch.randn(count)[group]))

    def model(x, group, y):
        b, tau = _coefficients(), _scale()
        with pyro.plate("groups", count):
            z = pyro.sample("z", dist.Normal(0.0, tau))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Bernoulli(logits=b[0] + b[1] * x + z[group]), obs=y)

    def truth(b, tau):
        def log_lik(u):
            fn = dist.Bernoulli(logits=b[0] + b[1] * x + tau * u)
            return by_group(fn.log_prob(y), group, count)

        return over_grid(log_lik)

    at = {"b": torch.tensor([0.5, 1.0]), **tensors(tau=1.2)}
    return Case(model, Grouped((x, group, y), by=1), at, truth)


def item_response():
    """2PL: persons are local, items global."""
    torch.manual_seed(0)
    slope, place = torch.rand(6) + 0.7, torch.randn(6)
    y = torch.bernoulli(torch.sigmoid(slope * (torch.randn(200, 1) - place)))

    def model(y):
        a = pyro.sample("a", dist.LogNormal(torch.zeros(6), 0.5).to_event(1))
        b = pyro.sample("b", dist.Normal(torch.zeros(6), 1.0).to_event(1))
        with pyro.plate("persons", len(y)):
            theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
            logits = a * (theta[:, None] - b)
            pyro.sample("y", dist.Bernoulli(logits=logits).to_event(1), obs=y)

    def truth(a, b):
        return over_grid(
            lambda u: dist.Bernoulli(logits=a * (u[..., None] - b)).log_prob(y).sum(-1)
        )

    return Case(model, (y,), {"a": slope, "b": place}, truth)


def gamma():
    """Gamma effects of Poisson rows: a negative binomial."""
    torch.manual_seed(0)
    x = torch.randn(200)
    y = torch.poisson((0.5 + 0.5 * x).exp() * dist.Gamma(3.0, 3.0).sample((200,)))

    def model(x, y):
        b, a = _coefficients(), _scale("a")
        with pyro.plate("rows", len(x)):
            z = pyro.sample("z", dist.Gamma(a, a))
            pyro.sample("y", dist.Poisson((b[0] + b[1] * x).exp() * z), obs=y)

    def truth(b, a):
        mean = (b[0] + b[1] * x).exp()
        return dist.NegativeBinomial(a, mean / (mean + a)).log_prob(y)

    return Case(model, (x, y), {"b": torch.tensor([0.5, 0.5]), **tensors(a=3.0)}, truth)


def beta():
    """Beta effects of binomial rows: a beta-binomial."""
    torch.manual_seed(0)
    trials = torch.full((100,), 10.0)
    y = dist.Binomial(10, dist.Beta(2.0, 4.0).sample((100,))).sample()

    def model(trials, y):
        a, t = _scale("a"), _scale("t")
        with pyro.plate("rows", len(y)):
            p = pyro.sample("p", dist.Beta(a, t))
            pyro.sample("y", dist.Binomial(trials, p), obs=y)

    def truth(a, t):
        return dist.BetaBinomial(a, t, trials).log_prob(y)

    return Case(model, (trials, y), tensors(a=2.0, t=4.0), truth)


def student():
    """Student t effects of Poisson rows: the tails are not a Gaussian's."""
    torch.manual_seed(0)
    y = torch.poisson((1 + 0.5 * dist.StudentT(4.0, 0.0, 1.0).sample((150,))).exp())

    def model(y):
        m, tau = pyro.sample("m", dist.Normal(0.0, 2.0)), _scale()
        with pyro.plate("rows", len(y)):
            z = pyro.sample("z", dist.StudentT(4.0, 0.0, tau))
            pyro.sample("y", dist.Poisson((m + z).exp()), obs=y)

    def truth(m, tau):
        def log_joint(v):  # z = tau sinh(v)
            z, fn = v.sinh(), dist.StudentT(4.0)
            log_normal = -(v**2) / 2 - math.log(2 * math.pi) / 2
            log_lik = dist.Poisson((m + tau * z).exp()).log_prob(y)
            return fn.log_prob(z) + v.cosh().log() + log_lik - log_normal

        return over_grid(log_joint, 6.0, 10001)

    return Case(model, (y,), tensors(m=1.0, tau=0.5), truth)


def two_latents():
    torch.manual_seed(0)
    count = 60
    group = groups(count, 3, 8)
    x, z = torch.randn(len(group)), torch.randn(count, 2) * torch.tensor([1.0, 0.5])
    y = torch.bernoulli(torch.sigmoid(0.5 + x + z[group, 0] + x * z[group, 1]))

    def model(x, group, y):
        b, tau, s = _coefficients(), _scale(), _scale("s")
        with pyro.plate("groups", count):
            z = pyro.sample("z", dist.Normal(0.0, tau))
            w = pyro.sample("w", dist.Normal(0.0, s))
        with pyro.plate("rows", len(x)):
            logits = b[0] + z[group] + (b[1] + w[group]) * x
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)

    def truth(b, tau, s):
        def log_lik(u, w):
            logits = b[0] + tau * u + (b[1] + s * w) * x
            return by_group(dist.Bernoulli(logits=logits).log_prob(y), group, count)

        return over_square(log_lik)

    at = {"b": torch.tensor([0.5, 1.0]), **tensors(tau=1.0, s=0.5)}
    return Case(model, Grouped((x, group, y), by=1), at, truth)


def chained():
    """A latent whose prior is another one."""
    torch.manual_seed(0)
    first = 0.5 * torch.randn(100)
    y, w = torch.poisson((1 + first + 0.5 * torch.randn(100)).exp()), torch.poisson(first.exp())

    def model(y, w):
        b, tau, s = _coefficients(), _scale(), _scale("s")
        with pyro.plate("rows", len(y)):
            z1 = pyro.sample("z1", dist.Normal(0.0, tau))
            z2 = pyro.sample("z2", dist.Normal(z1, s))
            pyro.sample("y", dist.Poisson((b[0] + z2).exp()), obs=y)
            pyro.sample("w", dist.Poisson((b[1] + z1).exp()), obs=w)

    def truth(b, tau, s):
        def log_lik(u, v):
            z1 = tau * u
            of_y = dist.Poisson((b[0] + z1 + s * v).exp()).log_prob(y)
            return of_y + dist.Poisson((b[1] + z1).exp()).log_prob(w)

        return over_square(log_lik)

    at = {"b": torch.tensor([1.0, 0.0]), **tensors(tau=0.5, s=0.5)}
    return Case(model, (y, w), at, truth)


def missing():
    """A covariate that some rows lack."""
    torch.manual_seed(0)
    x = 0.5 + 1.2 * torch.randn(200)
    y, seen = torch.bernoulli(torch.sigmoid(0.3 + x)), torch.rand(200) < 0.7
    x = torch.where(seen, x, 0.0)

    def model(x, seen, y):
        m, t, b = pyro.sample("m", dist.Normal(0.0, 2.0)), _scale("t"), _coefficients()
        with pyro.plate("rows", len(y)):
            x_missing = pyro.sample("x_missing", dist.Normal(m, t))
            with poutine.mask(mask=seen):
                pyro.sample("x", dist.Normal(m, t), obs=x)
            logits = b[0] + b[1] * torch.where(seen, x, x_missing)
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)

    def truth(m, t, b):
        known = dist.Normal(m, t).log_prob(x)
        known = known + dist.Bernoulli(logits=b[0] + b[1] * x).log_prob(y)
        summed = over_grid(lambda u: dist.Bernoulli(logits=b[0] + b[1] * (m + t * u)).log_prob(y))
        return torch.where(seen, known, summed)

    at = {"b": torch.tensor([0.3, 1.0]), **tensors(m=0.5, t=1.2)}
    return Case(model, (x, seen, y), at, truth)


def censored():
    """Survival times of groups with frailties, censored at 2: a mask, and a factor."""
    torch.manual_seed(0)
    count = 60
    group = groups(count, 2, 6)
    time = dist.Exponential((-0.5 + 0.7 * torch.randn(count)[group]).exp()).sample()
    late, time = time > 2, time.clamp(max=2.0)

    def model(time, late, group):
        b, tau = pyro.sample("b", dist.Normal(0.0, 2.0)), _scale()
        with pyro.plate("groups", count):
            z = pyro.sample("z", dist.Normal(0.0, tau))
        with pyro.plate("rows", len(time)):
            rate = (b + z[group]).exp()
            with poutine.mask(mask=~late):
                pyro.sample("time", dist.Exponential(rate), obs=time)
            with poutine.mask(mask=late):
                pyro.factor("late", -rate * time)

    def truth(b, tau):
        def log_lik(u):
            log_rate = b + tau * u
            return by_group(torch.where(late, 0.0, log_rate) - log_rate.exp() * time, group, count)

        return over_grid(log_lik)

    return Case(model, Grouped((time, late, group), by=2), tensors(b=-0.5, tau=0.7), truth)


# ------------------------------------------------------------------ discrete latents beside them


def zero_inflated():
    torch.manual_seed(0)
    x = torch.randn(200)
    y = torch.poisson((1 + 0.3 * x + 0.5 * torch.randn(200)).exp()) * (torch.rand(200) < 0.7)

    def model(x, y):
        b, tau, p = _coefficients(), _scale(), pyro.sample("p", dist.Beta(2.0, 2.0))
        with pyro.plate("rows", len(y)):
            z = pyro.sample("z", dist.Normal(0.0, tau))
            coin = pyro.sample("coin", dist.Bernoulli(p), infer={"enumerate": "parallel"})
            rate = torch.where(coin == 1, (b[0] + b[1] * x + z).exp(), torch.tensor(1e-6))
            pyro.sample("y", dist.Poisson(rate), obs=y)

    def truth(b, tau, p):
        zero = (1 - p).log() + dist.Poisson(torch.tensor(1e-6)).log_prob(y)

        def log_lik(u):
            count = dist.Poisson((b[0] + b[1] * x + tau * u).exp()).log_prob(y)
            return torch.logaddexp(p.log() + count, zero)

        return over_grid(log_lik)

    at = {"b": torch.tensor([1.0, 0.3]), **tensors(tau=0.5, p=0.7)}
    return Case(model, (x, y), at, truth)


def occupancy():
    """Five visits of each site, which may be empty; how well it is seen differs by site."""
    torch.manual_seed(0)
    x = torch.randn(150)
    occupied = torch.bernoulli(torch.sigmoid(0.5 + x))[:, None]
    y = torch.bernoulli(torch.sigmoid(-0.3 + 0.8 * torch.randn(150, 1)) * occupied.expand(-1, 5))

    def model(x, y):
        b, m, tau = _coefficients(), pyro.sample("m", dist.Normal(0.0, 2.0)), _scale()
        with pyro.plate("sites", len(y)):
            z = pyro.sample("z", dist.Normal(0.0, tau))
            coin = dist.Bernoulli(logits=b[0] + b[1] * x)
            is_there = pyro.sample("is_there", coin, infer={"enumerate": "parallel"})
            p = torch.sigmoid(m + z) * is_there.clamp(min=1e-6)
            visits = dist.Bernoulli(p[..., None].expand(*p.shape, 5)).to_event(1)
            pyro.sample("y", visits, obs=y)

    def truth(b, m, tau):
        logits = b[0] + b[1] * x

        def log_lik(u):
            p = torch.sigmoid(m + tau * u)[..., None]
            there, empty = (dist.Bernoulli(p * f).log_prob(y).sum(-1) for f in (1.0, 1e-6))
            return torch.logaddexp(logsigmoid(logits) + there, logsigmoid(-logits) + empty)

        return over_grid(log_lik)

    at = {"b": torch.tensor([0.5, 1.0]), **tensors(m=-0.3, tau=0.8)}
    return Case(model, (x, y), at, truth)


GAUSSIAN = [eight_schools, intercepts, slopes, errors_in_variables]
COUNTS = [poisson, logistic, item_response, two_latents, chained, missing, censored]
OTHER_PRIORS = [gamma, beta, student]
DISCRETE = [zero_inflated, occupancy]
truly_zero = partial(intercepts, tau=0.0)
