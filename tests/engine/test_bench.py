"""``runtime bench`` as a process, on a tiny model. The figures are the machine's business; that they fit is ours."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tinykit import tiny_model

ROOT = Path(__file__).parents[2]
SMALL = ("--set", "engine.device=cpu", "--set", "engine.threads=1", "--set", "engine.kv_tokens=4096")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "runtime", "bench", *arguments, *SMALL],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'http'}", "HOME": str(Path.home()), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def test_everything_as_json(model: Path) -> None:
    done = bench(str(model), "--dummy", "--json", "--requests", "5", "--input", "20", "--output", "8")
    assert (done.returncode, done.stderr) == (0, "")
    said = json.loads(done.stdout)
    figures = {bench: {name: f["value"] for name, f in many.items()} for bench, many in said["benches"].items()}
    throughput, latency, startup = (figures[bench] for bench in ("throughput", "latency", "startup"))
    assert (throughput["requests"], throughput["prompt tokens"], throughput["output tokens"]) == (5, 100, 40)
    assert throughput["output"] == pytest.approx(40 / throughput["time"])
    assert throughput["prompt and output"] == pytest.approx(140 / throughput["time"])
    assert throughput["steps"] >= 8 and throughput["retractions"] == 0
    assert latency["output"] == pytest.approx(1000 / latency["time per token"])
    parts = [seconds for name, seconds in startup.items() if name.startswith("engine") and "all" not in name]
    assert startup["engine: all of this"] == pytest.approx(sum(parts)) and len(parts) > 3
    served = [startup[f"runtime serve: {moment}"] for moment in ("port open", "ready", "first token")]
    assert served == sorted(served)
    assert "%" in said["benches"]["throughput"]["output"]["note"]
    assert any(note.startswith("The limit") and "GB/s" in note for note in said["notes"])


def test_a_table_for_a_model_that_is_nothing_but_a_configuration(model: Path, tmp_path: Path) -> None:
    shutil.copy(model / "config.json", tmp_path)
    done = bench(
        str(tmp_path), "--dummy", "--only", "throughput", "--only", "startup", "--requests", "2", "--output", "9"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert all(word in done.stdout for word in ("throughput", "startup", "of the limit", "no tokenizer"))
    assert "latency" not in done.stdout


def test_the_same_requests_as_everyone(model: Path) -> None:
    """Seed 0 draws the lengths that other engines' figures are about."""
    done = bench(str(model), "--dummy", "--json", "--only", "throughput", "--requests", "1")
    figures = json.loads(done.stdout)["benches"]["throughput"]
    assert (figures["prompt tokens"]["value"], figures["output tokens"]["value"]) == (964, 724)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--requests", "0"), "at least 1"),
        (("--only", "speed"), "invalid choice"),
        (("--dummy", "--input", "2000", "--output", "100"), "context of 2048"),
        (("--dummy", "--set", "engine.tensor_parallel=2"), "tensor_parallel = 1"),
        ((), "safetensors"),
        (("--host", "::1"), "unrecognized"),
    ],
)
def test_what_cannot_be_measured_is_a_sentence(model: Path, arguments: tuple[str, ...], words: str) -> None:
    done = bench(str(model), *arguments)
    assert done.returncode in (1, 2) and done.stdout == ""
    assert words in done.stderr and "Traceback" not in done.stderr
