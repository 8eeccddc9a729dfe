"""The random numbers of `philox.py`, computed in C++ for many counters at once, and equal to those
of `philox.py` bit for bit.

Loops over `WIDTH` counters have no branches, so compilers turn them into SIMD instructions.  Only
Philox itself is written with vector types.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import math
from typing import Any

import torch
from torch import Tensor

from pyro_scale.compile.cache import library
from pyro_scale.compile.inductor import build_plain
from pyro_scale.core.exclusive import exclusive
from pyro_scale.rng import philox
from pyro_scale.rng.philox import Streams

_SOURCE = """
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

// products of lower halves, which g++ does not know to be one instruction
#if defined(__AVX512F__)
typedef uint64_t Lanes __attribute__((vector_size(64)));
static inline Lanes product(Lanes x, Lanes y) {
    return (Lanes)_mm512_mul_epu32((__m512i)x, (__m512i)y);
}
#elif defined(__AVX2__)
typedef uint64_t Lanes __attribute__((vector_size(32)));
static inline Lanes product(Lanes x, Lanes y) {
    return (Lanes)_mm256_mul_epu32((__m256i)x, (__m256i)y);
}
#else
typedef uint64_t Lanes __attribute__((vector_size(16)));
static inline Lanes product(Lanes x, Lanes y) {
    return (x & 0xffffffffull) * (y & 0xffffffffull);
}
#endif

// counters at a time, and the vectors of them that are in registers together
static constexpr int WIDTH = 32, LANES = sizeof(Lanes) / sizeof(uint64_t), TOGETHER = 2;

// the words of counters side by side, each the lower half of 64 bits
struct alignas(64) Words {
    uint64_t a[WIDTH], b[WIDTH], c[WIDTH], d[WIDTH];
};

struct Stream {
    uint64_t seed;
    uint32_t chain, purpose;
};

static inline void philox(const Stream& stream, uint64_t place, Words& w) {
    const Lanes by0 = Lanes{} + %(multiplier0)dull, by1 = Lanes{} + %(multiplier1)dull;
    Lanes places;
    for (int i = 0; i < LANES; ++i) places[i] = place + i;
    for (int first = 0; first < WIDTH; first += TOGETHER * LANES) {
        Lanes a[TOGETHER], b[TOGETHER], c[TOGETHER], d[TOGETHER];
        for (int i = 0; i < TOGETHER; ++i) {
            a[i] = places;
            b[i] = places >> 32;
            c[i] = Lanes{} + stream.chain;
            d[i] = Lanes{} + stream.purpose;
            places += LANES;
        }
        uint64_t low = (uint32_t)stream.seed, high = stream.seed >> 32;
        #pragma GCC unroll %(rounds)d
        for (int round = 0; round < %(rounds)d; ++round) {
            for (int i = 0; i < TOGETHER; ++i) {
                const Lanes x = product(a[i], by0), y = product(c[i], by1);
                a[i] = (y >> 32) ^ b[i] ^ low;
                c[i] = (x >> 32) ^ d[i] ^ high;
                b[i] = y;
                d[i] = x;
            }
            low = (uint32_t)(low + %(weyl0)du);
            high = (uint32_t)(high + %(weyl1)du);
        }
        std::memcpy(w.a + first, a, sizeof a);
        std::memcpy(w.b + first, b, sizeof b);
        std::memcpy(w.c + first, c, sizeof c);
        std::memcpy(w.d + first, d, sizeof d);
    }
}

template <class T> struct Format;
template <> struct Format<float> {
    using Int = int32_t;
    static constexpr int mantissa = 23, bias = 126, log_terms = %(log32)d, sine_terms = %(sine32)d;
};
template <> struct Format<double> {
    using Int = int64_t;
    static constexpr int mantissa = 52, bias = 1022, log_terms = %(log64)d, sine_terms = %(sine64)d;
};

static constexpr double coefficient(int n) {
    double factorial = 1;
    for (int i = 2; i <= n; ++i) factorial *= i;
    return (n / 2 %% 2 ? -1.0 : 1.0) / factorial;
}

// conversions of numbers below 2^31 and below 2^52 that are SIMD instructions everywhere
static inline float convert(int32_t n) { return (float)n; }
static inline double convert(int64_t n) {
    const int64_t bits = n | 0x4330000000000000ll;
    double above;
    std::memcpy(&above, &bits, sizeof above);
    return above - 0x1p52;
}

// e log 2 + 2 artanh s
template <class T> static inline T logarithm(T u) {
    using F = Format<T>;
    typename F::Int bits;
    std::memcpy(&bits, &u, sizeof(T));
    T exponent = convert((typename F::Int)(bits >> F::mantissa)) - F::bias;
    constexpr typename F::Int one = 1;
    bits = (bits & ((one << F::mantissa) - 1)) | ((typename F::Int)F::bias << F::mantissa);
    T m;
    std::memcpy(&m, &bits, sizeof(T));
    const bool low = m < (T)%(sqrt_half).17g;
    m = low ? m * 2 : m;
    exponent -= low ? 1 : 0;
    const T s = (m - 1) / (m + 1), square = s * s;
    T series = (T)(1.0 / (2 * F::log_terms - 1));
    #pragma GCC unroll 16
    for (int k = F::log_terms - 2; k >= 0; --k) series = series * square + (T)(1.0 / (2 * k + 1));
    return exponent * (T)%(log2).17g + (2 * s) * series;
}

template <class T> static inline void box_muller(T uniform, uint32_t quadrant, T t, T* out) {
    constexpr int terms = Format<T>::sine_terms;
    T radius = std::sqrt(-2 * logarithm(uniform));
    radius = quadrant & 2 ? -radius : radius;
    const T square = t * t;
    T sine = (T)coefficient(2 * terms - 1), cosine = (T)coefficient(2 * terms);
    #pragma GCC unroll 16
    for (int k = terms - 2; k >= 0; --k) sine = sine * square + (T)coefficient(2 * k + 1);
    #pragma GCC unroll 16
    for (int k = terms - 1; k >= 0; --k) cosine = cosine * square + (T)coefficient(2 * k);
    sine = sine * t;
    out[0] = radius * (quadrant & 1 ? -sine : cosine);
    out[1] = radius * (quadrant & 1 ? cosine : sine);
}

static inline void pair(uint32_t u, uint32_t v, float* out) {
    const float uniform = ((float)u + 0.5f) * 0x1p-32f;
    const int32_t centered = (int32_t)(v & 0x3fffffff) - 0x20000000;
    box_muller(uniform, v >> 30, ((float)centered + 0.5f) * (float)%(angle32).17g, out);
}

// the uniform from 52 bits: k + 1/2 is a double
static inline void pair(uint64_t u, uint64_t v, double* out) {
    const double uniform = (convert((int64_t)(u >> 12)) + 0.5) * 0x1p-52;
    const double centered = convert((int64_t)(v << 2 >> 12)) - 0x1p51;
    const double t = (centered + 0.5) * %(angle64).17g;
    box_muller(uniform, (uint32_t)(v >> 62), t, out);
}

static inline void group(const Stream& stream, uint64_t place, float* out) {
    Words w;
    philox(stream, place, w);
    for (int i = 0; i < WIDTH; ++i) {
        pair((uint32_t)w.a[i], (uint32_t)w.b[i], out + 4 * i);
        pair((uint32_t)w.c[i], (uint32_t)w.d[i], out + 4 * i + 2);
    }
}

static inline void group(const Stream& stream, uint64_t place, double* out) {
    Words w;
    philox(stream, place, w);
    for (int i = 0; i < WIDTH; ++i)
        pair(w.b[i] << 32 | (uint32_t)w.a[i], w.d[i] << 32 | (uint32_t)w.c[i], out + 2 * i);
}

static inline uint64_t below(uint64_t bound, uint32_t low, uint32_t high) {
    return (high * bound + (low * bound >> 32)) >> 32;
}

// numbers first, first + 1, ... of a stream, from groups of them
template <class T, int PER, class Group>
static void fill(const Stream& stream, uint64_t first, int64_t count, T* out, Group group) {
    uint64_t place = first / PER;
    int64_t skip = first %% PER;
    alignas(64) T numbers[WIDTH * PER];
    while (count > 0) {
        group(stream, place, numbers);
        const int64_t taken = std::min(count, WIDTH * PER - skip);
        std::memcpy(out, numbers + skip, taken * sizeof(T));
        out += taken;
        count -= taken;
        place += WIDTH;
        skip = 0;
    }
}

// streams of one purpose, a chain each
struct Streams {
    const int64_t* seeds;
    const int64_t* chains;
    int64_t count;
    uint32_t purpose;

    Stream operator[](int64_t i) const {
        return {(uint64_t)seeds[i], (uint32_t)chains[i], purpose};
    }
};

template <class T, int PER>
static void normals(const Streams& streams, uint64_t first, int64_t count, T* out) {
    for (int64_t i = 0; i < streams.count; ++i, out += count)
        fill<T, PER>(streams[i], first, count, out,
                     [](const Stream& s, uint64_t place, T* to) { group(s, place, to); });
}

extern "C" void normals32(Streams streams, uint64_t first, int64_t count, float* out) {
    normals<float, 4>(streams, first, count, out);
}

extern "C" void normals64(Streams streams, uint64_t first, int64_t count, double* out) {
    normals<double, 2>(streams, first, count, out);
}

extern "C" void integers(Streams streams, uint64_t first, int64_t count, uint64_t bound,
                         int64_t* out) {
    const auto group = [bound](const Stream& stream, uint64_t place, int64_t* to) {
        Words w;
        philox(stream, place, w);
        for (int i = 0; i < WIDTH; ++i) {
            to[2 * i] = below(bound, w.a[i], w.b[i]);
            to[2 * i + 1] = below(bound, w.c[i], w.d[i]);
        }
    };
    for (int64_t i = 0; i < streams.count; ++i, out += count)
        fill<int64_t, 2>(streams[i], first, count, out, group);
}

// of 32 bits, so that twice as many rows are in the cache
static void permute(const Stream& stream, uint64_t index, int64_t size, int32_t* out) {
    uint64_t place = index * ((size + 1) / 2);
    for (int64_t i = 0; i < size; ++i) out[i] = i;
    Words w;
    for (int64_t begin = 0; begin < size; begin += 2 * WIDTH, place += WIDTH) {
        philox(stream, place, w);
        const int64_t end = std::min(size, begin + 2 * WIDTH);
        for (int64_t i = begin; i < end; ++i) {
            const int64_t from = (i - begin) / 2;
            const bool second = (i - begin) %% 2;
            const uint64_t low = second ? w.c[from] : w.a[from];
            const uint64_t high = second ? w.d[from] : w.b[from];
            std::swap(out[i], out[i + below(size - i, low, high)]);
        }
    }
}

// of an epoch, from a row on: its order, or its whole batches forwards and then backwards
static int64_t copy(const int32_t* order, int64_t whole, int64_t mirrored, int64_t from,
                    int64_t most, int64_t* out) {
    int64_t count = std::min(most, whole - from);
    if (from >= whole) {
        const int64_t batch = (from - whole) / mirrored, row = (from - whole) %% mirrored;
        order += whole - (batch + 1) * mirrored + row;
        count = std::min(most, mirrored - row);
    } else {
        order += from;
    }
    for (int64_t i = 0; i < count; ++i) out[i] = order[i];
    return count;
}

extern "C" int64_t epochs(Streams streams, uint64_t first, int64_t count, int64_t rows,
                          int64_t mirrored, int64_t held, int32_t* orders, int64_t* out) {
    const int64_t whole = mirrored ? rows / mirrored * mirrored : rows;
    const uint64_t period = mirrored ? 2 * whole : whole, end = first + count;
    int64_t epoch = held;
    for (int64_t i = 0; i < streams.count; ++i) {
        int32_t* const order = orders + i * rows;
        epoch = held;
        for (uint64_t place = first; place < end;) {
            if (epoch != (int64_t)(place / period)) {
                epoch = place / period;
                permute(streams[i], epoch, rows, order);
            }
            const int64_t copied = copy(order, whole, mirrored, place %% period, end - place, out);
            out += copied;
            place += copied;
        }
    }
    return epoch;
}

extern "C" void permutations(Streams streams, uint64_t index, int64_t size, int32_t* out) {
    for (int64_t i = 0; i < streams.count; ++i) permute(streams[i], index, size, out + i * size);
}
"""


class _Streams(ctypes.Structure):
    _fields_ = (
        ("seeds", ctypes.c_void_p),
        ("chains", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("purpose", ctypes.c_uint32),
    )


def _as_structure(streams: Streams) -> _Streams:
    chains = streams.chains
    return _Streams(streams.seeds.data_ptr(), chains.data_ptr(), len(chains), streams.purpose)


class Native:
    """The functions of the module `philox` that fill tensors with random numbers, with the same
    names, arguments and bits, in C++ (for contiguous tensors in main memory).

    Args:
        functions: the loaded C++ library.
    """

    def __init__(self, functions: ctypes.CDLL):
        streams, number, place = _Streams, ctypes.c_int64, ctypes.c_uint64
        pointer = ctypes.c_void_p
        self._normals: dict[torch.dtype, Any] = {
            torch.float32: functions.normals32,
            torch.float64: functions.normals64,
        }
        for function in self._normals.values():
            function.argtypes = [streams, place, number, pointer]
        self._integers, self._permutations = functions.integers, functions.permutations
        self._epochs = functions.epochs
        self._integers.argtypes = [streams, place, number, place, pointer]
        self._permutations.argtypes = [streams, place, number, pointer]
        self._epochs.argtypes = [streams, place, number, number, number, number, pointer, pointer]
        self._epochs.restype = number

    def normals(self, streams: Streams, first: int, out: Tensor) -> None:
        """Fills `out`, contiguous `[chains, n]` in main memory, float32 or float64, with the
        standard normal numbers that have the indices first, first + 1, ... in each chain's stream.
        """
        self._normals[out.dtype](_as_structure(streams), first, out.shape[1], out.data_ptr())

    def integers(self, streams: Streams, first: int, bound: int, out: Tensor) -> None:
        """Fills `out`, contiguous int64 `[chains, n]` in main memory, with the random integers from
        0 to bound - 1 that have the indices first, first + 1, ... in each chain's stream.
        """
        self._integers(_as_structure(streams), first, out.shape[1], bound, out.data_ptr())

    def permutations(self, streams: Streams, index: int, out: Tensor) -> None:
        """Fills `out`, contiguous int32 `[chains, size]` in main memory, with a random permutation
        of 0, ..., size - 1 for each chain: the one with number `index` in the chain's stream.
        """
        self._permutations(_as_structure(streams), index, out.shape[1], out.data_ptr())

    def epochs(
        self, streams: Streams, first: int, mirrored: int, held: int, orders: Tensor, out: Tensor
    ) -> int:
        """Fills `out`, contiguous int64 `[chains, n]` in main memory, with indices of rows of data,
        for epochs that visit all rows in random order. Returns the number of the epoch whose
        permutations `orders` contains afterwards.

        Args:
            streams: a stream for each chain.
            first: number, in the endless sequence of epochs, of the first row index to write.
            mirrored: 0 for plain epochs; otherwise the number of rows of a minibatch, for epochs
                that go through their minibatches first forwards and then backwards.
            held: number of the epoch whose permutations `orders` contains; -1 for none.
            orders: memory for the permutations of one epoch, int32 `[chains, rows]`; is written
                over.
            out: tensor to write over.
        """
        counts = out.shape[1], orders.shape[1], mirrored, held
        pointers = orders.data_ptr(), out.data_ptr()
        return int(self._epochs(_as_structure(streams), first, *counts, *pointers))


def source() -> str:
    """The C++ source of the library that draws random numbers, as text."""
    return _SOURCE % {
        "rounds": philox.ROUNDS,
        "multiplier0": philox.MULTIPLIERS[0],
        "multiplier1": philox.MULTIPLIERS[1],
        "weyl0": philox.WEYL[0],
        "weyl1": philox.WEYL[1],
        "log32": philox.LOG_TERMS[torch.float32],
        "log64": philox.LOG_TERMS[torch.float64],
        "sine32": philox.SINE_TERMS[torch.float32],
        "sine64": philox.SINE_TERMS[torch.float64],
        "sqrt_half": math.sqrt(0.5),
        "log2": math.log(2.0),
        "angle32": 2.0**-31 * math.pi,
        "angle64": 2.0**-53 * math.pi,
    }


def native() -> Native | None:
    """The compiled C++ library that draws random numbers on the CPU, built at the first call on a
    machine. None without a C++ compiler, or if the library gives other numbers than the functions
    in torch, which are then used.
    """
    with exclusive:
        return _native()


@functools.cache
def _native() -> Native | None:
    text = source()
    machine = torch.__version__, torch.backends.cpu.get_cpu_capability()
    key = hashlib.sha256(repr((machine, text)).encode()).hexdigest()
    with contextlib.suppress(Exception):  # errors of missing or unusual compilers
        built = Native(library(key, lambda: build_plain(text)))
        if _agrees(built):
            return built
    return None


def _agrees(built: Native) -> bool:
    """Whether the C++ library gives the same bits as the functions in torch, for a sample of
    numbers. It may not: compilers may deviate from IEEE arithmetic.
    """
    streams = Streams.from_seed([2**62 + 12345, 2**41 + 3], [7, 11], 1)
    for dtype in philox.PER_COUNTER:
        ours, theirs = torch.empty(2, 999, dtype=dtype), torch.empty(2, 999, dtype=dtype)
        built.normals(streams, 2**33 + 1, ours)
        philox.normals(streams, 2**33 + 1, theirs)
        if not torch.equal(ours, theirs):
            return False
    return True
