"""The contract of kernels: pure functions, hyperparameters.  Every test goes through the table of
methods; what each of them computes is in test_theory, test_thermostat and test_psgld."""

import dataclasses
import inspect
import math

import pytest
import torch
from gaussian import Field, bound, hills
from methods import METHODS, STOCHASTIC, TABLE, UNDERDAMPED, by_name
from reference import close, double, normals

import pyro_scale as ps
from pyro_scale import kernels
from pyro_scale.core.schedules import Cyclical
from pyro_scale.errors import ArgumentError
from pyro_scale.infer.sampler import Sampler
from pyro_scale.kernels import BAOA, SGHMC, Kernel, pSGLD

every_method = pytest.mark.parametrize("row", TABLE, ids=by_name)
without_adjustment = pytest.mark.parametrize("row", STOCHASTIC, ids=by_name)
SLOPE = Field(torch.func.grad(hills), hills)
#: Elements that do not know of each other.
APART = Field(lambda x: torch.cos(x) - x**3, lambda x: (torch.sin(x) - x**4 / 4).sum())


def test_every_method_has_a_row():
    public = {
        name
        for name, value in vars(kernels).items()
        if inspect.isclass(value) and issubclass(value, Kernel) and value is not Kernel
    }
    assert public == METHODS.keys()
    samplers = {name for name in ps.__all__ if _is_sampler(getattr(ps, name))}
    assert samplers == METHODS.keys()
    for row in TABLE:
        assert row.sampler.kernel_class is row.kernel
        fields = {field.name: field.default for field in dataclasses.fields(row.kernel)}
        assert fields.keys() == {"lr", "temperature", *row.others}
        assert fields["lr"] is dataclasses.MISSING
        assert fields["temperature"] == 1.0
        assert all(fields[name] != value for name, value in row.others.items())


def _is_sampler(value):
    return inspect.isclass(value) and issubclass(value, Sampler) and value is not Sampler


# ------------------------------------------------------------------ pure functions


def started(kernel, num_chains=None, seed=3):
    """(A state some steps on, whose every leaf has moved; the next step's noise)."""
    shape = (3,) if num_chains is None else (num_chains, 3)
    noise = normals(4, *shape[:-1], kernel.normals, 3, seed=seed)
    init, update = kernel.init, lambda s, z: kernel.update(s, SLOPE, z)[0]
    if num_chains is not None:
        init, update = torch.vmap(init), torch.vmap(update)
    state = init(0.5 * normals(*shape, seed=seed + 1), normals(*shape, seed=seed + 2))
    for each in noise[:3]:
        state = update(state, each)
    return state, noise[3]


@every_method
def test_update_leaves_its_inputs_alone(row):
    kernel = bound(row.of())
    state, noise = started(kernel)
    before = [leaf.clone() for leaf in (*state, noise, *kernel.values.values())]
    once, _ = kernel.update(state, SLOPE, noise)
    twice, _ = kernel.update(state, SLOPE, noise)
    after = (*state, noise, *kernel.values.values())
    assert all(map(torch.equal, before, after))
    assert all(map(torch.equal, once, twice))
    for new, old in zip(once, state, strict=True):
        assert (new != old).all()
        assert new.shape == old.shape
        assert new.dtype == old.dtype == torch.float64


@every_method
def test_vmapped_is_looped(row):
    kernel = bound(row.of())
    state, noise = started(kernel, num_chains=4)
    together, _ = torch.vmap(lambda s, z: kernel.update(s, SLOPE, z))(state, noise)
    for chain in range(4):
        alone, _ = kernel.update(type(state)(*(s[chain] for s in state)), SLOPE, noise[chain])
        for a, b in zip(together, alone, strict=True):
            close(a[chain], b, tolerance=1e-14)
    assert (together.position[0] != together.position[1]).all()


@without_adjustment
def test_one_gradient_a_step_whose_evaluation_is_passed_on(row):
    kernel, calls = bound(row.of()), []
    state, noise = started(kernel)

    class Target:
        def grad(self, position):
            calls.append(position)
            return -position, "evaluation"

    assert kernel.update(state, Target(), noise)[1] == "evaluation"
    assert len(calls) == 1
    assert calls[0].shape == (3,)


@without_adjustment
def test_every_normal_counts_and_none_at_temperature_zero(row):
    warm, cold = bound(row.of()), bound(row.of(temperature=0))
    state, noise = started(warm)
    for place in range(warm.normals):
        for element in range(3):
            other = noise.clone()
            other[place, element] += 1.0
            moved, still = (warm.update(state, APART, z)[0].position for z in (other, noise))
            own = torch.arange(3) == element
            assert (moved[own] != still[own]).all()
            if row.name != "SGNHT":  # whose thermostat ties the elements together
                assert torch.equal(moved[~own], still[~own])
            quiet = [cold.update(state, APART, z)[0] for z in (other, noise)]
            assert all(map(torch.equal, *quiet))


@pytest.mark.parametrize(("temperature", "num_data"), [(1.0, 1), (0.3, 40), (0.0, 7)])
@pytest.mark.parametrize("mass", [1.0, 2.5, double(0.5, 1.0, 3.0)], ids=["1", "2.5", "apart"])
@pytest.mark.parametrize("row", UNDERDAMPED, ids=by_name)
def test_momenta_start_at_their_stationary_spread(row, mass, temperature, num_data):
    """N(0, m T / N), at rest at temperature 0; the position is left as it is."""
    if temperature == 0 and row not in STOCHASTIC:
        return  # there is no temperature 0
    kernel = bound(row.of(temperature=temperature), num_data)
    mass = torch.as_tensor(mass).double()
    kernel = kernel.replace(mass=mass)
    position, noise = normals(3, seed=1), normals(3, seed=0)
    state = kernel.init(position, noise)
    close(state.momentum, (mass * temperature / num_data).sqrt() * noise, tolerance=1e-15)
    assert torch.equal(state.position, position)
    if row.name == "SGNHT":
        assert float(state.xi) == 0.7


@pytest.mark.parametrize("row", [r for r in TABLE if not r.has_momentum], ids=by_name)
def test_others_start_where_they_are_put(row):
    position = normals(3, seed=1)
    state = bound(row.of(temperature=0.5), num_data=10).init(position, normals(3))
    assert torch.equal(state.position, position)
    if row.name == "pSGLD":
        close(state.square, torch.full((3,), 0.05, dtype=torch.float64), tolerance=1e-15)


@without_adjustment
def test_a_value_for_each_element_is_one_for_all_where_they_are_alike(row):
    """And where they are not, it shows."""
    kernel = bound(row.of())
    state, noise = started(kernel)
    expected, _ = kernel.update(state, APART, noise)
    assert set(kernel.per_site) <= {"lr", *row.others}
    assert "lr" in kernel.per_site
    for name in (*kernel.per_site, "temperature"):
        vector = kernel.replace(**{name: kernel.values[name].expand(3)})
        for a, b in zip(vector.update(state, APART, noise)[0], expected, strict=True):
            close(a, b, tolerance=1e-14)
        apart = kernel.replace(**{name: kernel.values[name] * double(1.0, 1.3, 1.0)})
        moved, _ = apart.update(state, APART, noise)
        same = [bool(a == b) for a, b in zip(moved.position, expected.position, strict=True)]
        assert same == [True, False, True] or row.name == "SGNHT"


@every_method
def test_states_keep_their_dtype(row):
    """Values are float64, positions of float32 stay that."""
    kernel = bound(row.of())
    state = kernel.init(torch.ones(3), torch.ones(3))
    for _ in range(2):
        assert all(leaf.dtype == torch.float32 for leaf in state)
        state, _ = kernel.update(state, SLOPE, torch.ones(kernel.normals, 3))


# ------------------------------------------------------------------ hyperparameters

RATES = [
    (row, name)
    for row in TABLE
    for name in ("lr", *row.others)
    if name not in row.kernel.may_be_zero
]
of_rates = pytest.mark.parametrize(
    ("row", "name"), RATES, ids=[f"{row.name}-{name}" for row, name in RATES]
)


def test_what_may_be_zero():
    assert {row.name: set(row.kernel.may_be_zero) for row in TABLE} == {
        **{row.name: {"temperature"} for row in TABLE},
        "GHMC": set(),
        "pSGLD": {"temperature", "forgetting"},
    }


@pytest.mark.parametrize("value", [0, 0.0, -0.1, math.nan, math.inf, "0.1", None, True, [0.1]])
@of_rates
def test_rates_must_be_positive_numbers(row, name, value):
    with pytest.raises(ArgumentError, match=rf"^{name}=.*pass a number > 0, or a schedule"):
        row.of(**{name: value})


@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf, "1", None])
@every_method
def test_temperature_must_not_be_negative(row, value):
    bound = ">= 0" if row in STOCHASTIC else "> 0"
    with pytest.raises(ArgumentError, match=rf"^temperature=.*pass a number {bound}"):
        row.of(temperature=value)
    if row not in STOCHASTIC:
        with pytest.raises(ArgumentError, match=r"^temperature=0: pass a number > 0"):
            row.of(temperature=0)
        return
    assert row.of(temperature=0).values(0)["temperature"] == 0


def test_forgetting_is_a_weight():
    for value in (0, 0.0, 1, 0.5):
        assert pSGLD(lr=0.1, forgetting=value).values(0)["forgetting"] == value
    for value in (-0.1, math.nan, "1", 1.0001, 2):
        with pytest.raises(ArgumentError, match=r"^forgetting="):
            pSGLD(lr=0.1, forgetting=value)
    with pytest.raises(ArgumentError, match=r"^forgetting=1.5 at step 1: it is a weight, at most"):
        pSGLD(lr=0.1, forgetting=lambda step: 0.5 + step).columns(3)


@every_method
def test_schedules_are_functions_of_the_step(row):
    others = dict(row.others) if row.name != "pSGLD" else {"damping": 0.3}
    names = ["lr", "temperature", *others]
    kernel = row.of(**{name: lambda step, i=i: 1 / (1 + i + step) for i, name in enumerate(names)})
    columns = kernel.columns(4)
    for i, name in enumerate(names):
        close(columns[name], 1 / (1 + i + torch.arange(4).double()), tolerance=1e-15)
        assert float(kernel.values(2)[name]) == 1 / (3 + i)
    assert columns.keys() == {"lr", "temperature", *row.others}
    assert all(column.dtype == torch.float64 for column in columns.values())


@of_rates
def test_a_schedule_out_of_range_names_the_step(row, name):
    kernel = row.of(**{name: lambda step: 2.5 - step})
    assert len(kernel.columns(3)[name]) == 3
    with pytest.raises(ArgumentError, match=rf"^{name}=-0\.5 at step 3: pass"):
        kernel.columns(10)
    with pytest.raises(ArgumentError, match=rf"^{name}=-1\.5 at step 4: pass"):
        kernel.values(4)


@every_method
def test_kernels_are_frozen(row):
    kernel = row.of()
    for name in kernel.hyperparameters():
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(kernel, name, 0.2)


@every_method
def test_only_what_may_differ_by_site_is_a_dict(row):
    for name in ("temperature", *row.others):
        if name not in row.kernel.per_site:
            with pytest.raises(ArgumentError, match=rf"^{name} is one number.*by site: lr"):
                row.of(**{name: {"w": 0.5}})
    kernel = row.of(**{name: {"w": 0.5, "s": 0.1} for name in row.kernel.per_site})
    assert all(kernel.values(0)[name].tolist() == [0.5, 0.1] for name in row.kernel.per_site)


def test_by_site():
    assert {row.name: row.kernel.per_site for row in TABLE} == {
        **{row.name: ("lr", "friction", "mass") for row in UNDERDAMPED},
        "SGNHT": ("lr", "mass"),
        "SGLD": ("lr",),
        "pSGLD": ("lr",),
    }


@pytest.mark.parametrize(
    "value",
    [
        *(0, -0.1, math.nan, "0.1", None, True, [0.1]),
        *(double(0.1, 0.0), double(0.1, -1.0), double(math.nan), double(math.inf)),
        torch.ones(2, dtype=torch.int64),
        torch.ones(2, dtype=torch.bool),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["lr", "friction", "mass"])
def test_entries_of_a_dict_must_be_positive_numbers_or_tensors_of_them(name, value):
    expected = rf"^{name}\['w'\]=.*: pass a number, or a tensor of numbers, > 0, or a schedule"
    with pytest.raises(ArgumentError, match=expected):
        BAOA(**{"lr": 0.1, name: {"s": 0.1, "w": value}})


def test_schedules_inside_dicts():
    """A column for each entry; a tensor counts as 1."""
    lr = {"w": lambda step: 1 / (1 + step), "s": 0.3, "v": double(0.1, 0.2)}
    columns = SGHMC(lr=lr, mass={"w": 2.0}).columns(3)
    close(
        columns["lr"],
        double([1.0, 0.3, 1.0], [1 / 2, 0.3, 1.0], [1 / 3, 0.3, 1.0]),
        tolerance=1e-15,
    )
    close(columns["mass"], double([2.0], [2.0], [2.0]), tolerance=0)
    assert columns["friction"].tolist() == [1.0] * 3
    with pytest.raises(ArgumentError, match=r"^lr\['w'\]=0\.0 at step 2: pass"):
        SGHMC(lr={"w": lambda step: 2.0 - step}).columns(5)


@every_method
def test_an_empty_dict_is_refused(row):
    for name in row.kernel.per_site:
        with pytest.raises(ArgumentError, match=rf"^{name}={{}}: pass a value for each site"):
            row.of(**{name: {}})


@pytest.mark.parametrize("name", ["temperature", "friction", "mass", "lr"])
def test_cycles_rule_all_noise(name):
    cycle = Cyclical(0.1, cycle_steps=10)
    given = {"w": cycle} if name == "lr" else cycle
    with pytest.raises(ArgumentError, match=rf"^{name}.*: Cyclical cannot be set per site"):
        BAOA(**{"lr": 0.1, name: given})


def test_a_cyclical_step_size_takes_the_temperature_with_it():
    """0 while it explores, and else what it would be, a schedule's too."""
    cycle = Cyclical(0.2, cycle_steps=4, exploration=0.5, settling=0.0)
    columns = BAOA(lr=cycle, temperature=lambda step: 1.0 + step).columns(9)
    assert columns["temperature"].tolist() == [0, 0, 3, 4, 0, 0, 7, 8, 0]
    expected = [0.1 * (math.cos(math.pi * (step % 4) / 4) + 1) for step in range(9)]
    close(columns["lr"], double(*expected), tolerance=1e-15)
    kernel = BAOA(lr=cycle, temperature=0.5)
    assert [float(kernel.values(step)["temperature"]) for step in range(4)] == [0, 0, 0.5, 0.5]
    assert BAOA(lr=cycle).columns(3)["temperature"].tolist() == [0, 0, 1]
