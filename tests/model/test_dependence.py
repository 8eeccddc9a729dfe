"""Rows that depend on other rows of their batch: which, and one value for all rows."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from densities import weights
from reference import normals

import pyro_scale as ps
from pyro_scale.errors import PlateError

pytestmark = pytest.mark.usefixtures("float64")

N, B = 120, 20
X, Y = normals(N, 2), normals(N, seed=1)
#: Of which the first batch does not show what depends on rows before.
LATE = torch.cat([torch.zeros(40), Y[40:]])
TIMES = normals(N, seed=2)


def of_mean(mean_of):
    def model(x, y):
        w = weights()
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mean_of(x, y, w), 1.0), obs=y)

    return model


def lag(k):
    return of_mean(lambda x, y, w: x @ w + 0.3 * torch.cat([torch.zeros(k), y[:-k]]))


def events(x, y):
    mean = (x @ weights()).cumsum(0)
    pyro.sample("y", dist.Normal(mean, 1.0).to_event(1), obs=y)


def cox(at_risk):
    def model(x, times):
        scores = x @ weights()
        with pyro.plate("data", len(x)):
            pyro.factor("y", scores - at_risk(scores, times))

    return model


def later(scores, times):
    return torch.where(times >= times[:, None], scores, -torch.inf).logsumexp(1)


@pytest.mark.parametrize(
    ("model", "data", "on"),
    [
        (cox(later), (X, TIMES), "other rows"),
        (cox(lambda scores, _: scores.logcumsumexp(0)), (X, TIMES), "the rows before it"),
        (cox(lambda s, _: s.flip(0).logcumsumexp(0).flip(0)), (X, TIMES), "the rows after it"),
        (lag(1), (X, Y), "the row before it"),
        (lag(3), (X, Y), "the 3 rows before it"),
        (lag(1), (X, LATE), "the row before it"),
        (lag(2), (X, LATE), "the 2 rows before it"),
        (of_mean(lambda x, y, w: x @ w + y.roll(-1)), (X, Y), "other rows"),
        (of_mean(lambda x, _, w: (x @ w).cumsum(0)), (X, Y), "the rows before it"),
        (of_mean(lambda x, _, w: (x @ w).softmax(0)), (X, Y), "other rows"),
        (of_mean(lambda x, _, w: (x - x.mean(0)) @ w), (X, Y), "other rows"),
        (events, (X, Y), "the rows before it"),
    ],
)
def test_rows_that_depend_on_others_are_told_on_which_and_what_to_do(model, data, on):
    match = rf"site 'y': a row's log density depends on {on} in its batch.*\(batch_size=None\)"
    with pytest.raises(PlateError, match=match) as raised:
        ps.SGLD(model, lr=0.1).run(data, batch_size=B, seed=0, progress=False)
    assert "one value per row" not in str(raised.value)
    assert ps.explain(model, data).num_data == N  # the whole data are taken


def without_the_first(x, y):
    """A regression on the row before, which has no value for the first row."""
    mean = x[1:] @ weights() + y[:-1]
    with pyro.plate("data", len(y) - 1):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y[1:])


def test_rows_that_depend_on_others_where_the_first_has_no_value():
    with pytest.raises(PlateError, match="site 'y': a row's log density depends on other rows in"):
        ps.explain(without_the_first, (X, Y), batch_size=B)


def test_a_single_row_beside_itself_is_not_called_before_or_after():
    with pytest.raises(PlateError, match="depends on other rows in its batch"):
        ps.SGLD(cox(later), lr=0.1).run((X, TIMES), batch_size=1, seed=0, progress=False)


def test_rows_of_a_model_that_subsamples_by_itself():
    def model(x, y):
        w = weights()
        with pyro.plate("data", len(x), subsample_size=B) as i:
            pyro.sample("y", dist.Normal((x[i] @ w).cumsum(0), 1.0), obs=y[i])

    with pytest.raises(PlateError, match="site 'y': a row's log density depends on"):
        ps.explain(model, (X, Y))


def process_of_rows(x, y):
    noise = weights()[0].exp()
    covariance = torch.exp(-torch.cdist(x, x)) + noise * torch.eye(len(x))
    pyro.sample("y", dist.MultivariateNormal(torch.zeros(len(x)), covariance), obs=y)


def one_value(of_rows):
    def model(x, y):
        pyro.factor("y", of_rows(dist.Normal(x @ weights(), 1.0).log_prob(y)))

    return model


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (one_value(lambda rows: rows.sum()), "the sum over the rows of a batch. Give it one value"),
        (one_value(lambda rows: rows.mean()), "the mean over the rows of a batch. Give it one"),
        (one_value(lambda rows: rows.sum() - 7.0), "not the sum of those of its halves.*besides"),
        (process_of_rows, "not the sum of those of its halves: rows depend on each other"),
    ],
)
def test_one_value_for_all_rows_is_told_from_rows_that_depend_on_each_other(model, why):
    with pytest.raises(PlateError, match=f"site 'y': its log density is one value.*{why}"):
        ps.explain(model, (X, Y), batch_size=B)


def months(x, y):
    """Effects of a row's place, which both halves of 120 rows, and of 24, begin anew."""
    level = pyro.sample("level", dist.Normal(torch.zeros(12), 1.0).to_event(1))
    mean = x @ weights() + level[torch.arange(len(x)) % 12]
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def test_a_row_that_depends_on_its_place_needs_the_whole_data():
    with pytest.raises(PlateError, match="'y': a row's log density depends on its place in its"):
        ps.explain(months, (X, Y), batch_size=24)
    fit = ps.Laplace(months, structure="dense").run((X, Y), progress=False)
    features = torch.cat([torch.eye(12).repeat(N // 12, 1), X], 1)
    exact = torch.linalg.inv(features.T @ features + torch.eye(14))
    torch.testing.assert_close(fit.fit.gaussians[0].covariance, exact)
