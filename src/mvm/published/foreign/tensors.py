"""Tensors of a checkpoint that others wrote: read without executing anything, each taken once, put into our layout."""

import argparse
import math
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from mvm.checkpoint import Weights
from mvm.network.extras import sine_positions
from mvm.network.layers import rotary_table
from mvm.untrusted import MOST_WEIGHTS, check_pth, cut, is_named_tensor

PICKED = ("ema", "model", "state_dict")  # where training scripts keep the weights among other things
WRAPPERS = re.compile(r"^(module\.|_orig_mod\.)+")  # of torch's parallel and compiled modules


class Tensors:
    """Named tensors, each taken once; where: the file, for errors."""

    def __init__(self, named: Mapping[str, Tensor], where: str) -> None:
        self.left = {
            name: value.float() if value.is_floating_point() and value.itemsize < 4 else value
            for name, value in named.items()
        }
        self.where = where
        # of positions that a file holds, against their formula: the last digit of bfloat16 where it is rounded
        halved = any(value.is_floating_point() and value.itemsize < 4 for value in named.values())
        self.table_error = 2**-7 if halved else 1e-4

    def __contains__(self, name: str) -> bool:
        return name in self.left

    def shape(self, name: str, axes: int) -> tuple[int, ...]:
        """Return the shape of a tensor of so many axes."""
        if name not in self.left or self.left[name].ndim != axes:
            found = f"has shape {tuple(self.left[name].shape)}" if name in self.left else "is missing"
            raise ValueError(f"{self.where}: '{name}' {found}; is it of another format (--as)?")
        return tuple(self.left[name].shape)

    def take(self, name: str, *shape: int) -> Tensor:
        """Return a tensor of that shape, once."""
        if self.shape(name, len(shape)) != shape:
            raise ValueError(f"{self.where}: '{name}' has shape {tuple(self.left[name].shape)}, not {shape}")
        return self.left.pop(name)

    def linear(self, name: str, out: int, width: int) -> tuple[Tensor, Tensor]:
        """Return weight and bias of a linear layer."""
        return self.take(f"{name}.weight", out, width), self.take(f"{name}.bias", out)

    def count(self, prefix: str) -> int:
        """Return how many numbered modules begin with this, at least one."""
        numbers = {name[len(prefix) :].partition(".")[0] for name in self.left if name.startswith(prefix)}
        if not numbers:
            raise ValueError(f"{self.where}: '{prefix}0' is missing; is it of another format (--as)?")
        return len(numbers)

    def drop(self, *prefixes: str) -> None:
        """Leave out what sampling does not need."""
        self.left = {name: value for name, value in self.left.items() if not name.startswith(prefixes)}

    def finish(self) -> None:
        """Refuse tensors that nothing has taken: the file is of another network."""
        if self.left:
            names = ", ".join(sorted(map(cut, self.left))[:3])
            raise ValueError(f"{self.where}: {len(self.left)} tensors belong to no known part ({names}, ...)")


def pick(found: object, where: str, weights: str = "ema") -> dict[str, Tensor]:
    """Return the named tensors of a checkpoint: those of `weights` where it keeps several, else the only ones."""
    if isinstance(found, Mapping):
        tables = {key: found[key] for key in PICKED if isinstance(found.get(key), Mapping)}
        found = tables.get(weights) or next(iter(tables.values()), found)
    if not isinstance(found, Mapping) or not found or not all(map(is_named_tensor, found.items())):
        raise ValueError(f"{where} holds something other than named tensors; save the state dict alone")
    return {WRAPPERS.sub("", name): value for name, value in found.items()}


def read_tensors(path: Path, weights: str = "ema") -> dict[str, Tensor]:
    """Return the tensors of a .safetensors, or of a file of torch's, of which nothing is executed."""
    if not path.is_file():
        raise ValueError(f"'{path}' is no file; give a .safetensors, .pt, .pth or .ckpt")
    try:
        if path.suffix == ".safetensors":
            if path.stat().st_size > MOST_WEIGHTS:
                raise ValueError(f"larger than {MOST_WEIGHTS:,} bytes")
            found: object = load_file(path)
        else:
            check_pth(path)
            # training scripts keep their arguments beside the weights: a Namespace is a table, and is not looked at
            with torch.serialization.safe_globals([argparse.Namespace]):
                found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except PermissionError:
        raise
    except SafetensorError as error:
        raise ValueError(f"'{path}' is no whole safetensors file ({cut(error)}); get it again") from None
    except Exception as error:  # of a torn or foreign file torch raises ten kinds of error
        raise ValueError(f"'{path}' is no whole file of weights alone ({cut(error)}); get it again") from None
    return pick(found, f"'{path}'", weights)


# --- parts --------------------------------------------------------------------------------------------------------

Pair = tuple[Tensor, Tensor]  # weight and bias of a linear layer


def wide(compute: Callable[..., Tensor], *values: Tensor) -> Tensor:
    """Return what float64 gives, in the values' dtype."""
    return compute(*(value.double() for value in values)).to(values[0].dtype)


def scaled(pair: Pair, norm: Tensor) -> Pair:
    """Return a linear layer with the weights of the norm before it."""
    return wide(lambda weight, norm: weight * norm, pair[0], norm), pair[1]


def modulated(pair: Pair, norms: Iterable[Tensor]) -> Pair:
    """Return modulations (shift, scale, gate; or the first two) with the weights of the norms: w (1 + s) = 1 + s'."""
    weight, bias = pair[0].clone(), pair[1].clone()
    for number, norm in enumerate(norms):
        width = len(norm)
        rows = slice((3 * number + 1) * width, (3 * number + 2) * width)
        weight[rows] = wide(lambda weight, norm: weight * norm[:, None], weight[rows], norm)
        bias[rows] = wide(lambda bias, norm: norm * bias + norm - 1, bias[rows], norm)
    return weight, bias


def halves(value: Tensor, heads: int) -> Tensor:
    """Return rows (heads * head, ...) with rotary pairs (0, 1), (2, 3), ... as (0, half), (1, half + 1), ..."""
    return value.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def padded(value: Tensor, rows: int) -> Tensor:
    """Return a tensor with rows of zeros after its own: channels of an MLP that add nothing."""
    return torch.cat((value, value.new_zeros(rows - len(value), *value.shape[1:])))


def named(name: str, pair: Pair) -> Weights:
    """Return the entries of a linear layer."""
    return {f"{name}.weight": pair[0], f"{name}.bias": pair[1]}


def swiglu(name: str, gate: Pair, up: Pair, down: Pair) -> Weights:
    """Return a SwiGLU; its hidden width is the next multiple of 16, as ours."""
    hidden = 16 * math.ceil(len(gate[0]) / 16)
    joint = tuple(torch.cat((padded(a, hidden), padded(b, hidden))) for a, b in zip(gate, up, strict=True))
    return {
        f"{name}.gate_up.weight": joint[0],
        f"{name}.gate_up.bias": joint[1],
        **named(f"{name}.down", (padded(down[0].T, hidden).T.contiguous(), down[1])),
    }


def embedded(t: Tensors, name: str, width: int, channels: int, patch: int) -> Pair:
    """Return the layer that embeds patches, a convolution in the file."""
    weight = t.take(f"{name}.proj.weight", width, channels, patch, patch)
    return weight.flatten(1), t.take(f"{name}.proj.bias", width)


def to_patches(pair: Pair, channels: int, patch: int, sign: int = 1) -> Pair:
    """Return the last layer: a patch's numbers by channel first, the first channels alone, times the sign."""
    rows = [value.unflatten(0, (patch * patch, -1))[:, :channels].transpose(0, 1).flatten(0, 1) for value in pair]
    return sign * rows[0], sign * rows[1]


def check_sines(t: Tensors, name: str, side: int, width: int) -> None:
    """Refuse positions that are not the fixed waves: ours are not stored."""
    found = t.take(name, 1, side**2, width)[0]
    check_table(t, name, found, sine_positions((side, side), width))


def check_table(t: Tensors, name: str, found: Tensor, wanted: Tensor) -> None:
    """Refuse a table of a file that is not what our formula gives."""
    if not float((found.float() - wanted).abs().max()) <= t.table_error:
        raise ValueError(f"{t.where}: '{name}' is not the published table of positions; that network is not known")


def rotary_heads(t: Tensors, name: str, width: int, side: int, others: int = 0) -> int:
    """Return the number of heads that a table of rotary waves shows; others: tokens behind, without positions."""
    tokens, head = t.shape(f"{name}.freqs_cos", 2)
    if tokens != side**2 + others or not head or head % 4 or width % head:
        raise ValueError(f"{t.where}: '{name}.freqs_cos' is for {tokens} tokens and heads of {head}, of width {width}")
    angles = torch.cat((rotary_table((side, side), head, 1e4), torch.zeros(others, head // 2))).repeat_interleave(2, -1)
    for wave, function in (("cos", torch.cos), ("sin", torch.sin)):
        check_table(t, name, t.take(f"{name}.freqs_{wave}", tokens, head), function(angles))
    return width // head


def square(t: Tensors, count: int) -> int:
    """Return the side of a square of tokens."""
    side = math.isqrt(count)
    if side**2 != count or not side:
        raise ValueError(f"{t.where}: {count} tokens are no square")
    return side
