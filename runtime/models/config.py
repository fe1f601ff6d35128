"""What a model is, read from its folder's ``config.json`` (and ``generation_config.json``), without transformers."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


class ModelError(Exception):
    """A model folder that can't be served. The message is one sentence or two: what, where, what to do."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How RoPE's frequencies are stretched beyond the trained context.

    ``linear`` divides all by ``factor``; ``llama3`` divides the low ones, keeps the high ones and blends between
    (Llama 3.1; wavelengths are judged against ``original_context_tokens``).
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_tokens: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of one decoder-only transformer: pre-norm, RoPE, grouped-query attention, SiLU-gated MLP."""

    architecture: str  # llama | mistral | qwen2 | qwen3
    vocab_size: int
    hidden_size: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    mlp_size: int
    context_tokens: int
    rms_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tied_head: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dtype: str = "bfloat16"  # what the checkpoint was trained or saved in
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = field(default=())

    @property
    def q_size(self) -> int:
        return self.q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    def with_context(self, context_tokens: int) -> "ModelConfig":
        """The same model served with a shorter context; 0 keeps the model's own."""
        if context_tokens > self.context_tokens:
            raise ModelError(
                f"context_tokens = {context_tokens} exceeds the {self.context_tokens} tokens the model can attend to; "
                "ask for at most that"
            )
        return replace(self, context_tokens=context_tokens or self.context_tokens)

    @staticmethod
    def from_folder(folder: Path | str) -> "ModelConfig":
        """Reads ``folder/config.json`` and, where it exists, ``generation_config.json``. Raises ModelError."""
        folder = Path(folder)
        if not folder.is_dir():
            raise ModelError(f"the model folder {folder} does not exist; give a folder that holds config.json")
        data = _read_json(folder / "config.json")
        path = folder / "generation_config.json"
        generation = _read_json(path) if path.exists() else {}
        return ModelConfig.from_dict(data, generation, folder / "config.json")

    @staticmethod
    def from_dict(
        data: Mapping[str, Any], generation: Mapping[str, Any] | None = None, where: Path | str = "config.json"
    ) -> "ModelConfig":
        """From the parsed files' contents. ``where`` names the file in errors. Raises ModelError."""
        return _Reader(data, str(where)).config(generation or {})


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; a model folder needs it beside the weights") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can't be read as JSON ({error}); download the model again") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path} holds a {type(data).__name__}, not a JSON object; download the model again")
    return data


class _Reader:
    """Typed access to the fields of one config.json; every complaint names file and field."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data, self.where = data, where

    def fail(self, text: str) -> NoReturn:
        raise ModelError(f"{self.where}: {text}")

    def count(self, key: str, default: int | None = None) -> int:
        value = self.data.get(key)
        if value is None:
            if default is None:
                self.fail(f"{key} is missing; the file is not a complete model configuration")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.fail(f"{key} must be a whole number of at least 1, not {value!r}")
        return value

    def number(self, data: Mapping[str, Any], key: str, default: float | None = None) -> float:
        value = data.get(key)
        if value is None:
            if default is None:
                self.fail(f"{key} is missing; the file is not a complete model configuration")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            self.fail(f"{key} must be a positive number, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.data.get(key)
        if value is not None and not isinstance(value, bool):
            self.fail(f"{key} must be true or false, not {value!r}")
        return default if value is None else value

    def config(self, generation: Mapping[str, Any]) -> ModelConfig:
        architecture = self.architecture()
        hidden_size, q_heads = self.count("hidden_size"), self.count("num_attention_heads")
        kv_heads = self.count("num_key_value_heads", default=q_heads)
        if q_heads % kv_heads:
            self.fail(f"{q_heads} attention heads can't share {kv_heads} key/value heads evenly")
        head_dim = self.count("head_dim", default=max(hidden_size // q_heads, 1))
        if head_dim % 2:
            self.fail(f"head_dim must be even for rotary embeddings, not {head_dim}")
        if self.data.get("hidden_act", "silu") not in ("silu", "swish"):
            self.fail(f"hidden_act {self.data['hidden_act']!r} is not supported; supported: silu")
        if self.data.get("quantization_config"):
            self.fail("the weights are stored quantized, which is not supported; take the unquantized checkpoint")
        theta, scaling = self.rope()
        bias = self.flag("attention_bias")
        vocab_size = self.count("vocab_size")
        return ModelConfig(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            layers=self.count("num_hidden_layers"),
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            mlp_size=self.count("intermediate_size"),
            context_tokens=self.context_tokens(),
            rms_eps=self.number(self.data, "rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            tied_head=self.flag("tie_word_embeddings"),
            qkv_bias=bias or architecture == "qwen2",
            o_bias=bias and architecture in ("llama", "qwen3"),
            mlp_bias=self.flag("mlp_bias"),
            qk_norm=architecture == "qwen3",
            dtype=str(self.data.get("dtype") or self.data.get("torch_dtype") or "bfloat16").removeprefix("torch."),
            bos_token_id=next(iter(self.token_ids(self.data, "bos_token_id", vocab_size)), None),
            eos_token_ids=self.token_ids(generation, "eos_token_id", vocab_size)
            or self.token_ids(self.data, "eos_token_id", vocab_size),
        )

    def architecture(self) -> str:
        names = self.data.get("architectures")
        if not names and self.data.get("model_type") in ARCHITECTURES.values():
            return str(self.data["model_type"])
        known = [ARCHITECTURES[name] for name in names or () if name in ARCHITECTURES]
        if not known:
            given = ", ".join(map(str, names or ())) or str(self.data.get("model_type", "none named"))
            self.fail(f"the architecture ({given}) is not supported; supported: {', '.join(ARCHITECTURES)}")
        return known[0]

    def rope(self) -> tuple[float, RopeScaling | None]:
        """Both spellings: ``rope_parameters`` (transformers 5) and ``rope_theta`` + ``rope_scaling`` (before)."""
        given = self.data.get("rope_parameters") or self.data.get("rope_scaling") or {}
        if not isinstance(given, Mapping):
            self.fail(f"rope_scaling must be an object, not {given!r}")
        theta = self.number({**self.data, **given}, "rope_theta", 10000.0)
        partial = {**self.data, **given}.get("partial_rotary_factor")
        if partial not in (None, 1, 1.0):
            self.fail(f"partial_rotary_factor = {partial!r} is not supported; only whole heads are rotated")
        kind = given.get("rope_type", given.get("type", "default"))
        if kind == "default":
            return theta, None
        if kind == "linear":
            return theta, RopeScaling("linear", self.number(given, "factor"))
        if kind == "llama3":
            return theta, RopeScaling(
                "llama3",
                self.number(given, "factor"),
                self.number(given, "low_freq_factor"),
                self.number(given, "high_freq_factor"),
                int(self.number(given, "original_max_position_embeddings")),
            )
        self.fail(f"the RoPE scaling {kind!r} is not supported; supported: default, linear, llama3")

    def context_tokens(self) -> int:
        """Attention within a sliding window equals full attention up to the window's length, so we serve up to that."""
        context_tokens = self.count("max_position_embeddings")
        window = self.data.get("sliding_window")
        types = self.data.get("layer_types")
        slides = self.flag("use_sliding_window", default=True) if types is None else "sliding_attention" in types
        if window is None or not slides:
            return context_tokens
        return min(context_tokens, self.count("sliding_window"))

    def token_ids(self, data: Mapping[str, Any], key: str, vocab_size: int) -> tuple[int, ...]:
        value = data.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                self.fail(f"{key} = {token!r} is not a token id below vocab_size = {vocab_size}")
        return tuple(ids)
