"""Models of independent rows, by their priors or network and their likelihood."""

import inspect

import pyro
import pyro.distributions as dist
import torch


def of_rows(likelihood, **priors):
    """A model of sites with these priors, and of rows y.

    Args:
        likelihood: (x, *sites) -> the distribution of y; without x, the model is of y alone.
        priors: the sites' distributions, as functions: they have torch's default dtype at a run.
    """

    def sites():
        return {name: pyro.sample(name, prior()) for name, prior in priors.items()}

    def of_inputs(x, y=None):
        values = sites()
        with pyro.plate("data", len(x)):
            return pyro.sample("y", likelihood(x, **values), obs=y)

    def of_outputs(y):
        values = sites()
        with pyro.plate("data", len(y)):
            return pyro.sample("y", likelihood(**values), obs=y)

    return of_inputs if "x" in inspect.signature(likelihood).parameters else of_outputs


def of_network(net, likelihood):
    """A model of rows y whose distribution follows from a network's outputs.

    Args:
        net: a network of random weights, from `ps.bayesianize`.
        likelihood: outputs -> the distribution of y.
    """

    def model(x, y=None):
        outputs = net(x)
        with pyro.plate("data", len(x)):
            return pyro.sample("y", likelihood(outputs), obs=y)

    return model


def normal(*shape, sd=1.0, dtype=None):
    """The prior Normal(0, sd) of as many elements, as `of_rows` takes it."""
    return lambda: dist.Normal(torch.zeros(shape, dtype=dtype), sd).to_event(len(shape))
