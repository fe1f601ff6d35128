"""The engine's doors for programs refuse what the engine could not survive, and serve on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from tinykit import SMALL, TOKENS, tiny_model

from runtime import open_runtime
from runtime.config import load_config
from runtime.messages import SamplingParams
from runtime.offline import Engine
from runtime.service import BadRequest

# What an embedder's slip may look like; each would have broken a step for everybody.
SLIPS: list[tuple[str, dict[str, Any]]] = [
    ("stop_token_ids", {"stop_token_ids": (len(TOKENS),), "min_tokens": 2}),
    ("logit_bias", {"logit_bias": {len(TOKENS): 5.0}}),
    ("top_k", {"top_k": 2**31}),
    ("temperature", {"temperature": -1.0}),
    ("top_p", {"top_p": 0.0}),
    ("seed", {"seed": 2**64}),
    ("max_tokens", {"max_tokens": 4096}),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with Engine(str(model), *SMALL) as engine:
        yield engine


@pytest.mark.parametrize(("param", "fields"), SLIPS, ids=[param for param, _ in SLIPS])
def test_the_offline_engine_refuses_before_anything_runs(engine: Engine, param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        engine.generate(["hello", "hello world"], **fields)
    assert caught.value.param == param
    assert not engine.core.has_work()
    assert [len(a.tokens) for a in engine.generate(["hello", [5, 6]], max_tokens=3, ignore_eos=True)] == [3, 3]


def test_the_offline_engine_refuses_ids_that_the_model_has_not(engine: Engine) -> None:
    for prompt in ([], [len(TOKENS)], [-1], [2**40]):
        with pytest.raises(BadRequest, match=r"prompt|Token ids"):
            engine.generate([prompt, [5]])


def test_an_embedded_runtime_refuses_and_serves_on(model: Path) -> None:
    async def main() -> None:
        async with open_runtime(load_config(None, [f"model.source={model}", *SMALL])) as runtime:
            for param, fields in SLIPS:
                with pytest.raises(BadRequest) as caught:
                    await runtime.complete([5, 6], **fields)
                assert caught.value.param == param
            with pytest.raises(BadRequest, match="priority"):
                runtime.service.open([5], SamplingParams(), priority=1.5)  # type: ignore[arg-type]
            whole = await runtime.complete([5, 6], max_tokens=3, ignore_eos=True)
            assert len(whole.tokens) == 3 and whole.finish == "length"

    trio.run(main)
