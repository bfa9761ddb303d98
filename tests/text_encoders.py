"""Tiny random text encoders with a tokenizer of whole words, saved as transformers saves them."""

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

WORDS = ("[PAD]", "[UNK]", "[END]", "a", "red", "blue", "circle", "square", "two", "one", "three", "zero")
WIDTH = 16
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def network(kind: str) -> torch.nn.Module:
    """Return a network of random weights: bert, clip (its text half), or t5."""
    torch.manual_seed(0)
    words = {"vocab_size": len(WORDS), "pad_token_id": 0, "eos_token_id": 2}
    if kind == "bert":
        return transformers.BertModel(transformers.BertConfig(**SIZES, **words, max_position_embeddings=12))
    if kind == "clip":
        return transformers.CLIPTextModel(
            transformers.CLIPTextConfig(**SIZES, **words, max_position_embeddings=12, bos_token_id=2)
        )
    config = transformers.T5Config(
        d_model=WIDTH, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0, **words
    )
    return transformers.T5EncoderModel(config)


def tiny_encoder(folder: Path, kind: str = "bert") -> Path:
    """Write one, and return its folder. A text of n words has n + 1 tokens."""
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="$A [END]", special_tokens=[("[END]", 2)])
    network(kind).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
