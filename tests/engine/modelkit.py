"""Tiny random-weight checkpoints in transformers' own format, and a driver that steps a runner without a scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.engine import native
from runtime.engine.batch import Batch, Runner, SlotTable, StepResult

VOCAB = 320
FAMILIES = ("llama3", "qwen2", "qwen3", "mistral", "llama-linear")


def save_checkpoint(folder: Path, family: str, max_shard_size: str = "1GB", context_tokens: int = 1024) -> Any:
    """Saves a model of the family with random weights, sharp enough that greedy choices are clear; returns it."""
    import transformers

    common = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": context_tokens,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "initializer_range": 0.15,
    }
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 500000.0,
    }
    name, extra = {
        "llama3": ("Llama", {"tie_word_embeddings": False, "rope_parameters": llama3}),
        "llama-linear": (
            "Llama",
            {
                "tie_word_embeddings": True,
                "attention_bias": True,
                "mlp_bias": True,
                "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
            },
        ),
        "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
        "qwen3": ("Qwen3", {"tie_word_embeddings": False, "head_dim": 16}),
        "mistral": ("Mistral", {"tie_word_embeddings": False, "sliding_window": None, "head_dim": 10}),
    }[family]
    config = getattr(transformers, f"{name}Config")(**common, **extra)
    torch.manual_seed(sum(map(ord, family)))
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if key.endswith("bias") or "norm" in key:
                value.add_(torch.randn_like(value) * 0.1)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def built_library(folder: Path) -> None:
    """Makes sure that the native kernels are there, built into ``folder`` where this machine has none yet."""
    if native.find() is None:
        try:
            library = native.build(folder)
        except native.BuildError as error:
            pytest.skip(str(error))
        native.folders = lambda: (library.parent,)  # type: ignore[assignment]
        native.library.cache_clear()


def prompts(count: int, longest: int, seed: int = 0, vocab: int = VOCAB) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab, int(rng.integers(1, longest + 1))).tolist() for _ in range(count)]


@dataclass
class Live:
    """One request in the driver's hands: the slot's row holds its tokens, ``cached`` of them are computed."""

    slot: int
    length: int
    max_length: int
    cached: int = 0
    results: list[tuple[Batch, int, StepResult]] = field(default_factory=list)


class Driver:
    """Steps a runner as a scheduler would, with pages handed out in random order and no policy at all."""

    def __init__(self, runner: Runner, slots: SlotTable, seed: int = 0) -> None:
        self.runner, self.slots = runner, slots
        self.rng = np.random.default_rng(seed)
        self.free_pages = self.rng.permutation(runner.num_pages).tolist()
        self.free_slots = list(range(slots.slots))
        self.live: list[Live] = []
        self.steps = 0

    def open(self, prompt: Sequence[int], max_tokens: int, **params: Any) -> Live:
        """Admits a request; ``params`` are columns of the slot table."""
        slots, slot = self.slots, self.free_slots.pop(int(self.rng.integers(len(self.free_slots))))
        live = Live(slot, len(prompt), len(prompt) + max_tokens)
        slots.tokens[slot] = -1
        slots.tokens[slot, : len(prompt)] = prompt
        slots.prompt_tokens[slot] = len(prompt)
        pages = -(-live.max_length // slots.page_tokens)
        slots.pages[slot, :pages] = [self.free_pages.pop() for _ in range(pages)]
        defaults: dict[str, Any] = {
            "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
            "presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": 0, "bias": None, "min_length": 0,
            "held_back": (), "logprobs": -1, "prompt_logprobs": -1,
        }  # fmt: skip
        for name, value in {**defaults, **params}.items():
            getattr(slots, name)[slot] = value
        slots.filters[slot] = slots.top_p[slot] < 1 or slots.top_k[slot] > 0 or slots.min_p[slot] > 0
        slots.penalties[slot] = (
            slots.repetition_penalty[slot] != 1 or slots.presence_penalty[slot] or slots.frequency_penalty[slot]
        )
        self.live.append(live)
        return live

    def step(self, chunk: int = 1 << 30) -> StepResult:
        """One batch over all live requests; a prompt advances by at most ``chunk`` tokens."""
        self.live.sort(key=lambda live: live.length - live.cached > 1)
        slot = np.array([live.slot for live in self.live], np.int32)
        cached = np.array([live.cached for live in self.live], np.int32)
        extend = np.array([min(live.length - live.cached, chunk) for live in self.live], np.int32)
        sample = np.array([c + e == live.length for c, e, live in zip(cached, extend, self.live, strict=True)])
        none = np.empty(0, np.int32)
        decodes = sum(live.length - live.cached == 1 for live in self.live)
        batch = Batch(self.steps, slot, cached, extend, sample, decodes, none, none, none, none)
        result = self.runner.collect(self.runner.launch(batch))
        self.steps += 1
        for i, live in enumerate(self.live):
            live.results.append((batch, i, result))
            live.cached += int(extend[i])
            if sample[i]:
                self.slots.tokens[live.slot, live.length] = result.tokens[i]
                live.length += 1
        for live in [live for live in self.live if live.length >= live.max_length]:
            self.close(live)
        return result

    def close(self, live: Live) -> None:
        pages = -(-live.max_length // self.slots.page_tokens)
        self.free_pages.extend(self.slots.pages[live.slot, :pages].tolist())
        self.free_slots.append(live.slot)
        self.live.remove(live)

    def run(self, live: Live, chunk: int = 1 << 30) -> list[int]:
        """Steps until the request is done; its output tokens."""
        while live in self.live:
            self.step(chunk)
        return output(self.slots, live)


def output(slots: SlotTable, live: Live) -> list[int]:
    prompt_tokens = int(slots.prompt_tokens[live.slot])
    return [int(token) for token in slots.tokens[live.slot, prompt_tokens : live.length]]
