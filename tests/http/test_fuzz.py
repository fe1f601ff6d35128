"""Whatever JSON comes, the answer is an answer or a refusal in the right shape, never a fault of ours."""

from typing import Any

import httpx
import pytest
from frontkit import Server
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime_http.schema import UNSUPPORTED, ChatRequest, CompletionRequest, NativeRequest, NativeSampling

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-5, 300)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([0.0, 1.0, -0.0, 1e-9, 5e-324, 1e308])
    | st.text(max_size=20)
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls", "x"]), VALUES, max_size=4)
    | st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "assistant", "tool"]), "content": VALUES}),
    max_size=3,
)


def bodies(kind: Any, base: dict[str, Any], **better: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A valid body with some fields replaced by anything."""
    names = [*kind.__struct_encode_fields__, *UNSUPPORTED, "unheard_of"]
    changes = st.dictionaries(st.sampled_from(names), VALUES, max_size=4)
    known = st.fixed_dictionaries({}, optional=better)
    return st.builds(lambda change, more: base | change | more | {"stream": False}, changes, known)


def check(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    response = http.post(path, json=body)
    assert response.status_code in (200, 400, 404), (body, response.text)
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


FUZZ = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture(scope="module")
def client(scripted: Server) -> Any:
    with httpx.Client(base_url=scripted.url, timeout=30) as client:
        yield client


@FUZZ
@given(body=bodies(CompletionRequest, {"model": "scripted", "prompt": "Hi", "max_tokens": 4}))
def test_completions(client: httpx.Client, body: dict[str, Any]) -> None:
    check(client, "/v1/completions", body)


CHAT = {"model": "scripted", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


@FUZZ
@given(body=bodies(ChatRequest, CHAT, messages=MESSAGES))
def test_chat(client: httpx.Client, body: dict[str, Any]) -> None:
    check(client, "/v1/chat/completions", body | {"max_completion_tokens": 4})


SAMPLING = bodies(NativeSampling, {"max_new_tokens": 4}).map(lambda body: {**body, "stream": None})


@FUZZ
@given(body=bodies(NativeRequest, {"text": "Hi"}, sampling_params=SAMPLING | st.lists(SAMPLING, max_size=2)))
def test_native(client: httpx.Client, body: dict[str, Any]) -> None:
    check(client, "/generate", body)


@FUZZ
@given(raw=st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "replace")))
def test_bytes(client: httpx.Client, raw: bytes) -> None:
    response = client.post("/v1/completions", content=raw, headers={"content-type": "application/json"})
    assert response.status_code in (400, 404), response.text


@FUZZ
@given(units=st.lists(st.integers(0xD7FF, 0xE001) | st.integers(0x20, 0x7E), max_size=6))
def test_surrogates(client: httpx.Client, units: list[int]) -> None:
    escaped = "".join(f"\\u{unit:04x}" for unit in units)
    raw = f'{{"model": "scripted", "max_tokens": 2, "prompt": "a{escaped}"}}'.encode()
    response = client.post("/v1/completions", content=raw, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400), response.text
