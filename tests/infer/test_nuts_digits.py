"""NUTS on data whose posterior float32 cannot tell apart."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from models import normal, of_rows

import pyro_scale as ps

pytest.importorskip("nutpie")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

NOISE = torch.randn(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
HOW = {"seed": 0, "progress": False, "warmup_steps": 300}


location = of_rows(lambda mu: dist.Normal(mu, 1.0), mu=normal(sd=1e9))


#: Fine in unconstrained space, and not in the interval.
interval = of_rows(
    lambda mu: dist.Normal(mu - 1e7, 1.0),
    mu=lambda: dist.Uniform(1e7 - 50.0, 1e7 + 50.0),
)


def total(y):
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    pyro.deterministic("total", mu + 1e8)
    pyro.deterministic("three", torch.tensor(3.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mu, 1.0), obs=y)


@pytest.mark.parametrize(
    ("model", "offset", "site", "dtype"),
    [
        (location, 0.0, "mu", torch.float32),
        (location, 2e6, "mu", torch.float64),
        (location, 4e6, "mu", torch.float64),
        (location, 1e7, "mu", torch.float64),
        (interval, 0.0, "mu", torch.float64),
        (total, 0.0, "total", torch.float64),
    ],
)
def test_draws_have_the_digits_of_their_posterior(model, offset, site, dtype, tmp_path):
    y = (NOISE + offset).float()
    fit = ps.NUTS(model).run(y, **HOW)
    draws, report = fit.get_samples()[site], fit.report()
    assert draws.dtype == dtype
    assert report.verdict == "yes"
    ess = fit.summary().ess_bulk[site]
    assert float(draws.double().std()) == pytest.approx(0.1, rel=4 / (2 * ess) ** 0.5)
    to_mu = {"total": 1e8}.get(site, 1e7 if model is interval else 0.0)
    z_score = (draws.double().mean() - to_mu - y.double().mean()) / 0.1 * ess**0.5
    assert abs(float(z_score)) < 4
    fit.save(tmp_path / "fit.ps")
    again = ps.NUTS.load(tmp_path / "fit.ps", model)
    assert torch.equal(again.get_samples()[site], draws)
    assert again.report().verdict == "yes"


def test_its_predictions_and_loo_are_of_the_same_draws():
    """They are those of the data without their mean, rounded as these are."""
    y = (NOISE + 1e7).float()
    far = ps.NUTS(location).run(y, **HOW)
    near = ps.NUTS(location).run((y.double() - 1e7).float(), **HOW)
    assert far.loo().elpd == pytest.approx(near.loo().elpd, abs=0.5)
    predicted = far.predict(torch.zeros(2))["y"]
    error = 1.005**0.5 * (2 / predicted.numel()) ** 0.5
    assert float((predicted.double() - 1e7).std()) == pytest.approx(1.005, abs=4 * error)


def test_a_model_in_which_dtypes_would_clash_keeps_its_own_and_has_no_yes():
    def regression(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(1), 1e9).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    fit = ps.NUTS(regression).run((torch.ones(100, 1), (NOISE + 1e7).float()), **HOW)
    assert fit.get_samples()["w"].dtype == torch.float32
    report = fit.report()
    assert report.verdict == "no"
    assert report.headline.startswith("NO: site 'w': an element is the same number in all draws")
