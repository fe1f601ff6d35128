"""The CPU runner as a scheduler sees it: batches in, tokens out, on real (tiny) models."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from modelkit import FAMILIES, VOCAB, Driver, built_library, output, prompts, save_checkpoint
from msgspec import structs

from runtime.config import config_from
from runtime.engine import native
from runtime.engine.batch import SlotTable
from runtime.engine.build import choose_quantization
from runtime.engine.cpu import CpuRunner, choose_dtype
from runtime.models.config import ModelConfig, ModelError
from runtime.sources import ModelFiles


class Saved:
    """A tiny checkpoint, and runners on it by torch or by the native kernels."""

    def __init__(self, folder: Path, family: str, use_native: bool) -> None:
        self.folder, self.model, self.use_native = folder, save_checkpoint(folder, family), use_native
        self.config = ModelConfig.from_folder(folder)

    def runner(self, page_tokens: int = 16, slots: int = 8, **kwargs: Any) -> tuple[CpuRunner, SlotTable]:
        table = SlotTable(slots, self.config.context_tokens, page_tokens)
        kwargs = {"dtype": "float32", "kv_tokens": slots * 512, "threads": 1, "use_native": self.use_native, **kwargs}
        return CpuRunner(self.folder, self.config, table, **kwargs), table

    def greedy(self, prompt: list[int], tokens: int) -> list[int]:
        with torch.inference_mode():
            ids = self.model.generate(
                torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        return [int(token) for token in ids[0, len(prompt) :]]

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.model(torch.tensor([ids])).logits[0].log_softmax(-1)  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=["torch", "native"])
def use_native(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> bool:
    if request.param == "native":
        built_library(tmp_path_factory.mktemp("native"))
    return bool(request.param == "native")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, use_native: bool) -> Saved:
    return Saved(tmp_path_factory.mktemp(request.param), request.param, use_native)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, use_native: bool) -> Saved:
    return Saved(tmp_path_factory.mktemp("llama3"), "llama3", use_native)


def test_greedy_equals_transformers_in_staggered_batches(family: Saved) -> None:
    runner, slots = family.runner()
    driver = Driver(runner, slots)
    texts = prompts(12, 300, seed=1)
    waiting, live = list(texts), []
    while waiting or driver.live:
        while waiting and len(driver.live) < 5:
            live.append(driver.open(waiting.pop(0), max_tokens=20))
            if driver.rng.random() < 0.5:
                break
        driver.step(chunk=64)
    # A slot's row is reused by later requests, so take what each step returned.
    for text, request in zip(texts, live, strict=True):
        tokens = [int(result.tokens[i]) for batch, i, result in request.results if batch.sample[i]]
        assert tokens == family.greedy(text, 20)


@pytest.mark.parametrize("page_tokens", [1, 16, 64])
def test_page_and_chunk_sizes_change_nothing(llama: Saved, page_tokens: int) -> None:
    text = prompts(1, 200, seed=4)[0] * 3
    runner, slots = llama.runner(page_tokens)
    for chunk in (16, 256, 2048):
        driver = Driver(runner, slots, seed=chunk)
        assert driver.run(driver.open(text, 12), chunk) == llama.greedy(text, 12)


def test_logprobs_of_prompt_and_output_equal_transformers(family: Saved) -> None:
    runner, slots = family.runner()
    driver = Driver(runner, slots)
    text = prompts(1, 150, seed=5)[0] + prompts(1, 150, seed=6)[0]
    live = driver.open(text, 6, logprobs=3, prompt_logprobs=2)
    driver.open(text[:40], 9)
    tokens = text + driver.run(live, chunk=37)
    expected = family.logprobs(tokens).numpy()
    at = 0
    for batch, i, result in live.results:
        if i in result.prompt_logprobs:
            chosen, ids, values = result.prompt_logprobs[i]
            assert batch.cached[i] == at and len(chosen) == batch.extend[i]
            for offset in range(len(chosen)):
                following = at + offset + 1
                if following >= len(text):
                    assert np.isnan(chosen[offset])
                    continue
                row = expected[following - 1]
                assert chosen[offset] == pytest.approx(row[text[following]], abs=1e-3)
                np.testing.assert_allclose(values[offset], np.sort(row)[::-1][:2], atol=1e-3)
                np.testing.assert_allclose(row[ids[offset]], values[offset], atol=1e-3)
        at = int(batch.cached[i] + batch.extend[i])
        if batch.sample[i]:
            chosen_one, ids, values = result.logprobs[i]
            row = expected[at - 1]
            assert chosen_one == pytest.approx(row[tokens[at]], abs=1e-3)
            np.testing.assert_allclose(values, np.sort(row)[::-1][:3], atol=1e-3)
            assert ids[0] == row.argmax()


def test_seeded_sampling_is_the_same_alone_and_in_a_batch(llama: Saved) -> None:
    runner, slots = llama.runner()
    texts = prompts(5, 60, seed=8)
    params = [{"temperature": 0.9, "top_p": 0.95, "seed": 11 + i, "repetition_penalty": 1.1} for i in range(5)]
    alone = []
    for text, param in zip(texts, params, strict=True):
        driver = Driver(runner, slots)
        alone.append(driver.run(driver.open(text, 15, **param)))
    driver = Driver(runner, slots, seed=1)
    live = [driver.open(text, 15, **param) for text, param in zip(texts, params, strict=True)]
    while driver.live:
        driver.step(chunk=20)
    assert [output(slots, request) for request in live] == alone


def test_bfloat16_stays_near_float32(family: Saved) -> None:
    """Rounding moves logits a little; the tokens' float32 logprobs show how little."""
    runner, slots = family.runner(dtype="bfloat16")
    driver = Driver(runner, slots)
    live = driver.open(text := prompts(1, 100, seed=3)[0], 10, logprobs=0)
    tokens = text + driver.run(live)
    expected = family.logprobs(tokens)
    for step, (_, i, result) in enumerate(live.results):
        at = len(text) + step
        assert result.logprobs[i][0] == pytest.approx(float(expected[at - 1, tokens[at]]), abs=0.4)


def test_int8_stays_near_float32(family: Saved) -> None:
    runner, slots = family.runner(quantization="int8")
    driver = Driver(runner, slots)
    live = driver.open(text := prompts(1, 100, seed=3)[0], 10, logprobs=0)
    tokens = text + driver.run(live)
    expected = family.logprobs(tokens)
    for step, (_, i, result) in enumerate(live.results):
        at = len(text) + step
        assert result.logprobs[i][0] == pytest.approx(float(expected[at - 1, tokens[at]]), abs=0.4)


def test_not_finite_logits_fail_their_request_and_poison_no_page(llama: Saved, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for file in llama.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][300] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    slots = SlotTable(4, 128, 16)
    runner = CpuRunner(tmp_path, llama.config, slots, dtype="float32", kv_tokens=128, use_native=llama.use_native)
    driver = Driver(runner, slots)
    good, bad = driver.open([5, 6, 7], 8), driver.open([5, 300, 7] * 11, 4)
    driver.step()
    assert int(bad.results[0][2].tokens[bad.results[0][1]]) == -2
    driver.close(bad)
    while driver.live:
        driver.step()
    assert output(slots, good) == llama.greedy([5, 6, 7], 8)
    # All pages are used again, the poisoned ones among them; a short decode reads behind its end.
    later = [driver.open(text, 8) for text in ([9, 9], [4] * 20, [8] * 30)]
    while driver.live:
        driver.step()
    for request, text in zip(later, ([9, 9], [4] * 20, [8] * 30), strict=True):
        assert output(slots, request) == llama.greedy(text, 8)


def test_a_step_that_samples_nothing(llama: Saved) -> None:
    runner, slots = llama.runner()
    driver = Driver(runner, slots)
    driver.open(prompts(1, 90)[0] + [3] * 40, 1)
    assert driver.step(chunk=8).tokens.tolist() == [-1]


def test_memory_and_pool_size(llama: Saved) -> None:
    runner, slots = llama.runner(page_tokens=16, kv_tokens=1000)
    assert (runner.depth, runner.num_pages, runner.page_tokens) == (1, 63, 16)
    memory = runner.memory()
    token_bytes = 2 * llama.config.layers * llama.config.kv_size * 4
    assert memory["kv"] == (63 + 1) * 16 * token_bytes and memory["weights"] > 0
    from_memory = CpuRunner(llama.folder, llama.config, slots, use_native=llama.use_native)
    assert from_memory.num_pages == slots.slots * slots.context_pages  # memory for more is there, use for more is not
    runner.close()


def test_dummy_weights_and_progress(llama: Saved) -> None:
    seen: list[tuple[str, int, int]] = []
    slots = SlotTable(2, 64, 16)
    runner = CpuRunner(
        None, llama.config, slots, dummy_weights=True, kv_tokens=128, use_native=llama.use_native,
        progress=lambda *args: seen.append(args),
    )  # fmt: skip
    assert [phase for phase, _, _ in seen][-1] == "kv" and seen[0][0] == "weights"
    driver = Driver(runner, slots)
    assert all(0 <= token < VOCAB for token in driver.run(driver.open([1, 2, 3], 5)))


def test_refusals(llama: Saved) -> None:
    slots = SlotTable(2, 64, 16)
    with pytest.raises(ModelError, match="dtype = 'float8' is not known"):
        CpuRunner(llama.folder, llama.config, slots, dtype="float8")
    with pytest.raises(ModelError, match="quantization = 'int3' is not known"):
        CpuRunner(llama.folder, llama.config, slots, quantization="int3")
    with pytest.raises(ModelError, match=r"with its KV memory takes .* GiB, but only"):
        CpuRunner(llama.folder, llama.config, slots, kv_tokens=10**12)
    with pytest.raises(ModelError, match="no model folder was given"):
        CpuRunner(None, llama.config, slots, kv_tokens=64)
    with pytest.raises(ModelError, match=r"no memory is left for the KV cache: mem_fraction = 0\.0"):
        CpuRunner(llama.folder, llama.config, slots, mem_fraction=0.0)


@pytest.mark.parametrize(("dtype", "quantization"), [("float32", "none"), ("bfloat16", "none"), ("float32", "int8")])
def test_native_results_are_the_same_bits_in_any_company(
    dtype: str, quantization: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Alone or in a batch, whole or in chunks, in pages of any size, on any number of threads: the same logprobs to
    the last bit. That is what makes resumed and cached requests say what they would have said."""
    built_library(tmp_path_factory.mktemp("native"))
    saved = Saved(tmp_path_factory.mktemp("qwen3"), "qwen3", use_native=True)
    texts = prompts(6, 180, seed=12)
    seen: set[tuple[object, ...]] = set()
    for page_tokens, threads, chunk, crowd in ((16, 1, 1 << 30, 1), (1, 2, 1 << 30, 6), (64, 2, 13, 6), (16, 3, 1, 2)):
        runner, slots = saved.runner(page_tokens, dtype=dtype, quantization=quantization, threads=threads)
        driver = Driver(runner, slots, seed=chunk)
        live = driver.open(texts[0], 8, logprobs=2)
        for text in texts[1:crowd]:
            driver.open(text, 8, temperature=1.0, top_p=0.9, seed=3)
        tokens = driver.run(live, chunk)
        sampled = [result.logprobs[i] for batch, i, result in live.results if batch.sample[i]]
        seen.add((*tokens, *(value for one in sampled for value in (one[0], *one[2].tolist()))))
        runner.close()
    assert len(seen) == 1


def test_auto_dtype_keeps_float32_checkpoints(llama: Saved) -> None:
    assert choose_dtype("auto", llama.config, native=True) is torch.float32
    half = dataclasses.replace(llama.config, dtype="bfloat16")
    assert choose_dtype("auto", half, native=True) is torch.bfloat16
    assert choose_dtype("float32", half, native=True) is torch.float32


def test_auto_quantization_is_for_sources_that_were_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ModelFiles("m", "m", "m", "", (), 0)
    files = structs.replace(plain, quantized=True)

    def chosen(files: ModelFiles, device: str = "cpu", **model: str) -> str:
        return choose_quantization(config_from({"model": model}), files, device)

    monkeypatch.setattr(native, "library", lambda: object())
    assert (chosen(files), chosen(plain)) == ("int8", "none")
    assert chosen(files, "cuda") == "none"
    assert chosen(files, dtype="float32") == chosen(files, dtype="bfloat16") == "none"
    assert (chosen(files, quantization="none"), chosen(plain, quantization="int8")) == ("none", "int8")
    monkeypatch.setattr(native, "library", lambda: None)
    assert chosen(files) == "none"
