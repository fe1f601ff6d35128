"""What launchers share."""

from typing import Any


def options(warps: int, *, stages: int = 1, pdl: bool = False, registers: int | None = None) -> dict[str, Any]:
    """Launch options of a kernel; ``launch_pdl`` and ``maxnreg`` only where wanted: the interpreter knows neither."""
    chosen: dict[str, Any] = {"num_warps": warps, "num_stages": stages}
    if pdl:
        chosen["launch_pdl"] = True
    if registers is not None:
        chosen["maxnreg"] = registers
    return chosen
