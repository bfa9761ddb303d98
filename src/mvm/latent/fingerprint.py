"""Fingerprints: what a file of weights, statistics or latents belongs to, and the refusal of what does not."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

SHOWN = 12  # hex digits in messages


def fingerprint(facts: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> str:
    """Return the sha256 of facts (as JSON) and of named tensors: names, shapes, dtypes and bytes, in order of name."""
    found = hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode())
    for name, tensor in sorted((tensors or {}).items()):
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


class Origin(NamedTuple):
    """The encoder that something was made with: its fingerprint, which decides, and words for people."""

    fingerprint: str
    words: str

    def __str__(self) -> str:
        return f"{self.words} [{self.fingerprint[:SHOWN]}]"

    @staticmethod
    def of(metadata: Mapping[str, str]) -> "Origin":
        """Return the origin in the metadata of a file."""
        return Origin(metadata["encoder"], metadata["encoder_words"])

    @property
    def metadata(self) -> dict[str, str]:
        """Return the metadata of a file."""
        return {"encoder": self.fingerprint, "encoder_words": self.words}


def require_same(what: str, made_with: Origin, used_with: Origin) -> None:
    """Raise unless both encoders are one: anything else would give noise images."""
    if made_with.fingerprint != used_with.fingerprint:
        raise ValueError(
            f"{what} of the encoder {made_with} cannot be used with {used_with}: "
            "take the encoder with the same weights, layers and resolution, or train and measure anew"
        )
