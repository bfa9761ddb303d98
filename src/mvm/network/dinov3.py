"""DINOv3 as Meta publishes it: a .pth file whose names are translated to those of transformers' DINOv3ViTModel."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mvm.untrusted import check_pth, is_named_tensor

WAYS = (
    "DINOv3 is gated, and there are three ways to it: its hub name (facebook/dinov3-vitl16-pretrain-lvd1689m) once "
    "access is granted and you are logged in, a local folder in transformers' format, or Meta's .pth file; "
    "DINOv2 is free for all: facebook/dinov2-with-registers-base"
)


class DinoSize(NamedTuple):
    """Shape of one of Meta's vision transformers; hidden: width of its MLP, gated: whether that is a SwiGLU."""

    width: int
    depth: int
    heads: int
    hidden: int
    gated: bool


SIZES = {
    "S": DinoSize(384, 12, 6, 1536, False),
    "S+": DinoSize(384, 12, 6, 1536, True),
    "B": DinoSize(768, 12, 12, 3072, False),
    "L": DinoSize(1024, 24, 16, 4096, False),
    "H+": DinoSize(1280, 32, 20, 5120, True),
}
REGISTERS, PATCH = 4, 16

# Rotary periods are computed anew; the key's bias is masked to zero; the norm of local crops only served training.
_UNUSED = re.compile(r"rope_embed\.periods|blocks\.\d+\.attn\.qkv\.bias_mask|local_cls_norm\.(weight|bias)")
_OUTSIDE = {
    "cls_token": "embeddings.cls_token",
    "mask_token": "embeddings.mask_token",
    "storage_tokens": "embeddings.register_tokens",
    "patch_embed.proj": "embeddings.patch_embeddings",
    "norm": "norm",
}
_INSIDE = {
    "norm1": "norm1",
    "norm2": "norm2",
    "attn.proj": "attention.o_proj",
    "ls1": "layer_scale1",
    "ls2": "layer_scale2",
    "mlp.fc1": "mlp.up_proj",
    "mlp.fc2": "mlp.down_proj",
    "mlp.w1": "mlp.gate_proj",
    "mlp.w2": "mlp.up_proj",
    "mlp.w3": "mlp.down_proj",
}
_KEY_BIAS = ".attention.k_proj.bias"


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a .pth file, in float32; one that is missing or holds anything else is refused."""
    if not path.is_file():
        raise ValueError(f"'{path}' is not there; {WAYS}")
    check_pth(path)
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError:
        raise
    except Exception as error:  # of a torn or foreign .pth torch raises ten kinds of error
        raise ValueError(f"'{path}' is no whole .pth file of weights ({type(error).__name__}); get it again") from None
    if not isinstance(weights, dict) or not all(map(is_named_tensor, weights.items())):
        raise ValueError(f"'{path}' is no list of named weights; {WAYS}")
    return {name: value.float() for name, value in weights.items()}


def size_of(weights: dict[str, Tensor]) -> DinoSize:
    """Return the size that the weights have; an unknown one is refused."""
    gated = "blocks.0.mlp.w1.weight" in weights
    first = weights.get(f"blocks.0.mlp.{'w1' if gated else 'fc1'}.weight")
    if first is None:
        raise ValueError(f"these are no weights of a DINOv3 vision transformer; {WAYS}")
    depth = 1 + max(int(match[1]) for name in weights if (match := re.match(r"blocks\.(\d+)\.", name)))
    hidden, width = first.shape
    for size in SIZES.values():
        if (size.width, size.depth, size.hidden, size.gated) == (width, depth, hidden, gated):
            return size
    raise ValueError(
        f"a DINOv3 of width {width}, depth {depth} and MLP {hidden} is unknown; known sizes: {', '.join(SIZES)}"
    )


def config_of(size: DinoSize) -> dict[str, Any]:
    """Return the arguments of transformers' DINOv3ViTConfig."""
    return {
        "patch_size": PATCH,
        "hidden_size": size.width,
        "intermediate_size": size.hidden,
        "num_hidden_layers": size.depth,
        "num_attention_heads": size.heads,
        "num_register_tokens": REGISTERS,
        "use_gated_mlp": size.gated,
        "hidden_act": "silu" if size.gated else "gelu",
    }


def _translate(name: str, prefix: str) -> str:
    """Return transformers' name of one of Meta's weights; an unknown one is refused."""
    stem, dot, kind = name.rpartition(".")
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    if stem in _OUTSIDE:
        return f"{_OUTSIDE[stem]}.{kind}"
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)", stem)
    if not dot or block is None or block[2] not in _INSIDE:
        raise ValueError(f"'{name}' is no weight of a DINOv3 vision transformer; {WAYS}")
    return f"{prefix}layer.{block[1]}.{_INSIDE[block[2]]}.{'lambda1' if kind == 'gamma' else kind}"


def translated(weights: dict[str, Tensor], prefix: str = "model.") -> dict[str, Tensor]:
    """Return Meta's weights under transformers' names; prefix: what stands before "layer" there."""
    result = {}
    for name, value in weights.items():
        if _UNUSED.fullmatch(name):
            continue
        if joint := re.fullmatch(r"blocks\.(\d+)\.attn\.qkv\.(weight|bias)", name):
            for part, piece in zip("qkv", value.chunk(3), strict=True):
                result[f"{prefix}layer.{joint[1]}.attention.{part}_proj.{joint[2]}"] = piece
        else:
            result[_translate(name, prefix)] = value[:, None] if name == "mask_token" else value
    return {name: value for name, value in result.items() if not name.endswith(_KEY_BIAS)}
