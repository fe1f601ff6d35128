"""The CPU in the GPU's place: kernels run under Triton's interpreter, a "graph" is the function that was captured."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch


class NoEvent:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class InterpretedDevice:
    def __init__(self) -> None:
        self.on = torch.device("cpu")
        self.overlapped = False
        self.multiprocessors = 2
        self.captured = 0
        self.free = self.total = 1 << 30

    def stream(self) -> AbstractContextManager[object]:
        return nullcontext()

    def event(self) -> NoEvent:
        return NoEvent()

    def pinned(self, words: int) -> torch.Tensor:
        return torch.zeros(words, dtype=torch.int32)

    def memory(self) -> tuple[int, int]:
        return self.free, self.total

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1

        def replay() -> None:
            with torch.inference_mode():
                run()

        return replay

    def graph_bytes(self) -> int:
        return 0

    def close(self) -> None: ...
