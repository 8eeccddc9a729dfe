"""The base class of `MAP`, `VI`, `IVON`, `Laplace` and `EKF`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self, get_args

from pyro_scale.core.rows import Model
from pyro_scale.curvature.evidence import GaussianStructure
from pyro_scale.errors import ArgumentError
from pyro_scale.infer.method import InitStrategy, Method, asks
from pyro_scale.posterior.gaussians import Fit
from pyro_scale.results.gaussian import GaussianPosterior
from pyro_scale.storage.files import FilePath

#: Whether a Gaussian's elements are independent or correlated.
Structure = Literal["diag", "dense"]


class Approximation(Method):
    """Base class of methods that approximate the posterior by a Gaussian in unconstrained space, or
    by several, one a start. Not used directly.

    Args:
        model: a Pyro model, a `PyroModule` or a `LogPosterior`.
        structure: `"diag"` or `"dense"`.
        init_strategy: where the fit starts: one of Pyro's strategies, a dict of constrained tensors
            `[num_chains, ...]`, or another fit.
        num_data: number of rows in all, N; None takes it from the data.

    Raises:
        ArgumentError: an argument is unknown or out of range.
    """

    #: Values that `structure` may have.
    structures: ClassVar[tuple[str, ...]] = get_args(Structure)

    _not_run = "has no fit yet: call run(data, ...) first"

    def __init__(
        self,
        model: Model,
        *,
        structure: GaussianStructure | Literal["auto"] = "diag",
        init_strategy: InitStrategy = None,
        num_data: int | None = None,
    ):
        super().__init__(model, init_strategy=init_strategy, num_data=num_data)
        if structure not in self.structures:
            raise ArgumentError(f"structure={structure!r}: pass one of {self.structures}")
        self.structure = structure

    posterior: GaussianPosterior

    @property
    def fit(self) -> Fit:
        """The Gaussians in unconstrained space, one a start, with their centers and settings.

        Raises:
            NotRunError: nothing has been run.
        """
        return self.posterior.fit

    @classmethod
    def load(cls, path: FilePath, model: Model) -> Self:
        """A method of this class that holds the fit which `save` wrote to a file, with the file's
        `structure`. It has results but cannot be run; see `Method.load`.

        Args:
            path: path of the file.
            model: the model of the run, as for the constructor.
        """
        loaded = super().load(path, model)
        loaded.structure = loaded.fit.attrs["structure"]
        return loaded

    sample = asks(GaussianPosterior.sample)
    psis = asks(GaussianPosterior.psis)
    starts = asks(GaussianPosterior.starts)
    predict = asks(GaussianPosterior.predict)
    guide = asks(GaussianPosterior.guide)
    mass = asks(GaussianPosterior.mass)
    as_prior = asks(GaussianPosterior.as_prior)
    diagnostics = asks(GaussianPosterior.diagnostics)  # type: ignore[arg-type]


def fit_of(value: Any) -> Fit | None:
    """The `Fit` (Gaussians in unconstrained space, one a start, with the run's settings) inside
    `value`, if that is an approximation such as `Laplace` that has been run, or its posterior; None
    for any other value, so that a caller can tell a fit from a dict or a sampler.

    Raises:
        NotRunError: the approximation has not been run.
    """
    return value.fit if isinstance(value, Approximation | GaussianPosterior) else None
