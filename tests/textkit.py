"""Tokenizers for the tests: the default model's, and a small SentencePiece one."""

import functools
from pathlib import Path
from typing import Any

from runtime.gguf_tokenizer import write_tokenizer
from runtime.names import DEFAULT_SOURCE
from runtime.sources import resolve
from runtime.tokenizer import Tokenizer


@functools.cache
def model_folder() -> Path:
    """The default model, converted; fetched where the cache has it not."""
    return Path(resolve(DEFAULT_SOURCE).folder)


@functools.cache
def smollm2() -> Tokenizer:
    return Tokenizer(model_folder())


WORDS = ["▁", "▁hello", "▁world", "lo", "▁he", "llo", "he", "▁w", "or", "ld", "orld", *"lohewrd"]


def sentencepiece_metadata() -> dict[str, Any]:
    """What a GGUF file of a Llama-2 kind of model says about its tokenizer."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS, "<|tool|>"]
    types = [2, 3, 3, *([6] * 256), *([1] * len(WORDS)), 4]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(WORDS))] + [0.0],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def sentencepiece(folder: Path, **changes: Any) -> Tokenizer:
    """The tokenizer of ``sentencepiece_metadata``, written to ``folder``."""
    write_tokenizer({**sentencepiece_metadata(), **changes}, folder)
    return Tokenizer(folder)
