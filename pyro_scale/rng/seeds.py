"""Seeds, the purposes of random numbers, and generators for what is drawn once.

The standard normal numbers of steps and the rows of minibatches are drawn by the module `streams`,
not by these generators.
"""

from __future__ import annotations

import hashlib
import struct
from enum import IntEnum
from numbers import Integral

import torch

from pyro_scale.core.exclusive import exclusive
from pyro_scale.errors import ArgumentError


class Purpose(IntEnum):
    """Uses of random numbers, such as initial positions or minibatches: streams for different
    purposes are independent. Draws depend on these integers, so they never change.
    """

    INIT = 0
    NOISE = 1
    BATCHES = 2
    MOMENTUM = 3
    DATA_LOADER = 4
    STEP_SIZE = 5
    CURVATURE = 6
    APPROXIMATION = 7
    SHADOW = 8
    SEARCH = 9
    WINDOW = 10
    PILOT = 11
    PREDICTION = 12
    SIMULATION = 13


def choose_seed(seed: int | None) -> int:
    """The seed that was passed, or for None one from torch's generator, which `pyro.set_rng_seed`
    seeds.

    Raises:
        ArgumentError: `seed` is not an int in [0, 2^63).
    """
    if seed is None:
        with exclusive:
            return int(torch.randint(2**31, ()).item())
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not 0 <= int(seed) < 2**63:
        raise ArgumentError(f"seed={seed!r}: pass an int in [0, 2**63), or None to have one drawn")
    return int(seed)


def derived_seed(seed: int, chain: int, purpose: Purpose, block: int = 0) -> int:
    """A 63-bit seed, a hash of its arguments: other chains, purposes or blocks have independent
    random numbers.

    torch's CPU generator uses only 32 of these bits, so use it for few draws: starts, searches,
    augmentations of data sets.

    Args:
        seed: the run's seed.
        chain: number of the chain.
        purpose: what the random numbers are for.
        block: number of a part of the random numbers of this purpose, if they are drawn in parts.
    """
    key = struct.pack("<4Q", seed, chain, purpose, block)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def generator(
    seed: int, chain: int, purpose: Purpose, block: int = 0, device: torch.device | None = None
) -> torch.Generator:
    """A torch generator that is seeded by `derived_seed` of these arguments.

    Args:
        seed: the run's seed.
        chain: number of the chain.
        purpose: what the random numbers are for.
        block: number of a part of the random numbers of this purpose, if they are drawn in parts.
        device: device of the generator; None for the CPU.
    """
    source = torch.Generator(device or torch.device("cpu"))
    return source.manual_seed(derived_seed(seed, chain, purpose, block))
