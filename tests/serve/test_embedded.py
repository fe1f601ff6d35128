"""The runtime inside other programs: on trio and asyncio, with and without HTTP. It leaves and touches nothing."""

import json
import os
import signal
import threading
import urllib.request
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from servekit import MODEL, descendants

from runtime import BadRequest, Config, Engine, Runtime, load_config, open_runtime
from runtime.sources import resolve

pytestmark = pytest.mark.anyio
SETTINGS = ("engine.threads=1", "engine.kv_tokens=8192", "model.dtype=float32", "http.port=0")
STORY = "Once upon a time there was a small town by the sea, and in it"


@pytest.fixture(params=["trio", "asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def others() -> set[int]:
    """What other tests have running meanwhile."""
    return descendants(os.getpid())


@pytest.fixture
def config() -> Config:
    return load_config(None, SETTINGS)


def ask(runtime: Runtime) -> str:
    """One completion over HTTP, from a thread."""
    body = {"model": MODEL, "prompt": STORY, "max_tokens": 8, "temperature": 0}
    url = f"{runtime.url}/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        text: str = json.loads(reply.read())["choices"][0]["text"]
        return text


async def test_with_http(config: Config, others: set[int]) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)}
    async with open_runtime(config, http=True) as runtime:
        assert runtime.info.name == MODEL
        whole = await runtime.complete(STORY, max_tokens=8, temperature=0.0)
        assert await anyio.to_thread.run_sync(ask, runtime) == whole.text
        assert handlers == {number: signal.getsignal(number) for number in handlers}
        assert descendants(os.getpid()) - others
    assert not descendants(os.getpid()) - others


async def test_without_http(config: Config, others: set[int]) -> None:
    async with open_runtime(config) as runtime:
        assert runtime.url is None
        texts: dict[int, str] = {}

        async def one(number: int) -> None:
            async for delta in runtime.generate(STORY, max_tokens=8, temperature=0.0):
                texts[number] = texts.get(number, "") + delta.text

        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(one, number)
        assert len(set(texts.values())) == 1

        # A cancelled request is gone at once, and harms nobody.
        with anyio.CancelScope() as scope:
            async for _ in runtime.generate(STORY, max_tokens=4000, ignore_eos=True):
                scope.cancel()
        chat = await runtime.complete([{"role": "user", "content": "What is the capital of France?"}], max_tokens=12)
        assert chat.finish in ("stop", "length")
        with pytest.raises(BadRequest, match="maximum context length"):
            await runtime.complete(STORY, max_tokens=100_000)
    assert not descendants(os.getpid()) - others


async def test_an_error_in_the_block_stops_everything_and_comes_out(config: Config, others: set[int]) -> None:
    with pytest.raises(ZeroDivisionError):
        async with open_runtime(config):
            raise ZeroDivisionError
    assert not descendants(os.getpid()) - others


async def test_cancelling_a_start_leaves_nothing(config: Config, others: set[int]) -> None:
    with anyio.move_on_after(0.5) as scope:
        async with open_runtime(config):
            raise AssertionError("the model is not loaded in half a second")
    assert scope.cancelled_caught
    assert not descendants(os.getpid()) - others


async def test_a_failed_start_names_the_cause(tmp_path: Path, others: set[int]) -> None:
    import actors

    with pytest.raises(actors.ActorStartError, match=r"config\.json is missing") as caught:
        async with open_runtime(load_config(None, (*SETTINGS, f"model.source={tmp_path}"))):
            pass
    assert caught.value.path == "model"
    assert not descendants(os.getpid()) - others


def test_the_engine_in_a_script() -> None:
    before = threading.active_count()
    with Engine(None, *SETTINGS[:3]) as engine:
        first, second = engine.generate([STORY, "The capital of France is"], max_tokens=8, temperature=0.0)
        assert first.finish == second.finish == "length"
        assert "Paris" in second.text
        assert "".join(d.text for d in engine.stream(STORY, max_tokens=8, temperature=0.0)) == first.text
        stream = engine.stream(STORY, max_tokens=1000)
        next(stream)
        stream.close()
        assert engine.generate(STORY, max_tokens=8, temperature=0.0)[0].text == first.text
        with pytest.raises(BadRequest):
            engine.generate([[]], max_tokens=8)
    assert threading.active_count() <= before + 1
    assert resolve(engine.config.model.source).name == MODEL
