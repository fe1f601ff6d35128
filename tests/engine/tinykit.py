"""A tiny model with a tokenizer, as a folder that every command and every door takes; its weights are random."""

import json
from pathlib import Path

from runtime.gguf_tokenizer import write_tokenizer

WORDS = ["▁", "▁hello", "▁world", "lo", "▁he", "llo", "he", "▁w", "or", "ld", "orld", *"lohewrd"]
TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": len(TOKENS),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Few pages and one thread: the tests share two cores.
SMALL = ("model.dummy_weights=true", "engine.device=cpu", "engine.threads=1", "engine.kv_tokens=4096")


def tiny_model(folder: Path) -> Path:
    """``folder`` with a configuration and a tokenizer, and no weights: for ``model.dummy_weights=true``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [2, 3, 3, *([6] * 256), *([1] * len(WORDS))],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(WORDS))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    write_tokenizer(metadata, folder)
    return folder
