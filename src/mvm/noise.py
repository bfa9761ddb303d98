"""Random numbers that are a pure function of (seed, stream, element).

Every sample owns a seed, so its noise is bit-equal whatever the batch size, order, process or device.
The generator is Philox4x32-10 (Salmon et al. 2011), written here because torch's own generators tie
the numbers to the shape of the call. The normals are formed in float64 and rounded to float32: a last
digit that differs between two machines' log or cos then all but never shows (never in 1.5 million, CPU to GPU).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from numbers import Integral

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

# Streams keep the draws of one seed apart; solver steps use STEP + index, resampling of particles RESAMPLE + index,
# likelihood's evaluations HUTCHINSON + index.
INITIAL, LABEL, TIME, TRAIN, DEQUANTISE, COMPONENT, DERIVE, MIRROR, BLOCK, DROPOUT, WARP, WARP_NORMAL, DATA = range(13)
AUGMENT = 1 << 12
STEP = 1 << 16
RESAMPLE = 1 << 30
HUTCHINSON = 1 << 31

MAX_SEED = 2**63 - 1
MAX_STREAM = 2**32 - 1


def _product(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """Return the high and low 32 bits of word * multiplier, both below 2^32.

    By halves of the multiplier: the whole product would overflow int64, which a compiler may treat as it likes.
    """
    upper, lower = word * (multiplier >> 16), word * (multiplier & 0xFFFF)  # each below 2^48
    middle = upper + (lower >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (lower & 0xFFFF)


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return the four 32-bit words of Philox4x32-10, each in an int64 tensor."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _on_device(stream: int, seeds: Tensor) -> Tensor:
    """Return the stream's number as a tensor: a compiler then makes one program for all streams."""
    if not 0 <= stream <= MAX_STREAM:  # a word of the counter: beyond it uniforms leave (0, 1) and normals are NaN
        raise ValueError(f"stream={stream} is out of range; it must lie in [0, {MAX_STREAM}]")
    return torch.full((), stream, dtype=torch.int64, device=seeds.device)


def _words(seeds: Tensor, stream: Tensor, count: int) -> Tensor:
    """Return 32-bit words (B, count): the first `count` of each seed's stream."""
    block = torch.arange((count + 3) // 4, device=seeds.device)[None, :]  # (1, blocks)
    seeds = seeds.to(torch.int64)[:, None]  # (B, 1)
    zero = torch.zeros_like(block)
    words = philox((block, zero + stream, zero, zero), (seeds & _MASK, (seeds >> 32) & _MASK))
    return torch.stack(words, dim=-1).flatten(1)[:, :count]


def _unit(words: Tensor) -> Tensor:
    """Return float64 in (0, 1), the centres of 2^32 equal cells: never 0, never 1."""
    return (words.double() + 0.5) * 2.0**-32


def uniform(seeds: Tensor, stream: int, shape: Sequence[int] = ()) -> Tensor:
    """Return float64 uniforms in (0, 1) of shape (B, *shape)."""
    return _unit(_words(seeds, _on_device(stream, seeds), math.prod(shape))).reshape(len(seeds), *shape)


def _normals(seeds: Tensor, stream: Tensor, count: int) -> Tensor:
    """Return standard normals (B, count) in float32, by Box-Muller."""
    u = _unit(_words(seeds, stream, count + count % 2)).unflatten(1, ((count + 1) // 2, 2))
    radius, angle = torch.sqrt(-2 * torch.log(u[..., 0])), 2 * math.pi * u[..., 1]
    z = torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), dim=-1).flatten(1)[:, :count]
    return z.float()


# What draws normals: `normal`, or the same compiled, as (seeds, stream, shape, dtype).
Normal = Callable[[Tensor, int, Sequence[int], torch.dtype], Tensor]


def normal(seeds: Tensor, stream: int, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Return standard normals of shape (B, *shape), of float32 precision in any dtype."""
    return _normals(seeds, _on_device(stream, seeds), math.prod(shape)).to(dtype).reshape(len(seeds), *shape)


@cache
def compiled_normals() -> Callable[[Tensor, Tensor, int], Tensor]:
    """Return _normals as one kernel instead of two hundred: the same bits (tests/test_noise.py)."""
    return torch.compile(_normals, dynamic=False)


def normal_compiled(seeds: Tensor, stream: int, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return `normal`'s numbers by a compiled program: pays where many are drawn in one shape."""
    drawn = compiled_normals()(seeds, _on_device(stream, seeds), math.prod(shape))
    return drawn.to(dtype).reshape(len(seeds), *shape)


def initial(seeds: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the starting noise x_1 of shape (B, *shape) that belongs to these seeds."""
    return normal(seeds, INITIAL, shape, dtype)


def derive(seed: int, indices: Tensor) -> Tensor:
    """Return one int64 seed per index: independent children of `seed`, the same in any order or batch."""
    parent = torch.as_tensor(seed, dtype=torch.int64, device=indices.device)
    indices = indices.to(torch.int64)
    zero = torch.zeros_like(indices)
    counter = (indices & _MASK, (indices >> 32) & _MASK, zero + DERIVE, zero)
    high, low, *_ = philox(counter, (zero + (parent & _MASK), zero + ((parent >> 32) & _MASK)))
    return ((high & 0x7FFFFFFF) << 32) | low


def as_seeds(seeds: Sequence[int] | Tensor | None, batch: int, device: torch.device | str = "cpu") -> Tensor:
    """Return int64 seeds (B,); None draws them once from torch's default generator."""
    if seeds is None:
        return torch.randint(MAX_SEED, (batch,)).to(device)
    if not isinstance(seeds, Tensor | Iterable) or (isinstance(seeds, Tensor) and seeds.ndim != 1):
        raise ValueError(f"seeds={seeds!r} must be a list of whole numbers, one per sample ({batch})")
    values = seeds.tolist() if isinstance(seeds, Tensor) else list(seeds)
    if len(values) != batch:
        raise ValueError(f"seeds has {len(values)} entries for a batch of {batch}; give one seed per sample")
    if any(not isinstance(s, Integral) for s in values):
        raise ValueError("seeds must be whole numbers, one per sample")
    if any(not 0 <= s <= MAX_SEED for s in values):
        raise ValueError(f"seeds must lie in [0, {MAX_SEED}]; got {[s for s in values if not 0 <= s <= MAX_SEED][:3]}")
    return torch.tensor(values, dtype=torch.int64, device=device)
