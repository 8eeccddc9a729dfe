"""Section 5.3 of the paper, tables 1 and 2, figures 7 and 10: text from elsewhere, found by
epistemic uncertainty.

A pretrained language model is fine-tuned on science textbooks: the last attention layer alone, by
SGD and by SGHMC at the posterior's temperature, one chain (serial: draws along it) and ten
(parallel: the last state of each).  Asked for the last word of 100 science statements in English,
and of the same in Samoan, which it has never seen: does the uncertainty tell the languages apart?

What is scaled down: the base is the small Llama of `language_model.py` (3.4 million weights, of
which 147,456 are Bayesian) in place of Llama 3 (8 billion; 218 million); rows are of 32 tokens, 24
apart, of which the last 8 count (300, 200 and 50), 2,000 of them for training, one epoch (20);
OpenStax's physics and microbiology in place of TQA.

The prior is Normal(the pretrained weight, sd): no data, no change.  Its sd, and whether chains
start at the pretrained weights or at draws of the prior, are those of `CHOICES` whose ensemble has
the least loss on paragraphs held out of the training, whatever it does on the statements.  The
declaration of human rights, in both languages, is a second test.

    OMP_NUM_THREADS=1 python notebooks/paper/ood_text.py [--base DIRECTORY] [--parts DIRECTORY]

Every run is a part, which is kept in a file of its own when it is done: stopped at any time, the
same command goes on with what is missing.  In the end it writes ood_text.json and ood_text.png
beside this file; about a quarter of an hour of one core, with a base that is there.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import re
import statistics
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from data_folder import DATA, loader
from language_model import FOLDER, Language, base, book, causal
from pyro.infer.autoguide.initialization import init_to_sample
from results import rounded
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import pyro_scale as ps

HERE = Path(__file__).resolve().parent
RESULTS, FIGURE = HERE / "ood_text.json", HERE / "ood_text.png"

#: Where chains start, and prior sds, that are tried.
CHOICES = (("module", 0.1), ("module", 0.3), ("prior", 0.03))
STARTS = {"module": ps.init_to_module, "prior": init_to_sample}
#: Of the prior of SGD, which is next to none.
FLAT = 1.0
SEEDS = range(3)
#: Rows for training, steps of batches of ten, as for torch's SGD.
ROWS, STEPS, BATCH, LR, MOMENTUM = 2000, 200, 10, 0.01, 0.9
#: Chains of an ensemble, draws of a serial chain.
CHAINS = DRAWS = 10


# -- texts ------------------------------------------------------------------------------------


class Texts(NamedTuple):
    """What is read.

    Args:
        books: what a small base can be trained on.
        science: paragraphs for fine-tuning; every tenth is held out.
        statements: English, and in the other language, line by line.
        declaration: more of both languages, paragraphs.
    """

    books: list[str]
    science: list[str]
    statements: tuple[list[str], list[str]]
    declaration: tuple[list[str], list[str]]

    @property
    def held_out(self) -> list[str]:
        """Science that no weight is fitted to."""
        return self.science[::10]

    @property
    def training(self) -> list[str]:
        """The rest of it."""
        return [text for place, text in enumerate(self.science) if place % 10]


def load() -> Texts | None:
    """The experiment's texts, or None where the data are missing."""
    data = loader()
    if data is None:
        return None
    english, samoan = ([text for _, text in data.load_udhr(code)] for code in ("en", "sm"))
    science = [text for *_, text in data.load_science_en()]
    return Texts([book(1), book(2)], science, data.load_statements(), (english, samoan))


def stand_in() -> Texts:
    """Python's own help, and a language that is English with other letters: in place of data that
    are missing."""
    topics = list(pydoc_data.topics.topics.values())
    paragraphs = [" ".join(p.split()) for text in topics for p in text.split("\n\n")]
    prose = [p for p in paragraphs if len(p) > 150 and p.count("|") == 0]
    half = len(prose) // 2
    sentences = [s for p in prose[half:] for s in re.split(r"(?<=[a-z]\.) ", p)]
    lines = [s for s in sentences if 8 < s.count(" ") < 25 and s.endswith(".")][:100]
    other = str.maketrans("aeioubcdfghjklmnpqrstvwxyz", "oiaeuzxwvtsrqpnmlkjhgfdcby")
    more = prose[half::20]
    pairs = [(some, [text.translate(other) for text in some]) for some in (lines, more)]
    return Texts(["\n\n".join(prose[:half])], prose[half:], *pairs)


class Rows(NamedTuple):
    """Stretches of text.

    Args:
        tokens: what is read, `[rows, length]`.
        places: the tokens after which a word is asked for, `[rows, words]`.
        words: these words' tokens, `[rows, words]`.
    """

    tokens: Tensor
    places: Tensor
    words: Tensor

    def some(self, count: int) -> Rows:
        """Rows at random, always the same."""
        chosen = torch.randperm(len(self.tokens), generator=torch.Generator().manual_seed(0))[
            :count
        ]
        return Rows(*(each[chosen] for each in self))


def stretches(
    language: Language, paragraphs: Sequence[str], counted: int = 8, length: int = 32
) -> Rows:
    """Overlapping stretches of a text, of which the last words are asked for."""
    tokens = language.tokens("\n\n".join(paragraphs)).unfold(0, length + 1, length - 8)
    places = torch.arange(length - counted, length).expand(len(tokens), -1)
    return Rows(tokens[:, :-1], places, tokens[:, -counted:])


def last_words(language: Language, sentences: Sequence[str]) -> Rows:
    """Sentences without their last words, which are asked for: the first token of each."""
    cut = [sentence.rpartition(" ") for sentence in sentences]
    starts = [language.tokens(start) for start, _, _ in cut]
    words = torch.stack([language.tokens(space + word)[:1] for _, space, word in cut])
    places = torch.tensor([[len(start) - 1] for start in starts])
    # what is filled up comes after the place, where a causal model does not look
    return Rows(nn.utils.rnn.pad_sequence(starts, batch_first=True), places, words)


# -- the model --------------------------------------------------------------------------------


class NextWord(nn.Module):
    """A language model's logits of the words that follow some places of a text."""

    def __init__(self, llama: LlamaForCausalLM):
        super().__init__()
        self.llama = llama
        llama.set_attn_implementation("eager")  # plain softmax, which is mapped and compiled

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Tokens `[rows, length]`, places `[rows, words]` -> logits `[rows, words, vocabulary]`."""
        mask = causal(tokens.shape[1])
        hidden = self.llama.model(tokens, attention_mask=mask, use_cache=False).last_hidden_state
        chosen = places[..., None].expand(-1, -1, hidden.shape[-1])
        return self.llama.lm_head(hidden.gather(1, chosen))


def last_attention(language: Language, width: float) -> nn.Module:
    """The network with its last attention layer drawn from Normal(its weights, width)."""
    last = len(language.network.model.layers) - 1
    return ps.bayesianize(
        NextWord(language.network),
        include=f"llama.model.layers.{last}.self_attn",
        prior=lambda _, weight: dist.Normal(weight.detach(), width),
    )


def model_of(net: nn.Module) -> Callable[..., None]:
    """The Pyro model: rows of words."""

    def model(tokens: Tensor, places: Tensor, words: Tensor | None = None) -> None:
        logits = net(tokens, places)
        with pyro.plate("rows", len(tokens)):
            pyro.deterministic("logits", logits, event_dim=2)
            pyro.sample("word", dist.Categorical(logits=logits).to_event(1), obs=words)

    return model


def fine_tuned(
    model: Callable[..., None],
    rows: Rows,
    temperature: float = 1.0,
    start: str = "module",
    num_chains: int = 1,
    num_samples: int = 1,
    num_steps: int = STEPS,
    seed: int = 0,
) -> ps.Sampler:
    """Chains of SGHMC, which are SGD with momentum at temperature 0.

    With more than one draw of a chain, they are of its second half.
    """
    thinning = max(1, num_steps // 2 // num_samples)
    sghmc = ps.SGHMC.from_sgd(
        model,
        lr=LR,
        momentum=MOMENTUM,
        temperature=temperature,
        init_strategy=STARTS[start],
        compile=True,
    )
    return sghmc.run(
        tuple(rows),
        batch_size=BATCH,
        num_samples=num_samples,
        warmup_steps=num_steps - num_samples * thinning,
        thinning=thinning,
        num_chains=num_chains,
        seed=seed,
        progress=False,
    )


# -- what is measured -------------------------------------------------------------------------


class Scores(NamedTuple):
    """Of an ensemble's predictions, in nats, `[words]`; `each` is of its members, one by one.

    Args:
        total, aleatoric, epistemic: the paper's equation 2.
        loss: of the ensemble's mean probabilities.
        each_total, each_loss: `[members, words]`.
    """

    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    loss: Tensor
    each_total: Tensor
    each_loss: Tensor


def scores(logits: Tensor, words: Tensor) -> Scores:
    """Of logits `[members, rows, words, vocabulary]`."""
    logs = logits.flatten(1, 2).log_softmax(-1)
    true = words.flatten()[:, None]
    each = -logs.gather(-1, true.expand(len(logs), -1, -1))[..., 0]
    mean = logs.double().exp().mean(0)
    loss = -mean.gather(-1, true)[:, 0].log().float()
    return Scores(
        *ps.metrics.uncertainty(logs.exp()), loss, torch.special.entr(logs.exp()).sum(-1), each
    )


def tests(language: Language, texts: Texts) -> dict[str, Rows]:
    """Statements and declaration in both languages, and paragraphs held out."""
    english, other = texts.declaration
    return {
        "English statements": last_words(language, texts.statements[0]),
        "Samoan statements": last_words(language, texts.statements[1]),
        "English declaration": stretches(language, english, counted=1).some(80),
        "Samoan declaration": stretches(language, other, counted=1).some(80),
        "held-out science": stretches(language, texts.held_out).some(100),
    }


def predicted(fit: ps.Sampler, rows: dict[str, Rows]) -> dict[str, Scores]:
    """A fit's scores on all tests."""
    found = {}
    for name, test in rows.items():
        logits = fit.predict(test.tokens, test.places, return_sites=["logits"], batch_size=20)[
            "logits"
        ]
        found[name] = scores(logits, test.words)
    return found


def separation(found: dict[str, Scores], kind: str, text: str = "statements") -> float:
    """How well an uncertainty tells Samoan from English: AUROC."""
    english, samoan = (getattr(found[f"{language} {text}"], kind) for language in LANGUAGES)
    return float(ps.metrics.auroc(english, samoan))


LANGUAGES = ("English", "Samoan")


# -- the run ----------------------------------------------------------------------------------


def main(folder: Path, parts: Path) -> None:
    """The whole run."""
    texts = load()
    if texts is None:
        raise SystemExit(f"no data in {DATA}: set PYRO_SCALE_DATA")
    language = base(folder)
    rows, asked = stretches(language, texts.training).some(ROWS), tests(language, texts)
    parts.mkdir(parents=True, exist_ok=True)

    def part(name: str, width: float, **how: Any) -> dict[str, Scores]:
        path = parts / f"{name}.pt"
        if not path.exists():
            model = model_of(last_attention(language, width))
            begun, worked = time.perf_counter(), time.process_time()
            fit = fine_tuned(model, rows, **how)
            seconds = [time.perf_counter() - begun, time.process_time() - worked]
            found = {key: tuple(value) for key, value in predicted(fit, asked).items()}
            torch.save({"scores": found, "seconds": seconds} | facts(fit), path)
            print(name, [round(s, 1) for s in seconds], flush=True)
        kept = torch.load(path, weights_only=True)
        return {key: Scores(*value) for key, value in kept["scores"].items()}

    def chains(start: str, width: float, seed: int) -> dict[str, Scores]:
        how = {"start": start, "num_chains": CHAINS, "seed": seed}
        return part(f"parallel {start} {width} {seed}", width, **how)

    tried = {choice: chains(*choice, seed=0) for choice in CHOICES}
    start, width = min(tried, key=lambda c: float(tried[c]["held-out science"].loss.mean()))
    ensemble = part("SGD", FLAT, temperature=0.0, num_chains=CHAINS)
    serial = [
        part(f"serial {start} {width} {s}", width, start=start, num_samples=DRAWS, seed=s)
        for s in SEEDS
    ]
    methods = {
        "base": [plain(language, asked)],
        "SGD": one_by_one(ensemble),
        "SGD ensemble": [ensemble],
        "serial SGHMC": serial,
        "parallel SGHMC": [chains(start, width, seed) for seed in SEEDS],
    }
    runs = {path.stem: torch.load(path, weights_only=True) for path in sorted(parts.glob("*.pt"))}
    report = {
        "settings": {"start": start, "prior sd": width, "rows": ROWS, "steps": STEPS, "lr": LR},
        "by_choice": {f"{s}, {w}": summary([found]) for (s, w), found in tried.items()},
        "table": {name: summary(found) for name, found in methods.items()},
        "difference": differences(methods),
        "uncertainties": {name: histograms(found[0]) for name, found in methods.items()},
        "runs": {
            name: {k: v for k, v in run.items() if k != "scores"} for name, run in runs.items()
        },
        "cost": costs(language, rows, width),
        "versions": {name: version(name) for name in ("torch", "transformers", "pyro-scale")},
        "threads": torch.get_num_threads(),
    }
    RESULTS.write_text(json.dumps(rounded(report, 4)) + "\n")
    plotted(rounded(report, 4)).savefig(FIGURE, dpi=110)


def facts(fit: ps.Sampler) -> dict[str, str]:
    """How a run was run."""
    attrs = fit.diagnostics().attrs
    return {name: str(attrs[name]) for name in ("frozen_base", "program")}


def plain(language: Language, asked: dict[str, Rows]) -> dict[str, Scores]:
    """Scores of the base as it is."""
    net = NextWord(language.network)
    with torch.no_grad():
        return {
            name: scores(net(rows.tokens, rows.places)[None], rows.words)
            for name, rows in asked.items()
        }


def one_by_one(found: dict[str, Scores]) -> list[dict[str, Scores]]:
    """An ensemble's members, each as if it were alone."""
    members = len(next(iter(found.values())).each_loss)
    return [
        {
            name: Scores(
                s.each_total[i],
                s.each_total[i],
                torch.zeros_like(s.total),
                s.each_loss[i],
                s.each_total[[i]],
                s.each_loss[[i]],
            )
            for name, s in found.items()
        }
        for i in range(members)
    ]


def aurocs(runs: list[dict[str, Scores]]) -> dict[str, list[float]]:
    """Means and sds over runs."""
    return {
        f"{kind}, {text}": mean_and_sd([separation(found, kind, text) for found in runs])
        for text in ("statements", "declaration")
        for kind in ("total", "aleatoric", "epistemic")
    }


def summary(runs: list[dict[str, Scores]]) -> dict[str, Any]:
    """A column of the table: AUROCs, and losses."""
    losses = {
        f"loss, {name}": mean_and_sd([float(found[name].loss.mean()) for found in runs])
        for name in runs[0]
    }
    return {"runs": len(runs)} | aurocs(runs) | losses


def mean_and_sd(values: Sequence[float]) -> list[float]:
    """Over repeats; an sd of 0 for one of them."""
    return [statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0]


def differences(methods: dict[str, list[dict[str, Scores]]], times: int = 2000) -> dict[str, Any]:
    """AUROC of the ensembles' epistemic uncertainty minus others', with 95% intervals.

    A paired bootstrap: statements are drawn anew, each with its translation, the same for all
    methods; an AUROC is the mean over a method's runs.
    """
    source = torch.Generator().manual_seed(0)
    others = {"total, parallel SGHMC": ("parallel SGHMC", "total")}
    others |= {f"total, {name}": (name, "total") for name in ("SGD", "serial SGHMC", "base")}
    others |= {f"epistemic, {n}": (n, "epistemic") for n in ("serial SGHMC", "SGD ensemble")}
    found: dict[str, Any] = {}
    for text in ("statements", "declaration"):
        size = len(methods["base"][0][f"English {text}"].total)
        draws = [torch.arange(size)]
        draws += [torch.randint(size, (size,), generator=source) for _ in range(times)]
        ours = resampled(methods["parallel SGHMC"], "epistemic", text, draws)
        for label, (name, kind) in others.items():
            gain = ours - resampled(methods[name], kind, text, draws)
            interval = gain[1:].quantile(torch.tensor([0.025, 0.975])).tolist()
            found[f"{label}, {text}"] = [float(gain[0]), *interval]
    return found


def resampled(runs: list[dict[str, Scores]], kind: str, text: str, draws: list[Tensor]) -> Tensor:
    """Mean AUROCs over runs, of each choice of statements."""
    pairs = [[getattr(run[f"{language} {text}"], kind) for language in LANGUAGES] for run in runs]
    return torch.tensor(
        [
            statistics.fmean(float(ps.metrics.auroc(a[chosen], b[chosen])) for a, b in pairs)
            for chosen in draws
        ]
    )


def costs(language: Language, rows: Rows, width: float) -> dict[str, float]:
    """Seconds of one core: of whole runs of two lengths, and what follows from them."""
    model = model_of(last_attention(language, width))
    taken = {}
    for chains in (1, CHAINS):
        for steps in (30, 90):
            begun = time.process_time()
            fine_tuned(model, rows, num_chains=chains, num_steps=steps)
            taken[chains, steps] = time.process_time() - begun
    net, layers = NextWord(language.network), len(language.network.model.layers)
    begun = time.process_time()
    with torch.no_grad():
        for batch in range(20):
            net(rows.tokens[batch * BATCH : (batch + 1) * BATCH], rows.places[:BATCH, :1])
    once = (time.process_time() - begun) / 20 * (layers - 1) / layers
    step = {chains: (taken[chains, 90] - taken[chains, 30]) / 60 for chains in (1, CHAINS)}
    return {
        "a step, 1 chain": step[1],
        "a step, 10 chains": step[CHAINS],
        "before the first step, 1 chain": taken[1, 30] - 30 * step[1],
        "before the first step, 10 chains": taken[CHAINS, 30] - 30 * step[CHAINS],
        "base, a batch": once,
    }


def histograms(found: dict[str, Scores]) -> dict[str, dict[str, list[float]]]:
    """What the figure needs."""
    return {
        kind: {
            language: getattr(found[f"{language} statements"], kind).tolist()
            for language in LANGUAGES
        }
        for kind in ("total", "aleatoric", "epistemic")
    }


def plotted(report: dict[str, Any]) -> plt.Figure:
    """The paper's figures 7 and 10: uncertainties in both languages."""
    kinds = {"total": "TU", "aleatoric": "AU", "epistemic": "EU"}
    panels = [("base", "total"), ("SGD", "total")]
    panels += [(name, kind) for name in ("serial SGHMC", "parallel SGHMC") for kind in kinds]
    figure, axes = plt.subplots(2, 4, figsize=(13, 5.6))
    places = [axes[0, 0], axes[1, 0], *axes[0, 1:], *axes[1, 1:]]
    for axis, (name, kind) in zip(places, panels, strict=True):
        values = report["uncertainties"][name][kind]
        both = torch.tensor([values[language] for language in LANGUAGES])
        bins = torch.linspace(float(both.min()), float(both.max()), 21).tolist()
        for language, color in zip(LANGUAGES, ("#0072B2", "#D55E00"), strict=True):
            axis.hist(values[language], bins, color=color, alpha=0.55, label=language)
        area = report["table"][name][f"{kind}, statements"][0]
        axis.set_title(f"{name}: {kinds[kind]}, AUROC {area:.2f}", fontsize=10)
        axis.set(xlabel=f"{kind} uncertainty (nats)", ylabel="statements")
    axes[0, 0].legend(frameon=False)
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--base", type=Path, default=FOLDER)
    parser.add_argument("--parts", type=Path, default=HERE / "ood_text_parts")
    given = parser.parse_args()
    main(given.base, given.parts)
