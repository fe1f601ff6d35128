"""The command line, as a process."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from sourcekit import ROOT, plain_folder
from textkit import model_folder

from runtime.engine import native


def runtime(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "runtime", *arguments],
        cwd=cwd,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'http'}", "HOME": str(Path.home()), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_and_version() -> None:
    assert "serve" in runtime("--help").stdout
    assert runtime("--version").stdout.startswith("runtime 0.")
    for command in ("serve", "check", "config"):
        said = runtime(command, "--help").stdout
        assert "SECTION.KEY=VALUE" in said
        assert "hub id" in said
    assert runtime().returncode == 2


def test_config_prints_what_would_run(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text('[model]\nsource = "here"\n[http]\nport = 5\n')
    done = runtime("config", "m.toml", "--set", "engine.threads=3", "--host", "::1", cwd=tmp_path)
    found = tomllib.loads(done.stdout)
    assert (found["model"]["source"], found["engine"]["threads"]) == ("here", 3)
    assert (found["http"]["host"], found["http"]["port"]) == ("::1", 5)
    assert tomllib.loads(runtime("config", str(tmp_path)).stdout)["model"]["source"] == str(tmp_path)
    assert tomllib.loads(runtime("config", "owner/name").stdout)["model"]["name"] == "owner/name"


@pytest.mark.parametrize("command", ["serve", "check", "config"])
def test_a_wrong_configuration_is_exit_code_2_and_sentences(tmp_path: Path, command: str) -> None:
    (tmp_path / "m.toml").write_text("[http]\nprot = 5\n[engine]\nthreads = 'x'")
    done = runtime(command, "m.toml", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "runtime: m.toml can't be used:",
        "  http.prot: there is no such key; did you mean http.port?",
        '  engine.threads: "x" (string) was given; allowed: a whole number, at least 0',
    ]
    assert runtime(command, "none.toml", cwd=tmp_path).returncode == 2


def test_check(tmp_path: Path) -> None:
    done = runtime("check", str(model_folder()))
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 weight file(s), 269 MB, and a tokenizer" in done.stdout
    assert "on a CPU model.quantization is int8" in done.stdout or native.library() is None
    done = runtime("check", str(model_folder()), "--set", "model.dtype=float32")
    assert done.stdout.endswith("on a CPU model.quantization is none\n")
    done = runtime("check", "--set", "model.context_tokens=9000")
    assert done.returncode == 1
    assert "8192" in done.stderr
    folder = plain_folder(tmp_path / "model")
    assert runtime("check", str(folder)).returncode == 1  # its config.json is empty
    (folder / "model.safetensors").write_bytes(b"cut")
    done = runtime("check", str(folder))
    assert done.returncode == 1
    assert "cut off" in done.stderr
    assert "Traceback" not in done.stderr
    assert runtime("check", "--set", f"model.source={tmp_path / 'none'}").returncode == 1
