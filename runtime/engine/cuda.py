"""The runner for one NVIDIA GPU. Two steps may be in flight: the host reads step N's tokens while N + 1 runs.

A decoding step costs the host one pinned copy of the step's fields, one graph launch, one copy of the sampled ids back
and an event. Sampled tokens stay in the device's copy of the slot table, where the next step reads its inputs. Steps
with prompt tokens run the same kernels launch by launch. Everything is on one stream, in order.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runtime.engine.batch import F32, I32, Batch, SlotTable, StepResult
from runtime.engine.choose import Asked, Chooser, Pending, log_softmax_of
from runtime.engine.device import CudaDevice, Device, Event
from runtime.engine.device_table import DeviceTable
from runtime.engine.forward import Forward
from runtime.engine.graphs import Graphs
from runtime.engine.upload import upload
from runtime.models.config import ModelConfig, ModelError
from runtime.models.loader import Progress, dummy, weight_bytes

STEP_TOKENS = 16384
_PROMPT_LOGIT_ROWS = 256
_LIBRARY_BYTES = 3 << 29  # what a process takes beside its tensors: context, cuBLAS, kernels, graphs


@dataclass(slots=True)
class PromptScores:
    """Prompt logprobs on their way for one row: entries [0, known) of ``extend`` are real."""

    extend: int
    known: int
    top: int
    parts: list[tuple[int, int, int]] = field(default_factory=list)  # numbers of (chosen, ids, values)


@dataclass(slots=True)
class Flight:
    """A step between ``launch`` and ``collect``."""

    rows: int
    turn: int
    pending: Pending | None = None
    asked: Asked | None = None
    scores: dict[int, PromptScores] = field(default_factory=dict)


class CudaRunner:
    """Implements ``runtime.engine.batch.Runner`` with depth 2.

    ``dtype``: auto (the checkpoint's, bfloat16 for float32 ones) | bfloat16 | float16 | float32. ``kv_tokens`` 0: what
    memory allows: free after loading - total * (1 - mem_fraction), at most all slots at full context. ``engines``: so
    many share the GPU (a standby is one), each of which takes an equal part of total * mem_fraction. ``step_tokens``:
    most tokens in one step; the activation buffers are made for that many. ``device``: tests put another in place.

    Raises ModelError for whatever is wrong with the model or memory; the message says what to change.
    """

    depth = 2

    def __init__(
        self,
        model_dir: Path | str | None,
        config: ModelConfig,
        slots: SlotTable,
        *,
        dtype: str = "auto",
        quantization: str = "none",
        kv_tokens: int = 0,
        mem_fraction: float = 0.85,
        engines: int = 1,
        step_tokens: int = STEP_TOKENS,
        dummy_weights: bool = False,
        progress: Progress | None = None,
        device: Device | None = None,
    ) -> None:
        check_shapes(config, quantization, slots.page_tokens)
        self.config, self.page_tokens = config, slots.page_tokens
        self.dtype = choose_dtype(dtype, config)
        self.device = CudaDevice() if device is None else device
        step_tokens = max(step_tokens, slots.slots)
        self._free_at_start, self._total = self.device.memory()
        self._weight_bytes = weight_bytes(config, self.dtype)
        self._check_room(step_tokens, slots)
        with torch.inference_mode(), self.device.stream():
            try:
                self._load(model_dir, slots, step_tokens, dummy_weights, progress)
                self.num_pages = self._kv_pages(kv_tokens, mem_fraction, engines, step_tokens, slots)
                if progress is not None:
                    progress("kv", 0, self.num_pages * self._page_bytes)
                self._make_caches()
            except torch.OutOfMemoryError as error:
                raise ModelError(
                    f"the GPU ran out of memory at start ({error}); lower engine.mem_fraction, engine.step_tokens or "
                    "engine.max_running_requests, or end what else runs on the GPU"
                ) from None
        self._group = config.q_heads // config.kv_heads
        self._out = [self.device.pinned(slots.slots) for _ in range(2)]
        self._out_arrays = [buffer.numpy() for buffer in self._out]
        self._events: list[Event] = [self.device.event() for _ in range(2)]
        self._turn = 0
        self.graphs = Graphs(self._decode, self.table.clear_rows, slots.slots, self.device)
        self.warm_up()

    # Construction

    def _load(
        self,
        model_dir: Path | str | None,
        slots: SlotTable,
        step_tokens: int,
        dummy_weights: bool,
        progress: Progress | None,
    ) -> None:
        on = self.device.on
        if dummy_weights:
            weights = dict(dummy(self.config, self.dtype, device=on, progress=progress))
        elif model_dir is None:
            raise ModelError("no model folder was given; give one, or ask for dummy weights")
        else:
            weights = upload(model_dir, self.config, self.dtype, device=on, progress=progress)
        self.table = DeviceTable(slots, self.device)
        self.forward = Forward(self.config, weights, self.table, step_tokens, self.device)
        self.chooser = Chooser(self.table, self.config.vocab_size, self.device)

    @property
    def _page_bytes(self) -> int:
        config = self.config
        return 2 * config.layers * config.kv_size * self.page_tokens * self.dtype.itemsize

    def _check_room(self, step_tokens: int, slots: SlotTable) -> None:
        """Before anything is loaded: weights and buffers must fit at all."""
        config, gib = self.config, 2**30
        line = 2 * config.hidden_size + 2 * config.q_size + 2 * config.kv_size + 3 * config.mlp_size
        buffers = step_tokens * line * self.dtype.itemsize + slots.slots * config.vocab_size * 4
        if self._weight_bytes + buffers > self._free_at_start:
            raise ModelError(
                f"the weights take {self._weight_bytes / gib:.2f} GiB and a step's buffers {buffers / gib:.2f} GiB, "
                f"but only {self._free_at_start / gib:.2f} of the GPU's {self._total / gib:.2f} GiB are free; end what "
                "else runs on the GPU, lower engine.step_tokens, or take a smaller model"
            )

    def _kv_pages(self, kv_tokens: int, mem_fraction: float, engines: int, step_tokens: int, slots: SlotTable) -> int:
        gib = 2**30
        free = self.device.memory()[0]
        if kv_tokens:
            pages = -(-kv_tokens // self.page_tokens)
            if pages * self._page_bytes > free:
                raise ModelError(
                    f"engine.kv_tokens = {kv_tokens} takes {pages * self._page_bytes / gib:.2f} GiB, but after loading "
                    f"{free / gib:.2f} GiB of the GPU are free; lower it, or leave it at 0"
                )
            return pages
        kept = int(self._total * (1 - mem_fraction))
        room = free - kept
        if engines > 1:
            # What is free says nothing while the others load: each keeps to its part.
            own = self._weight_bytes + self.forward.buffer_bytes + self.chooser.nbytes + _LIBRARY_BYTES
            room = min(free, int(self._total * mem_fraction) // engines - own)
        pages = min(room // self._page_bytes, slots.slots * slots.context_pages)
        if pages < 1 and engines > 1:
            raise ModelError(
                f"{engines} engines share the GPU (supervision.standby = {engines - 1}), and an equal part of its "
                f"{self._total * mem_fraction / gib:.2f} GiB (engine.mem_fraction = {mem_fraction}) leaves nothing for "
                "the KV cache beside the weights; set standby = 0, raise mem_fraction, or take a smaller model"
            )
        if pages < 1:
            raise ModelError(
                f"no GPU memory is left for the KV cache: {free / gib:.2f} GiB are free after loading, and "
                f"engine.mem_fraction = {mem_fraction} keeps {kept / gib:.2f} GiB; raise it, lower engine.step_tokens "
                f"({step_tokens}) or engine.max_running_requests ({slots.slots}), or end what else runs on the GPU"
            )
        return int(pages)

    def _make_caches(self) -> None:
        config = self.config
        shape = (config.layers, 2, self.num_pages, config.kv_heads, self.page_tokens, config.head_dim)
        self._kv = torch.empty(shape, dtype=self.dtype, device=self.device.on)
        self.forward.caches = [(layer[0], layer[1]) for layer in self._kv]

    def warm_up(self) -> None:
        """Compile and load the kernels of plain decoding steps, and capture the smallest graph and the largest."""
        with torch.inference_mode():
            self.graphs.ready(1, True)
            self.graphs.ready(self.table.most_rows, True)

    def capture_all(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture the plain graphs of all batch sizes now instead of when they are met. ``progress``: (done, total)."""
        with torch.inference_mode():
            self.graphs.capture_all(progress)

    # A step

    def _decode(self, rows: int, sampled: bool) -> None:
        """The launches of a decoding step; this is what graphs hold."""
        self.table.write()
        logits = self.forward.decode(rows)
        if sampled:
            self.chooser.plain(logits, pdl=self.forward.overlapped)

    def launch(self, batch: Batch) -> Flight:
        """Enqueue a step. Reads the slot table's new rows now, and the rest of it never."""
        with torch.inference_mode(), self.device.stream():
            self._turn ^= 1
            if len(batch.new_slots):
                self.chooser.admit(batch.new_slots)
            flight = Flight(len(batch.slots), self._turn)
            if batch.decodes == flight.rows:
                self._launch_decode(batch, flight)
            else:
                self._launch_extend(batch, flight)
            self._out[self._turn].copy_(self.chooser.sampled, non_blocking=True)
            self._events[self._turn].record()
        return flight

    def _launch_decode(self, batch: Batch, flight: Flight) -> None:
        special = self.chooser.special(batch.slots)
        replay = self.graphs.ready(flight.rows, not special)
        self.table.upload(batch, self._group)
        replay()
        if special:
            self._choose(batch, self.forward.logits[: flight.rows], flight)

    def _launch_extend(self, batch: Batch, flight: Flight) -> None:
        extension = self.table.upload(batch, self._group)
        assert extension is not None
        self.table.write()
        tokens = int(batch.extend.sum())
        assert tokens <= self.forward.step_tokens
        logits = self.forward.extend(flight.rows, tokens, batch.decodes, extension)
        if self.chooser.special(batch.slots):
            self._choose(batch, logits, flight)
        else:
            self.chooser.plain(logits)
        self._score_prompts(batch, flight)

    def _choose(self, batch: Batch, logits: Tensor, flight: Flight) -> None:
        flight.pending = Pending()
        flight.asked = self.chooser.choose(batch, logits, flight.pending)

    def _score_prompts(self, batch: Batch, flight: Flight) -> None:
        """Prompt logprobs of the rows that asked: what position p says about the prompt's token at p + 1."""
        table = self.table.table
        asked = table.prompt_logprobs[batch.slots] >= 0
        asked &= batch.cached + 1 < table.prompt_tokens[batch.slots]
        if not asked.any():
            return
        if flight.pending is None:
            flight.pending = Pending()
        starts = np.concatenate([[0], np.cumsum(batch.extend)])
        # The sampled rows' logits have been used: their buffer serves again.
        logits = self.forward.logits
        stream = self.forward.residual(int(starts[-1])).stream
        block = min(_PROMPT_LOGIT_ROWS, len(logits))
        for row in np.flatnonzero(asked).tolist():
            slot, first, extend = int(batch.slots[row]), int(batch.cached[row]) + 1, int(batch.extend[row])
            known = min(extend, int(table.prompt_tokens[slot]) - first)
            scores = PromptScores(extend, known, int(table.prompt_logprobs[slot]))
            for at in range(0, known, block):
                n = min(block, known - at)
                hidden = stream[starts[row] + at : starts[row] + at + n]
                following = self.table.tokens[slot, first + at : first + at + n]
                found = log_softmax_of(self.forward.head_of(hidden, logits[:n]), following, scores.top)
                chosen, ids, values = (flight.pending.send(part) for part in found)
                scores.parts.append((chosen, ids, values))
            flight.scores[row] = scores

    def collect(self, handle: Flight) -> StepResult:
        """Wait for the step."""
        self._events[handle.turn].synchronize()
        tokens: I32 = self._out_arrays[handle.turn][: handle.rows].copy()
        logprobs: dict[int, tuple[float, I32, F32]] = {}
        prompt_logprobs: dict[int, tuple[F32, I32, F32]] = {}
        if handle.pending is not None:
            if handle.asked is not None:
                logprobs = handle.asked.results(handle.pending, tokens)
            for row, scores in handle.scores.items():
                prompt_logprobs[row] = _gathered(scores, handle.pending)
        return StepResult(tokens, logprobs, prompt_logprobs)

    # Insight and end

    def memory(self) -> dict[str, int]:
        """Bytes by use. ``other``: the slot table's copy, rotary tables, and what the driver and libraries took."""
        activations = self.forward.buffer_bytes + self.chooser.nbytes
        known = {
            "weights": self._weight_bytes,
            "kv": self._kv.nbytes,
            "graphs": self.device.graph_bytes(),
            "activations": activations,
        }
        taken = self._free_at_start - self.device.memory()[0]
        return {**known, "other": max(taken - sum(known.values()), 0)}

    def close(self) -> None:
        """Give the memory back; the runner is of no use afterwards."""
        del self.graphs, self.forward, self.chooser, self.table, self._kv
        self.device.close()


def _gathered(scores: PromptScores, pending: Pending) -> tuple[F32, I32, F32]:
    """One row's arrays; NaN where the next token is not part of the prompt."""
    chosen: F32 = np.full(scores.extend, np.nan, np.float32)
    ids: I32 = np.full((scores.extend, scores.top), -1, np.int32)
    values: F32 = np.full((scores.extend, scores.top), np.nan, np.float32)
    at = 0
    for numbers in scores.parts:
        parts: list[npt.NDArray[Any]] = [pending.take(number) for number in numbers]
        n = len(parts[0])
        chosen[at : at + n], ids[at : at + n], values[at : at + n] = parts
        at += n
    return chosen, ids, values


def check_shapes(config: ModelConfig, quantization: str, page_tokens: int) -> None:
    """Raises ModelError for what the kernels can't do."""
    if quantization != "none":
        raise ModelError(f"quantization = {quantization!r} is not supported on a GPU; take none")
    if config.head_dim not in (16, 32, 64, 128, 256):
        raise ModelError(f"head_dim = {config.head_dim} is not supported on a GPU; supported: 16, 32, 64, 128, 256")
    if page_tokens not in (16, 32):
        raise ModelError(f"engine.page_tokens = {page_tokens} is not supported on a GPU; supported: 16, 32")


def choose_dtype(dtype: str, config: ModelConfig) -> torch.dtype:
    """What ``auto`` means here: the checkpoint's type, bfloat16 for what is stored in float32."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype == "auto":
        return torch.float16 if config.dtype == "float16" else torch.bfloat16
    if dtype not in known:
        raise ModelError(f"dtype = {dtype!r} is not known on a GPU; known: auto, {', '.join(known)}")
    return known[dtype]
