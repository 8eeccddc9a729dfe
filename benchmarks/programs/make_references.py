"""The truth of the programs: `python benchmarks/programs/make_references.py`, once, some minutes.

    --only NAME     only this program (repeatable); the others' entries are kept
    --samples 2000  draws a chain, after 1,000 steps of warm-up
    --chains 4
    --seed 0
    --densities     only compare the log joints of the two writings

Conjugate models and linear regressions have closed forms.  The rest are sampled by NumPyro's NUTS
in float64, from models that were written a second time (`reference/`) with discrete latents summed
out by hand: a program is compared with the statistics that it is about, not with itself.  That both
writings are of one posterior is shown by `--densities`, with Pyro's own enumeration.

Writes `references.json`: how each was made, and for each element of the compared sites the mean,
sd and kurtosis, the Monte Carlo standard errors of mean and sd, bulk ESS and R-hat.  Needs the
extra `bench`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import arviz
import numpy as np
import pyro
import torch
from program import Program, elements, names
from pyro import poutine
from pyro.infer import TraceEnum_ELBO
from pyro.infer.autoguide.initialization import InitMessenger, init_to_uniform
from pyro.poutine.subsample_messenger import _Subsample as Subsample

HERE = Path(__file__).parent
REFERENCES = HERE / "references.json"
WARMUP = 1000

#: What a reference has to reach: the mean's standard error in sds, and R-hat.
MOST_ERROR, MOST_R_HAT = 0.03, 1.01

Moments = dict[str, dict[str, float]]


def exact(mean: float, sd: float, kurtosis: float = 3.0) -> dict[str, float]:
    """An element that is known without Monte Carlo error."""
    return {"mean": mean, "sd": sd, "kurtosis": kurtosis, "mcse": 0.0, "sd_mcse": 0.0}


def coin(program: Program) -> Moments:
    """Beta(10, 10), 6 heads and 4 tails."""
    a, b = 16.0, 14.0
    return {"fairness": exact(a / (a + b), (a * b / (a + b + 1)) ** 0.5 / (a + b))}


def survey(program: Program) -> Moments:
    """A uniform Dirichlet and a multinomial."""
    posterior = torch.distributions.Dirichlet(1 + program.data[0].double())
    moments = zip(posterior.mean.tolist(), posterior.stddev.tolist(), strict=True)
    return {f"shares[{i}]": exact(mean, sd) for i, (mean, sd) in enumerate(moments)}


def linear_regression(program: Program) -> Moments:
    """Normal given sigma, which is left to quadrature."""
    x, y = program.data
    return by_quadrature(x, y, prior_sd=1.0)


def conditioned(program: Program) -> Moments:
    """The same of a line, whose data are those that the model was conditioned on."""
    (x,) = program.data
    y = poutine.trace(program.model).get_trace(x).nodes["y"]["value"]
    known = by_quadrature(torch.stack([torch.ones_like(x), x], 1), y, prior_sd=2.0)
    return {"alpha": known["beta[0]"], "beta": known["beta[1]"], "sigma": known["sigma"]}


def by_quadrature(x: torch.Tensor, y: torch.Tensor, prior_sd: float) -> Moments:
    """A regression's coefficients under a normal prior, and sigma under HalfNormal(1)."""
    sys.path.insert(0, str(HERE.parent / "accuracy"))
    from exact import regression

    size = x.shape[1]
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # of the grid
    moments = regression(
        x.double(),
        y.double(),
        torch.distributions.HalfNormal(1.0).log_prob,
        torch.zeros(size),
        torch.eye(size) / prior_sd**2,
    )
    torch.set_default_dtype(default)
    known = {}
    for site, (mean, sd) in moments.items():
        for index in np.ndindex(tuple(mean.shape)):
            name = f"{site}[{index[0]}]" if index else site
            known[name] = exact(float(mean[index]), float(sd[index]))
    return known


CLOSED_FORMS = {f.__name__: f for f in (coin, survey, linear_regression, conditioned)}


def measured(draws: dict[str, np.ndarray]) -> Moments:
    """Moments of elements' draws `[chains, draws]`; elements that do not vary are left out."""
    known = {}
    for name, column in draws.items():
        mean, sd = float(column.mean()), float(column.std())
        if sd < 1e-8:  # of a triangular matrix, say
            continue
        known[name] = {
            "mean": mean,
            "sd": sd,
            "kurtosis": float((((column - mean) / sd) ** 4).mean()),
            "mcse": float(arviz.mcse(column)),
            "sd_mcse": float(arviz.mcse(column, method="sd")),
            "ess": float(arviz.ess(column)),
            "r_hat": float(arviz.rhat(column)),
        }
    return known


def find_model(name: str) -> Any:
    """The program's second writing, out of `reference/`."""
    for part in ("regressions", "hierarchies", "series", "mixtures"):
        if found := getattr(import_module(f"reference.{part}"), name, None):
            return found
    raise LookupError(f"{name}: no model of this name in reference/")


def by_numpyro(program: Program, samples: int, chains: int, seed: int) -> Moments:
    """Moments by NUTS from the second writing."""
    import jax
    import numpyro
    from numpyro.infer import MCMC, NUTS

    jax.config.update("jax_enable_x64", True)
    columns = [column.numpy() for column in _tensors(program)]
    data = [c.astype(np.float64) if c.dtype == np.float32 else c for c in columns]
    nuts = NUTS(find_model(program.name), target_accept_prob=0.95)
    mcmc = MCMC(
        nuts,
        num_warmup=WARMUP,
        num_samples=samples,
        num_chains=chains,
        chain_method="sequential",
        progress_bar=False,
    )
    numpyro.set_platform("cpu")
    mcmc.run(jax.random.PRNGKey(seed), *data)
    return measured(elements(mcmc.get_samples(group_by_chain=True), program.right))


def density_difference(program: Program) -> float | None:
    """By how much the log joints of the program, by Pyro's own enumeration, and of the second
    writing differ at most at three random points, up to a constant and relative to the largest;
    None where the two have other coordinates.
    """
    import jax
    from numpyro.handlers import seed as seeded
    from numpyro.infer.util import log_density

    jax.config.update("jax_enable_x64", True)
    args = tuple(t.double() if t.is_floating_point() else t for t in _tensors(program))
    arrays = [arg.numpy() for arg in args]
    second_model = seeded(find_model(program.name), 0)
    firsts, differences = [], []
    for seed in range(3):
        pyro.set_rng_seed(seed)
        with InitMessenger(at_random):
            trace = poutine.trace(program.model).get_trace(*args)
        latents = {name: node["value"] for name, node in trace.nodes.items() if is_latent(node)}
        observed = poutine.condition(program.model, latents)
        log_joint = -TraceEnum_ELBO(max_plate_nesting=2).loss(observed, lambda *args: None, *args)
        values = {name: np.asarray(value) for name, value in latents.items()}
        second, sites = log_density(second_model, arrays, {}, values)
        if {n for n, s in sites.items() if s["type"] == "sample" and not s["is_observed"]} - {
            *values
        }:
            return None
        firsts.append(log_joint)
        differences.append(log_joint - float(second))
    return float(np.ptp(differences) / max(1.0, *np.abs(firsts)))


def at_random(site: dict[str, Any]) -> torch.Tensor:
    """A value of moderate size, unlike draws from heavy tails; any of an enumerated site."""
    fn = site["fn"]
    return fn.sample() if fn.has_enumerate_support else init_to_uniform(site)


def is_latent(node: dict[str, Any]) -> bool:
    """Whether a node of a trace is a latent that is not enumerated."""
    observed = node["type"] != "sample" or node["is_observed"] or isinstance(node["fn"], Subsample)
    return not observed and not node["fn"].has_enumerate_support


def _tensors(program: Program) -> tuple[Any, ...]:
    """The whole data, which may be in a loader."""
    if hasattr(program.data, "dataset"):
        return program.data.dataset.tensors
    return program.data if isinstance(program.data, tuple) else (program.data,)


def verdict(moments: Moments) -> str:
    """Whether a reference is good enough."""
    error = max(e["mcse"] / e["sd"] for e in moments.values())
    sd_error = max(e["sd_mcse"] / e["sd"] for e in moments.values())
    r_hat = max(e.get("r_hat", 1.0) for e in moments.values())
    good = error < MOST_ERROR and r_hat < MOST_R_HAT
    return (
        f"{'good' if good else 'NOT GOOD'}: {len(moments)} elements, means +- {error:.4f} sd, "
        f"sds +- {100 * sd_error:.1f} %, R-hat {r_hat:.4f}"
    )


def described(difference: float | None) -> str:
    """A difference of log joints in words."""
    if difference is None:
        return "not compared, in other coordinates"
    return f"log joints differ by {difference:.1e} of their size"


def reference(program: Program, samples: int, chains: int, seed: int) -> dict[str, Any]:
    """A program's entry of `references.json`."""
    start = perf_counter()
    if program.name in CLOSED_FORMS:
        how: dict[str, Any] = {"method": "closed form"}
        moments = CLOSED_FORMS[program.name](program)
    else:
        versions = {package: version(package) for package in ("numpyro", "jax")}
        settings = {"chains": chains, "samples": samples, "warmup": WARMUP, "seed": seed}
        how = {"method": "NUTS of NumPyro, float64", **settings, **versions}
        moments = by_numpyro(program, samples, chains, seed)
    how["seconds"] = round(perf_counter() - start, 1)
    return {"how": how, "elements": moments}


def rounded(value: Any) -> Any:
    """Numbers to seven digits, which is beyond any Monte Carlo error."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return float(f"{value:.7g}") if isinstance(value, float) else value


def main(arguments: Iterable[str] | None = None) -> None:
    """Runs what is asked for and updates the file after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", default=[], choices=names(), metavar="NAME")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--densities", action="store_true")
    options = parser.parse_args(arguments)
    if options.densities:
        torch.set_default_dtype(torch.float64)
        pyro.enable_validation(False)  # whose checks of masked mixtures fail on enumerated values
    for name in options.only or names():
        program = Program.load(name)
        if not program.right:
            continue
        if options.densities:
            if name not in CLOSED_FORMS:
                print(f"{name}: {described(density_difference(program))}", flush=True)
            continue
        known = json.loads(REFERENCES.read_text()) if REFERENCES.exists() else {}
        entry = reference(program, options.samples, options.chains, options.seed)
        known[name] = rounded(entry)
        ordered = dict(sorted(known.items()))
        REFERENCES.write_text(json.dumps(ordered, indent=1) + "\n")
        print(f"{name}: {verdict(entry['elements'])}, {entry['how']['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
