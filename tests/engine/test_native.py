"""Building and finding the native kernels, and the variants of them that other processors run."""

import ctypes
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from modelkit import Driver, built_library, prompts, save_checkpoint

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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_long_contexts_are_the_same_bits_in_any_company(dtype: str, tmp_path: Path) -> None:
    """Attention over a context of several segments is shared out in many ways; none changes a bit."""
    built_library(tmp_path / "build")
    model = save_checkpoint(tmp_path / "model", "qwen3", context_tokens=1700)
    config = ModelConfig.from_folder(tmp_path / "model")
    long = [token for part in prompts(80, 120, seed=4) for token in part][:1530]
    others = prompts(20, 700, seed=12)
    seen: dict[tuple[int, ...], list[object]] = {}
    for case in (
        (16, 1, 1 << 30, 0),  # page size, threads, chunk, requests beside it
        (16, 2, 1 << 30, 0),
        (1, 2, 1, 2),
        (64, 2, 8, 19),
        (16, 3, 37, 1),
        (16, 4, 500, 5),
        (64, 8, 1 << 30, 19),
        (16, 1, 13, 3),
    ):
        page_tokens, threads, chunk, crowd = case
        slots = SlotTable(20, config.context_tokens, page_tokens)
        runner = CpuRunner(
            tmp_path / "model", config, slots, dtype=dtype, kv_tokens=20 * 1700, threads=threads, use_native=True
        )
        driver = Driver(runner, slots, seed=chunk)
        live = driver.open(long, 12, logprobs=2, prompt_logprobs=1)
        for text in others[:crowd]:
            driver.open(text, 1600 - len(text), temperature=1.0, seed=3)
        tokens = driver.run(live, chunk)
        said: list[object] = [*tokens]
        for batch, i, result in live.results:
            if i in result.prompt_logprobs:
                said += result.prompt_logprobs[i][0][: len(long) - 1 - int(batch.cached[i])].tolist()
            if batch.sample[i]:
                said += [result.logprobs[i][0], *result.logprobs[i][2].tolist()]
        seen[case] = said
        runner.close()
    first = next(iter(seen.values()))
    assert len(first) == 12 + len(long) - 1 + 12 * 3
    assert [case for case, said in seen.items() if said != first] == []
    if dtype == "float32":
        with torch.inference_mode():
            ids = torch.tensor([[*long, *map(int, first[:12])]])  # type: ignore[call-overload]
            expected = model(ids).logits[0].log_softmax(-1)
        scores = expected[:-1].gather(1, ids[0, 1:, None])[: len(long) - 1, 0]
        torch.testing.assert_close(torch.tensor(first[12 : 12 + len(long) - 1]), scores, atol=1e-3, rtol=0)


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
