"""Fetching one wheel from the package index that the user's pip is set up for.

pip does it, in a process of its own: it knows the user's index, proxy, certificates and credentials. Only wheels are
taken, because unpacking a source distribution may run its code.
"""

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from runtime.cache import Progress
from runtime.names import KNOWN_PACKAGES, PackageRef, SourceError

_POLL_S = 0.1
_CHUNK_BYTES = 1 << 20

# Runs pip and ends with us: we hold the other end of its standard input and never write to it.
_PIP_UNTIL_EOF = """
import os, runpy, sys, threading
threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
sys.argv[0] = "pip"
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""

_OFFLINE = re.compile(
    r"NewConnectionError|ConnectTimeout|ReadTimeout|NameResolutionError|ProxyError|ConnectionError|Max retries exceeded"
    r"|Connection (?:refused|reset)|Network is unreachable|Temporary failure in name resolution"
)
_VERSIONS = re.compile(r"from versions: ([^)]*)\)")


def fetch_wheel(package: PackageRef, folder: Path, progress: Progress) -> tuple[Path, str]:
    """Download the package's wheel into ``folder``; its path and sha256. Blocks.

    A digest that differs from the known one is an error. If ``progress`` raises, pip is ended and the error passed on.
    """
    scratch = folder / "pip"
    scratch.mkdir()
    known = KNOWN_PACKAGES.get(package.requirement)
    with _pip(package, folder, scratch) as pip:
        while pip.poll() is None:
            progress("download", _largest_file_bytes(scratch), known.size_bytes if known else None)
            # A wait that a child's exit ends at once would need a thread; a tenth of a second is no loss here.
            with contextlib.suppress(subprocess.TimeoutExpired):
                pip.wait(_POLL_S)
        words = (scratch / "log").read_text(encoding="utf-8", errors="replace")
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise SourceError(_trouble(package, words))
    shutil.rmtree(scratch)
    (wheel,) = wheels
    digest = _sha256(wheel, progress)
    if known and digest != known.sha256:
        raise SourceError(
            f"the file {wheel.name} that pip fetched for {package.requirement} has the sha256 {digest}, "
            f"but {known.sha256} is right; it was thrown away: run `pip cache purge`, check which index pip uses, "
            "and start again"
        )
    return wheel, digest


@contextlib.contextmanager
def _pip(package: PackageRef, folder: Path, scratch: Path) -> Iterator[subprocess.Popen[bytes]]:
    arguments = ["download", "--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check"]
    arguments += ["--retries", "1", "--progress-bar", "off", "--dest", str(folder), package.requirement]
    # pip downloads into its temporary folder first; there we can see how far it is.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with (scratch / "log").open("wb") as log:
        pip = subprocess.Popen(
            [sys.executable, "-c", _PIP_UNTIL_EOF, *arguments],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,  # the terminal's Ctrl-C is for us
        )
    try:
        yield pip
    finally:
        assert pip.stdin is not None
        pip.stdin.close()
        if pip.poll() is None:
            pip.kill()
        pip.wait()


def _largest_file_bytes(folder: Path) -> int:
    size = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                size = max(size, os.stat(os.path.join(parent, name)).st_size)
    return size


def _sha256(path: Path, progress: Progress) -> str:
    digest = hashlib.sha256()
    total = path.stat().st_size
    done = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress("verify", done, total)
    return digest.hexdigest()


def _trouble(package: PackageRef, words: str) -> str:
    """What pip's last words mean, and what to do."""
    wanted = package.requirement
    if "No module named pip" in words:
        return (
            f"{wanted} can't be fetched, because pip is not installed for {sys.executable}: run "
            "`python -m ensurepip`, or set model.source to a model folder or a .gguf file"
        )
    if _OFFLINE.search(words):
        return (
            f"{wanted} is not in the cache and the package index can't be reached: connect to the network once, "
            "or set model.source to a model folder or a .gguf file on this machine"
        )
    versions = _VERSIONS.search(words)
    if versions and versions[1] not in ("", "none"):
        return f"there is no {wanted} on the package index; its versions are {versions[1]}: change model.source"
    if "No matching distribution" in words:
        return (
            f"pip finds no wheel of {wanted}: check the name in model.source, and which index pip uses "
            "(`pip config list`)"
        )
    last = [line for line in words.splitlines() if line.strip()][-1:] or ["nothing"]
    return f"pip could not fetch {wanted}; its last words were: {last[0].strip()}"
