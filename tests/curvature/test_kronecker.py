"""Kronecker factors against blocks of the dense curvature where they are exact, and against sums
that are written out; the Gaussian that they make against its own matrices."""

from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from curvatures import check_gaussian, kronecker_block
from models import normal, of_network, of_rows
from reference import close, normals
from runs import QUIET
from torch import nn
from torch.utils.checkpoint import checkpoint

import pyro_scale as ps
from pyro_scale.core.gaussian import Kronecker
from pyro_scale.core.layout import Layout
from pyro_scale.curvature import ggn
from pyro_scale.curvature.uses import Product
from pyro_scale.errors import ArgumentError, ModelError

pytestmark = pytest.mark.usefixtures("float64", "store")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.projections, self.out = nn.Linear(4, 6), nn.Linear(2, 3)

    def forward(self, x):
        q, k, v = self.projections(x).chunk(3, -1)
        weights = (q @ k.mT).softmax(-1)
        return self.out((weights @ v).tanh()).sum(1)


NETWORKS = {
    "layers": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), (4,)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)
        ),
        (2, 4, 4),
    ),
    "attention": (Attention, (5, 4)),
}
HEADS = {
    "classes": (lambda f: dist.Categorical(logits=f), lambda n: torch.arange(n) % 3),
    "noise of each row": (
        lambda f: dist.Normal(f[:, 0], f[:, 1].exp()),
        lambda n: normals(n, seed=3),
    ),
    "counts": (lambda f: dist.Poisson(f[:, 0].exp()), lambda n: torch.arange(n).double()),
    "heavy tails": (
        lambda f: dist.StudentT(5.0, f[:, 0], f[:, 1].exp()),
        lambda n: normals(n, seed=4),
    ),
}


def network_model(make, head):
    torch.manual_seed(0)
    net = make()
    weights = {name: value.detach().clone() for name, value in net.named_parameters()}
    bayesian = ps.bayesianize(net)

    model = of_network(bayesian, head)
    return model, weights


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("network", ["layers"])
def test_of_one_row_they_are_the_blocks_of_the_dense_curvature(network, head):
    (make, shape), (likelihood, observe) = NETWORKS[network], HEADS[head]
    model, weights = network_model(make, likelihood)
    batch = normals(1, *shape, seed=1), observe(1)
    curvature = ps.Curvature(ps.LogPosterior(model, num_data=1))
    dense, slices = curvature.dense(weights, batch), Layout.from_tensors(weights).slices()
    factors, others = curvature.kronecker(weights, batch)
    assert not others
    assert factors.keys() == weights.keys()
    for name, (own,) in factors.items():
        places = slices[name].start + own.places.flatten()
        close(torch.kron(own.mean_inputs, own.outputs), dense[places][:, places], 1e-12)


@pytest.mark.parametrize("network", ["convolutions", "attention"])
def test_positions_are_taken_for_rows(network):
    """Expand: the mean of inputs' products over rows and positions, times the gradients' sum."""
    make, shape = NETWORKS[network]
    model, weights = network_model(make, HEADS["classes"][0])
    batch = normals(6, *shape, seed=1), HEADS["classes"][1](6)
    factors, others = ps.Curvature(ps.LogPosterior(model, num_data=6)).kronecker(weights, batch)
    assert not others
    net = make()
    net.load_state_dict(weights)
    inputs, outputs = {}, {}

    def remember(name, layer, given, out):
        inputs[name], outputs[name] = given[0].detach(), out

    for name, layer in net.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            layer.register_forward_hook(partial(remember, name))
    logits = net(batch[0])
    probs = logits.detach().softmax(-1)
    root = torch.diag_embed(probs.sqrt()) - probs[:, :, None] * probs.sqrt()[:, None]
    for name in inputs:
        gradients = torch.stack(
            [
                torch.autograd.grad(logits, outputs[name], root[:, :, c], retain_graph=True)[0]
                for c in range(3)
            ]
        )
        x, groups = inputs[name], 1
        if x.dim() == 4:
            groups = 2
            x = nn.functional.unfold(x, 3).mT.reshape(6, 4, 2, 9)
            gradients = gradients.flatten(3).mT.reshape(3, 6, 4, 2, 2)
        else:
            x, gradients = x.unsqueeze(-2), gradients.unsqueeze(-2)
        assert len(factors[f"{name}.weight"]) == groups
        for group, own in enumerate(factors[f"{name}.weight"]):
            a = x[..., group, :].flatten(0, -2)
            g = gradients[..., group, :].flatten(0, -2)
            close(own.mean_inputs, a.mT @ a / len(a), 1e-12)
            close(own.outputs, g.mT @ g, 1e-12)


def test_of_a_deep_linear_network_they_are_exact_on_all_rows():
    """Its gradients are the same for all rows."""

    def make():
        return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))

    model, weights = network_model(make, lambda f: dist.Normal(f, 0.7).to_event(1))
    batch = normals(9, 4, seed=1), normals(9, 2, seed=2)
    curvature = ps.Curvature(ps.LogPosterior(model, num_data=9))
    dense, slices = curvature.dense(weights, batch), Layout.from_tensors(weights).slices()
    for name, (own,) in curvature.kronecker(weights, batch)[0].items():
        places = slices[name].start + own.places.flatten()
        close(torch.kron(own.mean_inputs, own.outputs), dense[places][:, places], 1e-12)


def test_the_gaussian_of_a_fit_in_any_number_of_chunks():
    """Precision: the factors' products plus the prior's; N rows, whatever the batch size."""
    model, weights = network_model(NETWORKS["layers"][0], HEADS["classes"][0])
    data = normals(20, 4, seed=1), torch.arange(20) % 3
    factors, _ = ps.Curvature(ps.LogPosterior(model, num_data=20)).kronecker(weights, data)
    layout = Layout.from_tensors(weights)
    expected = torch.eye(layout.size)
    for name, (own,) in factors.items():
        places = layout.slices()[name].start + own.places.flatten()
        expected[places[:, None], places] += torch.kron(own.mean_inputs, own.outputs)
    for size in (None, 20, 7):
        fit = ps.Laplace(model, structure="kron").run(data, mode=weights, batch_size=size, **QUIET)
        gaussian = fit.fit.gaussians[0]
        close(gaussian.precision, expected, 1e-10)
        close(gaussian.covariance, torch.linalg.inv(expected), 1e-10)
        log_joint = ps.LogPosterior(model, num_data=20)(weights, data).log_joint
        evidence = (
            log_joint
            + (layout.size * torch.log(torch.tensor(2 * torch.pi)) - torch.logdet(expected)) / 2
        )
        close(fit.log_marginal_likelihood(), evidence, 1e-9)


class Twice(nn.Module):
    """A weight that is used twice, one of its uses scaled."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(0.5 * normals(4, 4)), nn.Parameter(normals(4))

    def forward(self, x):
        return (x @ self.weight + self.bias).tanh() @ self.weight[:, :4] * 1.5


@pytest.mark.parametrize("network", ["layers", "convolutions", "attention", "twice"])
def test_corrected_blocks_have_the_curvatures_diagonal_in_their_bases(network):
    """In any number of chunks, a row's uses and positions summed before they are squared."""
    make, shape = (NETWORKS | {"twice": (Twice, (4,))})[network]
    model, weights = network_model(make, HEADS["classes"][0])
    data = normals(12, *shape, seed=1), HEADS["classes"][1](12)
    dense = ps.Curvature(ps.LogPosterior(model, num_data=12)).dense(weights, data)
    dense = dense + torch.eye(len(dense))
    how = {"mode": weights, **QUIET}
    plain = ps.Laplace(model, structure="kron").run(data, **how).fit.gaussians[0]
    for size in (None, 5):
        fit = ps.Laplace(model, structure="kron", corrected=True)
        gaussian = fit.run(data, batch_size=size, **how).fit.gaussians[0]
        assert len(gaussian.blocks) == len(plain.blocks)
        for block, without in zip(gaussian.blocks, plain.blocks, strict=True):
            basis, places = torch.kron(block.left, block.right), block.places.flatten()
            exact = dense[places][:, places]
            close(1 / block.variances.flatten(), (basis.T @ exact @ basis).diagonal(), 1e-10)
            if size is None:  # or what no row has is turned by rounding
                close(block.left, without.left, 1e-12)
                close(block.right, without.right, 1e-12)
            far = (gaussian.precision[places][:, places] - exact).norm()
            assert far <= (plain.precision[places][:, places] - exact).norm() + 1e-10


def test_a_vector_is_corrected_with_a_prior_of_several_scales():
    scales, x, y = torch.tensor([0.5, 1.0, 2.0, 3.0]), normals(9, 4, seed=1), normals(9, seed=2)

    counts = of_rows(lambda x, w: dist.Poisson((x @ w).exp()), w=normal(4, sd=scales))

    mode = {"w": 0.1 * torch.ones(4)}
    fit = ps.Laplace(counts, structure="kron", corrected=True)
    (block,) = fit.run((x, y.abs().round()), mode=mode, **QUIET).fit.gaussians[0].blocks
    axes = block.left if len(block.left) > 1 else block.right
    exact = (x * (x @ mode["w"]).exp()[:, None]).T @ x + torch.diag(scales**-2)
    close(1 / block.variances.flatten(), (axes.T @ exact @ axes).diagonal(), 1e-10)


def test_there_must_be_factors_to_correct():
    with pytest.raises(ArgumentError, match="no factors to correct"):
        ps.Laplace(network_model(*NETWORKS["layers"][:1], HEADS["classes"][0])[0], corrected=True)


def test_the_gaussian_is_its_matrices(tmp_path):
    left, right = normals(3, 5, seed=1), normals(2, 4, seed=2)
    left, right = left @ left.T, right @ right.T
    places = torch.tensor([[4, 0], [2, 5], [1, 7]])
    block = kronecker_block(places, left, right, torch.tensor(0.5))
    gaussian = Kronecker(
        normals(8, seed=3), (block,), torch.tensor([3, 6]), torch.tensor([2.0, 3.0])
    )
    precision = torch.diag(torch.tensor([0, 0, 0, 1 / 2, 0, 0, 1 / 3, 0]))
    flat = places.flatten()
    precision[flat[:, None], flat] = torch.kron(left, right) + 0.5 * torch.eye(6)
    check_gaussian(gaussian, precision)
    covariance = torch.linalg.inv(precision)
    close(Kronecker.from_contents(**gaussian.contents()).covariance, covariance, 1e-12)


def test_what_has_no_factors_is_said():
    effects = of_rows(lambda x, z: dist.Normal(z[x], 0.5), z=normal(4))

    data = torch.arange(8) % 4, normals(8, seed=1)
    with pytest.raises(ArgumentError, match="no site is the weight of a matrix product"):
        ps.Laplace(effects, structure="kron").run(data, **QUIET)
    with pytest.raises(ArgumentError, match="a Hessian has no such factors"):
        ps.Laplace(effects, structure="kron", curvature="hessian")


SCALES = torch.tensor([1.0, 2.0, 0.3], dtype=torch.float64)
CORRELATED = 0.5 * torch.eye(3).double() + 0.5
PRIORS = {
    "several scales": dist.Normal(torch.zeros(3).double(), SCALES).to_event(1),
    "correlated": dist.MultivariateNormal(torch.zeros(3).double(), CORRELATED),
}


@pytest.mark.parametrize("prior", PRIORS)
def test_a_vector_has_any_gaussian_prior(prior):
    """As a weight of one output, and as a bias: the precision is the exact one of each site."""

    def model(x, y):
        w = pyro.sample("w", PRIORS[prior])
        b = pyro.sample("b", PRIORS[prior])
        z = pyro.sample("z", dist.Normal(0.0, 2.0))
        with pyro.plate("data", len(x)):
            mean = (x @ w + z)[:, None] + torch.zeros(3) + b
            pyro.sample("y", dist.Normal(mean, 0.5).to_event(1), obs=y)

    x, y = normals(8, 3, seed=1), normals(8, 3, seed=2)
    fit = ps.Laplace(model, structure="kron").run((x, y), **QUIET)
    covariance = CORRELATED if prior == "correlated" else SCALES.square().diag()
    precision = torch.linalg.inv(covariance)
    found = fit.fit.gaussians[0].precision
    close(found[:3, :3], precision + 3 * 4 * x.T @ x, 1e-8)
    close(found[3:6, 3:6], precision + 8 * 4 * torch.eye(3), 1e-8)
    assert (fit.fit.attrs["factors"], fit.fit.attrs["independent"]) == ("w, b, z", "")


@pytest.mark.parametrize(
    ("prior", "words"),
    [
        (dist.Normal(torch.zeros(3, 2).double(), SCALES[:, None]).to_event(2), "one prior scale"),
        (
            dist.MultivariateNormal(torch.zeros(2).double(), CORRELATED[:2, :2])
            .expand([3])
            .to_event(1),
            "independent elements",
        ),
    ],
)
def test_a_matrix_needs_a_prior_of_one_scale(prior, words):
    model = of_rows(lambda x, w: dist.Normal(x @ w, 0.5).to_event(1), w=lambda: prior)

    data = normals(8, 3, seed=1), normals(8, 2, seed=2)
    with pytest.raises(ModelError, match=f"'w': structure='kron' needs .*{words}"):
        ps.Laplace(model, structure="kron").run(data, **QUIET)


def test_a_prior_that_ties_sites_together_is_one_of_independent_elements():
    """A scale of the weights' own, as in hierarchies: blocks are of single sites."""

    def model(x, y):
        scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
        w = pyro.sample("w", dist.Normal(torch.zeros(3, 2), scale).to_event(2))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, 0.5).to_event(1), obs=y)

    x, y = normals(8, 3, seed=1), normals(8, 2, seed=2)
    mode = {"scale": torch.tensor(2.0), "w": normals(3, 2, seed=3)}
    fit = ps.Laplace(model, structure="kron").run((x, y), mode=mode, **QUIET)
    expected = torch.kron(4 * x.T @ x, torch.eye(2)) + torch.eye(6) / 4
    close(fit.fit.gaussians[0].precision[1:, 1:], expected, 1e-9)
    assert fit.fit.attrs["factors"] == "w"
    assert fit.fit.attrs["independent"] == "scale"


def test_a_fit_is_saved_and_predicts(tmp_path):
    model, weights = network_model(NETWORKS["layers"][0], HEADS["classes"][0])
    data = normals(20, 4, seed=1), torch.arange(20) % 3
    fit = ps.Laplace(model, structure="kron").run(data, mode=weights, **QUIET)
    fit.save(tmp_path / "fit")
    again = ps.Laplace.load(tmp_path / "fit", model)
    close(again.fit.gaussians[0].covariance, fit.fit.gaussians[0].covariance, 1e-12)
    predicted = fit.predict(data[0], num_samples=50, linearized=True)
    assert predicted["y"].shape == (50, 20)


def kron_of(model, data, **how):
    return ps.Laplace(model, structure="kron").run(data, **how, **QUIET).fit.gaussians[0]


@pytest.mark.parametrize("size", [20, 10, 7, 1])
def test_weights_that_are_products_of_weights_are_alike_in_all_chunks(size):
    """A last chunk of one row, in which what is of params alone looks like the row's."""
    shapes = {"w": (4, 2), "a": (4, 1), "b": (1, 2), "c": (2,)}

    def model(x, y):
        p = {
            n: pyro.sample(n, dist.Normal(torch.zeros(s), 1.0).to_event())
            for n, s in shapes.items()
        }
        with pyro.plate("data", len(x)):
            mean = x @ (p["w"] + p["a"] @ p["b"]) + p["c"]
            pyro.sample("y", dist.Normal(mean, 0.5).to_event(1), obs=y)

    data = normals(41, 4, seed=1), normals(41, 2, seed=2)
    mode = {n: normals(*s, seed=5 + i) for i, (n, s) in enumerate(shapes.items())}
    whole = kron_of(model, data, mode=mode)
    close(kron_of(model, data, mode=mode, batch_size=size).covariance, whole.covariance, 1e-9)
    assert {tuple(block.places.shape) for block in whole.blocks} == {(4, 2), (1, 2)}


def test_units_that_are_dead_in_a_chunk_change_nothing():
    model = of_rows(
        lambda x, a, b: dist.Normal((x @ a).relu() @ b, 0.5), a=normal(3, 2), b=normal(2)
    )

    data = normals(16, 3, seed=1), normals(16, seed=2)
    mode = {"a": normals(3, 2, seed=3), "b": normals(2, seed=4)}
    whole = kron_of(model, data, mode=mode)
    for size in (8, 4, 2, 1):
        close(kron_of(model, data, mode=mode, batch_size=size).covariance, whole.covariance, 1e-9)


def test_masked_weights_are_on_the_diagonal():
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])

    model = of_rows(
        lambda x, w, v: dist.Normal((x @ (w * mask)).tanh() @ v, 0.5), w=normal(3, 2), v=normal(2)
    )

    data = normals(9, 3, seed=1), normals(9, seed=2)
    gaussian = kron_of(model, data, mode={"w": normals(3, 2, seed=3), "v": normals(2, seed=4)})
    (block,) = gaussian.blocks
    assert block.places.flatten().tolist() == [6, 7]
    assert gaussian.others.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("size", [20, 10, 7, 1])
def test_a_mask_that_lets_all_through_changes_nothing(size):
    """In a chunk of one row, too, where weights times a mask look like the row's."""

    mask = torch.ones(4, 2)

    model = of_rows(lambda x, w: dist.Normal(x @ (w * mask), 0.5).to_event(1), w=normal(4, 2))

    data, mode = (normals(41, 4, seed=1), normals(41, 2, seed=2)), {"w": normals(4, 2, seed=3)}
    expected = torch.kron(4 * data[0].T @ data[0], torch.eye(2)) + torch.eye(8)
    close(kron_of(model, data, mode=mode, batch_size=size).precision, expected, 1e-9)


def test_a_bug_in_the_graphs_curvature_does_not_vanish(monkeypatch):
    """Nor one of the model's, though the general way is there."""
    model, weights = network_model(NETWORKS["layers"][0], HEADS["classes"][0])
    curvature = ps.Curvature(ps.LogPosterior(model, num_data=6))
    batch = normals(6, 4, seed=1), torch.arange(6) % 3
    curvature.diagonal(weights, batch)

    def broken(self, gradients):
        raise RuntimeError("shapes cannot be multiplied")

    monkeypatch.setattr(Product, "squares", broken)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        curvature.diagonal(weights, batch)
    monkeypatch.setattr(ggn, "observe", broken)
    for of_params in (curvature.diagonal, curvature.kronecker):
        with pytest.raises((RuntimeError, TypeError)):
            of_params(weights, batch)


def test_activations_that_are_computed_anew_go_the_general_way():
    """Their graph is gone after one backward pass."""
    shape = (4, 5)

    def model(x, y, again=True):
        w = pyro.sample("w", dist.Normal(torch.zeros(shape), 1.0).to_event(2))
        v = pyro.sample("v", dist.Normal(torch.zeros(5), 1.0).to_event(1))

        def hidden(x, w):
            return (x @ w).tanh()

        h = checkpoint(hidden, x, w, use_reentrant=False) if again else hidden(x, w)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(h @ v, 0.5), obs=y)

    params = {"w": normals(*shape, seed=1), "v": normals(5, seed=2)}
    batch = normals(6, 4, seed=3), normals(6, seed=4)
    plain = ps.Curvature(ps.LogPosterior(partial(model, again=False), num_data=6))
    found = ps.Curvature(ps.LogPosterior(model, num_data=6)).diagonal(params, batch)
    for name, expected in plain.diagonal(params, batch).items():
        close(found[name], expected, 1e-10)


def test_a_weight_times_a_number():
    """As of a layer in which the gradient does not depend on the width."""

    def model(x, y, by=1.0):
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ (w * 0.4), 0.5), obs=y)

    x, y = normals(9, 3, seed=1), normals(9, seed=2)
    close(kron_of(model, (x, y)).precision, torch.eye(3) + 4 * 0.16 * x.T @ x, 1e-9)


def test_what_is_broadcast_over_outputs_is_summed():
    noise = 0.1 * torch.eye(4) + 0.9

    model = of_rows(
        lambda x, a, m: dist.MultivariateNormal(x @ a + m, noise), a=normal(2, 4), m=normal(1)
    )

    gaussian = kron_of(model, (normals(6, 2, seed=1), normals(6, 4, seed=2)))
    expected = 1 + 6 * torch.linalg.inv(noise).sum()
    close(1 / gaussian.variance[-1], expected, 1e-9)


@pytest.mark.parametrize("structure", ["kron", "low_rank"])
def test_priors_that_give_no_gaussian_are_refused(structure):
    def model(x, y):
        w = pyro.sample("w", dist.StudentT(1.0, torch.zeros(2), 0.1).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, 5.0), obs=y)

    data = normals(6, 2, seed=1), normals(6, seed=2)
    fit, far = ps.Laplace(model, structure=structure), {"w": torch.tensor([3.0, 3.0])}
    with pytest.raises(ModelError, match="site 'w'"):
        fit.run(data, mode=far, **QUIET)
    fit = ps.Laplace(model, structure="dense").run(data, **QUIET)
    with pytest.raises(ArgumentError, match="another fit's Gaussian"):
        ps.Laplace(fit.as_prior(), structure=structure).run(data, **QUIET)


def test_params_of_another_precision_than_the_data():
    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(3, dtype=torch.float32), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w.double(), 0.5), obs=y)

    x, y = normals(9, 3, seed=1), normals(9, seed=2)
    close(kron_of(model, (x, y)).precision, torch.eye(3) + 4 * x.T @ x, 1e-4)
