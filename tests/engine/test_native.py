"""Building and finding the native kernels, and the variants of them that other processors run."""

import ctypes
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from modelkit import Driver, prompts, save_checkpoint

from runtime.engine import native
from runtime.engine.batch import SlotTable
from runtime.engine.cpu import CpuRunner
from runtime.models.config import ModelConfig, ModelError

X86 = platform.machine() == "x86_64"
VARIANTS = {
    "portable": ("-march=x86-64",),
    "avx2": ("-march=x86-64-v3",),
    "avx512 without bf16 and vnni": ("-march=x86-64-v4",),
}


def supported(flags: tuple[str, ...]) -> bool:
    needs = {"-march=x86-64-v3": "avx2", "-march=x86-64-v4": "avx512bw"}
    return X86 and all(needs.get(flag, "fpu") in native.cpu_flags() for flag in flags)


def build(folder: Path, flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Without optimising much: these are run for their results."""
    try:
        return native.load(native.build(folder, extra_flags=("-O1", *flags)))
    except native.BuildError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_processors_variants_agree_with_transformers(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = VARIANTS[variant]
    if not supported(flags):
        pytest.skip("this processor can't run it")
    library = build(tmp_path / "build", flags)
    monkeypatch.setattr(native, "library", lambda: library)
    model = save_checkpoint(tmp_path / "model", "qwen3")
    config = ModelConfig.from_folder(tmp_path / "model")
    text = prompts(1, 150, seed=2)[0] * 2
    for dtype, quantization, tolerance in (
        ("float32", "none", 1e-3),
        ("bfloat16", "none", 0.4),
        ("float32", "int8", 0.4),
    ):
        slots = SlotTable(2, config.context_tokens, 16)
        runner = CpuRunner(
            tmp_path / "model", config, slots, dtype=dtype, quantization=quantization, kv_tokens=1024, threads=2,
            use_native=True,
        )  # fmt: skip
        driver = Driver(runner, slots)
        live = driver.open(text, 6, logprobs=0)
        tokens = text + driver.run(live, chunk=100)
        with torch.inference_mode():
            expected = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        sampled = [result.logprobs[i][0] for batch, i, result in live.results if batch.sample[i]]
        for at, logprob in enumerate(sampled, len(text)):
            assert logprob == pytest.approx(float(expected[at - 1, tokens[at]]), abs=tolerance)
        runner.close()


def test_a_build_is_found_by_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "folders", lambda: (tmp_path / "user", tmp_path / "package"))
    assert native.find() is None
    library = build(tmp_path / "package")
    path = native.find()
    assert path is not None and path.parent == tmp_path / "package" and path.stem == native.key()
    assert library.linear_bytes(16, 64, 2, 0) == 16 * 64 + 16 * 4
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_failed_build_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(native.BuildError, match=r"no-such-compiler could not be run"):
        native.build(tmp_path, compiler="no-such-compiler")
    with pytest.raises(native.BuildError, match=r"failed with exit status"):
        native.build(tmp_path, compiler="false")
    assert list(tmp_path.iterdir()) == []


def test_the_command_builds_once(tmp_path: Path) -> None:
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("there is no compiler")
    environment = {"PYTHONPATH": ":".join(sys.path), "XDG_CACHE_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "runtime.engine.native", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    assert run("where").stdout == "not built\n"
    assert run("build").stdout.startswith("built ")
    assert run("build").stdout.endswith(" is up to date\n")
    assert run("where").stdout.strip().endswith(f"{native.key()}.so")


def test_without_a_build_the_runner_takes_torch_or_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    save_checkpoint(tmp_path, "llama3")
    config, slots = ModelConfig.from_folder(tmp_path), SlotTable(1, 64, 16)
    assert not CpuRunner(tmp_path, config, slots, kv_tokens=64).native
    with pytest.raises(ModelError, match=r"run python -m runtime\.engine\.native build"):
        CpuRunner(tmp_path, config, slots, kv_tokens=64, use_native=True)
