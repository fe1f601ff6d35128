"""Our own CPU kernels: a whole step of the model in one call into a small C++ library.

The library is compiled once, for this machine, by ``python -m runtime.engine.native build`` (a set-up step; nothing is
compiled at start) and found by a key of its sources and this CPU's instruction sets, so that a library built elsewhere
is never run here. Without it the runner takes the torch path: the same results, slower.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from runtime.engine.cpu_info import cpu_flags

SOURCES = ("vec.h", "pool.h", "linear.h", "attention.h", "sampling.h", "step.cpp")
_FOLDER = Path(__file__).parent
_FLAGS = (
    "-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread", "-fno-math-errno", "-ffp-contract=fast",
)  # fmt: skip
_COMPILERS = ("c++", "g++", "clang++")
_TIMEOUT_S = 300


class BuildError(Exception):
    """The kernels could not be compiled. The message says why and what to do."""


def key() -> str:
    """Names a build: sources, flags, processor."""
    digest = hashlib.sha256(" ".join((*_FLAGS, platform.machine(), *sorted(cpu_flags()))).encode())
    for name in SOURCES:
        digest.update((_FOLDER / name).read_bytes())
    return digest.hexdigest()[:16]


def folders() -> tuple[Path, ...]:
    """Where builds are looked for: the user's cache, then the package itself."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    home = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return home / "runtime-serve" / "native", _FOLDER / "build"


def find() -> Path | None:
    """The library built for this machine from these sources, if there is one."""
    name = f"{key()}.so"
    return next((folder / name for folder in folders() if (folder / name).is_file()), None)


def build(folder: Path | None = None, compiler: str | None = None, extra_flags: tuple[str, ...] = ()) -> Path:
    """Compiles the library into ``folder`` (default: the user's cache) and returns its path. Raises BuildError.

    Takes about ten seconds; an interrupted build leaves nothing.
    """
    compiler = compiler or os.environ.get("CXX") or next(filter(None, map(shutil.which, _COMPILERS)), None)
    if not compiler:
        raise BuildError("no C++ compiler was found: install g++ or clang++, or set CXX; serving works without, slower")
    folder = folder or folders()[0]
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{key()}.so"
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        output = Path(scratch) / "library.so"
        command = [compiler, *_FLAGS, *extra_flags, str(_FOLDER / "step.cpp"), "-o", str(output)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BuildError(f"the compiler {compiler} could not be run: {error}") from None
        if done.returncode:
            raise BuildError(f"{compiler} failed with exit status {done.returncode}:\n{done.stderr[-2000:]}")
        output.replace(target)
    return target


def load(path: Path) -> ctypes.CDLL:
    """Opens a built library and declares its functions. Raises OSError."""
    library = ctypes.CDLL(str(path))
    pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    for name, result, arguments in (
        ("engine_new", pointer, [i32]),
        ("engine_free", None, [pointer]),
        ("engine_workspace_bytes", i64, [pointer]),
        ("linear_bytes", i64, [i32, i32, i32, i32]),
        ("linear_pack", None, [pointer, pointer, pointer, i32, i32, i32, i32, i32]),
        ("step_run", i32, [pointer, pointer, pointer]),
        ("head_run", i32, [pointer, pointer, pointer, i32, pointer]),
        ("rows_best", None, [pointer, pointer, i32, i32, pointer, pointer]),
        ("rows_draw", None, [pointer, pointer, i32, i32, *[pointer] * 5]),
        ("rows_largest", None, [pointer, pointer, i32, i32, pointer, pointer, i32, pointer, pointer, pointer]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@cache
def library() -> ctypes.CDLL | None:
    """The library for this machine, or None where it was not built or can't be opened."""
    path = find()
    try:
        return load(path) if path else None
    except OSError:
        return None
