"""Small GGUF files, written with the gguf package as llama.cpp's converter writes them."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter
from textkit import sentencepiece_metadata

F32 = npt.NDArray[np.float32]
Q_HEADS, KV_HEADS, HEAD_DIM, HIDDEN, MLP, LAYERS = 4, 2, 8, 32, 64, 2

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def random_model(arch: str, tied: bool = True, seed: int = 0) -> dict[str, F32]:
    """Tensors under their names in transformers; every value is exact in bfloat16."""
    random = np.random.default_rng(seed)
    vocab = len(sentencepiece_metadata()["tokenizer.ggml.tokens"])
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, HIDDEN), "model.norm.weight": (HIDDEN,)}
    shapes |= {} if tied else {"lm_head.weight": (vocab, HIDDEN)}
    for layer in range(LAYERS):
        block = {
            "input_layernorm.weight": (HIDDEN,),
            "post_attention_layernorm.weight": (HIDDEN,),
            "self_attn.q_proj.weight": (Q_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj.weight": (HIDDEN, Q_HEADS * HEAD_DIM),
            "mlp.gate_proj.weight": (MLP, HIDDEN),
            "mlp.up_proj.weight": (MLP, HIDDEN),
            "mlp.down_proj.weight": (HIDDEN, MLP),
        }
        if arch == "qwen2":
            block |= {f"self_attn.{name}_proj.bias": block[f"self_attn.{name}_proj.weight"][:1] for name in "qkv"}
        if arch == "qwen3":
            block |= {"self_attn.q_norm.weight": (HEAD_DIM,), "self_attn.k_norm.weight": (HEAD_DIM,)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    return {name: as_bfloat16(random.normal(size=shape).astype(np.float32)) for name, shape in shapes.items()}


def as_bfloat16(values: F32) -> F32:
    """The nearest values that bfloat16 can hold, by way of torch."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16).float().numpy()


def write_gguf(
    path: Path,
    tensors: dict[str, F32],
    arch: str = "llama",
    type_: GGMLQuantizationType = GGMLQuantizationType.F32,
    extra: dict[str, F32] | None = None,
    **metadata: Any,
) -> Path:
    """A file of a model with the small SentencePiece tokenizer. ``metadata`` overrides values (None: left out)."""
    writer = GGUFWriter(path, arch)
    values: dict[str, Any] = {
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.block_count": LAYERS,
        f"{arch}.feed_forward_length": MLP,
        f"{arch}.attention.head_count": Q_HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 10000.0,
        **sentencepiece_metadata(),
        **metadata,
    }
    for key, value in values.items():
        if value is not None:
            add_value(writer, key, value)
    for name, tensor in tensors.items():
        matrix = tensor.ndim == 2 and type_ != GGMLQuantizationType.F32
        data = permuted(name, tensor) if arch == "llama" else tensor
        stored = gguf.quants.quantize(data, type_) if matrix else data
        writer.add_tensor(gguf_name(name), stored, raw_dtype=type_ if matrix else None)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.{kind}"


def permuted(name: str, tensor: F32) -> F32:
    """llama.cpp's order of the rows of q and k (convert_hf_to_gguf.py, LlamaModel.permute)."""
    heads = {"q_proj": Q_HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    parts = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return np.ascontiguousarray(parts.swapaxes(1, 2).reshape(tensor.shape))
