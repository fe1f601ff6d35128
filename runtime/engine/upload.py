"""A checkpoint's weights onto a GPU at the rate of the page cache or the disk.

``safe_open`` reaches 5 GB/s: one thread, pageable memory. Here several threads read ranges of the files into pinned
buffers and start their copies to the device, each on a stream of its own, so that reading and copying overlap. The
parts of a fused tensor are read straight to their places in it.
"""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

import torch
from torch import Tensor

from runtime.models.config import ModelConfig, ModelError
from runtime.models.loader import Checkpoint, Param, Progress, Shard, load, plan, weight_bytes

_THREADS = 8
_CHUNK_BYTES = 16 << 20
_STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


@dataclass(slots=True, frozen=True)
class Range:
    """Bytes of a file, and the device bytes they belong to."""

    file: int
    offset: int
    to: Tensor  # uint8, one-dimensional


class _Files:
    """The checkpoint's files opened for reading, and where in them each tensor stands."""

    def __init__(self, folder: Path, close: ExitStack) -> None:
        index = folder / "model.safetensors.index.json"
        names = ["model.safetensors"]
        if index.exists():
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        self.fds: list[int] = []
        self.places: dict[str, tuple[int, int, int, torch.dtype]] = {}  # file, offset, bytes, stored dtype
        for number, name in enumerate(names):
            fd = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
            close.callback(os.close, fd)
            self.fds.append(fd)
            size = int.from_bytes(os.pread(fd, 8, 0), "little")
            for tensor, entry in json.loads(os.pread(fd, size, 8)).items():
                if tensor != "__metadata__":
                    start, end = entry["data_offsets"]
                    self.places[tensor] = (number, 8 + size + start, end - start, _STORED[entry["dtype"]])


def upload(
    folder: Path | str,
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    device: torch.device,
    shard: Shard | None = None,
    progress: Progress | None = None,
) -> dict[str, Tensor]:
    """``loader.plan``'s tensors by name, in ``dtype`` on ``device``.

    Raises ModelError, as ``loader.load`` does, before anything is allocated. Waits until all is in place. Columns cut
    by a shard are not contiguous in the file, and a CPU needs no copies: those go ``loader.load``'s way.
    """
    shard = shard or Shard()
    if device.type == "cpu" or shard.size > 1:
        return dict(load(folder, config, dtype, device=device, shard=shard, progress=progress))
    params = plan(config, shard)
    with Checkpoint(folder) as checkpoint:
        for param in params:
            for part in param.parts:
                checkpoint.tensor(part.name, part.shape)
    total = weight_bytes(config, dtype, shard)
    with ExitStack() as close:
        files = _Files(Path(folder), close)
        weights = {param.name: torch.empty(param.shape(shard), dtype=dtype, device=device) for param in params}
        converted: list[tuple[Tensor, Tensor]] = []  # (place, as stored)
        ranges = [piece for param in params for piece in _ranges(param, weights[param.name], files, converted, device)]
        _transfer(ranges, files.fds, device, progress, total)
        for place, stored in converted:
            place.copy_(stored)
    if progress is not None:
        progress("weights", total, total)
    return weights


def _ranges(
    param: Param, weight: Tensor, files: _Files, converted: list[tuple[Tensor, Tensor]], device: torch.device
) -> Iterator[Range]:
    row = 0
    for part in param.parts:
        file, offset, nbytes, stored = files.places[part.name]
        place = weight[row : row + part.shape[0]]
        row += part.shape[0]
        if stored != weight.dtype:
            source = torch.empty(part.shape, dtype=stored, device=device)
            converted.append((place, source))
            place = source
        flat = place.reshape(-1).view(torch.uint8)
        assert len(flat) == nbytes
        for at in range(0, nbytes, _CHUNK_BYTES):
            yield Range(file, offset + at, flat[at : at + _CHUNK_BYTES])


def _transfer(ranges: list[Range], fds: list[int], device: torch.device, progress: Progress | None, total: int) -> None:
    """Read and copy all ranges; the first error of a thread is raised here."""
    todo: SimpleQueue[Range] = SimpleQueue()
    for piece in ranges:
        todo.put(piece)
    done: SimpleQueue[int | Exception] = SimpleQueue()
    # Weights were allocated on the caller's stream: what that memory was used for before must have ended.
    torch.cuda.current_stream(device).synchronize()
    threads = [
        threading.Thread(target=_work, args=(todo, done, fds, device), name=f"upload-{i}", daemon=True)
        for i in range(min(_THREADS, len(ranges)))
    ]
    for thread in threads:
        thread.start()
    moved, last_told, failure = 0, 0, None
    for _ in range(len(ranges)):
        news = done.get()
        if isinstance(news, Exception):
            failure = news
            break
        moved += news
        if progress is not None and moved - last_told >= 1 << 28:
            last_told = moved
            progress("weights", min(moved, total), total)
    if failure is not None:
        while True:  # nobody takes up more work
            try:
                todo.get_nowait()
            except Empty:
                break
    for thread in threads:
        thread.join()
    if failure is not None:
        raise failure


def _work(todo: SimpleQueue[Range], done: SimpleQueue[int | Exception], fds: list[int], device: torch.device) -> None:
    """One thread: two pinned buffers, one stream. Ends with all its copies complete."""
    try:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        buffers = [torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        views = [memoryview(buffer.numpy().data) for buffer in buffers]
        free = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        turn = 0
        with torch.inference_mode(), torch.cuda.stream(stream):
            while True:
                try:
                    piece = todo.get_nowait()
                except Empty:
                    break
                free[turn].synchronize()
                n = len(piece.to)
                _read(fds[piece.file], views[turn][:n], piece.offset)
                piece.to.copy_(buffers[turn][:n], non_blocking=True)
                free[turn].record(stream)
                turn ^= 1
                done.put(n)
        stream.synchronize()
    except Exception as error:  # told to the thread that waits
        done.put(error)


def _read(fd: int, view: memoryview, offset: int) -> None:
    at = 0
    while at < len(view):
        n = os.preadv(fd, [view[at:]], offset + at)
        if not n:
            raise ModelError("a weights file ended while it was read; download the model again")
        at += n
