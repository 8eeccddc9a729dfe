"""Small networks of every architecture, float64, in eval mode, each with rows to classify."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import pytest
import torch
from reference import normals
from torch import nn

import pyro_scale as ps

SD = 0.7  # of the prior
N, B, CLASSES, TOKENS, LENGTH = 12, 4, 3, 11, 5

Y = torch.arange(N) % CLASSES
MASK = torch.arange(LENGTH) < torch.tensor([5, 3, 4, 1, 2, 5, 3, 3, 4, 2, 5, 1])[:, None]


def called(net, *inputs):
    return net(*inputs)


class Case(NamedTuple):
    """A network, its inputs' rows, and how its logits come of them."""

    net: nn.Module
    inputs: tuple[torch.Tensor, ...]
    call: Callable[..., torch.Tensor] = called

    @property
    def data(self):
        return (*self.inputs, Y)

    @property
    def batch(self):
        """Rows that are not in the data's order of lengths or classes."""
        return tuple(each[2 : 2 + B] for each in self.data)

    def logits(self, weights, *inputs):
        """The plain network's, with other weights."""
        return self.call(Swapped(self.net, weights), *inputs)

    def loss(self, weights, *data):
        """Its mean cross entropy."""
        return nn.functional.cross_entropy(self.logits(weights, *data[:-1]), data[-1])

    def weights(self, names=None):
        """Copies to differentiate by."""
        named = dict(self.net.named_parameters())
        return {n: named[n].detach().clone().requires_grad_() for n in names or named}


class Swapped:
    def __init__(self, net, weights):
        self.net, self.weights = net, weights

    def __call__(self, *args, **kwargs):
        return torch.func.functional_call(self.net, self.weights, args, kwargs)


def classifier(bayesian, call=called):
    """The model of a case, whose last argument are the classes."""

    def model(*data: Any):
        *inputs, y = data
        logits = call(bayesian, *inputs)
        with pyro.plate("data", len(y)):
            pyro.deterministic("logits", logits, event_dim=1)
            pyro.sample("y", dist.Categorical(logits=logits), obs=y)

    return model


def tokens(seed=1):
    source = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, TOKENS, (N, LENGTH), generator=source)
    return torch.where(MASK, ids, 0)  # 0 pads


# ------------------------------------------------------------------ of torch


def mlp(*_):
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, CLASSES))


def convolution(norm=nn.Identity):
    layers = nn.Conv2d(1, 4, 3), norm(4), nn.Tanh(), nn.Flatten(), nn.Linear(16, CLASSES)
    net = nn.Sequential(*layers)
    if isinstance(net[1], nn.BatchNorm2d):
        net(torch.randn(6, 1, 4, 4))  # statistics that are not 0 and 1
        nn.init.normal_(net[1].weight)
        nn.init.normal_(net[1].bias)
    return net


def layer_norm():
    return nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, CLASSES))


class Sequence(nn.Module):
    """Classifies sequences of tokens by the mean of what a layer makes of them."""

    def __init__(self, layer=None, padding_idx=None):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 4, padding_idx=padding_idx)
        self.layer = layer
        self.head = nn.Linear(4, CLASSES)
        if padding_idx is not None:
            nn.init.normal_(self.embed.weight)  # a padding row that is not zero

    def forward(self, ids, mask=None):
        x = self.embed(ids)
        if isinstance(self.layer, nn.RNNBase):
            x, _ = self.layer(x)
        elif isinstance(self.layer, nn.MultiheadAttention):
            x, _ = self.layer(x, x, x, key_padding_mask=None if mask is None else ~mask)
        elif self.layer is not None:
            x = self.layer(x, src_key_padding_mask=None if mask is None else ~mask)
        if mask is None:
            return self.head(x.mean(1))
        return self.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def encoder():
    layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=6, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


class TiedBody(nn.Module):
    """An embedding that is also the first layer of a head."""

    def __init__(self, padding_idx=None):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 4, padding_idx=padding_idx)
        self.decode = nn.Linear(4, TOKENS, bias=False)
        self.head = nn.Linear(TOKENS, CLASSES)
        self.decode.weight = self.embed.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.decode(self.embed(ids).mean(1))))


def weight_norm():
    net = mlp()
    nn.utils.parametrizations.weight_norm(net[0])
    return net


def attention():
    return nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True)


def lstm():
    return nn.LSTM(4, 4, num_layers=2, dropout=0.2, batch_first=True)


def gru():
    return nn.GRU(4, 2, bidirectional=True, batch_first=True)


# ------------------------------------------------------------------ of others

# weights of size one, so that all of them matter
SMALL = {
    "vocab_size": TOKENS,
    "num_labels": CLASSES,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.7,
}


def bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=4,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=6,
        max_position_embeddings=8,
        **SMALL,
    )
    return transformers.BertForSequenceClassification(config)


def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=4,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=6,
        **SMALL,
    )
    return transformers.LlamaForSequenceClassification(config)


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=4, n_layer=1, n_head=2, n_positions=8, **SMALL)
    return transformers.GPT2ForSequenceClassification(config)


def lora():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS")
    net = peft.get_peft_model(bert(), config)
    for name, weight in net.named_parameters():
        if "lora_B" in name:  # which starts at 0, where half of the gradients are
            nn.init.normal_(weight)
    return net


def hugging_face(net, ids, mask=None):
    return net(input_ids=ids, attention_mask=mask).logits


CASES = {
    "MLP": lambda: Case(mlp(), (normals(N, 2),)),
    "convolution": lambda: Case(convolution(), (normals(N, 1, 4, 4),)),
    "BatchNorm": lambda: Case(convolution(nn.BatchNorm2d), (normals(N, 1, 4, 4),)),
    "group norm": lambda: Case(
        ps.replace_batchnorm(convolution(nn.BatchNorm2d)), (normals(N, 1, 4, 4),)
    ),
    "filter response norm": lambda: Case(
        ps.replace_batchnorm(convolution(nn.BatchNorm2d), by="filter_response"),
        (normals(N, 1, 4, 4),),
    ),
    "layer norm": lambda: Case(layer_norm(), (normals(N, 2),)),
    "embedding": lambda: Case(Sequence(), (tokens(),)),
    "padded embedding": lambda: Case(Sequence(padding_idx=0), (tokens(),)),
    "LSTM": lambda: Case(Sequence(lstm()), (tokens(),)),
    "GRU": lambda: Case(Sequence(gru()), (tokens(),)),
    "transformer": lambda: Case(Sequence(encoder()), (tokens(),)),
    "masked transformer": lambda: Case(Sequence(encoder()), (tokens(), MASK)),
    "attention": lambda: Case(Sequence(attention()), (tokens(), MASK)),
    "weight norm": lambda: Case(weight_norm(), (normals(N, 2),)),
    "tied": lambda: Case(TiedBody(), (tokens(),)),
    "Bert": lambda: Case(bert(), (tokens(),), hugging_face),
    "masked Bert": lambda: Case(bert(), (tokens(), MASK), hugging_face),
    "Llama": lambda: Case(llama(), (tokens(),), hugging_face),
    "masked Llama": lambda: Case(llama(), (tokens(), MASK), hugging_face),
    "GPT-2": lambda: Case(gpt2(), (tokens(),), hugging_face),
    "masked GPT-2": lambda: Case(gpt2(), (tokens(), MASK), hugging_face),
    "LoRA": lambda: Case(lora(), (tokens(), MASK), hugging_face),
}


def case(kind):
    """One of `CASES`, the same at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = CASES[kind]()
    made.net.double().eval()
    return made


def state(net):
    """All that a network holds, copied."""
    return copy.deepcopy(
        {
            "tensors": dict(net.state_dict()),
            "buffers": dict(net.named_buffers()),
            "requires_grad": {n: p.requires_grad for n, p in net.named_parameters()},
            "training": {path: m.training for path, m in net.named_modules()},
            "gradients": {n: p.grad for n, p in net.named_parameters()},
        }
    )


def assert_same(after, before):
    """Two states, bit for bit."""
    for what, values in before.items():
        assert after[what].keys() == values.keys()
        for name, value in values.items():
            same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
            assert same(after[what][name], value), (what, name)


def log_prior(weights):
    return sum(dist.Normal(0.0, SD).log_prob(weight).sum() for weight in weights.values())
