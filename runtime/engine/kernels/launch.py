"""What launchers share."""

from typing import Any


def options(warps: int, *, stages: int = 1, pdl: bool = False) -> dict[str, Any]:
    """Launch options of a kernel; ``launch_pdl`` only where wanted, since the interpreter does not know it."""
    chosen: dict[str, Any] = {"num_warps": warps, "num_stages": stages}
    if pdl:
        chosen["launch_pdl"] = True
    return chosen
