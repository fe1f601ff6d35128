"""What is not served, and how that is told: status, sentence, parameter."""

import json
from typing import Any

import httpx
import openai
import pytest
from frontkit import Server
from sse import ask

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(autouse=True)
def alive(http: httpx.Client, model: str) -> Any:
    """Whatever was refused, the server answers afterwards."""
    yield
    ask(http, COMPLETIONS, {"model": model, "prompt": "Hi", "max_tokens": 2})


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    return error


class TestBodies:
    @pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/generate", "/tokenize"])
    @pytest.mark.parametrize(
        "raw",
        [
            b"",
            b"  ",
            b"[]",
            b"null",
            b"123",
            b'"x"',
            b"true",
            b'{"model":"m","messages":[],x}',
            b'{"model": "m"',
            b"\xff",
            b'{"model": NaN}',
            b"[" * 100_000,
            b'{"a":' * 100_000,
            b'{"model": "\\ud800"}',
            b'{"model": 1e999}',
        ],
        ids=lambda raw: repr(raw[:12]),
    )
    def test_what_is_no_json_object(self, http: httpx.Client, path: str, raw: bytes) -> None:
        refused(http.post(path, content=raw, headers={"content-type": "application/json"}))

    def test_other_content_types(self, http: httpx.Client, model: str) -> None:
        body = json.dumps({"model": model, "prompt": "Hi"})
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
            error = refused(http.post(COMPLETIONS, content=body, headers={"content-type": kind}), 415)
            assert "application/json" in error["message"]
        for kind in ("application/json; charset=utf-8", "application/vnd.api+json"):
            assert http.post(COMPLETIONS, content=body, headers={"content-type": kind}).status_code == 200
        assert http.post(COMPLETIONS, content=body).status_code == 200

    def test_a_huge_one(self, http: httpx.Client) -> None:
        refused(http.post(COMPLETIONS, json={"prompt": "x" * (64 << 20)}), 413)


class TestRouting:
    def test_unknown_paths(self, http: httpx.Client) -> None:
        for method, path in (("POST", "/v1/nothing"), ("GET", "/"), ("GET", "/v1/chat"), ("POST", "/health/x")):
            error = refused(http.request(method, path), 404)
            assert path in error["message"] and error["type"] == "invalid_request_error"

    def test_wrong_methods(self, http: httpx.Client) -> None:
        for method, path in (("GET", CHAT), ("PUT", COMPLETIONS), ("DELETE", "/v1/models"), ("POST", "/health")):
            response = http.request(method, path)
            refused(response, 405)
            assert response.headers["allow"]


class TestModel:
    def test_it_must_be_the_one_served(self, http: httpx.Client) -> None:
        for path in (COMPLETIONS, CHAT):
            error = refused(http.post(path, json={"model": "no-such-model"}), 404)
            assert error["code"] == "model_not_found" and "no-such-model" in error["message"]
        assert refused(http.get("/v1/models/no-such-model"), 404)["code"] == "model_not_found"

    @pytest.mark.parametrize("name", [None, "", 5, ["a"], {}])
    def test_it_must_be_a_name(self, http: httpx.Client, name: Any) -> None:
        for path in (COMPLETIONS, CHAT):
            error = refused(http.post(path, json={"model": name, "prompt": "Hi", "messages": []}))
            assert error["param"] == "model"
            assert refused(http.post(path, json={}))["param"] == "model"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": []}, "temperature"),
    ({"top_p": -1}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 1000}, "n"),
    ({"n": 1.0}, "n"),
    ({"stop": [""]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [5]}, "stop[0]"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop": ["x"] * 65}, "stop"),
    ({"stop_token_ids": [999999, -5]}, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"logit_bias": {"999999": 5}}, "logit_bias"),
    ({"logit_bias": {"-1": 5}}, "logit_bias"),
    ({"logit_bias": {"x": 5}}, "logit_bias"),
    ({"logit_bias": {"٣": 5}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"5": "a"}}, "logit_bias[...]"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"seed": 1.5}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": 5}, "stream_options"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": "json"}, "response_format"),
    ({"priority": "high"}, "priority"),
    # slips of the pen
    ({"max_token": 5}, "max_token"),
    ({"temprature": 0}, "temprature"),
    ({"stop_token_id": [1]}, "stop_token_id"),
]


class TestParameters:
    @pytest.mark.parametrize(("wish", "param"), WRONG, ids=lambda value: json.dumps(value)[:40])
    def test_wrong_values_are_named(self, http: httpx.Client, model: str, wish: dict[str, Any], param: str) -> None:
        for path in (COMPLETIONS, CHAT):
            body = {"model": model, "prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
            body.pop("messages" if path == COMPLETIONS else "prompt")
            for flag in (False, True):
                error = refused(http.post(path, json={"stream": flag} | body | wish))
                assert error["param"] == param and error["type"] == "invalid_request_error"

    @pytest.mark.parametrize(
        "wish",
        [
            {"top_p": 1},
            {"top_p": 0},
            {"temperature": 2},
            {"temperature": 1e-5},
            {"top_k": -1},
            {"top_k": 0},
            {"top_k": 10**6},
            {"min_p": 1},
            {"seed": -1},
            {"seed": 2**70},
            {"stop": []},
            {"stop": None},
            {"logit_bias": {}},
            {"stream_options": None},
            {"user": "me", "metadata": {"a": 1}, "store": False},
            {"an_unheard_of_option": [1, 2]},
            {"best_of": None, "suffix": None, "functions": []},
            {"response_format": {"type": "text"}},
            {"min_tokens": 3},
            {"repetition_penalty": 1.1, "presence_penalty": -2, "frequency_penalty": 2},
        ],
        ids=lambda value: json.dumps(value)[:40],
    )
    def test_valid_ones_are_served(self, http: httpx.Client, model: str, wish: dict[str, Any]) -> None:
        ask(http, COMPLETIONS, {"model": model, "prompt": "Hi", "max_tokens": 4} | wish)
        body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        ask(http, CHAT, body | wish)

    @pytest.mark.parametrize(
        ("prompt", "param"),
        [
            ({}, "prompt"),
            ([], "prompt"),
            (5, "prompt"),
            ([None], "prompt"),
            ([[]], "prompt"),
            (["a", [1]], "prompt"),
            ([1, "a"], "prompt"),
            ([1.5], "prompt"),
            ([-1], "prompt"),
            ([999999], "prompt"),
            ([True], "prompt"),
            (None, "prompt"),
        ],
    )
    def test_wrong_prompts(self, http: httpx.Client, model: str, prompt: Any, param: str) -> None:
        assert refused(http.post(COMPLETIONS, json={"model": model, "prompt": prompt}))["param"] == param

    def test_completions_of_their_own(self, http: httpx.Client, model: str) -> None:
        for wish, param in (
            ({"logprobs": -1}, "logprobs"),
            ({"logprobs": 21}, "logprobs"),
            ({"best_of": 3}, "best_of"),
        ):
            assert refused(http.post(COMPLETIONS, json={"model": model, "prompt": "Hi"} | wish))["param"] == param

    @pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
    @pytest.mark.parametrize(
        ("wish", "param"),
        [
            ({"response_format": {"type": "json_object"}}, "response_format"),
            ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
            ({"guided_json": {}}, "guided_json"),
            ({"audio": {}}, "audio"),
            ({"modalities": ["audio"]}, "modalities"),
            ({"use_beam_search": True}, "use_beam_search"),
        ],
    )
    def test_what_is_not_supported_yet_says_so(
        self, scripted: Server, http: httpx.Client, path: str, wish: dict[str, Any], param: str
    ) -> None:
        body = {"model": "scripted", "prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]}
        error = refused(http.post(path, json=body | wish))
        assert error["param"] == param and "not supported" in error["message"]

    def test_tools_are_not_yet_supported(self, scripted: Server, http: httpx.Client) -> None:
        body = {"model": "scripted", "messages": [{"role": "user", "content": "Hi"}]}
        tool = {"type": "function", "function": {"name": "f"}}
        for choice in (None, "auto", "required", {"type": "function", "function": {"name": "f"}}):
            error = refused(http.post(CHAT, json=body | {"tools": [tool], "tool_choice": choice}))
            assert "not supported" in error["message"]
        ask(http, CHAT, body | {"tools": [tool], "tool_choice": "none"})
        ask(http, CHAT, body | {"tools": []})


class TestContext:
    @pytest.fixture
    def limit(self, http: httpx.Client, model: str) -> int:
        return ask_get(http, f"/v1/models/{model}")["max_model_len"]

    def test_it_is_used_to_the_last_token(self, http: httpx.Client, model: str, limit: int) -> None:
        body = {"model": model, "max_tokens": 1}
        answer = ask(http, COMPLETIONS, body | {"prompt": [65] * (limit - 1)})
        assert answer["usage"]["prompt_tokens"] == limit - 1
        error = refused(http.post(COMPLETIONS, json=body | {"prompt": [65] * limit}))
        assert error["code"] == "context_length_exceeded" and str(limit) in error["message"]

    def test_far_too_long_prompts(self, http: httpx.Client, model: str) -> None:
        text = " word" * 60_000
        for path, prompt in (
            (COMPLETIONS, {"prompt": text}),
            (CHAT, {"messages": [{"role": "user", "content": text}]}),
        ):
            for flag in (False, True):
                response = http.post(path, json={"model": model, "max_tokens": 4, "stream": flag} | prompt)
                assert refused(response)["code"] == "context_length_exceeded"

    def test_limits_beyond_it(self, http: httpx.Client, model: str, limit: int) -> None:
        body = {"model": model, "prompt": "Hi", "max_tokens": limit}
        assert refused(http.post(COMPLETIONS, json=body))["code"] == "context_length_exceeded"

    def test_the_default_limit_gives_way(self, scripted: Server, http: httpx.Client) -> None:
        answer = ask(http, COMPLETIONS, {"model": "scripted", "prompt": [65] * 8190, "ignore_eos": True})
        assert answer["usage"]["completion_tokens"] == 2


def ask_get(client: httpx.Client, path: str) -> dict[str, Any]:
    response = client.get(path)
    assert response.status_code == 200
    return response.json()


class TestOpenAiClient:
    """The published client raises what its users catch."""

    @pytest.fixture
    def client(self, base_url: str) -> Any:
        with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as client:
            yield client

    def test_error_classes(self, client: openai.OpenAI, model: str) -> None:
        messages: Any = [{"role": "user", "content": "Hi"}]
        with pytest.raises(openai.NotFoundError, match="no-such-model"):
            client.chat.completions.create(model="no-such-model", messages=messages)
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.chat.completions.create(model=model, messages=messages, temperature=9)
        with pytest.raises(openai.BadRequestError, match="messages"):
            client.chat.completions.create(model=model, messages="x")  # type: ignore[arg-type]
        with pytest.raises(openai.BadRequestError, match="top_p"):
            client.chat.completions.create(model=model, messages=messages, top_p=-1, stream=True)

    def test_chat(self, client: openai.OpenAI, model: str) -> None:
        messages: Any = [{"role": "user", "content": "Write one sentence about the sea."}]
        plain = client.chat.completions.create(model=model, messages=messages, max_tokens=30, temperature=0)
        stream = client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=30,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        text, usage = "", None
        for chunk in stream:
            usage = chunk.usage or usage
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
        assert text == plain.choices[0].message.content
        assert usage is not None and plain.usage is not None
        assert usage.total_tokens == plain.usage.total_tokens

    def test_completions(self, client: openai.OpenAI, model: str) -> None:
        plain = client.completions.create(model=model, prompt="Hi", max_tokens=30, temperature=0)
        stream = client.completions.create(model=model, prompt="Hi", max_tokens=30, temperature=0, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == plain.choices[0].text

    def test_models(self, client: openai.OpenAI, model: str) -> None:
        assert [each.id for each in client.models.list()] == [model]
        assert client.models.retrieve(model).id == model

    def test_an_error_in_the_stream(self, scripted: Server, client: openai.OpenAI) -> None:
        stream = client.completions.create(model="scripted", prompt="[[fail:3]]", stream=True)
        with pytest.raises(openai.APIError, match="The engine died"):
            for _ in stream:
                pass

    def test_a_stream_left_early_frees_its_slot(self, scripted: Server, client: openai.OpenAI) -> None:
        before = scripted.service.aborted
        with client.completions.create(
            model="scripted", prompt="Hi", max_tokens=8000, stream=True, extra_body={"ignore_eos": True}
        ) as stream:
            next(iter(stream))
        scripted.wait_until(lambda: scripted.service.aborted == before + 1)
