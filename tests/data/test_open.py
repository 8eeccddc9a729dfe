"""Data as users have them: N, batches in which every row counts equally, and bad input."""

import math
from collections import Counter

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from runs import EVERY_STEP, QUIET
from scipy import sparse
from torch.utils import _pytree as pytree
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

import pyro_scale as ps
from pyro_scale.data.open import open_data
from pyro_scale.errors import ArgumentError, DataError

N, B = 10, 4  # a ragged tail of 2


class Rows(Dataset):
    """Row i is (i, 2 i): read by index, with a length, and no tensors to look at."""

    def __init__(self, size=N):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if not 0 <= index < self.size:
            raise IndexError(index)
        return index, torch.tensor(2.0 * index)


class Stream(IterableDataset):
    def __init__(self, size=N):
        self.size = size

    def __iter__(self):
        return iter(zip(range(self.size), 2.0 * torch.arange(self.size), strict=True))


class SizedStream(Stream):
    def __len__(self):
        return self.size


class OddFirst(Sampler):
    """A sampler that nobody knows."""

    def __init__(self, size=N):
        self.size = size

    def __iter__(self):
        return iter([*range(1, self.size, 2), *range(0, self.size, 2)])

    def __len__(self):
        return self.size


def tensors(size=N):
    return torch.arange(size), 2.0 * torch.arange(size)


def by_name(rows):
    """A collate function that makes a dict, as Hugging Face's do."""
    index, double = zip(*rows, strict=True)
    return {"x": torch.tensor(index), "y": torch.stack(double)}


def index_of(arguments):
    """The rows of a batch, after a check that the two columns still belong together."""
    x, y = arguments.values() if isinstance(arguments, dict) else arguments
    assert torch.equal(2.0 * x, y.double())
    return x


def steps_of(batches, num_steps):
    """The batches of the first steps, one after another."""
    for step in range(num_steps):
        changing = pytree.tree_map(lambda leaf: leaf[:, 0], batches.take(step, step + 1))
        yield batches.batch(batches.fixed, changing)


def visits(data, num_steps, num_chains=1, seed=0, sampling="shuffle"):
    """Each chain's rows in the order in which it saw them, `[chains, steps, B]`."""
    data.first()
    batches = steps_of(data.batches(seed, num_chains, sampling), num_steps)
    steps = []
    for batch in batches:
        chains = [index_of(batch.of_chain(chain)[0]) for chain in range(num_chains)]
        steps.append(torch.stack(chains))
    return torch.stack(steps, dim=1)


BY_INDEX = {
    "tensors": lambda: open_data(tensors(), B),
    "dict": lambda: open_data(dict(zip("xy", tensors(), strict=True)), B),
    "TensorDataset": lambda: open_data(DataLoader(TensorDataset(*tensors()), B)),
    "shuffled": lambda: open_data(DataLoader(TensorDataset(*tensors()), B, shuffle=True)),
    "drop_last": lambda: open_data(DataLoader(TensorDataset(*tensors()), B, drop_last=True)),
    "collated": lambda: open_data(DataLoader(TensorDataset(*tensors()), B, collate_fn=by_name)),
    "map-style": lambda: open_data(DataLoader(Rows(), B, shuffle=True)),
    "map-style, collated": lambda: open_data(DataLoader(Rows(), B, collate_fn=by_name)),
    "map-style, drop_last": lambda: open_data(DataLoader(Rows(), B, drop_last=True)),
    "concatenated": lambda: open_data(
        DataLoader(ConcatDataset([TensorDataset(*tensors()), Subset(Rows(), [])]), B)
    ),
}
STREAMS = {
    "iterable": lambda: open_data(DataLoader(SizedStream(), B)),
    "iterable, num_data": lambda: open_data(DataLoader(Stream(), B), num_data=N),
    "iterable, collated": lambda: open_data(DataLoader(SizedStream(), B, collate_fn=by_name)),
    "own sampler": lambda: open_data(DataLoader(Rows(), B, sampler=OddFirst())),
    "own batch sampler": lambda: open_data(
        DataLoader(Rows(), batch_sampler=[[3, 1, 4], [5, 9, 2], [6], [8, 7, 0]])
    ),
    "list of batches": lambda: open_data(
        list(zip(*(column.split(B) for column in tensors()), strict=True)), num_data=N
    ),
}


# ------------------------------------------------------------------ every row counts equally


@pytest.mark.parametrize("num_chains", [1, 3])
@pytest.mark.parametrize("kind", BY_INDEX)
def test_every_row_counts_equally_over_epochs(kind, num_chains):
    """Two epochs of 10 rows are five batches of 4: each row twice, by every chain; and no
    chain sees a row of the second epoch before it has seen all of the first."""
    seen = visits(BY_INDEX[kind](), num_steps=5, num_chains=num_chains)
    assert seen.shape == (num_chains, 5, B)
    for chain in seen.flatten(1):
        assert sorted(chain[:N].tolist()) == list(range(N))
        assert sorted(chain[N:].tolist()) == list(range(N))
        assert not torch.equal(chain[:N], chain[N:])  # a new order each epoch


@pytest.mark.parametrize("num_chains", [1, 2])
@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_counts_every_row_equally(kind, num_chains):
    """The loader's own order, cut into batches of one size: its ragged tail is carried on."""
    data = STREAMS[kind]()
    data.first()
    size = data.batch_size
    steps = 2 * size  # 2 N epochs in all: a whole number of batches
    batches = visits(data, num_steps=steps * N // size, num_chains=num_chains)
    order = batches.transpose(0, 1).flatten()
    epochs = order.split(N)
    assert len(epochs) == 2 * num_chains * size
    assert torch.equal(order.unique(return_counts=True)[1], torch.full((N,), len(epochs)))
    if num_chains == 1:  # as the loader gave them; several chains get a step's batches at random
        assert all(sorted(epoch.tolist()) == list(range(N)) for epoch in epochs)


@pytest.mark.parametrize("num_chains", [2, 4])
def test_every_chain_sees_all_of_an_unshuffled_stream(num_chains):
    """Dealt in turn, chain c would get the batches c, c + num_chains, ... of four for ever."""
    batches = [(torch.arange(2 * i, 2 * i + 2),) for i in range(4)]
    data = open_data(batches, num_data=8)
    data.first()
    taken = steps_of(data.batches(0, num_chains, "shuffle"), 400)
    for chain in torch.stack([batch.arguments[0][:, 0] for batch in taken], dim=1):
        counts = torch.bincount(chain // 2, minlength=4).double()
        z = (counts - 100) / math.sqrt(400 * 0.25 * 0.75)
        assert z.abs().max() < 4.4


def test_a_shuffled_stream_is_shuffled_anew_each_epoch_by_the_seed():
    def orders(seed):
        loader = DataLoader(Rows(), batch_sampler=BatchSampler(RandomOrder(), B, drop_last=False))
        return visits(open_data(loader), num_steps=5, seed=seed).flatten().split(N)

    class RandomOrder(OddFirst):
        def __iter__(self):
            return iter(torch.randperm(N).tolist())

    first, second = orders(seed=1)
    assert not torch.equal(first, second)
    assert all(map(torch.equal, orders(seed=1), (first, second)))
    assert not torch.equal(orders(seed=2)[0], first)


def test_replacement_draws_rows_independently():
    """4000 draws of 10 rows: chi squared of 9 degrees is below 33.7 but for 1 seed in 10,000,
    and a row is followed by itself as often as by any other."""
    seen = visits(open_data(tensors(), B), num_steps=1000, sampling="replacement").flatten()
    counts = torch.bincount(seen, minlength=N)
    assert float(((counts - 400.0) ** 2 / 400).sum()) < 33.7
    repeats = int((seen[1:] == seen[:-1]).sum())
    assert abs(repeats - 400) < 4 * (400 * 0.9) ** 0.5


@pytest.mark.parametrize("sampling", ["shuffle", "replacement"])
@pytest.mark.parametrize("kind", ["tensors", "map-style"])
def test_a_chains_batches_do_not_depend_on_the_other_chains(kind, sampling):
    runs = [visits(BY_INDEX[kind](), 7, chains, 5, sampling) for chains in (1, 2, 4)]
    assert torch.equal(runs[0], runs[2][:1])
    assert torch.equal(runs[1], runs[2][:2])
    assert not torch.equal(runs[2][0], runs[2][1])
    assert not torch.equal(runs[0], visits(BY_INDEX[kind](), 7, 1, 6, sampling))


def test_a_data_set_read_by_index_gives_the_batches_that_its_tensors_would():
    runs = [visits(BY_INDEX[kind](), 9, 2, seed=3) for kind in BY_INDEX]
    assert all(torch.equal(run, runs[0]) for run in runs[1:])


def test_worker_processes_change_nothing():
    loader = DataLoader(Rows(), B, num_workers=1, collate_fn=by_name)
    alone = visits(BY_INDEX["map-style"](), 6, 2, seed=4)
    assert torch.equal(visits(open_data(loader), 6, 2, seed=4), alone)


def test_whole_batches_are_the_data_as_they_are():
    for size in (None, N):
        data = open_data(tensors(), size)
        assert torch.equal(visits(data, 3), torch.arange(N).expand(1, 3, N))


@pytest.mark.parametrize("kind", [*BY_INDEX, *STREAMS])
def test_in_order_reads_every_row_once(kind):
    data = (BY_INDEX | STREAMS)[kind]()
    data.first()
    seen = torch.cat([index_of(batch) for batch in data.in_order()]).tolist()
    assert sorted(seen) == list(range(N))
    if kind in BY_INDEX:
        assert seen == list(range(N))


@pytest.mark.parametrize("kind", [*BY_INDEX, *STREAMS])
def test_torchs_generator_is_left_alone(kind):
    torch.manual_seed(11)
    before = torch.get_rng_state()
    visits((BY_INDEX | STREAMS)[kind](), 6, 2)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", ["map-style", "stream"])
def test_random_augmentation_is_ruled_by_the_seed(kind):
    """A data set that draws from torch's generator when it is read: same seed, same batches."""

    class Augmented(Rows):
        def __getitem__(self, index):
            return torch.rand(())

    def read(outer_seed):
        torch.manual_seed(outer_seed)
        before = torch.get_rng_state()
        sampler = OddFirst() if kind == "stream" else None
        data = open_data(DataLoader(Augmented(), B, sampler=sampler))
        data.first()
        batches = steps_of(data.batches(0, 2, "shuffle"), 4)
        values = torch.stack([batch.arguments[0] for batch in batches])
        assert torch.equal(torch.get_rng_state(), before)
        return values

    assert torch.equal(read(1), read(2))


# ------------------------------------------------------------------ N and B


def loader(*args, size=N, **kwargs):
    return DataLoader(TensorDataset(*tensors(size)), *args, **kwargs)


SOME = [7, 1, 4, 2, 9, 5]


@pytest.mark.parametrize(
    ("make", "num_data", "batch_size"),
    [
        (lambda: open_data(tensors()), 10, None),
        (lambda: open_data(tensors()[0]), 10, None),
        (lambda: open_data(list(tensors()), 3), 10, 3),
        (lambda: open_data({"x": tensors()[0], "scale": 2.0}, 3), 10, 3),
        (lambda: open_data((*tensors(), torch.tensor(2.0)), 3), 10, 3),  # 0-d: not rows
        (lambda: open_data(((tensors()[0], {"z": tensors()[1]}), 2), 3), 10, 3),  # nested
        (lambda: open_data(tensors(), 3, num_data=500), 500, 3),
        (lambda: open_data(loader(3)), 10, 3),
        (lambda: open_data(loader(3), num_data=500), 500, 3),
        (lambda: open_data(loader(3, sampler=SubsetRandomSampler(SOME))), 6, 3),
        (lambda: open_data(loader(3, sampler=SubsetRandomSampler(SOME)), num_data=70), 70, 3),
        (lambda: open_data(DataLoader(Rows(), 3, sampler=SubsetRandomSampler(SOME))), 6, 3),
        (lambda: open_data(DataLoader(Subset(TensorDataset(*tensors()), SOME), 3)), 6, 3),
        (lambda: open_data(DataLoader(random_split(Rows(), [7, 3])[0], 3)), 7, 3),
        (lambda: open_data(DataLoader(random_split(Rows(), [0.8, 0.2])[1], 2)), 2, None),
        (lambda: open_data(DataLoader(SizedStream(), 3)), 10, 3),
        (lambda: open_data(DataLoader(Stream(), 3), num_data=77), 77, 3),
        (lambda: open_data(DataLoader(Rows(), batch_sampler=[[0, 1, 2], [3, 4]])), 10, 3),
        (lambda: open_data(None), None, None),
    ],
)
def test_n_and_b(make, num_data, batch_size):
    data = make()
    data.first()
    assert data.num_data == num_data
    if batch_size is None:  # the whole data, which a loader says by its number of rows
        assert data.batch_size in (None, num_data)
    else:
        assert data.batch_size == batch_size


SUBSETS = {
    "sampler": lambda data: DataLoader(data, 3, sampler=SubsetRandomSampler(SOME)),
    "batch sampler": lambda data: DataLoader(
        data, batch_sampler=BatchSampler(SubsetRandomSampler(SOME), 3, drop_last=False)
    ),
    "subset": lambda data: DataLoader(Subset(data, SOME), 3, shuffle=True),
    "subset of a subset": lambda data: DataLoader(
        Subset(Subset(data, [0, *SOME]), range(1, 7)), 3, shuffle=True
    ),
    "sampler on a subset": lambda data: DataLoader(
        Subset(data, [0, *SOME]), 3, sampler=SubsetRandomSampler(range(1, 7))
    ),
}


@pytest.mark.parametrize("dataset", [Rows(), TensorDataset(*tensors())], ids=["index", "tensors"])
@pytest.mark.parametrize("kind", SUBSETS)
def test_subsets_are_read_and_counted_alone(kind, dataset):
    data = open_data(SUBSETS[kind](dataset))
    data.first()
    assert (data.num_data, data.batch_size) == (6, 3)
    seen = visits(data, num_steps=4, num_chains=1).flatten()
    assert Counter(seen.tolist()) == dict.fromkeys(SOME, 2)


@pytest.mark.parametrize("inner", [SequentialSampler, RandomSampler])
def test_a_batch_sampler_of_torchs_keeps_its_batch_size(inner):
    dataset = TensorDataset(*tensors())
    given = DataLoader(dataset, batch_sampler=BatchSampler(inner(dataset), 4, drop_last=False))
    data = open_data(given)
    data.first()
    assert (data.num_data, data.batch_size) == (10, 4)
    seen = visits(data, num_steps=5)
    assert Counter(seen.flatten().tolist()) == dict.fromkeys(range(N), 2)


# ------------------------------------------------------------------ bad data

WEIGHTED = WeightedRandomSampler(torch.arange(1.0, N + 1), N)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: open_data(DataLoader(Stream(), B)), DataError, r"N is unknown.*num_data=N"),
        (lambda: open_data(iter([tensors()])), DataError, r"N is unknown.*num_data=N"),
        (lambda: open_data([tensors()]), DataError, r"N is unknown.*num_data=N"),
        (lambda: open_data(tensors(), 11), DataError, r"batch_size=11 is more than the 10 rows"),
        (lambda: open_data(loader(11)), DataError, r"batch_size=11 is more than the 10 rows"),
        (
            lambda: open_data(loader(7, sampler=SubsetRandomSampler(SOME))),
            DataError,
            r"batch_size=7 is more than the 6 rows",
        ),
        (lambda: open_data(tensors(0)), DataError, r"no rows"),
        (lambda: open_data(loader(2, size=0)), DataError, r"empty"),
        (lambda: open_data(DataLoader(Rows(0), 2)), DataError, r"empty"),
        (lambda: open_data(loader(2, sampler=SubsetRandomSampler([]))), DataError, r"no rows"),
        (lambda: open_data([], num_data=5).first(), DataError, r"yields no batch.*empty"),
        (lambda: open_data(loader(3), 3), ArgumentError, r"batch_size=3 beside a loader"),
        (lambda: open_data(tensors(), 0), ArgumentError, r"batch_size=0: pass an int >= 1"),
        (lambda: open_data(tensors(), 2.5), ArgumentError, r"batch_size=2\.5: pass an int"),
        (lambda: open_data(tensors(), True), ArgumentError, r"batch_size=True: pass an int"),
        (lambda: open_data(None, 3), DataError, r"batch_size=3, but there is no tensor"),
        (lambda: open_data(([1, 2], 3), 2), DataError, r"batch_size=2, but there is no tensor"),
        (lambda: open_data((sparse.eye(3).tocsr(),)), DataError, r"argument 0 is a csr.*toarray"),
        (lambda: open_data((np.arange(3), tensors()[0])), DataError, r"first dim.*0: 3, 1: 10"),
        (lambda: open_data({"x": np.array(["a"])}), DataError, r"argument 'x' has strings"),
        (lambda: open_data(np.zeros((0, 2))), DataError, r"no rows"),
        (
            lambda: open_data((torch.zeros(3), torch.zeros(4, 3))),
            DataError,
            r"first dimensions differ.*3.*4.*functools\.partial",
        ),
        (lambda: open_data(loader(3, sampler=WEIGHTED)), DataError, r"Weighted.*poutine\.scale"),
        (
            lambda: open_data(loader(batch_sampler=BatchSampler(WEIGHTED, 3, False))),
            DataError,
            r"Weighted.*poutine\.scale",
        ),
        (lambda: open_data(TensorDataset(*tensors())), DataError, r"pass a DataLoader"),
        (lambda: open_data(7), DataError, r"data is an? int: pass a DataLoader"),
        (lambda: open_data(len), DataError, r"pass a DataLoader"),
        (lambda: open_data([(1, 2.0)], num_data=9).first(), DataError, r"hold no tensor"),
    ],
)
def test_bad_data_are_refused(make, error, message):
    with pytest.raises(error, match=rf"(?s){message}"):
        make()


def test_a_generator_is_refused_when_it_runs_out():
    data = open_data((tensors() for _ in range(3)), num_data=N)
    data.first()
    with pytest.raises(DataError, match="iterable again and again; pass a DataLoader"):
        visits(data, num_steps=5)


def normal_mean(x, y=None):
    x, y = torch.as_tensor(x), torch.as_tensor(y)  # as a user in a hurry writes it
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(w * x, 1.0), obs=y)


def as_arrays(rows):
    return tuple(np.array(column, dtype=np.float64) for column in zip(*rows, strict=True))


def test_batches_of_numpy_arrays_are_rows():
    """Unnoticed, the likelihood would count B rows of N."""
    arrays = DataLoader(Rows(), B, collate_fn=as_arrays)
    tensors = DataLoader(Rows(), B)
    found, expected = (ps.explain(normal_mean, loader) for loader in (arrays, tensors))
    assert str(found) == str(expected)
    how = {"num_samples": 2, "warmup_steps": 0, "thinning": 1, "num_chains": 1, "seed": 0}
    runs = [
        ps.BAOA(normal_mean, lr=0.1).run(loader, **how, progress=False)
        for loader in (arrays, tensors)
    ]
    assert torch.equal(*(run.get_samples()["w"] for run in runs))


def padded(rows):
    """Sequences, padded to the longest of the batch."""
    length = 1 + max(index % 4 for index, _ in rows)
    return torch.ones(len(rows), length), torch.stack([y for _, y in rows])


@pytest.mark.parametrize("num_chains", [1, 2])
def test_batches_padded_to_different_lengths(num_chains):
    """One chain takes them as they come; several cannot be stacked, which the library says."""
    given = open_data(DataLoader(Rows(), 2, collate_fn=padded))
    batches = steps_of(given.batches(0, num_chains, "shuffle"), 10)
    if num_chains == 1:
        lengths = {batch.of_chain(0)[0][0].shape[1] for batch in batches}
        assert len(lengths) > 1
    else:
        with pytest.raises(DataError, match=r"shape.*(pad|num_chains)"):
            list(batches)


def test_a_stream_whose_batches_are_padded_differently_is_refused_when_it_is_cut_anew():
    """Carrying a ragged tail on joins batches of different lengths, which torch refuses."""
    given = DataLoader(Rows(), batch_sampler=[[0, 4], [8], [3, 7], [1, 2], [5, 6]])
    given.collate_fn = padded
    data = open_data(given)
    data.first()
    with pytest.raises(DataError, match=r"shape.*pad"):
        list(steps_of(data.batches(0, 1, "shuffle"), 5))


@pytest.mark.parametrize("sampling", ["foo", "", 3])
@pytest.mark.parametrize("kind", ["whole", "minibatch", "map-style", "stream"])
def test_unknown_sampling_is_refused(kind, sampling):
    x, y = torch.arange(1.0, N + 1), torch.ones(N)
    data, size = {
        "whole": ((x, y), None),
        "minibatch": ((x, y), B),
        "map-style": (DataLoader(Rows(), B), None),
        "stream": (DataLoader(SizedStream(), B), None),
    }[kind]
    sampler = ps.BAOA(normal_mean, lr=0.1)
    known = r"\('shuffle', 'replacement', 'symmetric'\)"
    with pytest.raises(ArgumentError, match=rf"sampling={sampling!r}: pass one of {known}"):
        sampler.run(
            data,
            num_samples=2,
            num_chains=1,
            batch_size=size,
            sampling=sampling,
            progress=False,
            **EVERY_STEP,
        )


@pytest.mark.slow
@pytest.mark.parametrize(("method", "default"), [(ps.BAOA, "shuffle"), (ps.SGNHT, "replacement")])
def test_no_sampling_is_the_methods_own(method, default):
    data = torch.arange(1.0, N + 1), torch.ones(N)
    runs = [
        method(normal_mean, lr=0.01).run(
            data, num_samples=9, num_chains=1, batch_size=B, **kwargs, **EVERY_STEP, **QUIET
        )
        for kwargs in ({}, {"sampling": None}, {"sampling": default}, {"sampling": "symmetric"})
    ]
    draws = [run.get_samples()["w"] for run in runs]
    assert runs[0].to_arviz().attrs["sampling"] == default
    assert torch.equal(draws[0], draws[1])
    assert torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0], draws[3])


def test_a_stream_cannot_be_drawn_with_replacement():
    sampler = ps.BAOA(normal_mean, lr=0.01)
    with pytest.raises(ArgumentError, match=r"sampling='replacement' needs data.*by index"):
        sampler.run(
            DataLoader(SizedStream(), B),
            num_samples=2,
            num_chains=1,
            sampling="replacement",
            progress=False,
            **EVERY_STEP,
        )


def test_a_sampler_of_ones_own_that_shows_part_of_the_data_is_refused():
    class FirstHalf(torch.utils.data.Sampler):
        def __iter__(self):
            return iter(range(N // 2))

        def __len__(self):
            return N // 2

    given = DataLoader(Rows(), 2, sampler=FirstHalf())
    with pytest.raises(DataError, match=rf"{N // 2} of the data set's {N} rows.*Subset.*num_data"):
        open_data(given)
    assert open_data(given, num_data=N).num_data == N
