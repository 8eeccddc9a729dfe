"""Bayesian logistic regression by minibatches, on scikit-learn's breast cancer data.

Thirty measurements of a tumor say whether it is benign. Four chains of BAOA sample the posterior
of their weights from minibatches; held-out rows then show what that gains over the MAP, which is
the same sampler at temperature 0. `make demo` runs it: a quarter of a minute, after which the
draws and a trace plot are in `demo-output`.
"""

import math
from pathlib import Path

import arviz
import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, TensorDataset

import pyro_scale as ps

OUTPUT = Path("demo-output")


def model(x, y=None):
    """A plain Pyro model: nothing in it knows of minibatches."""
    with pyro.plate("feature", x.shape[1]):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Bernoulli(logits=x @ w + b), obs=y)


def load():
    """The training rows, the held-out rows and the features' names."""
    data = load_breast_cancer()
    x = torch.tensor(data.data, dtype=torch.float32)
    y = torch.tensor(data.target, dtype=torch.float32)
    train, test = train_test_split(torch.arange(len(x)), random_state=0)
    x = (x - x[train].mean(0)) / x[train].std(0)
    return (x[train], y[train]), (x[test], y[test]), data.feature_names


def score(fit, rows):
    """Accuracy, and the mean log density that the posterior-averaged prediction gives a row."""
    log_likelihood = fit.log_likelihood(rows)["y"]  # [draws, rows]
    log_density = log_likelihood.logsumexp(0) - math.log(len(log_likelihood))
    right = log_density > math.log(0.5)
    return float(right.float().mean()), float(log_density.mean())


def main():
    """Explain, run, diagnose, save, and compare with the MAP."""
    train, test, features = load()
    loader = DataLoader(TensorDataset(*train), batch_size=142, shuffle=True)
    print(ps.explain(model, loader), end="\n\n")

    mcmc = ps.BAOA(model, lr=0.3, friction=0.15)
    mcmc.run(loader, num_samples=1000, warmup_steps=10_000, thinning=200, num_chains=4, seed=0)
    idata = mcmc.to_arviz()
    idata.posterior.coords["feature"] = features

    print("\nThe posterior (weights of standardized features; y = 1 is benign):")
    print(arviz.summary(idata).to_string())
    diagnostics = mcmc.diagnostics()
    print(f"\nHow far to trust the draws:\n{diagnostics.to_string()}")
    print(f"worst R-hat: {diagnostics['r_hat'].max():.3f}")

    OUTPUT.mkdir(exist_ok=True)
    idata.to_netcdf(OUTPUT / "posterior.nc")
    shown = {"feature": ["mean radius", "radius error", "worst texture", "worst concave points"]}
    plot = getattr(arviz, "plot_trace_dist", arviz.plot_trace)  # as ArviZ 1 calls it
    plot(idata, coords=shown, compact=False)
    plt.gcf().set_layout_engine("constrained")  # no title over another plot's ticks
    plt.gcf().savefig(OUTPUT / "trace.png")

    print("\nThe MAP, by the same sampler without noise:")
    mode = ps.BAOA(model, lr=0.6, friction=0.15, temperature=0.0)
    mode.run(train, num_samples=1, warmup_steps=2000, thinning=1, num_chains=1, seed=0)
    print(f"\nOn {len(test[0])} held-out rows      accuracy   mean log predictive density")
    for name, fit in {"posterior": mcmc, "MAP": mode}.items():
        accuracy, log_density = score(fit, test)
        print(f"{name:<25}{accuracy:12.3f}   {log_density:.4f}")
    print(f"\nWrote {OUTPUT / 'posterior.nc'} and {OUTPUT / 'trace.png'}")


if __name__ == "__main__":
    main()
