"""What this machine's processor and memory are."""

import os
from functools import cache
from pathlib import Path


@cache
def cpu_flags() -> frozenset[str]:
    """The instruction sets the kernel reports for this processor; empty where it doesn't say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.split()[2:]) for line in lines if line.startswith(("flags", "Features"))), frozenset())


def total_bytes() -> int:
    """The machine's memory."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return 0


def usable_cores() -> int:
    """The cores this process may run on."""
    return len(os.sched_getaffinity(0))
