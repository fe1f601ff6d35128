"""Weights from a model folder's safetensors, named and fused the way our decoder wants them.

The files are mapped, not read: a fused tensor (qkv, gate_up) is allocated once in its final dtype and place and its
parts are copied from the mapping, so that loading needs the weights' own memory and no more. ``load`` is a generator:
a runner may quantize, repack or upload each tensor before the next one is built.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from runtime.models.config import ModelConfig, ModelError

Progress = Callable[[str, int, int], None]  # phase, bytes done, bytes in all

_FLOATS = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True, slots=True)
class Shard:
    """Which slice of the model a rank holds: heads and MLP columns are cut in ``size`` parts."""

    rank: int = 0
    size: int = 1


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of the checkpoint, and the cut that a rank takes of it (``dim`` None = whole)."""

    name: str
    shape: tuple[int, ...]
    dim: int | None = None


@dataclass(frozen=True, slots=True)
class Param:
    """One tensor of ours: the checkpoint's parts one below the other (dim 0), each cut by the shard."""

    name: str
    parts: tuple[Part, ...]
    matrix: bool = False  # a linear layer's weight: what quantization applies to

    def shape(self, shard: Shard) -> tuple[int, ...]:
        rows = [_cut(part, shard) for part in self.parts]
        return (sum(shape[0] for shape in rows), *rows[0][1:])

    def numel(self, shard: Shard) -> int:
        count = 1
        for size in self.shape(shard):
            count *= size
        return count


def _cut(part: Part, shard: Shard) -> tuple[int, ...]:
    return tuple(size // shard.size if dim == part.dim else size for dim, size in enumerate(part.shape))


def plan(config: ModelConfig, shard: Shard = Shard()) -> list[Param]:
    """All tensors of the model in the order of use. Names: ``embed``, ``layers.N.{attn_norm, qkv, qkv_bias, q_norm,
    k_norm, o, o_bias, mlp_norm, gate_up, gate_up_bias, down, down_bias}``, ``norm``, ``head`` (absent when tied).

    Raises ModelError when heads or MLP can't be cut evenly.
    """
    for what, size in (("kv_heads", config.kv_heads), ("mlp_size", config.mlp_size)):
        if size % shard.size:
            raise ModelError(f"tensor_parallel = {shard.size} does not divide the model's {what} ({size})")
    hidden, q, kv, mlp = config.hidden_size, config.q_size, config.kv_size, config.mlp_size
    vocab = (config.vocab_size, hidden)
    params = [Param("embed", (Part("model.embed_tokens.weight", vocab),))]
    for i in range(config.layers):
        attn, ffn = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."

        def add(name: str, *parts: Part, matrix: bool = False, layer: int = i) -> None:
            params.append(Param(f"layers.{layer}.{name}", parts, matrix))

        def rows(prefix: str, kind: str, *named: tuple[str, int], cut: bool = True) -> tuple[Part, ...]:
            tail = (hidden,) if kind == "weight" else ()
            return tuple(Part(f"{prefix}{name}.{kind}", (size, *tail), 0 if cut else None) for name, size in named)

        qkv, gate_up = (("q_proj", q), ("k_proj", kv), ("v_proj", kv)), (("gate_proj", mlp), ("up_proj", mlp))
        add("attn_norm", Part(f"model.layers.{i}.input_layernorm.weight", (hidden,)))
        add("qkv", *rows(attn, "weight", *qkv), matrix=True)
        if config.qkv_bias:
            add("qkv_bias", *rows(attn, "bias", *qkv))
        if config.qk_norm:
            add("q_norm", Part(f"{attn}q_norm.weight", (config.head_dim,)))
            add("k_norm", Part(f"{attn}k_norm.weight", (config.head_dim,)))
        add("o", Part(f"{attn}o_proj.weight", (hidden, q), 1), matrix=True)
        if config.o_bias:
            add("o_bias", *rows(attn, "bias", ("o_proj", hidden), cut=False))
        add("mlp_norm", Part(f"model.layers.{i}.post_attention_layernorm.weight", (hidden,)))
        add("gate_up", *rows(ffn, "weight", *gate_up), matrix=True)
        if config.mlp_bias:
            add("gate_up_bias", *rows(ffn, "bias", *gate_up))
        add("down", Part(f"{ffn}down_proj.weight", (hidden, mlp), 1), matrix=True)
        if config.mlp_bias:
            add("down_bias", *rows(ffn, "bias", ("down_proj", hidden), cut=False))
    params.append(Param("norm", (Part("model.norm.weight", (hidden,)),)))
    if not config.tied_head:
        params.append(Param("head", (Part("lm_head.weight", vocab),), matrix=True))
    return params


class Checkpoint:
    """The tensors of a folder's safetensors files, by name, mapped lazily. Raises ModelError, naming file and tensor.

    Use as a context manager; tensors taken from it stay valid afterwards.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ModelError(f"the model folder {self.folder} does not exist; give a folder that holds the weights")
        self._close = ExitStack()
        self._open: dict[str, Any] = {}
        self._file_of = self._index()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self._close.close()
        self._open.clear()

    def _index(self) -> dict[str, str]:
        index, single = self.folder / "model.safetensors.index.json", self.folder / "model.safetensors"
        if index.exists():
            try:
                weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                files = {str(name): str(file) for name, file in weight_map.items()}
            except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
                raise ModelError(f"{index} is not a safetensors index ({error!r}); download the model again") from None
            missing = sorted({file for file in files.values() if not (self.folder / file).is_file()})
            if missing:
                raise ModelError(
                    f"{self.folder} lacks {', '.join(missing)}, named in {index.name}; download the model again"
                )
            return files
        if not single.exists():
            raise ModelError(
                f"{self.folder} holds neither model.safetensors nor model.safetensors.index.json; "
                "give a folder with safetensors weights"
            )
        return dict.fromkeys(self._file(single.name).keys(), single.name)

    def _file(self, name: str) -> Any:
        if name not in self._open:
            path = self.folder / name
            try:
                self._open[name] = self._close.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError, ValueError) as error:
                raise ModelError(
                    f"{path} ({path.stat().st_size} bytes) is truncated or corrupt ({error}); download the model again"
                ) from None
        return self._open[name]

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The named tensor as stored (a view of the mapping), checked to be a float tensor of ``shape``."""
        if name not in self._file_of:
            raise ModelError(f"{self.folder} lacks the tensor {name}; the checkpoint is incomplete or of another model")
        file = self._file_of[name]
        try:
            view = self._file(file).get_slice(name)
            given, dtype = tuple(view.get_shape()), view.get_dtype()
        except SafetensorError:
            raise ModelError(
                f"{self.folder / file} lacks the tensor {name} that the index places there; download the model again"
            ) from None
        if given != shape:
            raise ModelError(
                f"{self.folder / file}: the tensor {name} has shape {list(given)}, but config.json means {list(shape)}"
            )
        if dtype not in _FLOATS:
            raise ModelError(
                f"{self.folder / file}: the tensor {name} is stored as {dtype}; only float weights are supported"
            )
        tensor = self._file(file).get_tensor(name)
        assert isinstance(tensor, torch.Tensor)
        return tensor


def load(
    folder: Path | str,
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    device: torch.device | str = "cpu",
    shard: Shard = Shard(),
    progress: Progress | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields ``plan``'s tensors by name, in ``dtype`` on ``device``. Raises ModelError before the first is allocated
    where a file or tensor is missing or of the wrong shape."""
    params = plan(config, shard)
    with Checkpoint(folder) as checkpoint:
        for param in params:
            for part in param.parts:
                checkpoint.tensor(part.name, part.shape)
        done, total = 0, weight_bytes(config, dtype, shard)
        for param in params:
            out = torch.empty(param.shape(shard), dtype=dtype, device=device)
            row = 0
            for part in param.parts:
                source = checkpoint.tensor(part.name, part.shape)
                if part.dim is not None and shard.size > 1:
                    source = source.chunk(shard.size, part.dim)[shard.rank]
                out[row : row + source.shape[0]].copy_(source)
                row += source.shape[0]
            yield param.name, out
            done += out.numel() * out.element_size()
            if progress is not None:
                progress("weights", done, total)


def dummy(
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    device: torch.device | str = "cpu",
    shard: Shard = Shard(),
    seed: int = 0,
    progress: Progress | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same tensors with random values from the configuration alone: for benchmarks and tests."""
    generator = torch.Generator(device).manual_seed(seed)
    done, total = 0, weight_bytes(config, dtype, shard)
    for param in plan(config, shard):
        shape = param.shape(shard)
        if param.name.endswith("norm"):
            out = torch.ones(shape, dtype=dtype, device=device)
        else:
            scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.02
            out = torch.empty(shape, dtype=dtype, device=device)
            # By rows: a whole embedding in float32 would double the memory for nothing.
            for rows in torch.split(out, 4096):
                rows.copy_(torch.randn(rows.shape, generator=generator, device=device) * scale)
        yield param.name, out
        done += out.numel() * out.element_size()
        if progress is not None:
            progress("weights", done, total)


def weight_bytes(
    config: ModelConfig,
    dtype: torch.dtype,
    shard: Shard = Shard(),
    *,
    matrix_bytes: float | None = None,
) -> int:
    """Memory of the weights; ``matrix_bytes`` is what a quantized linear layer takes per weight (default: dtype's)."""
    each = dtype.itemsize
    return sum(
        int(param.numel(shard) * (each if matrix_bytes is None or not param.matrix else matrix_bytes))
        for param in plan(config, shard)
    )


def available_bytes() -> int:
    """Memory this process may still take: the kernel's estimate, bounded by the control group's limit.

    Cached file pages in the group count as free: the kernel drops them before it refuses memory.
    """
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        stats = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return min(available, max(limit - used + int(stats.get("file", 0)), 0))
    except (OSError, ValueError):  # no control group of ours, or one without a limit ("max")
        return available


def check_memory(need_bytes: int, what: str, available: int | None = None) -> None:
    """Raises ModelError, with both numbers, where ``what`` needs more memory than there is."""
    available = available_bytes() if available is None else available
    if need_bytes > available:
        raise ModelError(
            f"{what} takes {need_bytes / 2**30:.2f} GiB, but only {available / 2**30:.2f} GiB of memory is free; "
            "take a smaller model, a smaller dtype or quantization, or free memory"
        )
