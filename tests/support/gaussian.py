"""What a kernel does on a Gaussian, read out exactly: its linear map, noise and stationary law."""

import dataclasses
import functools
from typing import Any, NamedTuple

import torch

from pyro_scale.kernels.gaussian import GaussianChain


class Value(NamedTuple):
    """A log joint, as an evaluation has it."""

    log_joint: Any


class Field:
    """A target with a given gradient (over N), and a log joint over N where it is asked for."""

    num_data = 1

    def __init__(self, gradient, log_joint=None):
        self.gradient = gradient
        self.log_joint = log_joint or (lambda position: torch.zeros((), dtype=position.dtype))

    def grad(self, position):
        return self.gradient(position), Value(self.log_joint(position))


def hills(x):
    """A log joint over N that is not quadratic, so that signs and scales all show."""
    return -(x**4).sum() / 4 - 0.7 * (x[0] * x[1:]).sum() + torch.sin(3 * x).sum()


@dataclasses.dataclass(frozen=True)
class Bound:
    """A kernel with one step's values, whose names are attributes, and so are its theory's."""

    kernel: Any
    values: dict[str, torch.Tensor]

    def __getattr__(self, name):
        if name in self.values:
            return self.values[name]
        if hasattr(self.kernel, name):
            return getattr(self.kernel, name)
        return functools.partial(getattr(self.kernel.theory, name), self.values)

    def init(self, position, noise):
        return self.kernel.init(position, self.values, noise)

    def update(self, state, target, noise):
        return self.kernel.update(state, target, self.values, noise)

    def replace(self, **values):
        return Bound(self.kernel, {**self.values, **values})

    def linearize(self, noise):
        kernel, values, left = self.kernel.theory.linearize(self.kernel, self.values, noise)
        return Bound(kernel, values), left

    def modes(self, precision):
        return GaussianChain.from_kernel(self.kernel, self.values, precision)


def bound(kernel, num_data=1, step=0):
    """The kernel at a step's values, its temperature over N."""
    return Bound(kernel, kernel.at(step, num_data))


def state_of(kernel, vector):
    """A state from the concatenation of its vectors."""
    probe = kernel.init(torch.zeros(1).double(), torch.zeros(1).double())
    return type(probe)(*vector.split(len(vector) // len(probe)))


def read_out(kernel, precision):
    """The maps of (state, noise, gradient noise) to the next state, for log joint / N
    -x'Px/2: the columns are the images of basis vectors."""
    dim = len(precision)
    target = Field(lambda x: -precision @ x)
    rest = torch.zeros(dim).double()
    size = torch.cat(kernel.init(rest, rest)).numel()
    still = torch.zeros(kernel.normals, dim).double()

    def columns(images):
        return torch.stack([torch.cat(image) for image in images], dim=1)

    def moved(vector, noise=still, target=target):
        return kernel.update(state_of(kernel, vector), target, noise)[0]

    zero = torch.zeros(size).double()
    transition = columns(moved(unit) for unit in torch.eye(size).double())
    units = torch.eye(kernel.normals * dim).double().reshape(-1, kernel.normals, dim)
    noise = columns(moved(zero, unit) for unit in units)
    pushed = columns(
        moved(zero, still, Field(lambda x, push=push: push)) for push in torch.eye(dim).double()
    )
    return transition, noise, pushed


def lyapunov(transition, noise_covariance):
    """S = A S A' + Q, solved as one linear system."""
    size = len(transition)
    system = torch.eye(size * size).double() - torch.kron(transition, transition)
    return torch.linalg.solve(system, noise_covariance.flatten()).reshape(size, size)


def stationary(kernel, precision, gradient_noise=0.0):
    """The exact stationary covariance of (position[, momentum])."""
    transition, noise, pushed = read_out(kernel, precision)
    assert torch.linalg.eigvals(transition).abs().max() < 1
    return lyapunov(transition, noise @ noise.T + gradient_noise * pushed @ pushed.T)
