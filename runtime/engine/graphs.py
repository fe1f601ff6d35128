"""Decoding steps as CUDA graphs, one per batch size in steps of eight and per way to sample, captured when first met.

A graph reads everything that changes from fixed places on the device (the table's present step), so a replay is one
launch. Batches are padded to the next size; padding rows are beyond the step's row count and change nothing.
"""

import bisect
from collections.abc import Callable

from runtime.engine.device import Device


def sizes_for(most_rows: int) -> list[int]:
    """1, 2, 4, 8, 16, 24 ... 256, then by 32."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(288, most_rows + 32, 32)]
    return [size for size in sizes if size < most_rows] + [most_rows]


class Graphs:
    """``run(rows, sampled)`` launches a decoding step: with the plain sampler at its end, or up to the logits.

    ``prepare`` makes the present step one of no rows: a size is run once before it is captured, so that what is
    compiled, loaded or allocated at first use is there by then, and that run must change nothing.
    """

    def __init__(
        self, run: Callable[[int, bool], None], prepare: Callable[[], None], most_rows: int, device: Device
    ) -> None:
        self._run, self._prepare, self._device = run, prepare, device
        self._sizes = sizes_for(most_rows)
        self._graphs: dict[tuple[int, bool], Callable[[], None]] = {}

    def size_for(self, rows: int) -> int:
        return self._sizes[bisect.bisect_left(self._sizes, rows)]

    def ready(self, rows: int, sampled: bool) -> Callable[[], None]:
        """What replays a step of ``rows`` rows. Call before the step is uploaded: a capture clears the present one."""
        key = (self.size_for(rows), sampled)
        if key not in self._graphs:
            with self._device.stream():
                self._prepare()
                self._run(*key)
            self._graphs[key] = self._device.capture(lambda: self._run(*key))
        return self._graphs[key]

    def capture_all(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Capture the plain graphs of all sizes now, the largest first."""
        for done, size in enumerate(reversed(self._sizes)):
            self.ready(size, True)
            if progress is not None:
                progress(done + 1, len(self._sizes))
