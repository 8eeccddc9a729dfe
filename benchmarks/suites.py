"""What is timed against what, and the numbers to reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from protocol import Contender


@dataclass(frozen=True)
class Target:
    """A bound on ours over the fastest of some peers, or on ours alone if there are none.

    Attributes:
        what: a description.
        ours: a row's name.
        peers: rows' names.
        faster: the least that peer / ours may be.
        at_most: the most that ours / peer may be, or ours in the suite's unit.

    Without a bound it is a figure to compare with.
    """

    what: str
    ours: str
    peers: tuple[str, ...] = ()
    faster: float | None = None
    at_most: float | None = None

    def figure(self, times: Mapping[str, float]) -> float | None:
        """What is bounded, from the rows' times; None where a row is missing."""
        peers = [times[name] for name in self.peers if name in times]
        if self.ours not in times or (self.peers and not peers):
            return None
        ratio = times[self.ours] / min(peers) if peers else times[self.ours]
        return ratio if self.faster is None else 1 / ratio

    @property
    def bound(self) -> str:
        """In words."""
        if self.faster is not None:
            return f">= {self.faster:g}x"
        return "" if self.at_most is None else f"<= {self.at_most:g}"

    def verdict(self, figure: float) -> str:
        """Whether a figure is good enough."""
        if self.faster is not None:
            return "yes" if figure >= self.faster else "NO"
        if self.at_most is not None:
            return "yes" if figure <= self.at_most else "NO"
        return ""


@dataclass(frozen=True)
class Suite:
    """Contenders that are timed in turns; the first is the one that ratios refer to.

    Attributes:
        name: of its file, and for `--only`.
        title: of its table.
        contenders: in the table's order.
        targets: what to reach.
        unit: of the table, with `per_second` of them in a second.
        most_rounds: for what takes long.
        comparable: whether all sample the same posterior, so that their draws can be compared.
    """

    name: str
    title: str
    contenders: tuple[Contender, ...]
    targets: tuple[Target, ...]
    unit: str = "us"
    per_second: float = 1e6
    most_rounds: int = 1000
    comparable: bool = True


OURS = "Pyro Scale"
REPLACEMENT = f"{OURS}, rows drawn anew"
DRAWN_ANEW: dict[str, Any] = {"sampling": "replacement"}


def _blackjax(name: str, function: str, **arguments: Any) -> Contender:
    return Contender(name, f"peer_blackjax:{function}", arguments)


LOGISTIC = Suite(
    "logistic",
    "Logistic regression, 768 rows, 8 columns, batch 32, one chain (us a step)",
    (
        Contender(OURS, "ours:logistic"),
        Contender(f"{OURS}, four chains", "ours:logistic", {"chains": 4}),
        Contender(f"{OURS}, second core free", "ours:logistic", pinned=False),
        Contender(f"{OURS}, threads left alone", "ours:logistic", pinned=False, one_thread=False),
        Contender(REPLACEMENT, "ours:logistic", DRAWN_ANEW),
        Contender(f"{REPLACEMENT}, four chains", "ours:logistic", {**DRAWN_ANEW, "chains": 4}),
        Contender(
            "posteriors on the Pyro model",
            "peer_posteriors:logistic",
            {"density": "through_pyro", "steps": 500},
        ),
        Contender(
            "posteriors by hand",
            "peer_posteriors:logistic",
            {"density": "by_hand", "steps": 1000},
        ),
        Contender(
            "posteriors by hand, compiled",
            "peer_posteriors:logistic",
            {"density": "by_hand", "steps": 5000, "compiled": True},
        ),
        Contender(
            "posteriors by hand, compiled, 5 steps unrolled",
            "peer_posteriors:logistic",
            {"density": "by_hand", "steps": 20_000, "compiled": True, "unrolled": 5},
        ),
        Contender("PyTorch by hand, compiled", "peer_torch:logistic", {"steps": 10_000}),
        Contender(
            "PyTorch by hand, compiled, 5 steps unrolled",
            "peer_torch:logistic",
            {"steps": 20_000, "unrolled": 5},
        ),
        _blackjax("BlackJAX, Python loop", "loop", steps=5000),
        _blackjax("BlackJAX, scan, indices in bulk", "scan", steps=200_000),
        _blackjax("BlackJAX, scan, indices in the body", "scan", steps=100_000, in_bulk=False),
        _blackjax("blackjax.sghmc, 10 gradients on a batch", "public", steps=200_000),
        _blackjax("JAX by hand, scan, all randomness in bulk", "by_hand", steps=200_000),
        Contender("Pyro SVI, AutoNormal", "peer_pyro:svi", {"steps": 300}),
        Contender("NumPyro NUTS on all rows, per gradient", "peer_numpyro:nuts", {"draws": 10_000}),
    ),
    (
        Target(
            "against posteriors on the same Pyro model",
            OURS,
            ("posteriors on the Pyro model",),
            400,
        ),
        Target("against posteriors by hand", OURS, ("posteriors by hand",), 250),
        Target(
            "against posteriors by hand and compiled", OURS, ("posteriors by hand, compiled",), 40
        ),
        Target(
            "against BlackJAX in its fastest form",
            OURS,
            ("BlackJAX, scan, indices in bulk", "BlackJAX, scan, indices in the body"),
            3,
        ),
        Target("the default against rows drawn anew", OURS, (REPLACEMENT,), at_most=1.15),
        Target(
            "the same, four chains",
            f"{OURS}, four chains",
            (f"{REPLACEMENT}, four chains",),
            at_most=1.15,
        ),
    ),
)

FULL_BATCH = Suite(
    "full_batch",
    "The same, all 768 rows at every step (us a step)",
    (
        Contender(OURS, "ours:logistic", {"batch_size": None, "steps": 60_000}),
        _blackjax("BlackJAX, scan", "full_batch", steps=50_000),
        _blackjax("BlackJAX, scan, x by columns", "full_batch", steps=50_000, by_columns=True),
        _blackjax(
            "JAX by hand, x by columns, noise in bulk",
            "full_batch",
            steps=50_000,
            by_columns=True,
            hand=True,
        ),
    ),
    (
        Target("against BlackJAX", OURS, ("BlackJAX, scan",), at_most=1.0),
        Target(
            "against BlackJAX, its data transposed",
            OURS,
            ("BlackJAX, scan, x by columns",),
            at_most=1,
        ),
    ),
)

MANY_CHAINS = Suite(
    "many_chains",
    "The same, 1,000 chains, batch 32 (us a chain-step)",
    (
        Contender(OURS, "ours:logistic", {"chains": 1000, "steps": 4000}),
        _blackjax("BlackJAX, vmap in scan", "many_chains", steps=2000),
        _blackjax("BlackJAX, scan in vmap", "many_chains", steps=2000, outside="vmap"),
    ),
    (
        Target(
            "against BlackJAX, the better form",
            OURS,
            ("BlackJAX, vmap in scan", "BlackJAX, scan in vmap"),
            1.5,
        ),
    ),
)


def _network(name: str, hidden: tuple[int, ...], steps: int, steps_of_peers: int) -> Suite:
    layers = "-".join(map(str, (64, *hidden, 10)))
    common: dict[str, Any] = {"hidden": hidden, "steps": steps}
    four = {**common, "chains": 4, "steps": steps // 2}
    peer = {**common, "steps": steps_of_peers}
    sgd: dict[str, dict[str, Any]] = {
        "SGD + randn, a tensor a weight": {"flat": False},
        "SGD + randn, one vector": {"flat": True},
        "SGD + randn, a tensor a weight, 10 steps unrolled": {"flat": False, "unrolled": 10},
        "SGD + randn, one vector, 10 steps unrolled": {"flat": True, "unrolled": 10},
    }
    one_core = (f"{OURS}, 1 chain", f"{OURS}, 4 chains")
    two_cores = tuple(f"{name}, second core free" for name in one_core)
    contenders = (
        Contender(one_core[0], "ours:network", common),
        Contender(one_core[1], "ours:network", four),
        Contender(two_cores[0], "ours:network", common, pinned=False),
        Contender(two_cores[1], "ours:network", four, pinned=False),
        *(Contender(name, "peer_sgd:compiled", {**peer, **form}) for name, form in sgd.items()),
        Contender("torch.randn of the parameters", "peer_sgd:randn", peer),
        Contender("eager SGD, no noise", "peer_sgd:eager", peer),
        _blackjax("BlackJAX, 1 chain", "network", **peer),
        _blackjax("BlackJAX, 4 chains", "network", **{**peer, "chains": 4}),
    )
    best = tuple(sgd)
    targets = (
        *(
            Target(f"{row}, against compiled SGD + randn", row, best, at_most=1.05)
            for row in one_core
        ),
        *(
            Target(f"{row}, against compiled SGD + randn", row, best, at_most=0.85)
            for row in two_cores
        ),
    )
    return Suite(
        name, f"Network {layers} on digits, batch 128 (us a chain-step)", contenders, targets
    )


def _rows(name: str, title: str, ours: str, peer: str, arguments: dict[str, Any]) -> Suite:
    def both(label: str, problem: str, **more: Any) -> tuple[Contender, ...]:
        return tuple(
            Contender(f"{label}, {rows:,} rows", problem, {**arguments, **more, "rows": rows})
            for rows in (10_000, 1_000_000)
        )

    contenders = (
        *both(OURS, ours),
        *both(REPLACEMENT, ours, **DRAWN_ANEW),
        *both("BlackJAX", peer),
    )
    names = [contender.name for contender in contenders]
    targets = tuple(
        Target(
            f"{label}, 1,000,000 rows against 10,000",
            names[place + 1],
            (names[place],),
            at_most=at_most,
        )
        for label, place, at_most in (
            (OURS, 0, 1.1),
            (REPLACEMENT, 2, 1.1),
            ("BlackJAX", 4, None),
        )
    )
    return Suite(name, title, contenders, targets, comparable=False)


COMPILE = Suite(
    "compile",
    "Before the first step (s)",
    (
        Contender(OURS, "waiting:compiling", pinned=False),
        *(
            Contender(
                f"README's program, {method}",
                "waiting:readme",
                {"method": method},
                pinned=False,
                one_thread=False,
            )
            for method in ("BAOA", "NUTS")
        ),
        Contender("import pyro_scale", "waiting:importing", {"module": "torch, pyro, pyro_scale"}),
        Contender("import torch, pyro", "waiting:importing", {"module": "torch, pyro"}),
    ),
    (
        Target("first compile ever, in s", f"{OURS}, first compile ever", at_most=20),
        Target("a new model, in s", f"{OURS}, new model in the same process", at_most=8),
        Target("a warm cache, in s", f"{OURS}, warm cache in a new process", at_most=2),
        Target(
            "import pyro_scale, against import torch, pyro",
            "import pyro_scale",
            ("import torch, pyro",),
            at_most=1.15,
        ),
        Target("README's program, in s", "README's program, BAOA", at_most=5),
        Target(
            "the same, nothing compiled before",
            "README's program, BAOA, nothing compiled",
            at_most=8,
        ),
    ),
    unit="s",
    per_second=1,
    most_rounds=3,
)

SUITES = (
    LOGISTIC,
    FULL_BATCH,
    MANY_CHAINS,
    _network("mlp_small", (64,), 20_000, 5000),
    _network("mlp_large", (512, 512), 4000, 300),
    _rows(
        "rows_logistic",
        "Logistic regression at 10,000 and 1,000,000 rows, batch 32 (us a step)",
        "ours:logistic",
        "peer_blackjax:scan",
        {"steps": 200_000},
    ),
    _rows(
        "rows_mlp",
        "Network 64-64-10 at 10,000 and 1,000,000 rows, batch 128 (us a step)",
        "ours:network",
        "peer_blackjax:network",
        {"hidden": (64,), "steps": 5000},
    ),
    COMPILE,
)
