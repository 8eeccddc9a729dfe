"""Laplace approximations of a network at given weights: what is timed is all of the fit.

Each contender answers with the posterior's precision, [D] or [D, D], as the only row of its draws.
"""

from __future__ import annotations

import copy
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from networks import Trained, trained
from ours import mlp_model
from protocol import Timing
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Batch = tuple[Tensor, Tensor]


def _timed(fit: Callable[[], Any], precision: Callable[[Any], Tensor]) -> Callable[[], Timing]:
    """Times a fit in seconds of the processor, after one that does not count, and reads the
    precision off."""
    fit()

    def timing() -> Timing:
        begin = time.process_time()
        found = fit()
        seconds = time.process_time() - begin
        return Timing({"": seconds}, draws=precision(found).detach().reshape(1, -1).numpy())

    return timing


def ours(
    hidden: tuple[int, ...],
    structure: str = "diag",
    curvature: str = "ggn",
    dtype: str = "float32",
    again: bool = True,
) -> Callable[[], Timing]:
    """All of `ps.Laplace.run` at the weights: of an object that has run on these tensors before, or
    of a new one, which inspects the model."""
    import pyro_scale as ps

    at, model = _prepared(hidden, dtype)

    def new() -> Any:
        return ps.Laplace(model, structure=structure, curvature=curvature)

    earlier = new()

    def fit() -> Any:
        laplace = earlier if again else new()
        return laplace.run((at.x, at.y), mode=at.weights, seed=0, progress=False)

    return _timed(fit, lambda laplace: laplace.fit.gaussians[0].precision)


def ours_curvature(
    hidden: tuple[int, ...],
    structure: str = "diag",
    dtype: str = "float32",
    kind: str = "ggn",
) -> Callable[[], Timing]:
    """`ps.Curvature` alone, of a model that is known already; with the prior added."""
    import pyro_scale as ps

    at, model = _prepared(hidden, dtype)
    known = ps.LogPosterior(model, num_data=len(at.x))

    def fit() -> Tensor:
        curvature = ps.Curvature(known, kind)
        if structure == "dense":
            matrix = curvature.dense(at.weights, (at.x, at.y))
            return matrix + torch.eye(len(matrix)).to(matrix)
        by_site = curvature.diagonal(at.weights, (at.x, at.y))
        return torch.cat([by_site[name].flatten() for name in at.weights]) + 1

    return _timed(fit, lambda found: found)


def laplace_torch(
    hidden: tuple[int, ...],
    backend: str | None,
    batch_size: int,
    structure: str = "Diag",
    dtype: str = "float32",
) -> Callable[[], Timing]:
    """`DiagLaplace`, `KronLaplace` or `FullLaplace`; the default backend is None."""
    _declare_operators()
    import laplace
    from laplace import curvature

    at = trained(hidden, dtype)
    loader = DataLoader(TensorDataset(at.x, at.y), batch_size=batch_size)
    kind = getattr(laplace, f"{structure}Laplace")
    options = {} if backend is None else {"backend": getattr(curvature, backend)}
    nets = iter([copy.deepcopy(at.net) for _ in range(100)])  # BackPACK leaves hooks behind

    def fit() -> Any:
        found = kind(next(nets), "classification", prior_precision=1.0, **options)
        found.fit(loader)
        if structure != "Kron":
            found.posterior_scale  # noqa: B018  (it is lazy: a factor, and its inverse)
        return found

    def precision(found: Any) -> Tensor:
        matrix = found.posterior_precision
        return matrix.to_matrix() if structure == "Kron" else matrix

    return _timed(fit, precision)


def posteriors_laplace(
    hidden: tuple[int, ...],
    kind: str,
    batch_size: int,
    dtype: str = "float32",
) -> Callable[[], Timing]:
    """`posteriors.laplace.diag_ggn`, `dense_ggn` or `diag_fisher`, batch by batch."""
    import posteriors

    at = trained(hidden, dtype)
    loader = DataLoader(TensorDataset(at.x, at.y), batch_size=batch_size)
    nothing = torch.tensor([])
    weights = OrderedDict(at.weights)  # of a dict, posteriors would sort the names
    size = sum(weight.numel() for weight in at.weights.values())
    prior: Any = torch.eye(size).to(at.x) if kind.startswith("dense") else 1.0
    module = getattr(posteriors.laplace, kind)

    def forward(weights: dict[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        return torch.func.functional_call(at.net, weights, batch[0]), nothing

    def outer(logits: Tensor, batch: Batch) -> Tensor:
        return -nn.functional.cross_entropy(logits, batch[1], reduction="sum")

    def rows(weights: dict[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        logits = torch.func.functional_call(at.net, weights, batch[0])
        return -nn.functional.cross_entropy(logits, batch[1], reduction="none"), nothing

    if kind.endswith("fisher"):
        transform = module.build(rows, True, prior)  # per_sample
    else:
        transform = module.build(forward, outer, prior)

    def fit() -> Any:
        state = transform.init(weights)
        for batch in loader:
            state, _ = transform.update(state, batch)
        return state

    def precision(state: Any) -> Tensor:
        if kind.startswith("dense"):
            return state.prec
        return torch.cat([state.prec_diag[name].flatten() for name in at.weights])

    return _timed(fit, precision)


def curvlinops_matrix(hidden: tuple[int, ...], dtype: str = "float32") -> Callable[[], Timing]:
    """curvlinops' `GGNLinearOperator` times the identity: the dense GGN, with the prior added."""
    operator, size = _operator(hidden, dtype)

    def fit() -> Tensor:
        eye = torch.eye(size, dtype=getattr(torch, dtype))
        return operator() @ eye + eye

    return _timed(fit, lambda found: found)


# ------------------------------------------------------------------ products


def ours_product(hidden: tuple[int, ...], dtype: str = "float32") -> Callable[[], Timing]:
    """`ps.Curvature.product` over all rows."""
    import pyro_scale as ps

    at, model = _prepared(hidden, dtype)
    curvature = ps.Curvature(ps.LogPosterior(model, num_data=len(at.x)))
    parts = _vector(at).split([weight.numel() for weight in at.weights.values()])
    vector = {
        name: part.reshape(weight.shape)
        for (name, weight), part in zip(at.weights.items(), parts, strict=True)
    }

    def fit() -> Tensor:
        found = curvature.product(at.weights, (at.x, at.y), vector)
        return torch.cat([found[name].flatten() for name in at.weights])

    return _timed(fit, lambda found: found)


def curvlinops_product(hidden: tuple[int, ...], dtype: str = "float32") -> Callable[[], Timing]:
    """curvlinops' `GGNLinearOperator` times a vector, all rows as one batch."""
    operator, _ = _operator(hidden, dtype)
    vector, made = _vector(trained(hidden, dtype)), operator()
    return _timed(lambda: made @ vector, lambda found: found)


# ------------------------------------------------------------------ shared


def _prepared(hidden: tuple[int, ...], dtype: str) -> tuple[Trained, Any]:
    at = trained(hidden, dtype)
    torch.set_default_dtype(getattr(torch, dtype))  # of the prior's numbers
    return at, mlp_model(at.net)


def _vector(at: Trained) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    size = sum(weight.numel() for weight in at.weights.values())
    return torch.randn(size, generator=generator, dtype=torch.float64).to(at.x)


def _operator(hidden: tuple[int, ...], dtype: str) -> tuple[Callable[[], Any], int]:
    _declare_operators()
    from curvlinops import GGNLinearOperator

    at = trained(hidden, dtype)
    loss, params = nn.CrossEntropyLoss(reduction="sum"), list(at.net.parameters())

    def operator() -> Any:
        data = [(at.x, at.y)]
        return GGNLinearOperator(at.net, loss, params, data, check_deterministic=False)

    return operator, sum(weight.numel() for weight in params)


def _declare_operators() -> None:
    """laplace-torch and BackPACK import torchvision and use nothing of it here; where its binary is
    not for this build of torch, it cannot be imported before its operators are declared."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor a, Tensor b, float c) -> Tensor")
