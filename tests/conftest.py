import logging

import pyro
import pytest
import torch

# pytest's handlers would make Inductor write a trace of every compilation for nobody
logging.getLogger("torch.__trace").addHandler = lambda handler: None


@pytest.fixture(scope="module")
def float64():
    """Literals in models are float64; for a module, since hypothesis refuses narrower fixtures."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def store():
    """A param store of the test's own."""
    with pyro.get_param_store().scope():
        yield
