"""Tapes: however the steps are cut into spans, every step gets what it would get by itself."""

import itertools
import threading
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyro_scale.core.schedules import Cyclical
from pyro_scale.data.row_sampler import RowIndices
from pyro_scale.engine import inputs as step_inputs
from pyro_scale.engine import observers
from pyro_scale.engine.draws import Steps
from pyro_scale.engine.inputs import Inputs, StepInputs, steps_within_budget
from pyro_scale.engine.observers import Chunking
from pyro_scale.rng import philox
from pyro_scale.rng.philox import Streams
from pyro_scale.rng.seeds import Purpose
from pyro_scale.rng.streams import NoiseStream

quick = settings(max_examples=60, deadline=None, derandomize=True)
CPU = torch.device("cpu")


def spans_of(cuts, start=0):
    """Lengths -> spans one after another."""
    spans = []
    for cut in cuts:
        spans.append((start, start + cut))
        start += cut
    return spans


# ------------------------------------------------------------------ streams in spans


def noise(chains=2, shape=(2, 5), seed=3, dtype=torch.float64):
    return NoiseStream(seed, range(chains), shape, dtype, CPU)


@quick
@given(st.lists(st.integers(1, 15), min_size=1, max_size=8), st.integers(0, 40))
@pytest.mark.long
def test_noise_in_spans_is_noise_step_by_step(cuts, start):
    """From any step on; the numbers are those of the chain's own stream, one after another."""
    stream = noise()
    for first, last in spans_of(cuts, start):
        span = stream.span(first, last)
        assert span.shape == (2, last - first, 2, 5)
        for step in range(first, last):
            for chain in range(2):
                own = torch.empty(10, dtype=torch.float64)
                philox.normals(Streams.from_seed(3, [chain], Purpose.NOISE), 10 * step, own[None])
                assert torch.equal(span[chain, step - first], own.view(2, 5))


@quick
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 4))
def test_a_chains_noise_does_not_depend_on_their_number(cuts, chains):
    one, many = noise(chains=1), noise(chains=chains)
    for span in spans_of(cuts):
        assert torch.equal(one.span(*span)[0], many.span(*span)[0])


def test_an_earlier_span_can_be_asked_for_again():
    stream = noise()
    first = stream.span(0, 3).clone()
    stream.span(30, 50)
    assert torch.equal(stream.span(0, 3), first)


def test_a_span_that_was_given_out_is_not_written_to():
    """Unless it is given back: the program reads a block while the thread draws the next ones."""
    stream, rows = noise(), row_indices()
    for source in (stream, rows):
        held = [source.span(i, i + 4) for i in range(0, 12, 4)]
        copies = [span.clone() for span in held]
        for later in range(12, 200, 7):
            source.span(later, later + 7)
        for span, copy in zip(held, copies, strict=True):
            assert torch.equal(span, copy)


def row_indices(chains=2, num_rows=10, batch=3, sampling="shuffle", seed=5):
    return RowIndices(seed, range(chains), num_rows, batch, sampling)


@quick
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=8),
    st.integers(0, 30),
    st.sampled_from(["shuffle", "replacement", "symmetric"]),
    st.sampled_from([(10, 3), (10, 10), (7, 2), (50, 1), (60, 45), (1, 1)]),
)
def test_indices_in_spans_are_indices_step_by_step(cuts, start, sampling, sizes):
    num_rows, batch = sizes
    rows = row_indices(num_rows=num_rows, batch=batch, sampling=sampling)
    single = row_indices(num_rows=num_rows, batch=batch, sampling=sampling)
    alone = row_indices(chains=1, num_rows=num_rows, batch=batch, sampling=sampling)
    for first, last in spans_of(cuts, start):
        span = rows.span(first, last)
        assert span.shape == (2, last - first, batch)
        assert span.dtype == torch.int64
        assert int(span.min()) >= 0
        assert int(span.max()) < num_rows
        for step in range(first, last):
            assert torch.equal(span[:, step - first], single.at(step))
        assert torch.equal(span[:1], alone.span(first, last))


@pytest.mark.parametrize("sizes", [(10, 3), (7, 2), (60, 45), (50, 1), (10, 10)])
def test_every_epoch_is_an_order_of_all_rows(sizes):
    """Also where blocks and batches end in the middle of an epoch, and no two are alike."""
    num_rows, batch = sizes
    rows = row_indices(num_rows=num_rows, batch=batch)
    stream = torch.cat([rows.span(*s) for s in spans_of([1, 7, 64, 129, 400])], dim=1).flatten(1)
    epochs = stream[:, : stream.shape[1] // num_rows * num_rows].unflatten(1, (-1, num_rows))
    assert torch.equal(epochs.sort(-1).values, torch.arange(num_rows).expand_as(epochs))
    if num_rows >= 50:
        assert len(epochs.flatten(0, 1).unique(dim=0)) == epochs.shape[0] * epochs.shape[1]


@pytest.mark.parametrize("sizes", [(12, 3), (10, 3), (7, 2), (60, 45), (50, 1), (10, 10)])
def test_symmetric_sweeps_go_back_as_they_came(sizes):
    """Whole batches forwards, then the same ones backwards; a new order for every pair."""
    num_rows, batch = sizes
    whole, pairs = num_rows // batch, 60
    rows = row_indices(num_rows=num_rows, batch=batch, sampling="symmetric")
    steps = torch.cat([rows.span(*s) for s in spans_of([1, 7, 2 * whole * pairs - 8])], dim=1)
    sweeps = steps.unflatten(1, (pairs, 2 * whole))
    assert torch.equal(sweeps, sweeps.flip(2))
    forwards = sweeps[:, :, :whole].flatten(2).sort(-1).values
    assert (forwards.diff(dim=-1) > 0).all()  # no row twice
    if num_rows % batch == 0:
        assert torch.equal(forwards, torch.arange(num_rows).expand_as(forwards))
    if num_rows >= 50:
        assert len(sweeps.flatten(2).flatten(0, 1).unique(dim=0)) == 2 * pairs


def test_symmetric_sweeps_leave_rows_out_at_random():
    """Of 10 rows in batches of 4, two sit each sweep out: over 2 x 500 of them each row sits out
    in 200, and each pair in 1000/45; z and chi squared of 44 degrees beyond 4.4 and 95 come once
    in 10,000 seeds."""
    rows = row_indices(num_rows=10, batch=4, sampling="symmetric")
    sweeps = rows.span(0, 4 * 500).unflatten(1, (500, 4))[:, :, :2].flatten(2).flatten(0, 1)
    out = torch.ones(1000, 10).scatter(1, sweeps, 0.0)
    assert (out.sum(1) == 2).all()
    z = (out.sum(0) - 200) / (1000 * 0.2 * 0.8) ** 0.5
    assert z.abs().max() < 4.4
    pairs = (out.T @ out)[*torch.triu_indices(10, 10, 1)]
    assert float(((pairs - 1000 / 45).square() / (1000 / 45)).sum()) < 95
    assert not torch.equal(out[:500], out[500:])  # the chains' own


# ------------------------------------------------------------------ a block and its parts


def made(start=7, steps=9, chains=3):
    values = {"lr": torch.rand(steps), "friction": torch.rand(steps)}
    changing = [torch.rand(chains, steps, 4), {"i": torch.randint(9, (chains, steps))}]
    return StepInputs(start, values, torch.rand(chains, steps, 2, 5), changing)


@quick
@given(st.integers(1, 12))
def test_parts_are_the_block(size):
    block = made()
    parts = list(block.parts(size))
    assert [len(part) for part in parts[:-1]] == [size] * (len(parts) - 1)
    assert [part.start for part in parts] == list(range(7, 16, size))
    assert parts[-1].stop == block.stop == 16
    for part in parts:
        for place in range(len(part)):
            values, normals, changing = part.at(place)
            step = part.start + place - block.start
            assert values == {name: column[step] for name, column in block.values.items()}
            assert torch.equal(normals, block.noise[:, step])
            assert torch.equal(changing[0], block.changing[0][:, step])
            assert torch.equal(changing[1]["i"], block.changing[1]["i"][:, step])


def test_the_tape_of_some_chains():
    block = made()
    some = block.of_chains(slice(1, 3))
    assert some.start == block.start
    assert torch.equal(some.noise, block.noise[1:3])
    assert torch.equal(some.changing[1]["i"], block.changing[1]["i"][1:3])
    assert some.values == block.values


@pytest.mark.parametrize("numbers", [1, 100, 1000, 10**6, 10**8])
def test_the_memory_budget_sets_the_steps(numbers):
    """As many as fit, to a power of two; one at least, and no more than a bar can wait for."""
    empty = torch.empty(1, dtype=torch.int16).expand(2, 1, numbers)
    block = StepInputs(0, {}, torch.empty(2, 1, 1, 3), [empty])
    per_step = 2 * (3 * 4 + 2 * numbers)
    steps = steps_within_budget(block)
    assert steps & (steps - 1) == 0
    assert steps == 1 or steps * per_step <= step_inputs._BUDGET
    assert steps == step_inputs._LONGEST or 2 * steps * per_step > step_inputs._BUDGET
    assert 1 <= steps <= step_inputs._LONGEST


# ------------------------------------------------------------------ drawn ahead


@dataclass
class Watched:
    """Batches that say when, and by which thread, they were taken."""

    fail_at: int = 10**9
    taken: list = field(default_factory=list)
    arrived: threading.Condition = field(default_factory=threading.Condition)

    def take(self, start, stop, out=None):
        with self.arrived:
            self.taken.append((start, threading.current_thread()))
            self.arrived.notify_all()
        if start <= self.fail_at < stop:
            raise LookupError(f"row {self.fail_at}")
        numbers = torch.arange(start, stop).expand(2, -1)
        return numbers.clone() if out is None else out.copy_(numbers)

    def wait_for(self, start):
        with self.arrived:
            return self.arrived.wait_for(lambda: any(s == start for s, _ in self.taken), 30)


def inputs(batches):
    values = {"lr": torch.arange(400.0)}
    return Inputs(values, noise(shape=(1, 3)), batches)


def tape_threads():
    return [t for t in threading.enumerate() if t.name.startswith("pyro_scale-block")]


SPANS = spans_of([1, 3, 4, 9, 2, 30, 30, 1, 1, 1, 5])


EVEN = spans_of([8] * 40 + [3])


@pytest.mark.parametrize("spans", [[], SPANS[:1], SPANS[:2], SPANS, EVEN])
def test_blocks_are_block_one_after_another(spans):
    """Each is as it should be until the next one is asked for, whatever is drawn meanwhile."""
    batches, plain, found = Watched(), inputs(Watched()), []
    for block in inputs(batches).blocks(iter(spans)):
        found.append((block.start, block.stop))
        ahead = min(len(spans), len(found) + step_inputs._AHEAD)
        assert batches.wait_for(spans[ahead - 1][0])
        expected = plain.block(block.start, block.stop)
        assert torch.equal(block.values["lr"], expected.values["lr"])
        assert torch.equal(block.noise, expected.noise)
        assert torch.equal(block.changing, expected.changing)
    assert found == spans
    assert not tape_threads()


@pytest.mark.parametrize("sampling", ["shuffle", "replacement", "symmetric"])
def test_a_span_is_written_over_an_earlier_one(sampling):
    """The numbers are those of new memory, whole blocks and parts of them alike."""
    for source, again in [(noise(), noise()), (row_indices(sampling=sampling),) * 2]:
        out = source.span(0, 17)
        for start in (17, 34, 1000, 3):
            written = source.span(start, start + 17, out)
            assert written.data_ptr() == out.data_ptr()
            assert torch.equal(written, again.span(start, start + 17))


def test_the_next_tape_is_drawn_by_another_thread_while_one_is_used():
    """Nothing but the thread can take the next batches while this one waits for them."""
    batches = Watched()
    iterator = inputs(batches).blocks(iter(SPANS))
    for start, _ in SPANS[:-1]:
        block = next(iterator)
        assert block.start == start
        assert batches.wait_for(block.stop)
    list(iterator)
    assert [start for start, _ in batches.taken] == [start for start, _ in SPANS]
    threads = {thread for _, thread in batches.taken}
    assert len(threads) == 1
    assert threading.current_thread() not in threads


def test_few_tapes_are_drawn_ahead():
    """Memory holds a few of them, however slow the program is."""
    batches = Watched()
    iterator = inputs(batches).blocks(iter(spans_of([1] * 100)))
    next(iterator)
    batches.wait_for(step_inputs._AHEAD)
    iterator.close()
    assert len(batches.taken) <= step_inputs._AHEAD + 1


def test_an_exception_of_the_data_comes_out_in_its_turn():
    iterator = inputs(Watched(fail_at=18)).blocks(iter(SPANS))
    for _ in range(4):
        last = next(iterator)
    assert last.stop == 17
    with pytest.raises(LookupError, match="row 18"):
        next(iterator)
    assert not tape_threads()


@pytest.mark.parametrize("used", [0, 1, 5])
def test_abandoned_tapes_leave_no_thread(used):
    iterator = inputs(Watched()).blocks(iter(SPANS))
    for _ in range(used):
        next(iterator)
    del iterator
    assert not tape_threads()


# ------------------------------------------------------------------ which steps are kept


def steps_by_hand(num_samples, warmup, thinning, explores=lambda step: False):
    """The steps that are kept, one step after another."""
    kept, step, sampled = [], warmup, 0
    while len(kept) < num_samples:
        sampled += not explores(step)
        if not explores(step) and sampled % thinning == 0:
            kept.append(step)
        step += 1
    return kept


a_run = st.tuples(st.integers(1, 12), st.integers(0, 20), st.integers(1, 9))
#: Cycles that explore all, some or none of their first part.
cycles = st.builds(
    lambda length, part: Cyclical(0.1, length, part * (length - 1) / length, settling=0.0),
    st.integers(1, 12),
    st.sampled_from([0.0, 0.3, 0.8, 1.0]),
)


@quick
@given(a_run, cycles | st.none(), st.data())
def test_what_is_kept_by_brute_force(run, cycle, data):
    steps = Steps(*run, cycle and cycle.keeps)
    kept = steps_by_hand(*run, *([cycle.explores] if cycle else []))
    assert steps.kept.tolist() == kept
    assert steps.total == kept[-1] + 1
    step = data.draw(st.integers(0, steps.total - 1))
    assert steps.kept_before(step) == sum(k < step for k in kept)
    assert step + steps.left(step) - 1 == next(k for k in kept if k >= step)


@quick
@given(a_run, cycles | st.none(), st.lists(st.integers(1, 30), min_size=1, max_size=60))
def test_programs_that_count_evenly_keep_what_is_to_be_kept(run, cycle, cuts):
    """A program keeps the left-th state and every thinning-th from there: over blocks of any
    lengths, cut where `even_until` says."""
    steps = Steps(*run, cycle and cycle.keeps)
    found, start = [], 0
    for cut in itertools.cycle(cuts):
        stop = min(start + cut, steps.total)
        while start < stop:
            even = steps.even_until(start, stop)
            assert start < even <= stop
            first = start + steps.left(start) - 1
            found += range(first, even, steps.thinning)
            start = even
        if start == steps.total:
            break
    assert found == steps.kept.tolist()


@quick
@given(
    st.integers(0, 90), st.integers(2, 500), st.sampled_from([2, 8, 64]), st.lists(st.booleans())
)
def test_chunking_goes_through_every_step_once(begin, count, most, slow):
    """Blocks grow while they are quick, up to the budget; from the third step on, or from the
    third after those that an earlier run took."""
    num_steps = begin + count
    first = StepInputs(begin, {}, torch.empty(1, 2, 1, 1), ())
    chunking = Chunking(first, num_steps, most)
    slow, expected, before = iter(slow), begin + 2, 2
    for start, stop in chunking.spans():
        assert start == expected
        assert stop - start in (before, min(2 * before, most)) or stop == num_steps
        assert 0 < stop - start <= most
        expected, before = stop, stop - start
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(observers, "_NOTICED_SECONDS", -1.0 if next(slow, False) else 1e9)
            chunking.before(first)
            chunking.after(first)
    assert expected == num_steps


def test_a_cycle_settles_before_it_is_kept():
    cycle = Cyclical(0.1, cycle_steps=10, exploration=0.5, settling=0.3)
    assert Steps(6, 0, 1, cycle.keeps).kept.tolist() == [8, 9, 18, 19, 28, 29]
    assert Steps(3, 15, 2, cycle.keeps).kept.tolist() == [19, 29, 39]
    assert [cycle.explores(step) for step in (4, 5, 9, 14)] == [True, False, False, True]


@pytest.mark.parametrize("ends", [[1, 5, 40], range(7, 60, 7), [2, 3, 60], []])
def test_a_block_ends_where_it_has_to(ends):
    chunking = Chunking(StepInputs(0, {}, torch.empty(1, 2, 1, 1), ()), 60, 16, ends)
    opening = [(block.start, block.stop) for block in chunking.opening()]
    spans = [*opening, *chunking.spans()]
    assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
    assert set(ends) | {60} <= {stop for _, stop in spans}
