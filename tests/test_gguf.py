"""A converted GGUF file is the model it was made from."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf.quants
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from ggufkit import F32, HEAD_DIM, as_bfloat16, permuted, random_model, write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from textkit import model_folder

from runtime.gguf_convert import convert
from runtime.gguf_file import GgufError, GgufFile
from runtime.tokenizer import Tokenizer


def converted(path: Path, folder: Path) -> Path:
    folder.mkdir()
    convert(path, folder)
    return folder


def tensors_of(folder: Path) -> dict[str, F32]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert all(file.get_slice(name).get_dtype() == "BF16" for name in file.keys())  # noqa: SIM118  not a dict
        return {name: file.get_tensor(name).float().numpy() for name in file.keys()}  # noqa: SIM118


def config_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_every_tensor_is_back_under_its_name(tmp_path: Path, arch: str, tied: bool) -> None:
    original = random_model(arch, tied)
    metadata = {f"{arch}.attention.key_length": HEAD_DIM}
    folder = converted(write_gguf(tmp_path / "m.gguf", original, arch, **metadata), tmp_path / "out")
    found = tensors_of(folder)
    assert found.keys() == original.keys()
    for name, tensor in original.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)
    config = config_of(folder)
    assert (config["model_type"], config["head_dim"], config["tie_word_embeddings"]) == (arch, HEAD_DIM, tied)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["num_hidden_layers"]) == (4, 2, 2)
    assert (config["rms_norm_eps"], config["rope_theta"], config["attention_bias"]) == (1e-5, 10000.0, arch == "qwen2")


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantizations_round_to_the_nearest_bfloat16(tmp_path: Path, kind: str) -> None:
    type_ = GGMLQuantizationType[kind]
    original = random_model("llama")
    folder = converted(write_gguf(tmp_path / "m.gguf", original, "llama", type_), tmp_path / "out")
    name = "model.layers.1.self_attn.k_proj.weight"
    stored = gguf.quants.quantize(permuted(name, original[name]), type_)
    plain = gguf.quants.dequantize(stored, type_)
    np.testing.assert_array_equal(permuted(name, tensors_of(folder)[name]), as_bfloat16(plain))


def test_llama3_scaling_is_recognized(tmp_path: Path) -> None:
    """The file has the divisor of each frequency; config.json has the rule that makes them."""
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rule = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rule |= {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    wanted = LlamaConfig(hidden_size=32, num_attention_heads=4, head_dim=HEAD_DIM, rope_parameters=rule)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](wanted, torch.device("cpu"))
    plain = 500000.0 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    factors = {"rope_freqs.weight": (plain / scaled.numpy()).astype(np.float32)}
    file = write_gguf(tmp_path / "m.gguf", random_model("llama"), extra=factors, **{"llama.rope.freq_base": 500000.0})
    folder = converted(file, tmp_path / "out")
    del rule["rope_theta"]
    assert config_of(folder)["rope_scaling"] == rule
    odd = {"rope_freqs.weight": np.array([1, 3, 2, 7], np.float32)}
    with pytest.raises(GgufError, match="Llama 3's rule"):
        converted(write_gguf(tmp_path / "odd.gguf", random_model("llama"), extra=odd), tmp_path / "odd")


def test_linear_scaling(tmp_path: Path) -> None:
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5}
    file = write_gguf(tmp_path / "m.gguf", random_model("llama"), **scaling)
    assert config_of(converted(file, tmp_path / "out"))["rope_scaling"] == {"rope_type": "linear", "factor": 2.5}


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    metadata = {"tokenizer.chat_template": "{{ messages[0].content }}", "tokenizer.ggml.eot_token_id": 0}
    folder = converted(write_gguf(tmp_path / "m.gguf", random_model("llama"), **metadata), tmp_path / "out")
    tokenizer = Tokenizer(folder)
    assert tokenizer.encode("hello world")[0] == tokenizer.bos_id == 1
    assert tokenizer.eos_ids == (2, 0)
    assert tokenizer.render_chat([{"role": "user", "content": "Hi"}]) == "Hi"


def test_the_default_model_can_speak() -> None:
    """All of it at once: the converted weights, config and tokenizer, run by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer(model_folder())
    model = AutoModelForCausalLM.from_pretrained(model_folder(), dtype=torch.bfloat16)
    ids = torch.tensor([tokenizer.encode("The capital of France is the city of")])
    with torch.inference_mode():
        logits = model(ids).logits[0, -1]
    assert tokenizer.decode([int(logits.argmax())]) == " Paris"


def test_progress_counts_the_bytes_and_may_stop_it(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", random_model("llama"))
    seen: list[tuple[int, int]] = []
    (tmp_path / "out").mkdir()
    convert(path, tmp_path / "out", lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 0

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    (tmp_path / "stopped").mkdir()
    with pytest.raises(KeyboardInterrupt):
        convert(path, tmp_path / "stopped", stop)


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.write_bytes(b""), "empty"),
        (lambda path: path.write_bytes(b"PK\x03\x04" * 20), "letters GGUF"),
        (lambda path: path.write_bytes(b"GGUF\x01\x00\x00\x00" + bytes(16)), "version 1"),
        (lambda path: cut(path, 100), "cut off or damaged"),
        (lambda path: cut(path, path.stat().st_size - 64), "cut off: tensor"),
    ],
)
def test_damaged_files(tmp_path: Path, spoil: Callable[[Path], Any], words: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", random_model("llama"))
    spoil(path)
    with pytest.raises(GgufError, match=words):
        GgufFile(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(4, 1500), new=st.binary(min_size=1, max_size=8), size=st.integers(0, 30_000) | st.none())
def test_no_damage_is_more_than_an_error(tmp_path: Path, at: int, new: bytes, size: int | None) -> None:
    path = tmp_path / "m.gguf"
    if not path.exists():
        write_gguf(path, random_model("llama"))
    content = bytearray(path.read_bytes())
    content[at : at + len(new)] = new
    (tmp_path / "damaged.gguf").write_bytes(content[:size])
    try:
        GgufFile(tmp_path / "damaged.gguf").close()
    except GgufError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"llama.block_count": None}, r"llama\.block_count is missing"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn' is not supported"),
        ({"tokenizer.ggml.tokens": None}, "no tokenizer"),
        ({"tokenizer.ggml.model": "bert"}, "'bert' is not supported"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "odd"}, "pre-tokenizer 'odd'"),
        ({"tokenizer.ggml.scores": None}, "scores is missing"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, metadata: dict[str, Any], words: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", random_model("llama"), **metadata)
    with pytest.raises(GgufError, match=words):
        converted(path, tmp_path / "out")


def test_unknown_architectures_and_tensors_are_named(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match="'mamba' is not supported; supported: llama"):
        converted(write_gguf(tmp_path / "m.gguf", random_model("llama"), "mamba"), tmp_path / "out")
    extra = {"blk.0.ffn_gate_inp.weight": np.zeros((4, 32), np.float32)}
    with pytest.raises(GgufError, match=r"blk\.0\.ffn_gate_inp\.weight"):
        converted(write_gguf(tmp_path / "x.gguf", random_model("llama"), extra=extra), tmp_path / "x")
