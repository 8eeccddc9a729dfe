"""torchdata's loaders that hold their place: a run that goes on does not read again."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from repetitions import long_but
from runs import EVERY_STEP, QUIET
from torch.utils.data import IterableDataset

import pyro_scale as ps

stateful = pytest.importorskip("torchdata.stateful_dataloader")
ROWS, BATCH = 1000, 7


class Counted(IterableDataset):
    """Rows that are read in order, by a data set that knows how far it is."""

    def __init__(self):
        self.place, self.read = 0, []

    def __iter__(self):
        while self.place < ROWS:
            self.place += 1
            self.read.append(self.place)
            source = torch.Generator().manual_seed(self.place)
            yield torch.randn(2, generator=source) + 0.01 * torch.randn(2)  # and torch's own
        self.place = 0

    def __len__(self):
        return ROWS

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class Interrupted:
    """A model, until the user has had enough."""

    def __init__(self, after):
        self.left = after

    def __call__(self, x):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        mean = pyro.sample("mean", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("rows", len(x)):
            pyro.sample("x", dist.Normal(mean, 1.0).to_event(1), obs=x)


def run_loader(dataset, after=-1, num_chains=1, **options):
    loader = stateful.StatefulDataLoader(dataset, batch_size=BATCH)
    sampler = ps.BAOA(Interrupted(after), lr=0.05, compile=False)
    return sampler.run(
        loader, num_samples=350, num_chains=num_chains, **options, **EVERY_STEP, **QUIET
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("after", "num_chains"),
    long_but([(after, chains) for after in (60, 200, 330) for chains in (1, 3)], (200, 3)),
)
@pytest.mark.filterwarnings("ignore:interrupted:UserWarning")
def test_a_run_goes_on_where_its_loader_was(tmp_path, after, num_chains):
    """Bit for bit, in any epoch, and without the rows that it has had."""
    whole = run_loader(Counted(), num_chains=num_chains).get_samples(group_by_chain=True)["mean"]
    first = run_loader(
        Counted(), after, num_chains, checkpoint=tmp_path, checkpoint_every=0
    ).get_samples(group_by_chain=True)["mean"]
    had = first.shape[1]
    assert 0 < had < 350
    assert torch.equal(whole[:, :had], first)
    left = Counted()
    again = run_loader(left, num_chains=num_chains, resume=tmp_path)
    assert torch.equal(whole, again.get_samples(group_by_chain=True)["mean"])
    # the model is understood on a batch; without its state, reading would go on after that
    assert left.read[BATCH] != BATCH + 1
