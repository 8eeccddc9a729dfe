"""Chains in groups: what is learned within one does not depend on the others."""

import dataclasses
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from reference import close, double, normals
from warned import quiet

import pyro_scale as ps
from pyro_scale.core.mixing import autocorrelation_time, by_group, split_r_hat
from pyro_scale.core.whitening import DenseWhitening, DiagonalWhitening
from pyro_scale.engine.draws import Draws
from pyro_scale.tuning.groups import Lengths, Limit, are_most, have_left, slow_time
from pyro_scale.tuning.one_group import OneGroup
from pyro_scale.tuning.pilot import Bias, pilot
from pyro_scale.tuning.policy import PILOTS, SINGLE_PILOTS, TOLERANCE, WARM_UP, WarmUp
from pyro_scale.tuning.windows import NoStableStep, learn, warm_up

pytestmark = pytest.mark.usefixtures("float64")

NO_LIMIT = Limit(math.inf, lambda: False)


@dataclasses.dataclass(frozen=True)
class Walks:
    """Groups of independent draws of N(0, 1) in one dimension, whose step sizes are too long from
    given ones on: there chains break, or have a bias of three of them."""

    lr: torch.Tensor
    longest: torch.Tensor
    chains: int = 1
    breaks: bool = True
    learns: bool = True
    num_latents: int = 1
    starts: torch.Tensor | None = None

    def with_lr(self, lr):
        return dataclasses.replace(self, lr=lr)

    def run(self, steps, purpose, number, halved=False):
        lr = self.lr / 2 if halved else self.lr
        lr, longest = (each.repeat_interleave(self.chains) for each in (lr, self.longest))
        shape = len(lr), steps.num_samples, 1
        bias = torch.where(lr > longest, math.nan if self.breaks else 3 * lr, 0.0)
        positions = normals(*shape, seed=number) + bias[:, None, None]
        draws = Draws.allocate(positions[:, 0], steps)
        draws.positions, draws.num_steps = positions, (1 + halved) * steps.total
        return draws

    def are_sound(self, draws):
        return draws.positions.isfinite().all(-1).all(-1).view(-1, self.chains)

    def moved_to(self, draws, sound):
        last = draws.positions[:, -1, 0].view_as(sound)
        return dataclasses.replace(self, starts=torch.where(sound, last, 0.0))

    def sound_draws(self, draws, sound):
        return draws.positions.nan_to_num().unflatten(0, (-1, self.chains))

    to_whitened = staticmethod(torch.Tensor.double)
    to_values = staticmethod(torch.Tensor.double)

    def learn(self, draws):
        return self, torch.ones(len(self.lr)), torch.full((len(self.lr), 2), 1e-4)


def test_statistics_are_those_of_each_group_alone():
    draws = normals(3, 2, 40, 4, seed=1).cumsum(2)
    for statistic in (autocorrelation_time, split_r_hat):
        together = by_group(statistic, draws)
        assert together.shape == (3, 4)
        assert torch.equal(together, torch.stack([statistic(each) for each in draws]))


@pytest.mark.parametrize("dense", [True, False])
def test_geometries_of_many_groups_are_those_of_each_alone(dense):
    count, size = 5, 3
    factor = normals(count, size, size, seed=2).tril() + 3 * torch.eye(size)
    tensors = [normals(count, size, seed=3), factor if dense else factor.diagonal(0, 1, 2)]
    kind = DenseWhitening if dense else DiagonalWhitening
    z, worth = normals(count, 2, 50, size, seed=4) + 0.3, 20 + 50 * torch.rand(count)

    def learned(tensors, z, worth):
        change, new = learn(kind(*tensors), z, 1, worth)
        return change, list(new.tensors)

    changes, new = torch.vmap(learned)(tensors, z, worth)
    for group in range(count):
        change, alone = learned([each[group] for each in tensors], z[group], worth[group])
        close(changes[group], change)
        for one, other in zip(new, alone, strict=True):
            close(one[group], other)


def test_a_group_that_breaks_halves_its_step_and_the_others_go_on():
    groups = Walks(torch.full((4,), 0.4), double(9, 9, 9, 0.1), chains=2)
    moved, window = warm_up(groups, NO_LIMIT, WarmUp(first_window=64))
    assert window.number == 1  # as three of four groups agree
    assert window.agrees
    assert moved.lr.tolist() == [0.4, 0.4, 0.4, 0.2]
    assert moved.starts[:3].abs().min() > 0
    assert not moved.starts[3].any()


def test_a_group_that_broke_may_have_its_step_back():
    groups = Walks(double(0.4, 0.4), double(9, 0.1))
    lengths = Lengths(windows=4)
    moved, window = warm_up(groups, Limit(math.inf, lambda: False, lengths), WarmUp())
    assert window.number == 4
    assert moved.lr.tolist() == [0.4, 0.2]  # 0.2 broke, 0.1 did not, 0.2 was tried again


def test_all_groups_that_break_repeat_the_window():
    groups = Walks(double(0.8, 0.8), double(0.2, 0.2))
    moved, window = warm_up(groups, NO_LIMIT, WarmUp())
    assert window.number == 1
    assert window.steps == 3 * 256
    assert moved.lr.tolist() == [0.2, 0.2]


def test_a_group_does_not_depend_on_the_others_where_lengths_are_known():
    limit = Limit(math.inf, lambda: False, Lengths(windows=2, pilots=2, pilot=600))
    for groups in (Walks(double(0.8), double(0.3)), Walks(double(0.8, 0.1), double(0.3, 9))):
        moved, window = warm_up(groups, limit, WarmUp())
        assert (window.number, window.steps) == (2, 3 * 256)
        assert float(moved.lr[0]) == 0.2
        moved, _ = pilot(dataclasses.replace(moved, lr=groups.lr), 1.0, 2, limit, SINGLE_PILOTS)
        assert float(moved.lr[0]) == 0.2


def test_no_step_is_stable():
    with pytest.raises(NoStableStep) as told:
        warm_up(Walks(double(0.8, 0.8), double(0, 0)), NO_LIMIT, WarmUp(halvings=2))
    groups, draws = told.value.args
    assert groups.lr.tolist() == [0.2, 0.2]
    assert draws.positions.isnan().all()


def test_steps_are_shortened_where_they_are_biased():
    groups = Walks(double(0.4, 0.4, 0.4), double(9, 0.3, 0.09), breaks=False)
    moved, tried = pilot(groups, 1.0, 2, NO_LIMIT, SINGLE_PILOTS)
    short, shorter = 0.4 * SINGLE_PILOTS.shorter, 0.4 * SINGLE_PILOTS.shorter**2
    close(moved.lr, double(0.4, short, shorter))
    assert len(tried.biases) == 3
    assert tried.steps > 3 * tried.number * 512


@pytest.mark.parametrize("limit", [1600, 20_000, math.inf])
def test_the_bias_is_that_of_the_last_step_even_if_no_pilot_tried_it(limit):
    """The bias of the mean is three steps, whatever the step is."""
    groups = Walks(double(0.4), double(0), breaks=False)
    moved, tried = pilot(groups, 1.0, 1, Limit(limit, lambda: False), SINGLE_PILOTS)
    assert float(moved.lr) < 0.4
    count = tried.length // max(1, tried.length // SINGLE_PILOTS.draws)
    sd = normals(1, count, 1, seed=tried.number - 1).std()
    close(tried.bias.mean * sd, 3 * moved.lr)


#: A step of `Parted` whose bias is uncertain after one pilot.
LONG = 0.9


def _bias(mean, mean_mcse, log_sd, log_sd_mcse):
    return Bias(*(double(*numbers) for numbers in (mean, mean_mcse, log_sd, log_sd_mcse)))


@dataclasses.dataclass(frozen=True)
class Parted(Walks):
    """Draws that the step size makes noisier by its square, with noise of their own at both step
    sizes: the longer the step, the larger is the error of its bias."""

    def run(self, steps, purpose, number, halved=False):
        draws = Walks.run(self, steps, purpose, number, halved)
        noise = normals(*draws.positions.shape, seed=100 + number + 1000 * halved)
        draws.positions = normals(*noise.shape, seed=number) + self.lr.view(-1, 1, 1) * noise
        return draws


def test_a_step_is_shortened_until_its_bias_is_known():
    """One pilot of the first length is enough, as its bias is not significant, only uncertain."""
    groups = Parted(double(LONG), double(9), chains=4)
    moved, tried = pilot(groups, 1.0, 2, NO_LIMIT, PILOTS)
    assert (tried.number, tried.length) == (1, PILOTS.least)
    assert PILOTS.shorter < float(moved.lr) / LONG < 1
    assert tried.bias.is_known.all()
    factor = float(moved.lr) / LONG
    assert not tried.bias.scaled(factor**-2).is_known.all()


def test_the_factor_until_a_bias_is_known_makes_it_just_known():
    bias = _bias([0.05, 0.0], [0.04, 0.01], [0.01, -0.08], [0.001, 0.02])
    factor = bias.factor_until_known(2)
    worst = 0.08 + PILOTS.errors_of_yes * 0.02
    assert factor == pytest.approx(0.99 * (TOLERANCE.sd / worst) ** 0.5)
    assert bias.scaled(factor**2).is_known.all()
    assert not bias.scaled((1.02 * factor) ** 2).is_known.all()
    assert _bias([0.01], [0.01], [0.01], [0.01]).factor_until_known(2) == 1


def test_of_two_biases_the_one_with_smaller_errors_counts_element_by_element():
    one = _bias([0.1, 0.2, 0.3], [0.01, 0.01, 0.01], [0.4, 0.5, 0.6], [0.5, 0.01, 0.01])
    other = _bias([1.0, 2.0, 3.0], [0.02, 0.02, math.nan], [4.0, 5.0, 6.0], [0.02, 0.02, 0.02])
    assert one.or_more_precise(other).mean.tolist() == [1.0, 0.2, 0.3]
    assert one.or_more_precise(other).log_sd.tolist() == [4.0, 0.5, 0.6]


def _supports(y):
    low = pyro.sample("low", dist.Normal(0.0, 1.0))
    pyro.sample("scale", dist.HalfNormal(1.0))
    pyro.sample("parts", dist.Beta(2.0, 2.0 * torch.ones(2, 3)).to_event(2))
    pyro.sample("shares", dist.Dirichlet(torch.ones(3)))
    pyro.sample("above", dist.Uniform(low, low + 1))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(low, 1.0), obs=y)


def test_values_are_those_that_users_read_where_elements_are_mapped_one_by_one():
    sampler = ps.BAOA(_supports, lr=0.1, precondition=None)
    quiet(sampler.run, (normals(20, seed=6),), num_samples=5, seed=0, progress=False)
    problem, draws = sampler._last.plan.problem, sampler.posterior.draws
    group = OneGroup(problem, None, None, None)
    values = group.to_values(draws.positions[None].double())[0]
    slices, samples = draws.layout.slices(), sampler.get_samples(group_by_chain=True)
    for name in ("low", "scale", "parts"):
        close(values[..., slices[name]], samples[name].double().reshape(4, 5, -1))
    for name in ("shares", "above"):  # a simplex; a support that depends on another site
        assert torch.equal(values[..., slices[name]], draws.positions[..., slices[name]].double())


def test_lengths_that_are_known_are_kept():
    groups = Walks(double(0.4, 0.4), double(9, 0.3), breaks=False)
    lengths = Lengths(pilots=2, pilot=600)
    _, tried = pilot(groups, 1.0, 2, Limit(math.inf, lambda: False, lengths), SINGLE_PILOTS)
    assert (tried.number, tried.length, tried.steps) == (2, 600, 2 * 3 * 600)


def test_a_stage_ends_with_most_groups_and_its_time_is_that_of_a_slow_one():
    assert are_most(torch.tensor([True, True, True, False]))
    assert not are_most(torch.tensor([True, True, False, False]))
    assert slow_time(torch.arange(101.0)) == 95
    assert slow_time(double(3.7)) == 3.7


def test_a_chain_has_left_if_its_log_joint_fell_once_beyond_the_depth():
    """By hand, of 3 dimensions: a fall in the first quarter does not count, as chains still settle;
    one draw is enough, and so is NaN."""
    depth = WARM_UP.depth(3)
    log_joint = torch.zeros(6, 16)
    log_joint[1, 2] = -2 * depth
    log_joint[2, 9] = -0.99 * depth
    log_joint[3, 9] = -1.01 * depth
    log_joint[4, 9] = torch.nan
    log_joint[5] = torch.linspace(-2 * depth, 0.0, 16)  # rising
    assert have_left(log_joint, 3).tolist() == [False, False, False, True, True, False]
