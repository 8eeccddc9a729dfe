"""Section 5.1 of the paper, figures 4, 8 and 9: cold posteriors of a CNN-LSTM on film reviews.

A network classifies IMDB's reviews (embedding, convolution, max-pooling, LSTM, linear layer), all
of its weights with a normal prior of variance 1/40, batches of 32.  What a test review's label is
given to be, averaged over draws, is scored at temperatures from 0.01 to 3: by Laplace (empirical
Fisher and GGN), by VI, both also linearized, and by SGHMC: one chain (serial), and the last states
of many (parallel).  Beside them MAP, the MLE, and Laplace without the prior in its precision, as
the paper's code has it.

The paper's model is `Size()`: 20,000 words, 2.7 million weights, 25,000 reviews, 30 epochs, a day
of an A100.  What is run here is `SMALL`.  Epochs, batches, prior, learning rates, frictions and
burn-in (in epochs) are the paper's, so that a chain takes as many of its prior's relaxation times.

    OMP_NUM_THREADS=1 python notebooks/paper/imdb.py [--parts DIRECTORY]

Every method, temperature and seed is a part, which is kept in a file of its own when it is done:
stopped at any time, the same command goes on with what is missing.  In the end it writes imdb.json
and imdb.png.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
import torchopt
from data_folder import DATA, loader
from torch import Tensor, nn

import pyro_scale as ps

HERE = Path(__file__).resolve().parent
RESULTS, FIGURE = HERE / "imdb.json", HERE / "imdb.png"

TEMPERATURES, SEEDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0), range(3)
#: Prior sds: the paper's; the MLE's; what the paper's code adds to Laplace's precision is 0.001.
PRIOR, FLAT, LOST = 40**-0.5, 1e3, 0.001**-0.5
#: Draws of a serial chain (as in the paper), chains of a parallel part, and of an ensemble: the
#: paper draws 5 ensembles of 15 from 35 chains.
SERIAL, GROUP, ENSEMBLE, ENSEMBLES = 27, 4, 10, 5


class Size(NamedTuple):
    """What is scaled down: words and reviews of the data, widths of the network, epochs."""

    words: int = 20_000
    train: int = 25_000
    test: int = 25_000
    embedding: int = 128
    filters: int = 64
    hidden: int = 128
    epochs: int = 30

    @property
    def epoch(self) -> int:
        """Steps of an epoch."""
        return -(-self.train // 32)


SMALL = Size(words=5_000, train=5_000, test=2_000, embedding=64, filters=32, hidden=64)


class CNNLSTM(nn.Module):
    """Logits of a review's two labels, from its last 100 tokens, `[rows, 100]`."""

    def __init__(self, size: Size):
        super().__init__()
        self.embedding = nn.Embedding(size.words, size.embedding)
        self.convolution = nn.Conv1d(size.embedding, size.filters, kernel_size=5)
        self.pool = nn.MaxPool1d(4)
        self.lstm = nn.LSTM(size.filters, size.hidden, batch_first=True)
        self.linear = nn.Linear(size.hidden, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens `[rows, 100]` -> logits `[rows, 2]`."""
        embedded = self.embedding(tokens).transpose(1, 2)
        features = self.pool(torch.relu(self.convolution(embedded))).transpose(1, 2)
        return self.linear(self.lstm(features)[0][:, -1])


def classifier(size: Size, seed: int, prior_sd: float = PRIOR) -> Callable[..., Any]:
    """The Pyro model of a network that starts as torch makes it, from a seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = ps.bayesianize(CNNLSTM(size), prior=dist.Normal(0.0, prior_sd))

    def model(tokens: Tensor, label: Tensor | None = None) -> Tensor:
        logits = net(tokens)
        with pyro.plate("reviews", len(tokens)):
            pyro.deterministic("positive", logits.softmax(-1)[:, 1])
            return pyro.sample("label", dist.Categorical(logits=logits), obs=label)

    return model


# ---------------------------------------------------------------------------- data


class Reviews(NamedTuple):
    """Tokens `[rows, 100]` and labels `[rows]`."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def words_of(text: str) -> list[str]:
    """Lower-case words of a review."""
    return re.findall(r"[a-z0-9']+", text.replace("<br />", " ").lower())


def tokens_of(texts: Sequence[str], number: dict[str, int], length: int = 100) -> Tensor:
    """Each text's last words as numbers, padded in front: 0 is padding, 1 is any other word."""
    rows = torch.zeros(len(texts), length, dtype=torch.long)
    for row, text in zip(rows, texts, strict=True):
        last = [number.get(word, 1) for word in words_of(text)][-length:]
        row[length - len(last) :] = torch.tensor(last)
    return rows


def reviews(size: Size) -> Reviews:
    """A fixed random subset of IMDB; the most frequent words of its training texts alone."""
    load = loader()
    if load is None:
        raise SystemExit(f"no data in {DATA}: set PYRO_SCALE_DATA")
    chosen = {}
    for split, count in (("train", size.train), ("test", size.test)):
        texts, labels, _ = load.load_imdb(split)
        rows = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))[:count]
        chosen[split] = [texts[row] for row in rows], torch.tensor(labels)[rows].long()
    counts = Counter(word for text in chosen["train"][0] for word in words_of(text))
    frequent = [word for word, _ in counts.most_common(size.words - 2)]
    number = {word: place + 2 for place, word in enumerate(frequent)}
    return Reviews(*((tokens_of(texts, number), labels) for texts, labels in chosen.values()))


def made_up(size: Size) -> Reviews:
    """What stands in where IMDB is missing: random words, each for or against a label."""
    source = torch.Generator().manual_seed(0)
    side, chosen = torch.randn(size.words, generator=source), []
    for count in (size.train, size.test):
        tokens = torch.randint(2, size.words, (count, 100), generator=source)
        chance = torch.sigmoid(side[tokens[:, -40:]].sum(1) / 3)
        chosen.append((tokens, torch.bernoulli(chance, generator=source).long()))
    return Reviews(*chosen)


# ---------------------------------------------------------------------------- methods

#: Probabilities of "positive" by method and temperature, `[draws, test reviews]`.
Predicted = dict[tuple[str, float], Tensor]
#: Draws of a Gaussian, in parameter space as in the paper, and of linearized logits.
DRAWS, LINEARIzED = 50, 30


#: What Laplace's precision is made of; the last is the paper's code's, which has no prior.
LAPLACES = (
    ("Laplace GGN", "ggn"),
    ("Laplace EF", "empirical_fisher"),
    ("Laplace GGN without prior", "ggn", LOST),
)


class Experiment:
    """The data, and every method on them."""

    def __init__(self, size: Size, parts: Path):
        self.size, self.parts = size, parts
        self.train, self.test = reviews(size)

    def positive(self, fit: Any, num_samples: int | None = None) -> Tensor:
        """Of each draw, `[draws, test reviews]`."""
        chosen = {"num_samples": num_samples, "return_sites": ["positive"], "batch_size": 500}
        return fit.predict(self.test[0], **chosen)["positive"]

    def linearized(self, fit: Any) -> Tensor:
        """On average over draws, `[1, test reviews]`."""
        chosen = {"num_samples": LINEARIzED, "reduce": "mean", "batch_size": 500}
        return fit.predict(self.test[0], linearized=True, **chosen)["label"][None, :, 1]

    def both(self, fit: Any) -> tuple[Tensor, Tensor]:
        """By draws of weights, and linearized, `[1, test reviews]` each."""
        return self.positive(fit, DRAWS).mean(0, keepdim=True), self.linearized(fit)

    def optimized(self, method: Any, seed: int) -> Any:
        """Runs MAP or VI for the paper's epochs."""
        epochs = self.size.epochs
        return method.run(self.train, batch_size=32, num_epochs=epochs, seed=seed, progress=False)

    def map(self, name: str, seed: int, prior_sd: float = PRIOR) -> Predicted:
        """The mode, which is kept for Laplace; with a flat prior the MLE."""
        model, optimizer = classifier(self.size, seed, prior_sd), torchopt.adam(1e-3)
        fit = self.optimized(ps.MAP(model, optimizer=optimizer, compile=True), seed)
        fit.save(self.parts / f"{name} {seed}.fit")
        return {(name, 0.0): self.positive(fit)}

    def laplace(self, name: str, seed: int, curvature: Any, prior_sd: float = PRIOR) -> Predicted:
        """At the MAP's mode, at every temperature."""
        model = classifier(self.size, seed, prior_sd)
        mode = ps.MAP.load(self.parts / f"MAP {seed}.fit", model)
        fit = ps.Laplace(model, curvature=curvature)
        fit.run(self.train, mode=mode, batch_size=32, seed=seed, progress=False)
        found: Predicted = {}
        for t in TEMPERATURES:
            found[name, t], found[f"{name}, linearized", t] = self.both(fit.at_temperature(t))
        return found

    def vi(self, seed: int, temperature: float) -> Predicted:
        """From the network that torch makes and log sds of -3, as in the paper."""
        method = ps.VI(
            classifier(self.size, seed),
            optimizer=torchopt.adam(1e-3),
            sticking_the_landing=True,
            temperature=temperature,
            init_scale=math.exp(-3),
            compile=True,
        )
        plain, linearized = self.both(self.optimized(method, seed))
        return {("VI", temperature): plain, ("VI, linearized", temperature): linearized}

    def sghmc(self, name: str, seed: int, temperature: float) -> Predicted:
        """One chain's draws every 1.28 epochs, the third after as many epochs as other methods
        have; or of many chains the states there."""
        num_chains, num_samples = (1, SERIAL) if name == "SGHMC serial" else (GROUP, 1)
        epoch, epochs = self.size.epoch, self.size.epochs
        thinning = int(1.28 * epoch)
        warmup = epochs * epoch - min(num_samples, 3) * thinning
        model = classifier(self.size, seed)
        sampler = ps.SGHMC(model, lr=0.1, friction=1.0, temperature=temperature, compile=True)
        sampler.run(
            self.train,
            batch_size=32,
            num_samples=num_samples,
            warmup_steps=warmup,
            thinning=thinning,
            num_chains=num_chains,
            seed=seed,
            progress=False,
        )
        return {(name, temperature): self.positive(sampler)}

    def all_parts(self) -> Iterator[tuple[str, Callable[[], Predicted]]]:
        """Every part's name and what does it, seed by seed."""
        for seed in SEEDS:
            yield f"MAP {seed}", partial(self.map, "MAP", seed)
            yield f"MLE {seed}", partial(self.map, "MLE", seed, FLAT)
            for name, *how in LAPLACES:
                yield f"{name} {seed}", partial(self.laplace, name, seed, *how)
            for t in TEMPERATURES:
                yield f"VI {seed} {t:g}", partial(self.vi, seed, t)
                for place, name in enumerate(("SGHMC serial", "SGHMC parallel")):
                    run = partial(self.sghmc, name, seed + 100 * place, t)
                    yield f"{name} {seed} {t:g}", run


def run_parts(experiment: Experiment) -> None:
    """Does what is missing of the parts, each of which is written when it is done."""
    for name, run in experiment.all_parts():
        path = experiment.parts / f"{name}.pt"
        if path.exists():
            continue
        begun, cpu = time.perf_counter(), time.process_time()
        predicted = run()
        kept = {
            "predicted": predicted,
            "seconds": time.perf_counter() - begun,
            "cpu": time.process_time() - cpu,
        }
        torch.save(kept, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)
        print(time.strftime("%H:%M:%S"), name, f"{kept['cpu']:.0f} s of processor", flush=True)


# ---------------------------------------------------------------------------- results


def score(positive: Tensor, labels: Tensor) -> tuple[float, float]:
    """(Loss in nats a review, accuracy) of draws `[draws, reviews]`, which are averaged."""
    mean = positive.double().mean(0)
    given = torch.where(labels == 1, mean, 1 - mean)
    return float(-given.clamp(min=1e-7).log().mean()), float((given > 0.5).double().mean())


def collected(parts: Path) -> dict[tuple[str, float], list[Tensor]]:
    """What is done: draws `[draws, test reviews]` of every seed, or ensemble, by method and
    temperature."""
    found: dict[tuple[str, float], list[Tensor]] = {}
    for path in sorted(parts.glob("*.pt")):
        for key, draws in torch.load(path)["predicted"].items():
            found.setdefault(key, []).append(draws)
    for t in TEMPERATURES:
        chains = found.pop(("SGHMC parallel", t), [])
        chains += [draws[2:3] for draws in found.get(("SGHMC serial", t), [])]
        if len(every := torch.cat(chains) if chains else torch.zeros(0)) >= ENSEMBLE:
            source = torch.Generator().manual_seed(0)
            found["SGHMC parallel", t] = [
                every[torch.randperm(len(every), generator=source)[:ENSEMBLE]]
                for _ in range(ENSEMBLES)
            ]
    return found


def results(parts: Path, size: Size, labels: Tensor) -> dict[str, Any]:
    """Scores of what is done, and what it took."""
    scores: dict[str, dict[str, Any]] = {}
    for (method, t), seeds in collected(parts).items():
        loss, accuracy = zip(*(score(draws, labels) for draws in seeds), strict=True)
        scores.setdefault(method, {})[f"{t:g}"] = {"loss": loss, "accuracy": accuracy}
    files = [torch.load(path) for path in parts.glob("*.pt")]
    return {
        "size": size._asdict(),
        "scores": scores,
        "parts": len(files),
        "processor_seconds": round(sum(each["cpu"] for each in files)),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "pyro_scale": version("pyro_scale"),
    }


#: The figure's highest loss, and its panels: methods with their colors.
HIGHEST = 0.85
PANELS = (
    {
        "Laplace EF": "#56B4E9",
        "Laplace EF, linearized": "#0072B2",
        "Laplace GGN": "#E69F00",
        "Laplace GGN, linearized": "#D55E00",
        "Laplace GGN without prior": "#999999",
        "Laplace GGN without prior, linearized": "#000000",
    },
    {"VI": "#009E73", "VI, linearized": "#CC79A7"},
    {"SGHMC serial": "#56B4E9", "SGHMC parallel": "#D55E00"},
)


def draw(found: dict[str, Any], figure: Path | None = None) -> Any:
    """Loss and accuracy against temperature: means over seeds, and one standard deviation."""
    panels = [colors for colors in PANELS if colors.keys() & found.keys()]
    width = len(panels)
    fig, axes = plt.subplots(
        2, width, figsize=(4.2 * width, 7), sharex=True, sharey="row", squeeze=False
    )
    for row, metric in zip(axes, ("loss", "accuracy"), strict=True):
        for panel, colors in zip(row, panels, strict=True):
            for name, style in (("MAP", "--"), ("MLE", ":")):
                if name in found:
                    mean = statistics.fmean(found[name]["0"][metric])
                    panel.axhline(mean, color="0.4", ls=style, label=f"{name}, loss {mean:.2f}")
            for name, color in colors.items():
                line(panel, found.get(name, {}), metric, name, color)
            panel.set_xscale("log")
            panel.grid(alpha=0.3)
    for panel in axes[0]:
        panel.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    axes[0, 0].set_ylim(top=HIGHEST)
    axes[0, 0].set_ylabel("test loss, nats a review")
    axes[1, 0].set_ylabel("test accuracy")
    for panel in axes[1]:
        panel.set_xlabel("temperature")
        panel.set_xticks(TEMPERATURES, [f"{t:g}" for t in TEMPERATURES])
        panel.minorticks_off()
    fig.tight_layout()
    if figure is not None:
        fig.savefig(figure, dpi=120)
    return fig


def line(panel: Any, by_temperature: dict[str, Any], metric: str, name: str, color: str) -> None:
    """One method's mean, and a band of a standard deviation on either side."""
    points = sorted((float(t), scores[metric]) for t, scores in by_temperature.items())
    if points:
        at, values = zip(*points, strict=True)
        mean = [statistics.fmean(each) for each in values]
        sd = [statistics.stdev(each) if len(each) > 1 else 0.0 for each in values]
        panel.plot(at, mean, "o-", color=color, label=name, ms=4)
        low = [m - s for m, s in zip(mean, sd, strict=True)]
        high = [m + s for m, s in zip(mean, sd, strict=True)]
        panel.fill_between(at, low, high, color=color, alpha=0.2, lw=0)


def main() -> None:
    """Does what is missing, and writes numbers and figure of what there is."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", type=Path, default=HERE / "imdb_parts")
    parser.add_argument("--only-collect", action="store_true", help="run nothing")
    given = parser.parse_args()
    given.parts.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("ignore", message="There is a performance drop")
    # a prior takes weights that no review needs below 1e-38, where convolutions are 50 times slower
    torch.set_flush_denormal(True)
    experiment = Experiment(SMALL, given.parts)
    if not given.only_collect:
        run_parts(experiment)
    found = results(given.parts, SMALL, experiment.test[1])
    if not found["scores"]:
        raise SystemExit(f"no parts in {given.parts}")
    draw(found["scores"], FIGURE)
    RESULTS.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
