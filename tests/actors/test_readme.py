"""Every example of the README runs and prints what the README says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import actors
from actors import inspect as actors_inspect
from tests.actors import targets
from tests.actors.helpers import process, until

README = Path(actors.__file__).with_name("README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.S)
TESTS = Path(__file__).parent


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example(number: int, tmp_path: Path) -> None:
    code, expected = EXAMPLES[number]
    script = tmp_path / "example.py"
    script.write_text(code)
    root = str(Path(actors.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-W", "error", script], env={"PYTHONPATH": root}, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.returncode) == (expected, 0), done.stderr


def test_there_are_examples_and_the_guarantees_name_real_tests() -> None:
    assert len(EXAMPLES) == 3 and README.count("```python") == 3
    table = README[README.index("## What is guaranteed") : README.index("And what is not")]
    file = ""
    for name, test in re.findall(r"`(\w+\.py)?(?:::(\w+))?`", table):
        file = name or file
        assert f"def {test}" in (TESTS / file).read_text() or f"{test} =" in (TESTS / file).read_text()


async def test_inspection_from_outside() -> None:
    """`python -m actors.inspect` sees the whole tree, also what is inside its processes."""
    name = f"test-{id(object())}"
    inspector = actors.ChildSpec("inspector", "actors.inspect:inspector", (name,))
    async with actors.open_supervisor([inspector, process("n", targets.nested)]) as sup:
        import anyio

        async def ask(*words: str) -> str:
            return await anyio.to_thread.run_sync(actors_inspect.ask, name, *words)

        assert sup.ref("inspector").value == name
        tree = await until(lambda: ask())
        assert "inner (process)" in tree and "inspector (task)" in tree
        assert '"path":"n/inner"' in await ask("json")
        assert "sleep_forever" in await ask("stacks", "n/task") or "in inbox" in await ask("stacks", "n/task")
        assert "error: there is no actor" in await ask("stacks", "nowhere")
        assert "error: known are" in await ask("nonsense")
