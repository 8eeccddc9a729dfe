"""Measurements of docs/which-method.md that no report has.

`python docs/figures/which_method.py` makes all of them, `... rows networks` some.  Seconds are the
processor's, of one thread; a first run has its compilation in it.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import torch
import torchopt
from scipy.stats import multivariate_t
from sklearn.datasets import load_breast_cancer, load_digits
from torch import Tensor, nn

import pyro_scale as ps

QUIET: dict[str, Any] = {"seed": 0, "progress": False}


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """What it returns, and its seconds."""
    begun = time.process_time()
    result = run()
    return result, time.process_time() - begun


def logistic(x: Tensor, y: Tensor | None = None) -> Tensor:
    """A prior of sd 1 on every coefficient."""
    w = pyro.sample("w", dist.Normal(x.new_zeros(x.shape[1]), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def made_up(num_rows: int, num_columns: int) -> tuple[Tensor, Tensor]:
    """Normal columns, an intercept, and coefficients of sd 0.5."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, num_columns, generator=generator)
    x[:, 0] = 1
    logits = x @ (torch.randn(num_columns, generator=generator) * 0.5)
    return x, torch.bernoulli(torch.sigmoid(logits), generator=generator)


def rows() -> None:
    """Seconds of exact draws and of minibatches, by the number of rows."""
    for num_rows in (1_000, 10_000, 100_000):
        data = made_up(num_rows, 20)
        for method in (ps.NUTS(logistic), ps.BAOA(logistic)):
            seconds = [timed(lambda m=method, d=data: m.run(d, **QUIET))[1] for _ in range(2)]
            table = method.diagnostics()
            verdict = method.report().verdict if isinstance(method, ps.BAOA) else ""
            print(
                f"{num_rows:,} rows of 20, {type(method).__name__}: first {seconds[0]:.1f} s, "
                f"again {seconds[1]:.1f} s; R-hat {table['r_hat'].max():.3f}, "
                f"ESS {table['ess_bulk'].min():.0f} {verdict}",
                flush=True,
            )


def groups() -> None:
    """A non-centered hierarchy of ten rows a group."""
    for num_groups in (200, 600, 2_000):
        generator = torch.Generator().manual_seed(0)
        group = torch.arange(num_groups).repeat_interleave(10)
        x = torch.randn(len(group), generator=generator)
        effects = 0.7 * torch.randn(num_groups, generator=generator)
        y = effects[group] + 0.5 * x + torch.randn(len(group), generator=generator)

        def hierarchy(
            group: Tensor, x: Tensor, y: Tensor | None = None, size: int = num_groups
        ) -> Tensor:
            level = pyro.sample("level", dist.Normal(0.0, 1.0))
            slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
            tau = pyro.sample("tau", dist.HalfNormal(1.0))
            sigma = pyro.sample("sigma", dist.HalfNormal(1.0))
            z = pyro.sample("z", dist.Normal(torch.zeros(size), 1.0).to_event(1))
            with pyro.plate("data", len(x)):
                mean = level + tau * z[group] + slope * x
                return pyro.sample("y", dist.Normal(mean, sigma), obs=y)

        for method in (ps.NUTS(hierarchy), ps.BAOA(hierarchy)):
            data = {"group": group, "x": x, "y": y}
            name = f"{num_groups} groups, {type(method).__name__}"
            try:
                _, seconds = timed(lambda m=method, d=data: m.run(d, **QUIET))
            except ps.errors.ArgumentError as error:
                print(f"{name}: {error}", flush=True)
                continue
            table = method.diagnostics()
            said = method.report().headline if isinstance(method, ps.BAOA) else ""
            print(
                f"{name}: {seconds:.1f} s, R-hat {table['r_hat'].max():.3f}, "
                f"ESS {table['ess_bulk'].min():.0f} {said}",
                flush=True,
            )


SCHOOLS = {
    "error": torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0]),
    "y": torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0]),
}


def schools(error: Tensor, y: Tensor | None = None) -> None:
    """Eight schools, non-centered."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", len(error)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(mu + tau * z, error), obs=y)


def tails() -> None:
    """Quantiles of tau of the eight schools, and the evidence, beside quadrature."""
    levels = [0.5, 0.95, 0.99]
    error, y = (SCHOOLS[name].double().numpy() for name in ("error", "y"))
    tau = np.linspace(1e-6, 400, 400_001)
    variance = tau[:, None] ** 2 + error**2
    precision, weighted = (1 / variance).sum(1), (y / variance).sum(1)
    log_p = -0.5 * (np.log(variance) + y**2 / variance).sum(1) - 4 * np.log(2 * np.pi)
    log_p += 0.5 * (weighted**2 / (precision + 1 / 25) - np.log(1 + 25 * precision))
    log_p += np.log(2 / (np.pi * 5)) - np.log(1 + (tau / 5) ** 2)
    density = np.exp(log_p - log_p.max())
    evidence = np.log(density.sum() * (tau[1] - tau[0])) + log_p.max()
    exact = np.interp(levels, density.cumsum() / density.sum(), tau)
    print("exact", exact.round(2), f"evidence {evidence:.3f}")

    def show(name: str, method: Any, seeds: int, **options: Any) -> None:
        found = []
        for seed in range(seeds):
            method.run(SCHOOLS, seed=seed, progress=False, **options)
            is_gaussian = isinstance(method, ps.Laplace | ps.VI)
            draws = method.sample(50_000) if is_gaussian else method.get_samples()
            found.append(np.quantile(draws["tau"].double().numpy(), levels))
        error = np.std(found, axis=0, ddof=1) / seeds**0.5
        print(name, np.mean(found, axis=0).round(2), "+-", error.round(2), flush=True)

    for kind in (ps.NUTS, ps.GHMC, ps.BAOA):
        show(kind.__name__, kind(schools), 8)
    falling = torchopt.adam(torchopt.schedule.polynomial_schedule(2e-2, 1e-4, 1.0, 10_000))
    vi = ps.VI(schools, structure="dense", optimizer=falling, num_particles=4)
    show("VI, dense", vi, 4, num_steps=10_000)
    laplace = ps.Laplace(schools)
    show("Laplace", laplace, 2)
    k = float(laplace.psis().pareto_k)
    print(f"evidence by Laplace {float(laplace.log_marginal_likelihood()):.3f}, k {k:.2f}")


def gaussians() -> None:
    """The filter and Laplace on logistic regressions, beside NUTS and importance sampling."""
    x, y = (torch.tensor(part, dtype=torch.float64) for part in load_breast_cancer(return_X_y=True))
    x = ((x - x.mean(0)) / x.std(0))[:, [0, 1, 4]]
    x_made, y_made = (part.double() for part in made_up(1_000, 20))
    for name, data in {"569 x 3": (x, y), "1,000 x 20": (x_made, y_made)}.items():
        exact = ps.NUTS(logistic).run(data, num_samples=4000, **QUIET).get_samples()["w"].double()
        laplace = ps.Laplace(logistic).run(data, **QUIET)
        fits = {"Laplace": laplace}
        for size in (1, 64):
            ekf = ps.EKF(logistic, structure="dense")
            fits[f"EKF by {size}"] = ekf.run(data, batch_size=size, progress=False)
        for method, fit in fits.items():
            gaussian = fit.fit.gaussians[0]
            mean = ((gaussian.mean - exact.mean(0)) / exact.std(0)).abs().max()
            sds = gaussian.variance.sqrt() / exact.std(0)
            print(
                f"{name}, {method}: mean off by {mean:.2f} sds at most, sds {sds.min():.2f} to "
                f"{sds.max():.2f} of NUTS's",
                flush=True,
            )
        factor, size = torch.linalg.cholesky(torch.cov(exact.T)), exact.shape[1]
        heavy = multivariate_t(np.zeros(size), np.eye(size), df=8, seed=0)
        z = torch.tensor(heavy.rvs(100_000))
        w = exact.mean(0) + z @ factor.T
        log_q = torch.tensor(heavy.logpdf(z.numpy())) - factor.diagonal().log().sum()
        log_p = dist.Normal(0.0, 1.0).log_prob(w).sum(1)
        for part in torch.arange(len(w)).split(5_000):
            log_p[part] += dist.Bernoulli(logits=w[part] @ data[0].T).log_prob(data[1]).sum(1)
        ratio = (log_p - log_q - (log_p - log_q).max()).exp()
        log_z = ratio.mean().log() + (log_p - log_q).max()
        error = float(ratio.std() / ratio.mean()) / len(w) ** 0.5
        found = float(laplace.log_marginal_likelihood())
        print(f"{name}, evidence: {log_z:.3f} +- {error:.3f}, by Laplace {found:.3f}", flush=True)


def of_network(bayes: Any) -> Callable[..., Tensor]:
    """A classifier."""

    def model(x: Tensor, y: Tensor | None = None) -> Tensor:
        logits = bayes(x)
        with pyro.plate("data", len(x)):
            return pyro.sample("digit", dist.Categorical(logits=logits), obs=y)

    return model


def trained(x: Tensor, y: Tensor) -> nn.Module:
    """A network by Adam, with the weight decay that a prior of sd 1 is."""
    layers = nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)
    net = nn.Sequential(nn.Flatten(), *layers)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(150):
        for part in torch.randperm(len(x)).split(128):
            decay = sum(weight.square().sum() for weight in net.parameters()) / 2 / len(x)
            loss = nn.functional.cross_entropy(net(x[part]), y[part]) + decay
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return net


def scores_of(name: str, predict: Callable[..., Any], where: dict[str, Any]) -> dict[str, Any]:
    """Of rows inside, and how well uncertainty tells them from rows outside."""
    probs, known = predict(where["inside"], "mean"), predict(where["inside"], "entropy")
    scores = {"method": name}
    scores |= {s: float(getattr(ps.metrics, s)(probs, where["truth"])) for s in ("nll", "ece")}
    unknown = [predict(rows, "entropy") for rows in where["outside"]]
    for part in ("total", "epistemic"):
        pairs = [(getattr(known, part), getattr(each, part)) for each in unknown]
        scores[part] = float(np.mean([ps.metrics.auroc(*pair) for pair in pairs]))
    return scores


def one_split(split: int) -> list[dict[str, Any]]:
    """Digits 0 to 7 are known; 8 and 9, inverted, turned images and noise are outside."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    torch.manual_seed(split)
    known = torch.randperm(len(labels))
    known = known[labels[known] < 8]
    inside, data = images[known[:400]], (images[known[400:]], labels[known[400:]])
    outside = [images[labels >= 8], 1 - inside, inside.rot90(dims=(1, 2))]
    outside.append(torch.rand(inside.shape))
    where = {"inside": inside, "truth": labels[known[:400]], "outside": outside}
    net, seconds = timed(lambda: trained(*data))
    prior = dist.Normal(0.0, 1.0)
    every, head = (ps.bayesianize(net, include=i, prior=prior) for i in (None, "5"))
    weights, all_of_it, last = every.weights(), of_network(every), of_network(head)
    runs: dict[str, tuple[Any, dict[str, Any]]] = {
        "last layer, Laplace": (ps.Laplace(last), {}),
        "last layer, BAOA": (ps.BAOA(last), {}),
        "Kronecker": (ps.Laplace(all_of_it, structure="kron"), {"mode": weights}),
        "ensemble of 8": (ps.BAOA(all_of_it, temperature=0), {"num_chains": 8}),
        "BAOA": (ps.BAOA(all_of_it), {"num_samples": 200}),
    }

    def by_net(x: Tensor, reduce: str) -> Any:
        probs = net(x).softmax(-1).detach()
        return probs if reduce == "mean" else ps.metrics.uncertainty(probs[None])

    found = [scores_of("one network", by_net, where) | {"seconds": seconds}]
    for name, (method, options) in runs.items():
        fit, seconds = timed(lambda m=method, o=options: m.run(data, **QUIET, **o))
        linear = {"linearized": True} if isinstance(fit, ps.Laplace) else {}
        fits = {name: fit}
        if name == "Kronecker":
            fits["Kronecker, T = 0.1"] = fit.at_temperature(0.1)
        for label, each in fits.items():

            def predict(x: Tensor, reduce: str, each: Any = each, how: Any = linear) -> Any:
                return each.predict(x, reduce=reduce, **how)["digit"]

            found.append(scores_of(label, predict, where) | {"seconds": seconds})
            print(split, found[-1], flush=True)
        if isinstance(fit, ps.BAOA):
            print(fit.report().headline, flush=True)
    return found


def networks() -> None:
    """Three splits of the digits."""
    table = pd.DataFrame([row for split in range(3) for row in one_split(split)])
    by_method = table.groupby("method")
    print(by_method.mean().round(3), by_method.sem().round(3), sep="\n")


PARTS = {each.__name__: each for each in (rows, groups, tails, gaussians, networks)}

if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    pd.set_option("display.width", 120)
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()
