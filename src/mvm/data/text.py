"""Captions as conditions: a frozen text encoder in transformers' format, and the embeddings of a data set's captions.

encoder = TextEncoder("t5-small")                             # a folder
encoder.embed(["a red circle", "two squares"], length=16)     # {"tokens": (2, 16, width), "mask": (2, 16)}

A folder is read as data: config.json, tokenizer.json and weights in safetensors. Nothing that they name is imported,
executed, or read elsewhere.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mvm.files import sha256
from mvm.options import choose, needs, quiet_torchao
from mvm.store import ALONE, PartedArray, Rows, Share
from mvm.untrusted import plain_name, read_json, refusal

OPTION = "condition.encoder"
BATCH = 64  # captions in a forward pass
PART = 1024  # captions in a file of embeddings
MOST_LAYERS = 1000  # of an encoder: each takes time to build, whatever the file of weights

# transformers' class for each model_type of a config.json
MODELS = {
    "albert": "AlbertModel",
    "bert": "BertModel",
    "clip": "CLIPTextModel",
    "clip_text_model": "CLIPTextModel",
    "distilbert": "DistilBertModel",
    "electra": "ElectraModel",
    "modernbert": "ModernBertModel",
    "mpnet": "MPNetModel",
    "mt5": "MT5EncoderModel",
    "roberta": "RobertaModel",
    "t5": "T5EncoderModel",
    "umt5": "UMT5EncoderModel",
    "xlm-roberta": "XLMRobertaModel",
}
CODE = ("auto_map", "quantization_config", "attn_implementation")  # keys of a config that lead to other code


class TextEncoder:
    """A frozen text encoder: embed(texts, length) -> the states after its last layer, and which are of a token."""

    def __init__(self, folder: Path | str, device: torch.device | str = "cpu") -> None:
        self.folder, self.device = Path(folder), torch.device(device)
        quiet_torchao()
        try:
            import transformers
        except ImportError as error:
            raise ValueError(needs(f"{OPTION}='{folder}'", "transformers", "encoders")) from error
        self._library = transformers
        for name in ("config.json", "tokenizer.json"):
            if not (self.folder / name).is_file():
                what = "a local folder into which save_pretrained has written the text encoder and its fast tokenizer"
                raise ValueError(f"{OPTION}='{folder}' has no {name}; give {what}")
        if (self.folder / "adapter_config.json").exists():
            raise ValueError(f"{OPTION}='{folder}' is an adapter of another model; merge it, and save the whole model")
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            with refusal(f"'{index}' is damaged"):
                for name in read_json(index)["weight_map"].values():
                    plain_name(name)  # none leads out of the folder
        with refusal(f"{OPTION}='{self.folder}' cannot be read"):
            facts = read_json(self.folder / "config.json")
            self.kind = facts["model_type"]
            choose("model_type", self.kind, MODELS)
            if self.kind == "clip":
                self.kind, facts = "clip_text_model", facts["text_config"]
            known = {name: value for name, value in facts.items() if name not in CODE and not name.startswith("_")}
            self.config = self._library.CONFIG_MAPPING[self.kind].from_dict(known)
            if not 0 < self.config.num_hidden_layers <= MOST_LAYERS:
                raise ValueError(f"num_hidden_layers={self.config.num_hidden_layers} is more than {MOST_LAYERS}")
            from tokenizers import Tokenizer  # a part of transformers

            self._tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    @property
    def width(self) -> int:
        """Width of a token's embedding."""
        return self.config.hidden_size

    @property
    def limit(self) -> int | None:
        """The most tokens it reads; None: any number, as its positions are relative."""
        most = getattr(self.config, "max_position_embeddings", None)
        offset = self.config.pad_token_id + 1 if "roberta" in self.kind else 0  # where its positions begin
        return most and most - offset

    @cached_property
    def fingerprint(self) -> str:
        """A checksum of everything that decides embeddings: weights, config and tokenizer."""
        names = {"config.json", "tokenizer.json", *(path.name for path in self.folder.glob("*.safetensors"))}
        sums = {name: sha256(self.folder / name) for name in sorted(names)}
        return hashlib.sha256(json.dumps(sums).encode()).hexdigest()

    @cached_property
    def network(self) -> nn.Module:
        """The encoder itself, read when it is first used."""
        with refusal(f"{OPTION}='{self.folder}': its weights cannot be read", "save the whole model as safetensors"):
            network, report = getattr(self._library, MODELS[self.kind]).from_pretrained(
                self.folder,
                config=self.config,
                dtype=torch.float32,
                attn_implementation="sdpa",
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
            missing = sorted(name for name in report["missing_keys"] if not name.startswith("pooler"))
            if missing:  # transformers would draw them at random
                raise ValueError(f"{', '.join(missing[:3])} are missing")
        return network.eval().requires_grad_(False).to(self.device)

    def longest(self, texts: Sequence[str]) -> int:
        """Return the number of tokens in the longest text, but not more than the encoder reads."""
        longest = max((len(text.ids) for text in self._encoded(texts)), default=1)
        return max(1, min(longest, self.limit or longest))

    def _encoded(self, texts: Sequence[str], length: int = 0) -> list[Any]:
        """Return the tokenizer's encodings, cut and padded to a length where one is given."""
        with refusal(f"{OPTION}='{self.folder}': its tokenizer fails", "save the tokenizer again"):
            self._tokenizer.no_padding()
            self._tokenizer.no_truncation()
            if length:
                self._tokenizer.enable_truncation(length)
                self._tokenizer.enable_padding(pad_id=self.config.pad_token_id or 0, length=length)
            try:
                encoded = self._tokenizer.encode_batch(list(texts))
            except BaseException as error:  # a damaged table makes it panic, which is no Exception
                if type(error).__name__ != "PanicException":
                    raise
                raise ValueError(str(error)) from None
            largest = max((max(text.ids, default=0) for text in encoded), default=0)
            if largest >= self.config.vocab_size:
                raise ValueError(f"it makes token {largest}, and the encoder knows {self.config.vocab_size}")
        return encoded

    @torch.no_grad()
    def embed(self, texts: Sequence[str], length: int) -> dict[str, Tensor]:
        """Return tokens (N, length, width), zeros behind each text, and mask (N, length), True where there is a token.

        Longer texts are cut. A text without any token has one, of padding.
        """
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise ValueError("texts must be a list of str, one for each sample")
        if not 1 <= length <= (self.limit or length):
            most = self.limit or "any number of"
            raise ValueError(f"condition.length={length}: '{self.folder}' reads 1 to {most} tokens")
        with refusal(f"{OPTION}='{self.folder}' names no width of tokens", "save the whole model again"):
            tokens = [torch.empty(0, length, self.width, device=self.device)]
        masks = [torch.empty(0, length, dtype=torch.bool, device=self.device)]
        for start in range(0, len(texts), BATCH):
            encoded = self._encoded(texts[start : start + BATCH], length)
            ids = torch.tensor([text.ids for text in encoded], device=self.device)
            mask = torch.tensor([text.attention_mask for text in encoded], device=self.device).bool()
            mask[:, 0] = True
            network = self.network
            with refusal(f"{OPTION}='{self.folder}' fails on {len(encoded)} texts", "save the whole model again"):
                states = network(input_ids=ids, attention_mask=mask.long()).last_hidden_state.float()
            tokens.append(states.where(mask[..., None], states.new_zeros(())))
            masks.append(mask)
        return {"tokens": torch.cat(tokens), "mask": torch.cat(masks)}


def split(rows: Tensor) -> dict[str, Tensor]:
    """Return the tokens and the mask in rows of `embed_captions`."""
    return {"tokens": rows[..., :-1], "mask": rows[..., -1] > 0}


def embed_captions(
    encoder: TextEncoder, captions: Sequence[str], length: int, data: Path, share: Share = ALONE, progress: bool = True
) -> Rows:
    """Return the embeddings of distinct captions, made once, in a folder next to that of the data.

    A row is (length, width + 1): tokens, and their mask as the last column. Those of an earlier run are checked and
    kept.
    """
    key: dict[str, Any] = {
        "encoder": encoder.fingerprint,
        "captions": hashlib.sha256(json.dumps(list(captions)).encode()).hexdigest(),
        "length": length,
    }
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:8]
    folder, shape = data.with_name(f"{data.name}-captions-{digest}"), (1, len(captions), length, encoder.width + 1)
    how: dict[str, Any] = {"shape": shape, "dtype": np.float16, "size": PART, "notes": False}
    parts = PartedArray(folder, "embeddings of captions", name="captions", key=key, **how)

    def embed(part: range) -> Iterator[np.ndarray]:
        for start in range(part.start, part.stop, BATCH):
            tokens, mask = encoder.embed(captions[start : min(start + BATCH, part.stop)], length).values()
            rows = torch.cat((tokens, mask[..., None]), -1).half()
            if not bool(rows.isfinite().all()):
                raise ValueError(f"{OPTION}='{encoder.folder}' gives embeddings beyond float16; use another encoder")
            yield rows[None].cpu().numpy()

    smaller = "set a smaller condition.length, or move the data to another disk"
    parts.write_missing(embed, share=share, smaller=smaller, progress=progress)
    return parts.rows()
