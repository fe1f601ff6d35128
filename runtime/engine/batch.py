"""The seam between the scheduler (numpy, no torch) and a runner (CPU, CUDA): one step's work and its result.

Every live request owns one *slot*: a stable row in the ``SlotTable``. A step names slots; everything a runner needs
about a request stands in its row, so that a step's inputs are gathers by index, never per-request Python.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]


class SlotTable:
    """Rows of request state, indexed by slot. The scheduler writes, runners read.

    tokens [slots, context_tokens]    token ids, prompt then output; a position not sampled yet holds -1
    pages  [slots, context_pages]     physical page of each logical page
    The sampling rows are written once, at admission.
    """

    def __init__(self, slots: int, context_tokens: int, page_tokens: int) -> None:
        self.slots, self.context_tokens, self.page_tokens = slots, context_tokens, page_tokens
        self.context_pages = -(-context_tokens // page_tokens)
        self.tokens: I32 = np.full((slots, context_tokens), -1, np.int32)
        self.pages: I32 = np.zeros((slots, self.context_pages), np.int32)
        self.prompt_tokens: I32 = np.zeros(slots, np.int32)  # penalties count output tokens from here on
        self.temperature: F32 = np.zeros(slots, np.float32)
        self.top_p: F32 = np.ones(slots, np.float32)
        self.top_k: I32 = np.zeros(slots, np.int32)
        self.min_p: F32 = np.zeros(slots, np.float32)
        self.repetition_penalty: F32 = np.ones(slots, np.float32)
        self.presence_penalty: F32 = np.zeros(slots, np.float32)
        self.frequency_penalty: F32 = np.zeros(slots, np.float32)
        self.seed: npt.NDArray[np.uint64] = np.zeros(slots, np.uint64)
        # What of the sampler a row needs; a batch whose rows need nothing takes the short way.
        self.filters: npt.NDArray[np.bool_] = np.zeros(slots, np.bool_)  # any of top-k, top-p, min-p
        self.penalties: npt.NDArray[np.bool_] = np.zeros(slots, np.bool_)
        self.bias: list[dict[int, float] | None] = [None] * slots
        # Tokens that must not be sampled before position ``min_length`` (min_tokens: eos and stop ids).
        self.min_length: I32 = np.zeros(slots, np.int32)
        self.held_back: list[tuple[int, ...]] = [()] * slots
        self.logprobs: I32 = np.full(slots, -1, np.int32)
        self.prompt_logprobs: I32 = np.full(slots, -1, np.int32)


@dataclass(slots=True)
class Batch:
    """One step: for each of n requests, compute tokens [cached, cached + extend) of its row.

    Rows that only decode (extend == 1 and sample) come first; ``decodes`` counts them.
    """

    step: int
    slots: I32  # [n]
    cached: I32  # [n] positions whose KV is present already
    extend: I32  # [n] positions computed in this step, >= 1
    sample: npt.NDArray[np.bool_]  # [n] the last computed position yields a new token, written at row[cached + extend]
    decodes: int
    # Changes of the table since the last step, for runners that keep a copy on a device.
    new_slots: I32  # slots admitted since then: their whole rows are new
    page_slots: I32  # [m] and [m] and [m]: pages[slot, index] = page was appended
    page_indices: I32
    page_values: I32


@dataclass(slots=True)
class StepResult:
    """What a step yielded, aligned with the batch's rows."""

    tokens: I32  # [n] the sampled id; -1 where the row does not sample; -2 where the logits were not finite
    # Row -> (logprob, top ids, top logprobs) of the sampled token, only for rows that asked.
    logprobs: dict[int, tuple[float, I32, F32]]
    # Row -> for each computed position p the logprobs of token p + 1: logprob [extend], top ids and values [extend, k].
    prompt_logprobs: dict[int, tuple[F32, I32, F32]]


class Runner(Protocol):
    """A model with its KV memory on some device. One thread drives it.

    ``launch`` enqueues a step and returns at once where the device allows; ``collect`` waits for it. The scheduler may
    launch step N+1 before it collects N: a runner keeps sampled tokens in its own copy of ``SlotTable.tokens`` and
    reads inputs from there. At most ``depth`` steps are in flight (1 = strictly one after the other).
    """

    depth: int
    num_pages: int
    page_tokens: int

    def launch(self, batch: Batch) -> Any: ...

    def collect(self, handle: Any) -> StepResult: ...

    def memory(self) -> dict[str, int]:
        """Bytes by use: weights, kv, graphs, activations, other."""
        ...

    def close(self) -> None: ...
