"""Our decoder against transformers on the same weights."""

import json
from pathlib import Path

import pytest
import torch
from modelkit import FAMILIES, prompts, save_checkpoint

from runtime.engine.kv import causal_attention
from runtime.models.config import ModelConfig, ModelError, RopeScaling
from runtime.models.decoder import Decoder, inverse_frequencies
from runtime.models.loader import load


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path, family)
    config = ModelConfig.from_folder(tmp_path)
    with torch.inference_mode():
        decoder = Decoder(config, load(tmp_path, config, torch.float32))
        for prompt in prompts(4, 200):
            ids = torch.tensor(prompt)
            hidden = decoder.hidden(ids, torch.arange(len(ids)), lambda _, q, k, v: causal_attention(q, k, v, 0))
            expected = model(ids[None]).logits[0]
            assert (decoder.logits(hidden) - expected).abs().max() < 2e-4 * expected.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_config_reads_what_transformers_wrote(family: str, tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path, family)
    config = ModelConfig.from_folder(tmp_path)
    theirs = model.config
    assert config.architecture == theirs.model_type
    assert (config.q_heads, config.kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert config.tied_head == theirs.tie_word_embeddings
    assert config.eos_token_ids == (2,) and config.bos_token_id == 1
    assert config.dtype == "float32"
    assert config.qk_norm == (family == "qwen3")
    assert config.qkv_bias == (family in ("qwen2", "llama-linear"))
    expected = model.model.rotary_emb.inv_freq
    torch.testing.assert_close(inverse_frequencies(config), expected, rtol=1e-6, atol=0)


BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
}


def test_defaults_of_a_bare_config() -> None:
    config = ModelConfig.from_dict(BASE)
    assert (config.kv_heads, config.head_dim, config.rope_theta) == (4, 8, 10000.0)
    assert not config.tied_head and config.rope_scaling is None and config.eos_token_ids == ()


def test_old_and_new_spelling_of_rope() -> None:
    scaling = {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64
    }  # fmt: skip
    new = ModelConfig.from_dict(BASE | {"rope_parameters": scaling | {"rope_type": "llama3", "rope_theta": 5e5}})
    old = ModelConfig.from_dict(BASE | {"rope_theta": 5e5, "rope_scaling": scaling | {"type": "llama3"}})
    assert new == old and new.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 64)


def test_generation_config_decides_eos(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (5, 7)


def test_a_sliding_window_bounds_the_context() -> None:
    mistral = BASE | {"architectures": ["MistralForCausalLM"]}
    assert ModelConfig.from_dict(mistral | {"sliding_window": 64}).context_tokens == 64
    assert ModelConfig.from_dict(mistral | {"sliding_window": None}).context_tokens == 128
    qwen = BASE | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64}
    assert ModelConfig.from_dict(qwen | {"use_sliding_window": False}).context_tokens == 128
    assert ModelConfig.from_dict(qwen | {"layer_types": ["full_attention"] * 2}).context_tokens == 128
    assert ModelConfig.from_dict(qwen | {"layer_types": ["sliding_attention"] * 2}).context_tokens == 64


def test_a_shorter_context_can_be_asked_for_but_no_longer_one() -> None:
    config = ModelConfig.from_dict(BASE)
    assert config.with_context(0) == config
    assert config.with_context(64).context_tokens == 64
    with pytest.raises(ModelError, match="context_tokens = 256 exceeds the 128 tokens"):
        config.with_context(256)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"GPT2LMHeadModel\) is not supported; supported: LlamaForCausalLM"),
        ({"architectures": None, "model_type": "mamba"}, "mamba"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a whole number of at least 1, not 0"),
        ({"vocab_size": "many"}, "vocab_size must be a whole number of at least 1, not 'many'"),
        ({"num_key_value_heads": 3}, "4 attention heads can't share 3"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be a positive number"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "RoPE scaling 'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "stored quantized"),
        ({"eos_token_id": 100}, "eos_token_id = 100 is not a token id below vocab_size = 100"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    ],
)
def test_a_bad_config_is_refused_in_words(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint) as caught:
        ModelConfig.from_dict(BASE | change, where="/models/x/config.json")
    assert str(caught.value).startswith("/models/x/config.json: ")


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere does not exist"):
        ModelConfig.from_folder(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json can't be read as JSON"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"config\.json holds a list"):
        ModelConfig.from_folder(tmp_path)
