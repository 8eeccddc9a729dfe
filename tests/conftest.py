import pytest
import torch


@pytest.fixture(scope="module")
def float64():
    """Literals in models are float64; for a module, since hypothesis refuses narrower fixtures."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
