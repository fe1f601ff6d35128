"""The slot table's copy on the device, kept up to date by one staging copy a step.

Two pinned buffers take turns, as there are at most two steps in flight. The fixed part holds what every step needs, at
fixed places, so that captured graphs can read it; a step that admits requests or extends prompts has a second copy, of
the admitted rows and the attention tiles.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from runtime.engine.batch import I32, Batch, SlotTable
from runtime.engine.device import Device
from runtime.engine.kernels import inputs
from runtime.engine.kernels.extend_attention import tiles

_HEADER = 16
_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_INTS = ("top_k", "prompt_tokens")
_SEEDS = 2


@dataclass(slots=True)
class Extension:
    """Device views for a step with prompt tokens: the tiles of extend attention."""

    tile_row: torch.Tensor
    tile_index: torch.Tensor


def _aligned(words: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """With zeros at its end up to a multiple of 16 bytes."""
    return np.concatenate([words, np.zeros(-len(words) % 4, np.int32)])


class DeviceTable:
    """Device tensors by name; ``rows``, ``updates``, ``decodes`` [1]; ``slots``, ``positions`` (of the last computed
    token), ``wants``, ``cached``, ``ends`` (line of that token) [slots]; ``starts`` [slots + 1]: of the present step.
    """

    def __init__(self, table: SlotTable, device: Device) -> None:
        self.table, self.device, self.most_rows = table, device, table.slots
        self.page_tokens = table.page_tokens
        on, rows = device.on, table.slots
        self.tokens = torch.zeros((rows, table.context_tokens), dtype=torch.int32, device=on)
        self.pages = torch.zeros((rows, table.context_pages), dtype=torch.int32, device=on)
        self.columns = torch.zeros((len(_FLOATS) + len(_INTS) + _SEEDS, rows), dtype=torch.int32, device=on)
        floats = self.columns.view(torch.float32)
        self.temperature, self.top_p, self.min_p = floats[0], floats[1], floats[2]
        self.repetition_penalty, self.presence_penalty, self.frequency_penalty = floats[3], floats[4], floats[5]
        self.top_k, self.prompt_tokens, self.seed_low, self.seed_high = self.columns[6:10]

        self._updates_at = _HEADER + 6 * rows + 16
        self._usual_words = self._updates_at + 3 * rows  # a decoding step needs at most a page a row
        self._fixed_words = self._usual_words + 3 * (rows * table.context_pages)
        self._fixed_words = min(self._fixed_words, self._usual_words + (1 << 18))
        self._fixed = torch.zeros(self._fixed_words, dtype=torch.int32, device=on)
        self._staging = [device.pinned(self._fixed_words) for _ in range(2)]
        self._fields = [buffer.numpy() for buffer in self._staging]
        self._usual = [buffer[: self._usual_words] for buffer in self._staging]
        self._usual_to = self._fixed[: self._usual_words]
        self.rows, self.updates, self.decodes = self._fixed[0:1], self._fixed[1:2], self._fixed[2:3]
        self.update_triples = self._fixed[self._updates_at :]
        self.slots, self.positions, self.wants, self.cached, self.ends = (
            self._fixed[_HEADER + i * rows : _HEADER + (i + 1) * rows] for i in range(5)
        )
        self.starts = self._fixed[_HEADER + 5 * rows : _HEADER + 6 * rows + 1]
        self._extra = [device.pinned(1), device.pinned(1)]
        self._extra_to = torch.zeros(1, dtype=torch.int32, device=on)
        self._turn = 0

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.tokens, self.pages, self.columns, self._fixed, self._extra_to))

    def clear_rows(self) -> None:
        """Make the present step one of no rows: whatever runs before the next ``upload`` changes nothing."""
        self._fixed[:_HEADER].zero_()

    def upload(self, batch: Batch, group: int) -> Extension | None:
        """Bring the device's table and step up to ``batch``; None where all rows decode. ``group`` = query heads per
        KV head."""
        self._turn ^= 1
        n, rows = len(batch.slots), self.most_rows
        to = self._fields[self._turn]
        appended = (batch.page_slots, batch.page_indices, batch.page_values)
        if self._updates_at + 3 * len(appended[0]) > self._fixed_words:
            others = ~np.isin(batch.page_slots, batch.new_slots)  # the new rows come whole anyway
            appended = (appended[0][others], appended[1][others], appended[2][others])
        updates = len(appended[0])
        to[0], to[1], to[2] = n, updates, batch.decodes
        at = _HEADER
        to[at : at + n] = batch.slots
        np.add(batch.cached, batch.extend - 1, out=to[at + rows : at + rows + n])
        to[at + 2 * rows : at + 2 * rows + n] = batch.sample
        if updates:
            triples = to[self._updates_at : self._updates_at + 3 * updates]
            triples[0::3], triples[1::3], triples[2::3] = appended
        if batch.decodes < n:
            to[at + 3 * rows : at + 3 * rows + n] = batch.cached
            starts = to[at + 5 * rows : at + 5 * rows + n + 1]
            starts[0] = 0
            np.cumsum(batch.extend, out=starts[1:])
            np.subtract(starts[1:], 1, out=to[at + 4 * rows : at + 4 * rows + n])
        words = self._updates_at + 3 * updates
        if words <= self._usual_words:
            self._usual_to.copy_(self._usual[self._turn], non_blocking=True)
        else:
            self._fixed[:words].copy_(self._staging[self._turn][:words], non_blocking=True)
        if batch.decodes == n and not len(batch.new_slots):
            return None
        return self._upload_extra(batch, group)

    def _upload_extra(self, batch: Batch, group: int) -> Extension | None:
        d = batch.decodes
        row, index = tiles(batch.cached[d:], batch.extend[d:], group, d)
        news, payload = self._news(batch.new_slots)
        # Kernels are compiled anew for arguments that are not aligned to 16 bytes: these always are.
        parts: list[npt.NDArray[np.int32]] = [_aligned(row), _aligned(index), _aligned(news), *payload]
        words = sum(len(part) for part in parts)
        if words > len(self._extra_to):
            self._extra = [self.device.pinned(words * 2) for _ in range(2)]
            self._extra_to = torch.zeros(words * 2, dtype=torch.int32, device=self.device.on)
        np.concatenate(parts, out=self._extra[self._turn].numpy()[:words])
        self._extra_to[:words].copy_(self._extra[self._turn][:words], non_blocking=True)
        second, third = len(parts[0]), 2 * len(parts[0])
        if len(batch.new_slots):
            inputs.admit(
                len(batch.new_slots), self._extra_to[third:], self._extra_to[third + len(parts[2]) :], self.columns,
                self.tokens, self.pages,
            )  # fmt: skip
        if d == len(batch.slots):
            return None
        return Extension(self._extra_to[: len(row)], self._extra_to[second : second + len(row)])

    def _news(self, slots: I32) -> tuple[I32, list[I32]]:
        """(triples of slot, offset and known tokens; the rows' words: columns, pages, known tokens)"""
        table = self.table
        if not len(slots):
            return np.empty(0, np.int32), []
        columns = np.stack(
            [getattr(table, name)[slots].view(np.int32) for name in _FLOATS]
            + [getattr(table, name)[slots] for name in _INTS]
            + list(table.seed[slots].view(np.int32).reshape(-1, 2).T),
            axis=1,
        )
        payload: list[I32] = []
        news = np.empty((len(slots), 3), np.int32)
        at = 0
        for i, slot in enumerate(slots.tolist()):
            known = self._known(slot)
            news[i] = slot, at, known
            payload += [columns[i], table.pages[slot], table.tokens[slot, :known]]
            at += columns.shape[1] + table.context_pages + known
        return news.reshape(-1), payload

    def _known(self, slot: int) -> int:
        """Tokens of the row that are known: the prompt, and what a resumed request had generated."""
        prompt_tokens = int(self.table.prompt_tokens[slot])
        row = self.table.tokens[slot, prompt_tokens:]
        if not len(row) or row[0] < 0:
            return prompt_tokens
        unknown = row < 0
        return prompt_tokens + (int(unknown.argmax()) if unknown.any() else len(row))

    def write(self) -> None:
        """Apply the step's page appends; the first kernel of every step."""
        inputs.apply_pages(self.updates, self.update_triples, self.pages)
