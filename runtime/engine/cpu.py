"""The CPU runner: a model and its KV memory on this machine's cores, one step at a time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from runtime.engine import native
from runtime.engine.batch import F32, I32, Batch, SlotTable, StepResult
from runtime.engine.cpu_info import cpu_flags, total_bytes, usable_cores
from runtime.engine.kv import PagedKV, TorchModel
from runtime.engine.native.model import NativeModel, NativeRows
from runtime.engine.sampling import Rows, TorchRows, sample, token_logprobs
from runtime.models.config import ModelConfig, ModelError
from runtime.models.linear import Int8Linear, dense
from runtime.models.loader import Progress, available_bytes, check_memory, dummy, load, weight_bytes

_LOGIT_ROWS = 128  # prompt logprobs are taken in blocks: a block of float32 logits stays a few tens of MB


class Model(Protocol):
    """What a step needs of a model: ``TorchModel`` or ``NativeModel``."""

    other_bytes: int

    def attach(self, kv: PagedKV) -> None: ...
    def run(self, batch: Batch, rows: I32, keep_hidden: bool) -> tuple[torch.Tensor, torch.Tensor | None]: ...
    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...
    def workspace_bytes(self) -> int: ...
    def close(self) -> None: ...


class CpuRunner:
    """Implements ``runtime.engine.batch.Runner`` with torch on CPU, depth 1: ``launch`` computes, ``collect`` returns.

    ``dtype``: auto (bfloat16 where the CPU multiplies it natively and the model isn't float32) | float32 | bfloat16.
    ``quantization``: none | int8 (weights of the linear layers by output row; activations and KV stay in dtype).
    ``kv_tokens`` 0: what memory allows, at most all slots at full context: free after loading less
    (1 - mem_fraction) of the machine's memory. Raises ModelError for whatever is wrong with the model or memory.
    """

    depth = 1

    def __init__(
        self,
        model_dir: Path | str | None,
        config: ModelConfig,
        slots: SlotTable,
        *,
        dtype: str = "auto",
        quantization: str = "none",
        threads: int = 0,
        kv_tokens: int = 0,
        mem_fraction: float = 0.85,
        dummy_weights: bool = False,
        use_native: bool | None = None,
        progress: Progress | None = None,
    ) -> None:
        library = native.library() if use_native is not False else None
        if use_native and library is None:
            raise ModelError("the native kernels are not built; run python -m runtime.engine.native build")
        self.config, self.slots, self.page_tokens, self.native = config, slots, slots.page_tokens, library is not None
        self.dtype = choose_dtype(dtype, config, native=self.native)
        if quantization not in ("none", "int8"):
            raise ModelError(f"quantization = {quantization!r} is not known; known: none, int8")
        int8 = quantization == "int8"
        self._weight_bytes = _weight_bytes(config, self.dtype, int8=int8, native=self.native)
        token_bytes = PagedKV.token_bytes(config, self.dtype)
        check_memory(self._weight_bytes + kv_tokens * token_bytes, f"the model in {model_dir} with its KV memory")
        with torch.inference_mode():
            weights = self._weights(model_dir, dummy_weights, progress)
            self.model: Model
            self._rows: Rows
            if library is not None:
                # What torch still does, sampling, is small: its threads would only spin beside ours.
                torch.set_num_threads(1)
                model = NativeModel(
                    library, config, weights, slots, self.dtype, int8=int8, threads=threads or usable_cores()
                )
                self.model, self._rows = model, NativeRows(library, model.engine)
            else:
                if threads:
                    torch.set_num_threads(threads)
                self.model, self._rows = TorchModel(config, weights, slots, Int8Linear if int8 else dense), TorchRows()
            self.num_pages = self._kv_pages(kv_tokens, mem_fraction, token_bytes)
            if progress is not None:
                progress("kv", 0, self.num_pages * self.page_tokens * token_bytes)
            self.kv = PagedKV(config, self.num_pages, self.page_tokens, self.dtype)
            self.model.attach(self.kv)

    def _weights(
        self, model_dir: Path | str | None, dummy_weights: bool, progress: Progress | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        if dummy_weights:
            return dummy(self.config, self.dtype, progress=progress)
        if model_dir is None:
            raise ModelError("no model folder was given; give one, or ask for dummy weights")
        return load(model_dir, self.config, self.dtype, progress=progress)

    def _kv_pages(self, kv_tokens: int, mem_fraction: float, token_bytes: int) -> int:
        if kv_tokens:
            return -(-kv_tokens // self.page_tokens)
        free = available_bytes() - int(total_bytes() * (1 - mem_fraction))
        pages = min(free // (token_bytes * self.page_tokens), self.slots.slots * self.slots.context_pages)
        if pages < 1:
            raise ModelError(
                f"after loading the weights no memory is left for the KV cache: mem_fraction = {mem_fraction} keeps "
                f"{total_bytes() * (1 - mem_fraction) / 2**30:.2f} GiB free; raise it, or free memory"
            )
        return int(pages)

    def launch(self, batch: Batch) -> StepResult:
        """Computes the step. The sampled tokens are returned, not written to the slot table."""
        with torch.inference_mode():
            ends = np.cumsum(batch.extend, dtype=np.int32) - np.int32(1)
            rows = np.flatnonzero(batch.sample)
            asking = np.flatnonzero(self._wants_prompt(batch))
            logits, hidden = self.model.run(batch, ends[rows], bool(asking.size))
            tokens: I32 = np.full(len(batch.slots), -1, np.int32)
            logprobs = {}
            if rows.size:
                drawn = sample(logits, self.slots, batch.slots[rows], (batch.cached + batch.extend)[rows], self._rows)
                tokens[rows] = drawn.tokens
                logprobs = {int(rows[i]): value for i, value in drawn.logprobs.items()}
            prompt_logprobs = {}
            for i in asking.tolist():
                assert hidden is not None
                part = hidden[int(ends[i]) + 1 - int(batch.extend[i]) : int(ends[i]) + 1]
                prompt_logprobs[i] = self._prompt_logprobs(batch, i, part)
            return StepResult(tokens, logprobs, prompt_logprobs)

    def collect(self, handle: StepResult) -> StepResult:
        return handle

    def _wants_prompt(self, batch: Batch) -> npt.NDArray[np.bool_]:
        inside = batch.cached + 1 < self.slots.prompt_tokens[batch.slots]
        wants: npt.NDArray[np.bool_] = inside & (self.slots.prompt_logprobs[batch.slots] >= 0)
        return wants

    def _prompt_logprobs(self, batch: Batch, row: int, hidden: torch.Tensor) -> tuple[F32, I32, F32]:
        """NaN where the next token is not part of the prompt."""
        slot, first = int(batch.slots[row]), int(batch.cached[row]) + 1
        top = int(self.slots.prompt_logprobs[slot])
        known = min(len(hidden), int(self.slots.prompt_tokens[slot]) - first)
        chosen: F32 = np.full(len(hidden), np.nan, np.float32)
        ids: I32 = np.full((len(hidden), top), -1, np.int32)
        values: F32 = np.full((len(hidden), top), np.nan, np.float32)
        for at in range(0, known, _LOGIT_ROWS):
            part = slice(at, min(at + _LOGIT_ROWS, known))
            following = self.slots.tokens[slot, first + part.start : first + part.stop]
            chosen[part], ids[part], values[part] = token_logprobs(
                self.model.logits(hidden[part]), np.arange(len(following), dtype=np.int32), following, top, self._rows
            )
        return chosen, ids, values

    def memory(self) -> dict[str, int]:
        """Bytes by use. KV memory is committed as it is first written."""
        logits = _LOGIT_ROWS * 4 * self.config.vocab_size
        return {
            "weights": self._weight_bytes,
            "kv": self.kv.nbytes,
            "graphs": 0,
            "activations": logits + self.model.workspace_bytes(),
            "other": self.model.other_bytes,
        }

    def close(self) -> None:
        """Ends the native threads and gives the memory back; the runner is of no use afterwards."""
        self.model.close()
        del self.model, self.kv, self._rows


def _weight_bytes(config: ModelConfig, dtype: torch.dtype, *, int8: bool, native: bool) -> int:
    """What the weights will take. Our kernels and int8 hold a tied head apart from the embedding."""
    matrix_bytes = (1 + 4 / 64 if native else 1) if int8 else dtype.itemsize
    head = config.vocab_size * config.hidden_size * matrix_bytes if config.tied_head and (int8 or native) else 0
    return weight_bytes(config, dtype, matrix_bytes=matrix_bytes) + int(head)


def choose_dtype(dtype: str, config: ModelConfig, *, native: bool = False) -> torch.dtype:
    """What ``auto`` means here: the checkpoint's float32; else bfloat16, which is half the memory to read, where our
    kernels or this CPU's instructions make something of it."""
    if dtype == "auto":
        fast = native or {"avx512_bf16", "amx_bf16"} & cpu_flags()
        return torch.bfloat16 if fast and config.dtype != "float32" else torch.float32
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if dtype not in known:
        raise ModelError(f"dtype = {dtype!r} is not known on CPU; known: auto, {', '.join(known)}")
    return known[dtype]
