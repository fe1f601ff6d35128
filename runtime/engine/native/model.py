"""A model whose steps run in the native library: packed weights in one mapping, the structs that step.cpp reads."""

import ctypes
import mmap
from collections.abc import Iterable
from ctypes import c_float, c_int32, c_int64, c_void_p

import numpy as np
import torch

from runtime.engine.batch import F32, I32, Batch, SlotTable
from runtime.engine.kv import PagedKV
from runtime.engine.sampling import F64, U32
from runtime.models.config import ModelConfig, ModelError
from runtime.models.decoder import rope_table
from runtime.models.loader import plan

_F32, _BF16, _I8 = 0, 1, 2  # Format of linear.h
_LANES = 16
_FORMATS = {torch.float32: _F32, torch.bfloat16: _BF16}


class _Linear(ctypes.Structure):
    _fields_ = (
        ("weights", c_void_p), ("bias", c_void_p),
        ("outputs", c_int32), ("inputs", c_int32), ("format", c_int32), ("paired", c_int32),
    )  # fmt: skip


class _Layer(ctypes.Structure):
    _fields_ = (
        ("attn_norm", c_void_p), ("q_norm", c_void_p), ("k_norm", c_void_p), ("mlp_norm", c_void_p),
        ("keys", c_void_p), ("values", c_void_p),
        ("qkv", _Linear), ("o", _Linear), ("gate_up", _Linear), ("down", _Linear),
    )  # fmt: skip


class _Model(ctypes.Structure):
    _fields_ = (
        ("layers", c_int32), ("vocab", c_int32), ("hidden", c_int32), ("q_heads", c_int32), ("kv_heads", c_int32),
        ("head_dim", c_int32), ("mlp", c_int32), ("embed_format", c_int32), ("kv_format", c_int32), ("eps", c_float),
        ("embed", c_void_p), ("cos", c_void_p), ("sin", c_void_p), ("norm", c_void_p), ("layer", c_void_p),
        ("head", _Linear),
    )  # fmt: skip


class _Step(ctypes.Structure):
    _fields_ = (
        ("rows", c_int32), ("tokens", c_int32), ("page_tokens", c_int32), ("outputs", c_int32),
        ("slots", c_void_p), ("cached", c_void_p), ("extend", c_void_p),
        ("token_table", c_void_p), ("page_table", c_void_p), ("token_stride", c_int64), ("page_stride", c_int64),
        ("output_rows", c_void_p), ("logits", c_void_p), ("hidden", c_void_p),
    )  # fmt: skip


class NativeModel:
    """Same duty as ``TorchModel``: a step's batch in, logits and hidden states out.

    ``weights`` come from ``loader.load`` or ``loader.dummy``; each matrix is packed as it arrives. ``int8`` packs them
    as 8-bit integers with a scale per row and 64 inputs, and rounds activations likewise.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        config: ModelConfig,
        weights: Iterable[tuple[str, torch.Tensor]],
        slots: SlotTable,
        dtype: torch.dtype,
        *,
        int8: bool,
        threads: int,
    ) -> None:
        self.library, self._config, self._slots = library, config, slots
        self._format, self._kv_format = _I8 if int8 else _FORMATS[dtype], _FORMATS[dtype]
        self.engine = library.engine_new(threads)
        self._shapes = {param.name: param.parts for param in plan(config) if param.matrix}
        # One mapping for all matrices, in huge pages: a step streams through it from end to end.
        size = sum(self._packed_bytes(*shape) for shape in self._matrices())
        self._arena = mmap.mmap(-1, max(size, 1))
        if hasattr(self._arena, "madvise"):
            self._arena.madvise(mmap.MADV_HUGEPAGE)
        self._arena_at, self._used = np.frombuffer(self._arena, np.uint8).ctypes.data, 0
        self._kept: list[torch.Tensor] = []  # what the structs point to
        self._layers = (_Layer * config.layers)()
        self._model = _Model(
            layers=config.layers, vocab=config.vocab_size, hidden=config.hidden_size, q_heads=config.q_heads,
            kv_heads=config.kv_heads, head_dim=config.head_dim, mlp=config.mlp_size, kv_format=self._kv_format,
            eps=config.rms_eps, layer=ctypes.addressof(self._layers),
        )  # fmt: skip
        self._model.cos, self._model.sin = (self._keep(table) for table in rope_table(config))
        self._take(weights)
        self.weight_bytes = self._used + sum(tensor.nbytes for tensor in self._kept[2:])
        self.other_bytes = sum(tensor.nbytes for tensor in self._kept[:2])
        self._buffer = torch.empty(0, config.vocab_size)
        self._step = _Step(page_tokens=slots.page_tokens)

    def _matrices(self) -> list[tuple[int, int, bool]]:
        c = self._config
        layer = [
            (c.q_size + 2 * c.kv_size, c.hidden_size, False),
            (c.hidden_size, c.q_size, False),
            (2 * c.mlp_size, c.hidden_size, True),
            (c.hidden_size, c.mlp_size, False),
        ]
        return layer * c.layers + [(c.vocab_size, c.hidden_size, False)]

    def _packed_bytes(self, outputs: int, inputs: int, paired: bool) -> int:
        # Each matrix starts on a cache line.
        return -(-int(self.library.linear_bytes(outputs, inputs, self._format, paired)) // 64) * 64

    def _keep(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor.contiguous())
        return self._kept[-1].data_ptr()

    def _take(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        embed: torch.Tensor | None = None
        biases: dict[str, torch.Tensor] = {}
        for name, tensor in weights:
            *prefix, kind = name.split(".")
            target = self._layers[int(prefix[1])] if prefix else self._model
            if kind == "embed":
                embed = tensor
                self._model.embed, self._model.embed_format = self._keep(tensor), _FORMATS[tensor.dtype]
            elif kind.endswith("_bias"):
                getattr(target, kind.removesuffix("_bias")).bias = self._bias(kind, tensor)
            elif kind.endswith("norm"):
                setattr(target, kind, self._keep(tensor.float()))
            else:
                setattr(target, kind, self._pack(kind, tensor))
        assert embed is not None and not biases
        if self._config.tied_head:
            self._model.head = self._pack("head", embed)

    def _pack(self, kind: str, tensor: torch.Tensor) -> _Linear:
        outputs, inputs = tensor.shape
        paired = kind == "gate_up"
        tensor = tensor.contiguous()
        at = self._arena_at + self._used
        self.library.linear_pack(
            self.engine, at, tensor.data_ptr(), _FORMATS[tensor.dtype], outputs, inputs, self._format, paired
        )
        self._used += self._packed_bytes(outputs, inputs, paired)
        return _Linear(at, None, outputs, inputs, self._format, paired)

    def _bias(self, kind: str, tensor: torch.Tensor) -> int:
        """In the order of packed rows, zeros where panels are padded."""
        halves = tensor.float().chunk(2) if kind == "gate_up_bias" else (tensor.float(),)
        blocks = [torch.nn.functional.pad(half, (0, -len(half) % _LANES)).view(-1, _LANES) for half in halves]
        return self._keep(torch.stack(blocks, dim=1).flatten())

    def attach(self, kv: PagedKV) -> None:
        """Tells the layers where their keys and values live."""
        for layer, keys, values in zip(self._layers, kv.keys, kv.values, strict=True):
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()

    def run(self, batch: Batch, rows: I32, keep_hidden: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Computes a step. Of its tokens, laid out row after row, those at ``rows`` get logits float32 [rows, vocab],
        good until the next call; with ``keep_hidden`` all get their hidden state float32 [tokens, hidden]."""
        step, slots = self._step, self._slots
        tokens = int(batch.extend.sum())
        logits = self._logits_buffer(len(rows))
        hidden = torch.empty(tokens, self._config.hidden_size) if keep_hidden else None
        arrays = [np.ascontiguousarray(array, np.int32) for array in (batch.slots, batch.cached, batch.extend, rows)]
        step.slots, step.cached, step.extend, step.output_rows = (array.ctypes.data for array in arrays)
        step.rows, step.tokens, step.outputs = len(batch.slots), tokens, len(rows)
        step.token_table, step.token_stride = slots.tokens.ctypes.data, slots.context_tokens
        step.page_table, step.page_stride = slots.pages.ctypes.data, slots.context_pages
        step.logits = logits.data_ptr()
        step.hidden = hidden.data_ptr() if hidden is not None else None
        if not self.library.step_run(self.engine, ctypes.addressof(self._model), ctypes.addressof(step)):
            raise ModelError(f"no memory for the activations of a step of {tokens} tokens; take smaller steps")
        return logits, hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of rows of the hidden states: float32 [rows, vocab], good until the next call."""
        hidden = hidden.contiguous()
        logits = self._logits_buffer(len(hidden))
        self.library.head_run(
            self.engine, ctypes.addressof(self._model), hidden.data_ptr(), len(hidden), logits.data_ptr()
        )
        return logits

    def _logits_buffer(self, rows: int) -> torch.Tensor:
        """One buffer for all steps: fresh memory of this size would be cleared by the kernel every time."""
        if rows > len(self._buffer):
            self._buffer = torch.empty(rows, self._config.vocab_size)
        return self._buffer[:rows]

    def workspace_bytes(self) -> int:
        return int(self.library.engine_workspace_bytes(self.engine)) + self._buffer.nbytes

    def close(self) -> None:
        """Ends the threads; the model can't be used afterwards."""
        if getattr(self, "engine", None):
            self.library.engine_free(self.engine)
            self.engine = None

    def __del__(self) -> None:
        self.close()


class NativeRows:
    """``sampling.Rows`` by the library, on an engine's threads."""

    def __init__(self, library: ctypes.CDLL, engine: int) -> None:
        self._library, self._engine = library, engine

    def best(self, logits: torch.Tensor) -> tuple[F32, I32]:
        logits = logits.contiguous()
        rows, vocab = logits.shape
        values: F32 = np.empty(rows, np.float32)
        tokens: I32 = np.empty(rows, np.int32)
        self._library.rows_best(self._engine, logits.data_ptr(), rows, vocab, values.ctypes.data, tokens.ctypes.data)
        return values, tokens

    def draw(self, logits: torch.Tensor, which: I32, temperature: F32, first: U32, second: U32) -> I32:
        logits, tokens = logits.contiguous(), np.empty(len(which), np.int32)
        arrays = (which, temperature, first, second, tokens)
        self._library.rows_draw(
            self._engine, logits.data_ptr(), len(which), logits.shape[1], *(array.ctypes.data for array in arrays)
        )
        return tokens

    def largest(self, logits: torch.Tensor, which: I32, temperature: F32, count: int) -> tuple[F32, I32, F64]:
        logits = logits.contiguous()
        values: F32 = np.empty((len(which), count), np.float32)
        tokens: I32 = np.empty((len(which), count), np.int32)
        mass: F32 = np.empty(len(which), np.float32)
        self._library.rows_largest(
            self._engine, logits.data_ptr(), len(which), logits.shape[1], which.ctypes.data,
            temperature.ctypes.data, count, values.ctypes.data, tokens.ctypes.data, mass.ctypes.data,
        )  # fmt: skip
        return values, tokens, mass.astype(np.float64)
