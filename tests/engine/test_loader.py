"""Weights from safetensors: fused, sharded, and every way in which a folder can be broken."""

import json
from pathlib import Path

import pytest
import torch
from modelkit import save_checkpoint
from safetensors.torch import load_file, save_file

from runtime.models import loader
from runtime.models.config import ModelConfig, ModelError


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen2")
    save_checkpoint(folder, "qwen2")
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def all_of(folder: Path, **kwargs: object) -> dict[str, torch.Tensor]:
    config = ModelConfig.from_folder(folder)
    return dict(loader.load(folder, config, torch.float32, **kwargs))  # type: ignore[arg-type]


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(folder / "model.safetensors") | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


def test_fused_tensors_hold_their_parts(saved: Path) -> None:
    ours, theirs = all_of(saved), load_file(saved / "model.safetensors")
    prefix = "model.layers.1."
    for name, parts in {
        "qkv": ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
        "qkv_bias": ["self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"],
        "gate_up": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
        "down": ["mlp.down_proj.weight"],
    }.items():
        assert torch.equal(ours[f"layers.1.{name}"], torch.cat([theirs[prefix + part] for part in parts]))
    assert "head" not in ours


def test_dtype_and_progress(saved: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    config = ModelConfig.from_folder(saved)
    weights = dict(loader.load(saved, config, torch.bfloat16, progress=lambda *args: seen.append(args)))
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    total = sum(tensor.nbytes for tensor in weights.values())
    assert seen[-1] == ("weights", total, total) and len(seen) == len(weights)
    assert total == loader.weight_bytes(config, torch.bfloat16)


def test_a_sharded_folder_loads_the_same(saved: Path, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "qwen2", max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    one, many = all_of(saved), all_of(tmp_path)
    assert one.keys() == many.keys() and all(torch.equal(one[name], many[name]) for name in one)


def test_tensor_parallel_slices_put_together_are_the_whole(saved: Path) -> None:
    whole = all_of(saved)
    halves = [all_of(saved, shard=loader.Shard(rank, 2)) for rank in range(2)]
    config = ModelConfig.from_folder(saved)
    for i in range(config.layers):
        down = torch.cat([half[f"layers.{i}.down"] for half in halves], dim=1)
        assert torch.equal(down, whole[f"layers.{i}.down"])
        gates, ups = zip(*(half[f"layers.{i}.gate_up"].chunk(2) for half in halves), strict=True)
        assert torch.equal(torch.cat([*gates, *ups]), whole[f"layers.{i}.gate_up"])
        assert torch.equal(halves[0][f"layers.{i}.attn_norm"], whole[f"layers.{i}.attn_norm"])
    with pytest.raises(ModelError, match="tensor_parallel = 3 does not divide"):
        loader.plan(config, loader.Shard(0, 3))


def test_dummy_weights_have_the_shapes_of_real_ones(saved: Path) -> None:
    config = ModelConfig.from_folder(saved)
    real, fake = all_of(saved), dict(loader.dummy(config, torch.float32))
    assert {name: t.shape for name, t in real.items()} == {name: t.shape for name, t in fake.items()}
    again = dict(loader.dummy(config, torch.float32))
    assert all(torch.equal(fake[name], again[name]) for name in fake)


def test_missing_folder_and_files(tmp_path: Path, copied: Path) -> None:
    with pytest.raises(ModelError, match="nowhere does not exist"):
        loader.Checkpoint(tmp_path / "nowhere")
    (copied / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"holds neither model\.safetensors nor"):
        all_of(copied)
    index = copied / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(ModelError, match=r"lacks model-00001-of-00002\.safetensors, named in"):
        all_of(copied)
    index.write_text("[]")
    with pytest.raises(ModelError, match="is not a safetensors index"):
        all_of(copied)


@pytest.mark.parametrize("keep", [0, 5, 200, 0.5, 0.999])
def test_a_truncated_file_is_named(copied: Path, keep: float) -> None:
    file = copied / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(keep if keep >= 1 else keep * len(data))])
    with pytest.raises(ModelError, match=r"model\.safetensors \(\d+ bytes\) is truncated or corrupt"):
        all_of(copied)


def test_a_corrupt_header_is_named(copied: Path) -> None:
    file = copied / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[8:40] = b"x" * 32
    file.write_bytes(data)
    with pytest.raises(ModelError, match=r"model\.safetensors .* is truncated or corrupt"):
        all_of(copied)


def test_a_missing_tensor_is_named(copied: Path) -> None:
    rewrite(copied, {"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(ModelError, match=r"lacks the tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        all_of(copied)


def test_an_index_that_lies_is_named(copied: Path) -> None:
    names = dict.fromkeys([*load_file(copied / "model.safetensors"), "model.ghost"], "model.safetensors")
    (copied / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    rewrite(copied, {"model.norm.weight": None})
    with pytest.raises(ModelError, match=r"model\.norm\.weight that the index places there"):
        all_of(copied)


def test_wrong_shape_and_dtype_are_named(copied: Path) -> None:
    rewrite(copied, {"model.norm.weight": torch.ones(47)})
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \[47\], but config\.json means \[48\]"):
        all_of(copied)
    rewrite(copied, {"model.norm.weight": torch.ones(48, dtype=torch.int8)})
    with pytest.raises(ModelError, match=r"model\.norm\.weight is stored as I8"):
        all_of(copied)


def test_too_little_memory_is_said_with_both_numbers() -> None:
    loader.check_memory(2**30, "the model", available=2**30)
    with pytest.raises(ModelError, match=r"the model takes 3\.00 GiB, but only 1\.00 GiB"):
        loader.check_memory(3 * 2**30, "the model", available=2**30)
    assert loader.available_bytes() > 0
