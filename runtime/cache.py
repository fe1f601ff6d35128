"""The user's cache of models: each entry is a folder that is either complete or not there.

An entry is built in a temporary folder next to it and renamed when it is whole. A file lock lets one process build
and the others wait; the kernel drops the lock of a process that dies, and the next one sweeps what it left.
"""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from runtime.names import SourceError

Progress = Callable[[str, int, int | None], None]
"""phase, done, total (None = unknown); what it raises stops the work and is passed on."""

_MANIFEST = "manifest.json"
_LOCK_POLL_S = 0.05


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/runtime-serve, or ~/.cache/runtime-serve."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "runtime-serve"


def find_entry(key: str, made_from: dict[str, Any]) -> Path | None:
    """The entry, if it is there, whole, and made from this."""
    entry = _entry(key)
    try:
        manifest = json.loads((entry / _MANIFEST).read_bytes())
        same = manifest["made_from"] == made_from
        whole = all((entry / name).stat().st_size == size for name, size in manifest["files"].items())
    except (OSError, ValueError, KeyError):
        return None
    return entry if same and whole else None


def read_manifest(folder: Path) -> dict[str, Any]:
    """What an entry's manifest says; empty for a folder that is none."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_bytes())
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def build_once(
    key: str, made_from: dict[str, Any], build: Callable[[Path], dict[str, Any]], progress: Progress
) -> Path:
    """The entry ``key``; where it is missing or made from something else, ``build(folder)`` fills a new one.

    What ``build`` returns is kept in the manifest. Blocks; one process builds, others wait for it.
    """
    if entry := find_entry(key, made_from):
        return entry
    entry = _entry(key)
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with _locked(entry, progress):
            if found := find_entry(key, made_from):
                return found
            _sweep(entry)
            _build(entry, made_from, build)
            return entry
    except OSError as error:
        raise SourceError(_disk_trouble(error)) from error


def _entry(key: str) -> Path:
    return cache_folder() / "models" / key


def _build(entry: Path, made_from: dict[str, Any], build: Callable[[Path], dict[str, Any]]) -> None:
    folder = _temporary(entry)
    folder.mkdir()
    try:
        notes = build(folder)
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
        manifest = {"made_from": made_from, "files": sizes, **notes}
        (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        for path in [*files, folder / _MANIFEST]:
            _to_disk(path)
        if entry.exists():
            # Not made from the same, or damaged. A server that has it open keeps its mapping of the files.
            entry.rename(_temporary(entry))
        folder.rename(entry)
    finally:
        _sweep(entry)


def _to_disk(path: Path) -> None:
    """A power cut after the rename must not leave an entry that only looks whole."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary(entry: Path) -> Path:
    return entry.with_name(f".{entry.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def _sweep(entry: Path) -> None:
    """Remove temporary folders of this entry. Only the holder of its lock makes them, so nobody uses them."""
    for leftover in entry.parent.glob(f".{entry.name}.*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextlib.contextmanager
def _locked(entry: Path, progress: Progress) -> Iterator[None]:
    # The lock file stays: removing it would let two processes hold locks on two files of one name.
    descriptor = os.open(entry.with_name(f".{entry.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress("waiting for another process that prepares this model", 0, None)
                time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _disk_trouble(error: OSError) -> str:
    folder = cache_folder()
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk of the cache folder {folder} is full: free some space, or set XDG_CACHE_HOME to another disk"
    return f"the cache folder {folder} can't be used ({error}): set XDG_CACHE_HOME to a folder that can be written"
