"""The few things the GPU runner asks of a device besides running kernels. Tests put the CPU in its place, where the
kernels run under Triton's interpreter, so that the whole runner is tested without a GPU."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Event(Protocol):
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Device(Protocol):
    """One device and the one stream on which everything runs, in order."""

    on: torch.device
    overlapped: bool  # programmatic dependent launch
    multiprocessors: int

    def stream(self) -> AbstractContextManager[object]: ...

    def event(self) -> Event: ...

    def pinned(self, words: int) -> torch.Tensor:
        """int32 [words] in host memory that copies can read and write while the host goes on."""
        ...

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes, by the driver."""
        ...

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record what ``run`` launches; returns what replays it on the stream."""
        ...

    def graph_bytes(self) -> int:
        """Device memory that captured graphs hold."""
        ...

    def close(self) -> None:
        """Wait until nothing runs any more and give cached memory back."""
        ...


class CudaDevice:
    """One NVIDIA GPU through torch. All graphs share one memory pool: they never run at the same time."""

    def __init__(self, index: int = 0) -> None:
        self.on = torch.device("cuda", index)
        torch.cuda.set_device(self.on)
        self.overlapped = torch.cuda.get_device_capability(self.on) >= (9, 0)
        self.multiprocessors = torch.cuda.get_device_properties(self.on).multi_processor_count
        self._stream = torch.cuda.Stream(self.on)  # type: ignore[no-untyped-call]
        self._pool: Any = None
        self._graph_bytes = 0

    def stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def event(self) -> Event:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def pinned(self, words: int) -> torch.Tensor:
        return torch.zeros(words, dtype=torch.int32, pin_memory=True)

    def memory(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self.on)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        before = self.memory()[0]
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with self.stream():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            finally:
                graph.capture_end()
        self._graph_bytes += max(before - self.memory()[0], 0)
        return graph.replay

    def graph_bytes(self) -> int:
        return self._graph_bytes

    def close(self) -> None:
        torch.cuda.synchronize(self.on)
        torch.cuda.empty_cache()
