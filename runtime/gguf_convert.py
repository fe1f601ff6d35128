"""A GGUF file as the folder that everything else expects: config.json, bfloat16 safetensors, tokenizer.json.

Done once per file (``runtime.sources`` keeps the result). Tensors are taken one by one, in pieces that fit the CPU's
cache, so the memory needed doesn't grow with the model.
"""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf.quants
import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from runtime.gguf_file import GgufError, GgufFile, GgufTensor
from runtime.gguf_tokenizer import write_tokenizer

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# The factors of Llama 3's RoPE scaling, by frequency: they stand in config.json as the rule that makes them.
_ROPE_FACTORS = "rope_freqs.weight"

_PIECE_ELEMENTS = 256 * 1024


def convert(path: Path, folder: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> float:
    """Write the model in ``path`` into the existing, empty ``folder``. ``progress`` gets bytes written, bytes in all.

    Returns how many bits a weight took in ``path``. Raises GgufError for what can't be converted. What ``progress``
    raises passes through (that is how to stop it).
    """
    with GgufFile(path) as source:
        config = model_config(source)
        write_tokenizer(source.metadata, folder)
        _write_json(folder / "config.json", config)
        _write_weights(source, config, folder / "model.safetensors", progress)
        _write_json(folder / "generation_config.json", _generation_config(source.metadata))
        return source.weight_bits()


def model_config(source: GgufFile) -> dict[str, Any]:
    """The config.json of the model. Raises GgufError for architectures that are not supported, or missing values."""
    metadata = source.metadata
    arch = metadata.get("general.architecture")
    if (parts := metadata.get("split.count", 1)) > 1:
        raise GgufError(f"it is one of {parts} parts: join them into one file first (llama.cpp's gguf-split --merge)")
    if arch not in _ARCHITECTURES:
        raise GgufError(f"its architecture {arch!r} is not supported; supported: {', '.join(_ARCHITECTURES)}")

    def value(key: str, default: Any = None) -> Any:
        found = metadata.get(f"{arch}.{key}", default)
        if found is None:
            raise GgufError(f"the value {arch}.{key} is missing from its metadata")
        return found

    embedding = source.tensors.get("token_embd.weight")
    if embedding is None:
        raise GgufError("the tensor token_embd.weight is missing")
    heads = value("attention.head_count")
    config = {
        "architectures": [_ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": embedding.shape[0],
        "hidden_size": value("embedding_length"),
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv", heads),
        "head_dim": value("attention.key_length", value("embedding_length") // heads),
        "hidden_act": "silu",
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": _shortest(value("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(value("rope.freq_base", 10000.0)),
        "rope_scaling": None,
        "attention_bias": "blk.0.attn_q.bias" in source.tensors,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "torch_dtype": "bfloat16",
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
    config["rope_scaling"] = _rope_scaling(source, arch, config)
    return config


def _generation_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """Which tokens begin and end a text; chat models may end a turn by another one than a text."""
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)),
    }


def _shortest(value: float) -> float:
    """A float32 as the number that its author wrote: 9.99999974e-06 -> 1e-05."""
    return float(str(np.float32(value)))


def _rope_scaling(source: GgufFile, arch: str, config: dict[str, Any]) -> dict[str, Any] | None:
    kind = source.metadata.get(f"{arch}.rope.scaling.type", "none")
    if kind == "linear":
        return {"rope_type": "linear", "factor": _shortest(source.metadata[f"{arch}.rope.scaling.factor"])}
    if kind != "none":
        raise GgufError(f"its RoPE scaling {kind!r} is not supported")
    tensor = source.tensors.get(_ROPE_FACTORS)
    if tensor is None:
        return None
    # Llama 3.1 and later: the published rule has four numbers; three are the same in every release.
    factors = _dequantize(source, tensor, None)
    rule = {
        "rope_type": "llama3",
        "factor": _shortest(float(factors.max())),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if not np.allclose(factors, _llama3_factors(rule, config["rope_theta"], config["head_dim"]), rtol=1e-3):
        raise GgufError(f"the factors in its tensor {_ROPE_FACTORS} don't follow Llama 3's rule")
    return rule


def _llama3_factors(rule: dict[str, Any], theta: float, head_dim: int) -> npt.NDArray[np.float64]:
    """What each frequency is divided by (github.com/meta-llama/llama-models, models/llama3/model.py)."""
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high, context = rule["low_freq_factor"], rule["high_freq_factor"], rule["original_max_position_embeddings"]
    smooth = np.clip((context / wavelength - low) / (high - low), 0.0, 1.0)
    return np.asarray(1 / ((1 - smooth) / rule["factor"] + smooth))


# ---------------------------------------------------------------------------------------------- weights


def _write_weights(source: GgufFile, config: dict[str, Any], path: Path, progress: Callable[[int, int], None]) -> None:
    """model.safetensors: an 8-byte length, a JSON header, the tensors one after the other."""
    named = {_hf_name(name): tensor for name, tensor in source.tensors.items() if name != _ROPE_FACTORS}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    total = 0
    for name, tensor in named.items():
        size = 2 * math.prod(tensor.shape)
        header[name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [total, total + size]}
        total += size
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    done = 0
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for name, tensor in named.items():
            for piece in _bfloat16_pieces(source, tensor, _row_order(name, tensor, config)):
                file.write(piece.data)
                done += piece.nbytes
                progress(done, total)


def _hf_name(name: str) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    match name.split("."):
        case ["blk", layer, part, kind] if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
    raise GgufError(f"it has a tensor {name!r}, which no supported architecture has")


def _row_order(name: str, tensor: GgufTensor, config: dict[str, Any]) -> npt.NDArray[np.intp] | None:
    """Which stored row is which: GGUF's llama interleaves the two halves that RoPE pairs up; undo that."""
    if config["model_type"] != "llama":
        return None
    if ".self_attn.q_proj." in name:
        heads = config["num_attention_heads"]
    elif ".self_attn.k_proj." in name:
        heads = config["num_key_value_heads"]
    else:
        return None
    rows = np.arange(tensor.shape[0])
    return rows.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _bfloat16_pieces(
    source: GgufFile, tensor: GgufTensor, order: npt.NDArray[np.intp] | None
) -> Iterator[npt.NDArray[np.uint16]]:
    for rows in _row_pieces(source, tensor, order):
        if tensor.type == GGMLQuantizationType.BF16:
            yield np.ascontiguousarray(rows).view(np.uint16)
        else:
            yield _round_to_bfloat16(_dequantize_rows(rows, tensor.type))


def _dequantize(source: GgufFile, tensor: GgufTensor, order: npt.NDArray[np.intp] | None) -> npt.NDArray[np.float32]:
    pieces = [_dequantize_rows(rows, tensor.type) for rows in _row_pieces(source, tensor, order)]
    return np.concatenate(pieces).reshape(tensor.shape)


def _row_pieces(
    source: GgufFile, tensor: GgufTensor, order: npt.NDArray[np.intp] | None
) -> Iterator[npt.NDArray[np.uint8]]:
    """The stored bytes [rows, row_bytes], some rows at a time. One-dimensional tensors are cut between elements."""
    rows = tensor.shape[0] if len(tensor.shape) > 1 or order is not None else 1
    data = np.frombuffer(source.data, np.uint8, tensor.size_bytes, tensor.offset).reshape(rows, -1)
    step = max(1, _PIECE_ELEMENTS * rows // math.prod(tensor.shape))
    for start in range(0, rows, step):
        yield data[start : start + step] if order is None else data[order[start : start + step]]


def _dequantize_rows(rows: npt.NDArray[np.uint8], type_: GGMLQuantizationType) -> npt.NDArray[np.float32]:
    rows = np.ascontiguousarray(rows)
    if type_ == GGMLQuantizationType.F32:
        return rows.view(np.float32)
    if type_ == GGMLQuantizationType.F16:
        return rows.view(np.float16).astype(np.float32)
    quantization = getattr(gguf.quants, type_.name, None)
    if quantization is None:
        raise GgufError(f"its quantization {type_.name} is not supported")
    quantization.init_grid()
    # The package's own loop takes 16 rows at a time, which costs more in Python than in arithmetic.
    blocks = rows.reshape(-1, GGML_QUANT_SIZES[type_][1])
    values: npt.NDArray[np.float32] = quantization.dequantize_blocks(blocks)
    return values


def _round_to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """To nearest, ties to even. Weights are finite, so NaNs need no care."""
    bits = np.ascontiguousarray(values).view(np.uint32).ravel()
    rounding = bits >> 16
    rounding &= 1
    rounding += 0x7FFF
    rounding += bits
    return rounding.view(np.uint16)[1::2].copy()  # the upper halves


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
