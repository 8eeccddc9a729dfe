"""Vectors, rows, seeds and schedules."""

import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyro_scale.core import rows, schedules
from pyro_scale.core.layout import Layout
from pyro_scale.errors import ArgumentError, DataError
from pyro_scale.rng.seeds import Purpose, choose_seed, derived_seed, generator
from pyro_scale.rng.streams import NoiseStream

quick = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.differing_executors],
)
shapes = st.lists(st.lists(st.integers(0, 3), max_size=3).map(tuple), min_size=1, max_size=5)


def numbered(sizes, start=0):
    """Tensors of these shapes that hold start, start + 1, ... throughout."""
    values = {}
    for i, shape in enumerate(sizes):
        values[f"site {i}"] = torch.arange(start, start + math.prod(shape)).double().reshape(shape)
        start += math.prod(shape)
    return values


# ------------------------------------------------------------------ layout


class TestLayout:
    @pytest.mark.slow
    @quick
    @given(shapes)
    def test_lays_entries_end_to_end_in_their_order(self, sizes):
        values = numbered(sizes)
        layout = Layout.from_tensors(values)
        vector = layout.flatten(dict(reversed(values.items())))
        assert torch.equal(vector, torch.arange(layout.size).double())
        for name, value in layout.unflatten(vector).items():
            assert torch.equal(value, values[name])
            assert torch.equal(vector[layout.slices()[name]], values[name].flatten())

    @quick
    @given(shapes, st.lists(st.integers(1, 3), max_size=2))
    def test_unflattens_any_leading_dimensions(self, sizes, leading):
        values = numbered(sizes)
        layout = Layout.from_tensors(values)
        vectors = layout.flatten(values) + 100 * torch.arange(math.prod(leading)).double().reshape(
            *leading, 1
        )
        for name, value in layout.unflatten(vectors).items():
            assert value.shape == (*leading, *values[name].shape)
            parts = value.reshape(math.prod(leading), *values[name].shape)
            for i in range(math.prod(leading)):
                assert torch.equal(parts[i], values[name] + 100 * i)

    def test_names_the_site_of_an_element(self):
        layout = Layout.from_tensors(
            {"a": torch.zeros(2), "none": torch.zeros(0), "b": torch.zeros(())}
        )
        assert [layout.site_at(i) for i in range(3)] == ["a", "a", "b"]

    def test_has_the_widest_dtype_and_gives_each_its_own_back(self):
        values = {"a": torch.ones(2), "b": torch.full((2,), math.pi, dtype=torch.float64)}
        layout = Layout.from_tensors(values)
        vector = layout.flatten(values)
        assert vector.dtype == layout.dtype == torch.float64
        assert vector[2] == math.pi
        back = layout.unflatten(vector)
        assert back["a"].dtype == torch.float32
        assert torch.equal(back["b"], values["b"])

    def test_goes_through_vmap_and_grad(self):
        values = numbered([(2,), (2, 2)])
        layout = Layout.from_tensors(values)

        def energy(vector):
            parts = layout.unflatten(vector)
            return (parts["site 0"] ** 2).sum() + 3 * parts["site 1"].sum()

        vectors = torch.stack([layout.flatten(values), 1 + layout.flatten(values)])
        gradient = torch.vmap(torch.func.grad(energy))(vectors)
        expected = torch.cat([2 * vectors[:, :2], torch.full((2, 4), 3.0).double()], dim=1)
        assert torch.equal(gradient, expected)


# ------------------------------------------------------------------ schedules


class TestSchedules:
    def test_polynomial_decay_is_welling_and_tehs(self):
        lr = schedules.polynomial_decay(0.3, power=0.55, delay=20)
        for step in (0, 1, 20, 1000):
            assert lr(step) == pytest.approx(0.3 * (20 / (20 + step)) ** 0.55, rel=1e-14)
        assert schedules.polynomial_decay(0.3)(7) == pytest.approx(0.3 * 8**-0.33, rel=1e-14)
        assert schedules.polynomial_decay(0.3, power=0)(99) == 0.3

    def test_cosine_decay_is_half_a_cosine(self):
        lr = schedules.cosine_decay(0.5, num_steps=60, end=0.1)
        expected = {0: 0.5, 20: 0.4, 30: 0.3, 40: 0.2, 60: 0.1, 61: 0.1, 10**6: 0.1}
        assert {step: round(lr(step), 14) for step in expected} == expected

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: schedules.polynomial_decay(0.0), "start > 0"),
            (lambda: schedules.polynomial_decay(0.1, power=-1), "power >= 0"),
            (lambda: schedules.polynomial_decay(0.1, delay=0), "delay > 0"),
            (lambda: schedules.cosine_decay(0.1, num_steps=0), "num_steps >= 1, not 0"),
        ],
    )
    def test_nonsense_is_refused(self, make, message):
        with pytest.raises(ArgumentError, match=message):
            make()


# ------------------------------------------------------------------ randomness


def columns(seed=0, chains=2, shape=(1, 3), dtype=torch.float64):
    return NoiseStream(seed, range(chains), shape, dtype, torch.device("cpu"))


class TestRandomness:
    def test_what_a_seed_means_never_changes(self):
        """A release that changed these would change every published run."""
        numbers = {"INIT": 0, "NOISE": 1, "BATCHES": 2, "MOMENTUM": 3, "DATA_LOADER": 4}
        assert {p.name: int(p) for p in Purpose} == {
            **numbers,
            "STEP_SIZE": 5,
            "CURVATURE": 6,
            "APPROXIMATION": 7,
            "SHADOW": 8,
            "SEARCH": 9,
            "WINDOW": 10,
            "PILOT": 11,
            "PREDICTION": 12,
            "SIMULATION": 13,
        }
        assert derived_seed(0, 0, Purpose.NOISE) == 5950159816103605179
        assert derived_seed(7, 3, Purpose.BATCHES, block=2) == 2521211164429912937

    def test_streams_differ_by_seed_chain_purpose_and_block(self):
        seeds = {
            derived_seed(seed, chain, purpose, block)
            for seed in (0, 1, 2**40)
            for chain in range(5)
            for purpose in Purpose
            for block in range(5)
        }
        assert len(seeds) == 3 * 5 * len(Purpose) * 5
        assert all(0 <= seed < 2**63 for seed in seeds)

    def test_a_generator_starts_at_its_streams_beginning(self):
        first = torch.randn(3, generator=generator(5, 1, Purpose.INIT))
        again = torch.randn(3, generator=generator(5, 1, Purpose.INIT))
        expected = torch.Generator().manual_seed(derived_seed(5, 1, Purpose.INIT))
        assert torch.equal(first, again)
        assert torch.equal(first, torch.randn(3, generator=expected))

    @quick
    @given(st.lists(st.integers(0, 5000), min_size=1, max_size=6), st.integers(1, 4))
    def test_noise_is_a_function_of_seed_chain_and_step(self, steps, chains):
        """In any order, any number of chains, as after a resumption."""
        one, many = columns(chains=1), columns(chains=chains)
        for step in steps:
            noise = many.at(step)
            assert noise.shape == (chains, 1, 3)
            assert torch.equal(noise[0], one.at(step)[0])
            assert torch.equal(noise, columns(chains=chains).at(step))

    def test_noise_is_standard_normal_and_white(self):
        """Over 4 x 3000 x 3 numbers each z below is normal, and 4.5 comes once in 150,000."""
        source = columns(seed=3, chains=4)
        noise = torch.stack([source.at(step) for step in range(3000)])[:, :, 0]
        count = noise.numel()

        def z(mean, variance):
            return abs(float(mean)) * (count / variance) ** 0.5

        assert z(noise.mean(), 1) < 4.5
        assert z(noise.square().mean() - 1, 2) < 4.5
        assert z(noise.pow(4).mean() - 3, 96) < 4.5
        assert z((noise[1:] * noise[:-1]).mean(), 1) < 4.5  # from step to step
        assert z((noise[:, 1:] * noise[:, :-1]).mean() * 0.75**0.5, 1) < 4.5  # chain to chain

    def test_torchs_generator_is_left_alone_unless_it_is_asked(self):
        state = torch.get_rng_state()
        columns().at(0)
        assert choose_seed(3) == 3
        assert torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(11)
        drawn = choose_seed(None)
        torch.manual_seed(11)
        assert choose_seed(None) == drawn
        assert choose_seed(None) != drawn

    @pytest.mark.parametrize("seed", [-1, 2**63, 1.0, True, "0"])
    def test_bad_seeds_are_refused(self, seed):
        with pytest.raises(ArgumentError, match="pass an int in"):
            choose_seed(seed)


# ------------------------------------------------------------------ rows

X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6)
ARGUMENTS = [
    (X, Y, torch.tensor(3.0), "as it is", None),
    {"x": X, "y": Y, "n": 7},
    ({"x": X, "more": [Y, 2.5]}, Y),
]


def leaves(arguments):
    return torch.utils._pytree.tree_leaves(arguments)


class TestRows:
    @pytest.mark.parametrize("arguments", ARGUMENTS)
    @quick
    @given(cuts=st.lists(st.integers(1, 5), unique=True, max_size=4).map(sorted))
    def test_parts_put_together_are_the_whole(self, arguments, cuts):
        edges = [0, *cuts, 6]
        parts = [rows.take(arguments, slice(a, b)) for a, b in itertools.pairwise(edges)]
        assert [rows.count(part) for part in parts] == [b - a for a, b in itertools.pairwise(edges)]
        whole = rows.concatenate(parts)
        for leaf, expected in zip(leaves(whole), leaves(arguments), strict=True):
            same = torch.equal(leaf, expected) if rows.is_rows(expected) else leaf is expected
            assert same

    @pytest.mark.parametrize("arguments", ARGUMENTS)
    def test_taking_by_indices_of_any_shape(self, arguments):
        index = torch.tensor([[5, 0], [3, 3]])
        taken = rows.take(arguments, index)
        for leaf, expected in zip(leaves(taken), leaves(arguments), strict=True):
            assert (
                torch.equal(leaf, expected[index]) if rows.is_rows(expected) else (leaf is expected)
            )

    def test_stacking_and_vmapping_over_what_is_rows_alone(self):
        parts = [rows.take((X, Y, torch.tensor(3.0), 2), slice(i, i + 3)) for i in (0, 3)]
        stacked = rows.stack(parts)
        assert torch.equal(stacked[0], X.reshape(2, 3, 2))
        dims = rows.vmap_dims(stacked, 0)
        assert dims == (0, 0, None, None)
        totals = torch.vmap(lambda x, y, c, k: (x.sum(-1) * y).sum() * c * k, in_dims=dims)(
            *stacked
        )
        expected = (X.sum(-1) * Y).reshape(2, 3).sum(-1) * 6
        assert torch.equal(totals, expected)

    def test_scalars_are_no_rows_and_need_none(self):
        assert rows.count((torch.tensor(1.0), 3, "x")) is None
        assert rows.count({}) is None
        assert rows.count((torch.zeros(0, 3),)) == 0

    def test_different_first_dimensions_are_refused_by_name(self):
        with pytest.raises(DataError, match=r"'x'.*: 6, .*'y'.*: 5.*functools.partial"):
            rows.count({"x": X, "y": Y[:5]})

    @pytest.mark.parametrize(
        ("batch", "arguments"),
        [
            (X, (X,)),
            ([X, Y], (X, Y)),
            ((X, Y), (X, Y)),
            ({"x": X}, {"x": X}),
            ((), ()),
        ],
    )
    def test_a_batch_is_the_models_arguments(self, batch, arguments):
        given = rows.as_arguments(batch)
        assert type(given) is type(arguments)
        assert leaves(given) == leaves(arguments) or all(
            a is b for a, b in zip(leaves(given), leaves(arguments), strict=True)
        )

    def test_calls_by_position_and_by_name(self):
        def model(x, y):
            return x - y

        assert rows.call(model, (5, 2)) == 3
        assert rows.call(model, {"y": 5, "x": 2}) == -3
