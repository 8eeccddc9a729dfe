"""Section 5.2 of the paper, figures 5 and 6: continual learning of books with LoRA.

A language model reads one book after another, and is tested on the last 15% of every book that it
has read.  Only LoRA's weights of the last attention layer move (rank 8, alpha 32; query, key and
output projections, by PEFT).  Methods:

- online: AdamW on each book, from where the last one ended;
- Laplace: the same, but an empirical-Fisher diagonal Laplace of each book is the next one's prior
  (the paper's equation 1);
- isotropic: a control, the same recursion with a precision that has the same mean and is equal in
  all elements, so that it is as strong and knows nothing of which weights matter;
- sharper: the same recursion with 100 times the Fisher matrix, as the published configuration has
  it and the paper does not say;
- slower: a control, online with a tenth of the learning rate;
- offline: all books at once;
- single: each book alone from the base, which figure 6's losses are relative to.

The paper has Llama 2 of 7 billion weights, rows of 2,048 tokens, 20 books of at least 100,000
tokens, and 6 hours of an A100.  Here the base is `language_model.py`'s Llama of 3.4 million, which
has read books 1 to 12; the episodes are books 13 to 16, and `Size()` says how much of each is read,
once.  The learning rate is the best for book 17 read alone, the prior sd is 1 as `bayesianize` has
it, and Laplace's temperature is 1: nothing was chosen on the books that are reported.

    OMP_NUM_THREADS=1 python notebooks/paper/continual.py [--base DIRECTORY]

Writes continual.json and continual.png beside this file.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import inspect
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import language_model
import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
import torchopt
from peft import LoraConfig, get_peft_model
from results import mean_and_error, rounded
from torch import Tensor
from torch.nn.functional import cross_entropy

import pyro_scale as ps

HERE = Path(__file__).resolve().parent
RESULTS, FIGURE = HERE / "continual.json", HERE / "continual.png"

#: Episodes, and the book that the learning rate is chosen on.
BOOKS, CHOSEN_ON = (13, 14, 15, 16), 17
TITLES = (
    "The Wind in the Willows",
    "The Phantom of the Opera",
    "The Innocence of Father Brown",
    "Tarzan of the Apes",
)
SEEDS = range(3)
METHODS = ("online", "slower", "Laplace", "isotropic", "sharper", "offline")
#: What the published configuration multiplies the Fisher matrix by.
SHARPER = 100

Model = Callable[..., None]
Rows = tuple[Tensor, Tensor]


class Size(NamedTuple):
    """What is scaled down, and what was chosen."""

    #: Tokens that a row predicts.
    context: int = 64
    #: Rows of a book, evenly spaced over its first 85% and its last 15%.
    train: int = 640
    test: int = 64
    batch: int = 8
    lr: float = 3e-3
    #: How often all books are tested while one is read.
    tests: int = 3


class Book(NamedTuple):
    """What the last layer sees of the tokens of each row, `[rows, context, width]`, and the tokens
    that follow them, `[rows, context]`."""

    train: Rows
    test: Rows


# -- data -------------------------------------------------------------------------------------


def cut(tokens: Tensor, count: int, context: int) -> Tensor:
    """Evenly spaced stretches, `[count, context + 1]`, which overlap where tokens are few."""
    first = torch.linspace(0, len(tokens) - context - 1, count).long()
    return tokens[first[:, None] + torch.arange(context + 1)]


def books(language: language_model.Language, texts: Sequence[str], size: Size) -> list[Book]:
    """Texts as rows.  All layers but the last are frozen and the same for all methods, so they
    are run here, once for every row."""
    found = []
    for text in texts:
        tokens = language.tokens(text)
        held_out = round(0.85 * len(tokens))
        train = cut(tokens[:held_out], size.train, size.context)
        test = cut(tokens[held_out:], size.test, size.context)
        found.append(Book(*((below(language, r), r[:, 1:]) for r in (train, test))))
    return found


@torch.no_grad()
def below(language: language_model.Language, rows: Tensor) -> Tensor:
    """What comes out of the layer before the last, `[rows, context, width]`."""
    network = copy.deepcopy(language.network.model)
    network.layers, network.norm = network.layers[:-1], torch.nn.Identity()
    parts = [network(part, use_cache=False).last_hidden_state for part in rows[:, :-1].split(32)]
    return torch.cat(parts)


def stand_ins() -> tuple[list[str], list[str]]:
    """English that comes with Python and its packages, for the base and for four episodes."""
    topics = importlib.import_module("pydoc_data.topics").topics.values()
    modules = map(importlib.import_module, ("scipy.stats", "torch", "matplotlib.pyplot", "pandas"))
    docs = ["\n".join(inspect.getdoc(v) or "" for v in vars(m).values()) for m in modules]
    return ["\n".join(topics)], docs


# -- model ------------------------------------------------------------------------------------


def adapted(language: language_model.Language, seed: int) -> torch.nn.Module:
    """The last layer and what is above it, with LoRA as a seed draws it."""
    top = copy.deepcopy(language.network)
    top.model.layers = top.model.layers[-1:]
    # the mask below is read by this one alone, and a step can be recorded with it
    top.set_attn_implementation("eager")
    config = LoraConfig(r=8, lora_alpha=32, target_modules=["q_proj", "k_proj", "o_proj"])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return get_peft_model(top, config).eval()


def reader(network: torch.nn.Module, prior: Any = "unit") -> Model:
    """The Pyro model of rows: LoRA's weights have a prior, the rest is frozen."""
    net = ps.bayesianize(network, include="*lora_*", prior=prior)

    def model(seen: Tensor, following: Tensor) -> None:
        logits = net(
            inputs_embeds=seen, attention_mask=language_model.causal(seen.shape[1]), use_cache=False
        ).logits
        with pyro.plate("rows", len(seen)):
            pyro.sample("tokens", dist.Categorical(logits=logits).to_event(1), obs=following)

    return model


# -- learning ---------------------------------------------------------------------------------


def learned(
    model: Any, data: Rows, size: Size, seed: int, start: Any = ps.init_to_module, episodes: int = 1
) -> Iterator[ps.MAP]:
    """The mode as AdamW finds it in one pass, as it is whenever it is to be tested; of the rows of
    one book, or of several."""
    adamw = torchopt.adamw(size.lr, weight_decay=0.0)  # the prior is all the decay there is
    mode = ps.MAP(model, optimizer=adamw, init_strategy=start, num_data=len(data[0]))
    order = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(seed))
    for part in order.chunk(size.tests * episodes):
        for rows in part.split(size.batch):
            mode.step(*(tensor[rows] for tensor in data))
        yield mode


def losses(mode: ps.MAP, tests: Sequence[Rows]) -> list[float]:
    """Mean test loss of each book, in nats a token."""
    return [-float(mode.log_likelihood(test)["tokens"].sum()) / test[1].numel() for test in tests]


class Course(NamedTuple):
    """Test losses of all books as they go, `[tests][books]`, and where it ended."""

    losses: list[list[float]]
    mode: ps.MAP


def course(
    model: Any, data: Rows, tests: Sequence[Rows], size: Size, seed: int, **how: Any
) -> Course:
    """An episode, with tests."""
    found = []
    for mode in learned(model, data, size, seed, **how):
        found.append(losses(mode, tests))
    return Course(found, mode)


def in_turn(
    network: torch.nn.Module,
    shelf: Sequence[Book],
    size: Size,
    seed: int,
    method: str,
    first: Course,
) -> list[list[float]]:
    """The test losses of a method that reads the books one after another.

    Args:
        network: with LoRA, as it starts.
        shelf: the books.
        size: what is chosen.
        seed: of the batches.
        method: "online", "Laplace", "isotropic" or "sharper".
        first: the first book's, which is the same for all of them.
    """
    model: Any = reader(network)
    laplace = ps.Laplace(model, curvature="empirical_fisher")
    precision = torch.tensor(1.0)  # of the unit prior
    found, mode, tests = list(first.losses), first.mode, [each.test for each in shelf]
    for episode, (before, book) in enumerate(itertools.pairwise(shelf)):
        if method == "Laplace":
            absorb = laplace.update if episode else laplace.run
            absorb(before.train, mode=mode, batch_size=16, progress=False)
            model = laplace.as_prior()
        elif method != "online":
            laplace = ps.Laplace(model, curvature="empirical_fisher")
            laplace.run(before.train, mode=mode, batch_size=16, progress=False)
            precision = changed(method, laplace.fit.gaussians[0].precision, precision)
            model = reader(network, prior_of(laplace, precision))
        read, mode = course(model, book.train, tests, size, seed + episode + 1, start=mode)
        found += read
    return found


def changed(method: str, precision: Tensor, old: Tensor) -> Tensor:
    """A posterior's precision as a control has it, the prior's being the old one."""
    if method == "isotropic":
        return precision.mean().expand_as(precision)
    return old + SHARPER * (precision - old)


def prior_of(laplace: ps.Laplace, precision: Tensor) -> Callable[[str, Tensor], dist.Normal]:
    """Of a Laplace's mean, and another precision."""
    fit = laplace.fit
    mean, sd = (fit.layout.unflatten(each) for each in (fit.centers[0], precision.rsqrt()))
    return lambda name, weight: dist.Normal(mean[name], sd[name])


@torch.no_grad()
def untrained(network: torch.nn.Module, tests: Sequence[Rows]) -> list[float]:
    """Test losses of the base, which is the network as LoRA starts."""
    found = []
    for seen, following in tests:
        logits = network(
            inputs_embeds=seen, attention_mask=language_model.causal(seen.shape[1]), use_cache=False
        ).logits
        found.append(float(cross_entropy(logits.flatten(0, 1), following.flatten())))
    return found


def everything(shelf: Sequence[Book]) -> Rows:
    """The training rows of all books."""
    seen, following = zip(*(book.train for book in shelf), strict=True)
    return torch.cat(seen), torch.cat(following)


def run(
    language: language_model.Language, shelf: Sequence[Book], size: Size, seed: int
) -> dict[str, Any]:
    """One seed of everything.

    Returns:
        By method the test losses, `[tests][books]`, in nats a token; and `base`, those before any
        of it, and `single`, those of each book's own network, `[books]`.
    """
    network, tests = adapted(language, seed), [book.test for book in shelf]
    plain, slower = reader(network), size._replace(lr=size.lr / 10)
    seeds = range(100 * seed, 100 * seed + len(shelf))
    alone = [
        course(plain, book.train, tests if place == 0 else [book.test], size, seeds[place])
        for place, book in enumerate(shelf)
    ]
    slow = course(plain, shelf[0].train, tests, slower, seeds[0])
    found: dict[str, Any] = {
        method: in_turn(network, shelf, size, seeds[0], method, alone[0])
        for method in ("online", "Laplace", "isotropic", "sharper")
    }
    found["slower"] = in_turn(network, shelf, slower, seeds[0], "online", slow)
    found["offline"] = course(
        plain, everything(shelf), tests, size, seeds[0], episodes=len(shelf)
    ).losses
    found["single"] = [each.losses[-1][0] for each in alone]
    return found | {"base": untrained(network, tests)}


def chosen(language: language_model.Language, size: Size) -> tuple[float, dict[str, float]]:
    """The learning rate that is best for another book, and its test losses there."""
    network = adapted(language, 0)
    (book,) = books(language, [language_model.book(CHOSEN_ON)], size)
    found = {}
    for lr in (1e-3, 3e-3, 1e-2):
        tried = size._replace(lr=lr, tests=1)
        found[lr] = course(reader(network), book.train, [book.test], tried, 0).losses[-1][0]
    best = min(found, key=found.__getitem__)
    base = untrained(network, [book.test])
    return best, {"base": base[0]} | {str(lr): loss for lr, loss in found.items()}


# -- report -----------------------------------------------------------------------------------


def scores(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """At the end: test loss averaged over all books, that of the last book and of those before it;
    and by how much Laplace is below each other method."""

    def ends(method: str, which: slice) -> list[float]:
        return [
            statistics.fmean((each[method][-1] if method in METHODS else each[method])[which])
            for each in runs
        ]

    table, difference = {}, {}
    for name, which in (("all", slice(None)), ("earlier", slice(-1)), ("last", slice(-1, None))):
        table[name] = {m: ends(m, which) for m in (*METHODS, "single", "base")}
        for method in (m for m in METHODS if m != "Laplace"):
            pairs = zip(table[name][method], table[name]["Laplace"], strict=True)
            difference[f"{method} - Laplace, {name}"] = mean_and_error([a - b for a, b in pairs])
    return {"end": table, "difference": difference}


LOOKS = {
    "online": ("#D55E00", "-"),
    "slower": ("#E69F00", ":"),
    "isotropic": ("#009E73", "-."),
    "sharper": ("#CC79A7", "-."),
    "offline": ("#000000", "--"),
    "Laplace": ("#0072B2", "-"),
}
NAMES = {
    "online": "online AdamW",
    "sharper": "100 x Fisher",
    "slower": "online, lr / 10",
    "isotropic": "isotropic prior",
}


def plotted(runs: Sequence[dict[str, Any]], titles: Sequence[str], tests: int) -> plt.Figure:
    """Figures 5 and 6 of the paper, means over seeds with one sd on either side.

    Args:
        runs: what `run` gives, by seed.
        titles: of the books.
        tests: of every book while one is read.
    """
    figure = plt.figure(figsize=(11, 6.5))
    grid = figure.add_gridspec(len(titles), 2, width_ratios=(1.15, 1))
    left: list[Any] = []
    for place in range(len(titles)):
        left.append(figure.add_subplot(grid[place, 0], sharex=left[0] if left else None))
    right = figure.add_subplot(grid[:, 1])
    single = torch.tensor([each["single"] for each in runs])
    base = torch.tensor([each["base"] for each in runs])
    for method, (color, style) in LOOKS.items():
        if method not in runs[0]:
            continue
        curve = torch.tensor([each[method] for each in runs])  # [seeds, tests, books]
        curve = torch.cat([base[:, None], curve], 1)
        read = torch.arange(curve.shape[1])
        seen = 1 + (read - 1).clamp(min=0) // tests
        over = curve - single[:, None]
        average = [over[:, at, : int(count)].mean(1) for at, count in enumerate(seen)]
        lines = [(axis, curve[..., at]) for at, axis in enumerate(left)]
        for axis, line in (*lines, (right, torch.stack(average, 1))):
            mean, sd = line.mean(0), line.std(0, correction=0)
            label = NAMES.get(method, method)
            axis.plot(read / tests, mean, color=color, ls=style, lw=1.6, label=label)
            axis.fill_between(read / tests, mean - sd, mean + sd, color=color, alpha=0.2, lw=0)
    for axis in (*left, right):
        for episode in range(1, len(titles)):
            axis.axvline(episode, color="0.6", ls="--", lw=0.8)
    for place, (axis, title) in enumerate(zip(left, titles, strict=True)):
        axis.axvspan(place, place + 1, color="0.93", lw=0, zorder=0)
        axis.set_title(title, fontsize=9, loc="left", pad=2)
        axis.tick_params(labelbottom=place == len(titles) - 1)
    figure.supylabel("test loss (nats a token); gray: while the book is read", fontsize=9)
    left[-1].set_xlabel("books read")
    right.axhline(0, color="0.5", lw=0.8)
    right.set(
        xlabel="books read", ylabel="loss over that of single books,\nmean of books so far (nats)"
    )
    right.legend(loc="upper right", frameon=False, fontsize=9)
    figure.tight_layout()
    return figure


def main(folder: Path) -> None:
    """The whole run."""
    torch.set_num_threads(1)
    begun, language = time.perf_counter(), language_model.base(folder)
    lr, tried = chosen(language, Size())
    size = Size(lr=lr)
    print(tried, flush=True)
    shelf = books(language, [language_model.book(number) for number in BOOKS], size)
    runs = []
    for seed in SEEDS:
        runs.append(run(language, shelf, size, seed))
        print(f"seed {seed}: {time.perf_counter() - begun:.0f} s", flush=True)
    versions = {"torch": torch.__version__, "pyro-scale": version("pyro-scale")}
    report = {
        "size": size._asdict(),
        "chosen": tried,
        "titles": TITLES,
        "runs": runs,
        **scores(runs),
    }
    report |= {"versions": versions, "threads": 1, "seconds": time.perf_counter() - begun}
    RESULTS.write_text(json.dumps(rounded(report)) + "\n")
    plotted(runs, TITLES, size.tests).savefig(FIGURE, dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--base", type=Path, default=language_model.FOLDER)
    main(parser.parse_args().base)
