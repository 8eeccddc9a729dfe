"""A small language model of Llama's architecture, in place of the paper's Llama 2 and 3.

Nobody can download 8 billion weights here, nor run them.  So the base model of both language
experiments (sections 5.2 and 5.3) is trained from nothing on the first twelve of the books, by
plain PyTorch, and from then on taken for pretrained: its tokens are those of a byte-level BPE of
the same books, so that any text of any language can be written in them.

    OMP_NUM_THREADS=1 python notebooks/paper/language_model.py [--folder DIRECTORY]

trains it and keeps it in a folder that both experiments read.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from data_folder import DATA, loader
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

#: Where the trained base is kept; not a part of the repository.
FOLDER = Path(__file__).resolve().parent / "language_model"
#: Books that the base has read; those after them are new to it.
BASE_BOOKS = range(1, 13)


class Size(NamedTuple):
    """Of the vocabulary, the network, and what it is trained on."""

    words: int = 4096
    width: int = 192
    layers: int = 6
    heads: int = 6
    #: Tokens of a training row.
    context: int = 256
    steps: int = 2000
    batch: int = 8

    def network(self) -> LlamaForCausalLM:
        """Llama's architecture with random weights."""
        config = LlamaConfig(
            vocab_size=self.words,
            hidden_size=self.width,
            intermediate_size=8 * self.width // 3,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            max_position_embeddings=512,
            tie_word_embeddings=True,
        )
        return LlamaForCausalLM(config)


class Language(NamedTuple):
    """A tokenizer and a network in eval mode."""

    tokenizer: Tokenizer
    network: LlamaForCausalLM

    def tokens(self, text: str) -> Tensor:
        """A text as numbers, `[tokens]`."""
        return torch.tensor(self.tokenizer.encode(text).ids)


def causal(length: int) -> Tensor:
    """What is added to attention's scores, `[1, 1, length, length]`, so that a token sees none
    after it: the mask of transformers' own reads values in Python, which cannot be recorded."""
    return torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]


def book(number: int) -> str:
    """A book's text, its paragraphs in lines of their own."""
    load = loader()
    if load is None:
        raise SystemExit(f"no data in {DATA}: set PYRO_SCALE_DATA")
    return str(load.load_book(number, unwrap=True))


def tokenizer_of(texts: Sequence[str], words: int) -> Tokenizer:
    """Byte-level byte-pair encoding."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=words, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def trained(texts: Sequence[str], size: Size, seed: int = 0, every: int = 0) -> Language:
    """A language model of texts, by AdamW on random stretches of them.

    Args:
        texts: what it reads.
        size: of all that there is to choose.
        seed: of its first weights and of the stretches.
        every: steps between two lines that say how far it is; 0 for none.
    """
    tokenizer = tokenizer_of(texts, size.words)
    tokens = torch.cat([torch.tensor(each.ids) for each in tokenizer.encode_batch(list(texts))])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = size.network()
    source = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, betas=(0.9, 0.95))
    begun, losses = time.perf_counter(), []
    for step in range(size.steps):
        warmed, progress = min(1.0, step / 100), step / size.steps
        optimizer.param_groups[0]["lr"] = (
            2e-3 * warmed * (0.55 + 0.45 * math.cos(math.pi * progress))
        )
        first = torch.randint(len(tokens) - size.context, (size.batch,), generator=source)
        rows = tokens[first[:, None] + torch.arange(size.context + 1)]
        logits = network(rows[:, :-1]).logits
        loss = cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if every and step % every == every - 1:
            mean = sum(losses[-every:]) / every
            print(
                f"{step + 1} {mean:.3f} nats a token {time.perf_counter() - begun:.0f} s",
                flush=True,
            )
    return Language(tokenizer, network.eval().requires_grad_(False))


def base(folder: Path = FOLDER) -> Language:
    """The base model, which is trained and kept if it is not there."""
    if not (folder / "tokenizer.json").exists():
        language = trained([book(number) for number in BASE_BOOKS], Size(), every=100)
        language.network.save_pretrained(folder)
        language.tokenizer.save(str(folder / "tokenizer.json"))
    network = LlamaForCausalLM.from_pretrained(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Language(tokenizer, network.eval().requires_grad_(False))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    base(parser.parse_args().folder)
