"""Sampling on the device for batches with rows that want more than temperature: penalties, bias, held-back tokens,
top-k, top-p, min-p, logprobs. The order of ``runtime.engine.sampling``, without ever waiting for the device.

Per-row lists become flat index tensors on the host and travel in pinned memory; every other step is a batched
operation over the rows concerned.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runtime.engine.batch import F32, I32, Batch
from runtime.engine.device import Device
from runtime.engine.device_table import DeviceTable
from runtime.engine.kernels.sample import Scratch, sample, thresholds

_PENALTY_ROWS = 64  # rows counted at a time: the counts take 8 bytes a vocabulary entry and row


class Pending:
    """Tensors on their way to the host: ``take`` after the step's event."""

    def __init__(self) -> None:
        self._arrays: list[npt.NDArray[Any]] = []

    def send(self, tensor: Tensor) -> int:
        """Start the copy of ``tensor``; returns its number."""
        to = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        to.copy_(tensor, non_blocking=True)
        self._arrays.append(to.numpy())
        return len(self._arrays) - 1

    def take(self, number: int) -> npt.NDArray[Any]:
        return self._arrays[number]


@dataclass(slots=True)
class Asked:
    """Logprobs that are on their way: three arrays for ``rows``, each of which wants ``top[i]`` alternatives."""

    rows: npt.NDArray[np.intp]
    top: I32
    chosen: int
    ids: int
    values: int

    def results(self, pending: Pending, tokens: I32) -> dict[int, tuple[float, I32, F32]]:
        chosen, ids, values = (pending.take(n) for n in (self.chosen, self.ids, self.values))
        return {
            int(row): (float(chosen[i]), ids[i, : self.top[i]].astype(np.int32), values[i, : self.top[i]])
            for i, row in enumerate(self.rows)
            if tokens[row] >= 0
        }


def log_softmax_of(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of ``logits`` [n, vocab] in any float type: logprob of tokens [n]; ids and logprobs of the ``top`` largest."""
    wide = logits.float()
    normalizer = wide.logsumexp(1)
    chosen = wide.gather(1, tokens.long().clamp(min=0)[:, None])[:, 0] - normalizer
    values, ids = wide.topk(min(top, wide.shape[1]), 1)
    return chosen, ids, values - normalizer[:, None]


class Chooser:
    """Turns logits into tokens in the device table."""

    def __init__(self, table: DeviceTable, vocab: int, device: Device) -> None:
        self.table, self.device = table, device
        self.scratch = Scratch(table.most_rows, vocab, device.on)
        self.sampled = torch.zeros(table.most_rows, dtype=torch.int32, device=device.on)
        self._threshold = torch.zeros(table.most_rows, dtype=torch.float32, device=device.on)
        self._wants_lists = np.zeros(table.most_rows, np.bool_)  # bias or held-back tokens, by slot
        self._special = np.zeros(table.most_rows, np.bool_)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.scratch.best, self.scratch.best_id, self.sampled, self._threshold))

    def admit(self, slots: I32) -> None:
        """Note what the newly admitted rows want."""
        table = self.table.table
        for slot in slots.tolist():
            self._wants_lists[slot] = bool(table.bias[slot]) or bool(table.held_back[slot])
        self._special[slots] = (
            self._wants_lists[slots] | table.filters[slots] | table.penalties[slots] | (table.logprobs[slots] >= 0)
        )

    def special(self, slots: I32) -> bool:
        """Whether any row wants more than the plain way gives."""
        return bool(self._special[slots].any())

    def plain(self, logits: Tensor, *, pdl: bool = False) -> None:
        """Greedy or by temperature; fixed launches, so it can be captured."""
        self._sample(logits, None, pdl)

    def choose(self, batch: Batch, logits: Tensor, pending: Pending) -> Asked | None:
        """As rows want it. ``logits`` [rows, vocab] stay as they are."""
        table, slots = self.table.table, batch.slots
        positions = batch.cached + batch.extend
        edited = self._edit(batch, logits, positions)
        threshold = None
        if table.filters[slots].any():
            threshold = self._threshold[: len(slots)]
            t = self.table
            thresholds(edited, t.slots, t.temperature, t.top_k, t.top_p, t.min_p, threshold)
        self._sample(edited, threshold, False)
        return self._logprobs(batch, logits, pending)

    def _sample(self, logits: Tensor, threshold: Tensor | None, pdl: bool) -> None:
        t = self.table
        sample(
            logits, t.slots, t.positions, t.wants, t.rows, t.temperature, t.seed_low, t.seed_high, t.tokens,
            self.sampled, self.scratch, threshold, pdl=pdl,
        )  # fmt: skip

    def _edit(self, batch: Batch, logits: Tensor, positions: I32) -> Tensor:
        """Penalties, bias and held-back tokens, on a float32 copy where any row needs them."""
        table, slots = self.table.table, batch.slots
        penalized = np.flatnonzero(table.penalties[slots])
        lists = np.flatnonzero(self._wants_lists[slots])
        if not penalized.size and not lists.size:
            return logits
        edited = logits.float() if logits.dtype != torch.float32 else logits.clone()
        for at in range(0, len(penalized), _PENALTY_ROWS):
            self._penalize(edited, batch, penalized[at : at + _PENALTY_ROWS], positions)
        vocab = logits.shape[1]
        biased = [(int(r), table.bias[slots[r]] or {}) for r in lists]
        rows = [row for row, bias in biased for token in bias if 0 <= token < vocab]
        if rows:
            ids = [token for _, bias in biased for token in bias if 0 <= token < vocab]
            values = [value for _, bias in biased for token, value in bias.items() if 0 <= token < vocab]
            edited.index_put_((self._index(rows), self._index(ids)), self._floats(values), accumulate=True)
        held = [(int(r), table.held_back[slots[r]]) for r in lists if positions[r] < table.min_length[slots[r]]]
        rows = [row for row, ids in held for _ in ids]
        if rows:
            never = edited.new_full((), float("-inf"))
            edited.index_put_((self._index(rows), self._index([i for _, ids in held for i in ids])), never)
        return edited

    def _penalize(self, edited: Tensor, batch: Batch, which: npt.NDArray[np.intp], positions: I32) -> None:
        t, vocab = self.table, edited.shape[1]
        rows, slots = self._index(which), self._index(batch.slots[which])
        ends, longest = self._index(positions[which])[:, None], int(positions[which].max())
        places = torch.arange(longest, device=edited.device)[None, :]
        tokens = t.tokens[slots, :longest].long()
        seen = (places < ends) & (tokens >= 0) & (tokens < vocab)
        tokens = tokens.clamp(0, vocab - 1)
        counts = torch.zeros((2, len(which), vocab), dtype=torch.float32, device=edited.device)
        counts[0].scatter_add_(1, tokens, seen.float())
        counts[1].scatter_add_(1, tokens, (seen & (places >= t.prompt_tokens[slots][:, None])).float())
        x = edited.index_select(0, rows)
        repetition = t.repetition_penalty[slots][:, None]
        x = torch.where(counts[0] > 0, torch.where(x > 0, x / repetition, x * repetition), x)
        x -= t.frequency_penalty[slots][:, None] * counts[1]
        x -= t.presence_penalty[slots][:, None] * (counts[1] > 0)
        edited.index_copy_(0, rows, x)

    def _logprobs(self, batch: Batch, logits: Tensor, pending: Pending) -> Asked | None:
        wanted = self.table.table.logprobs[batch.slots]
        rows = np.flatnonzero((wanted >= 0) & batch.sample)
        if not rows.size:
            return None
        index = self._index(rows)
        found = log_softmax_of(logits.index_select(0, index), self.sampled[index], int(wanted[rows].max()))
        chosen, ids, values = (pending.send(part) for part in found)
        return Asked(rows, wanted[rows], chosen, ids, values)

    def _index(self, values: Iterable[int] | npt.NDArray[np.signedinteger]) -> Tensor:
        return self._send(torch.from_numpy(np.asarray(values, np.int64)))

    def _floats(self, values: list[float]) -> Tensor:
        return self._send(torch.from_numpy(np.asarray(values, np.float32)))

    def _send(self, host: Tensor) -> Tensor:
        if self.device.on.type == "cpu":
            return host
        return host.pin_memory().to(self.device.on, non_blocking=True)
