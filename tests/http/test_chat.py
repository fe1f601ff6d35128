"""/v1/chat/completions."""

from typing import Any

import httpx
import pytest
from frontkit import Server
from sse import ask, stream

PATH = "/v1/chat/completions"


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.fixture
def body(model: str) -> dict[str, Any]:
    return {"model": model, "messages": [user("Write one sentence about the sea.")], "max_tokens": 40, "temperature": 0}


def test_an_answer_has_the_published_shape(http: httpx.Client, body: dict[str, Any]) -> None:
    answer = ask(http, PATH, body)
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert set(choice) == {"index", "message", "logprobs", "finish_reason"}
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"]
    assert choice["message"]["refusal"] is None


def test_joined_deltas_are_the_unstreamed_text(http: httpx.Client, body: dict[str, Any]) -> None:
    answer, events = ask(http, PATH, body), stream(http, PATH, body)
    assert events.done
    assert events.text() == answer["choices"][0]["message"]["content"]
    assert events.finish_reasons() == [answer["choices"][0]["finish_reason"]]
    first, *rest = [choice["delta"] for choice in events.choices()]
    assert first == {"role": "assistant", "content": ""}
    assert all("role" not in delta for delta in rest)
    assert all(chunk["object"] == "chat.completion.chunk" and chunk["choices"] for chunk in events.chunks)


def test_few_chunks_have_no_text_even_with_a_stop(http: httpx.Client, body: dict[str, Any]) -> None:
    events = stream(http, PATH, body | {"stop": ["ZQXJ"]})
    empty = [c for c in events.choices() if not c["delta"].get("content") and c["finish_reason"] is None]
    assert len(empty) <= 2
    assert events.text() == stream(http, PATH, body).text()


def test_each_choice_of_a_stream_finishes_once(http: httpx.Client, body: dict[str, Any]) -> None:
    body |= {"n": 3, "temperature": 1.0, "ignore_eos": True, "max_tokens": 8}
    events = stream(http, PATH, body)
    assert events.done
    for i in range(3):
        assert events.text(i) and events.finish_reasons(i) == ["length"]
    answer = ask(http, PATH, body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 24


def test_an_end_by_eos_is_a_stop(scripted: Server, http: httpx.Client, body: dict[str, Any]) -> None:
    body |= {"logit_bias": {"256": 100}}
    answer = ask(http, PATH, body)["choices"][0]
    assert answer["message"]["content"] == "" and answer["finish_reason"] == "stop"
    assert stream(http, PATH, body).finish_reasons() == ["stop"]


def test_usage_of_a_stream_equals_the_unstreamed(http: httpx.Client, body: dict[str, Any]) -> None:
    events = stream(http, PATH, body | {"stream_options": {"include_usage": True}})
    *before, last = events.chunks
    usage = ask(http, PATH, body)["usage"]
    assert last["choices"] == []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == usage[name]
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in before)


def test_both_names_of_the_limit(http: httpx.Client, body: dict[str, Any]) -> None:
    del body["max_tokens"]
    body |= {"ignore_eos": True}
    assert ask(http, PATH, body | {"max_completion_tokens": 5})["usage"]["completion_tokens"] == 5
    assert ask(http, PATH, body | {"max_completion_tokens": 5, "max_tokens": 9})["usage"]["completion_tokens"] == 5


def test_without_a_limit_the_rest_of_the_context_is_used(scripted: Server, http: httpx.Client) -> None:
    answer = ask(http, PATH, {"model": "scripted", "messages": [user("[[burst:500]]")], "ignore_eos": True})
    assert answer["usage"]["total_tokens"] == 8192 and answer["choices"][0]["finish_reason"] == "length"


class TestContent:
    def test_text_parts_are_a_string(self, http: httpx.Client, body: dict[str, Any]) -> None:
        plain = ask(http, PATH, body | {"messages": [user("Hi")]})
        parts = ask(http, PATH, body | {"messages": [user([{"type": "text", "text": "Hi"}])]})
        assert parts["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
        assert parts["choices"] == plain["choices"]
        two = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]
        more = ask(http, PATH, body | {"messages": [user(two)]})
        assert more["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]

    @pytest.mark.parametrize(
        ("messages", "param"),
        [
            ([], "messages"),
            ("x", "messages"),
            ([user(None)], "messages[0].content"),
            ([user(5)], "messages[0].content"),
            ([user([])], "messages[0].content"),
            ([user([{"type": "text"}])], "messages[0].content[0]"),
            ([user(["x"])], "messages[0].content[0]"),
            ([user([{"type": "image_url", "image_url": {"url": "http://x/y.png"}}])], "messages[0].content[0]"),
            ([{"content": "x"}], "messages[0].role"),
            ([{"role": "boss", "content": "x"}], "messages[0].role"),
            ([user("a"), {"role": "assistant"}], "messages[1].content"),
        ],
    )
    def test_wrong_messages_are_named(
        self, http: httpx.Client, body: dict[str, Any], messages: Any, param: str
    ) -> None:
        response = http.post(PATH, json=body | {"messages": messages})
        error = response.json()["error"]
        assert response.status_code == 400 and error["type"] == "invalid_request_error" and error["param"] == param

    def test_a_templates_refusal_is_told(self, scripted: Server, http: httpx.Client) -> None:
        response = http.post(PATH, json={"model": "scripted", "messages": [user("[[refuse]]")]})
        assert response.status_code == 400
        assert "System role not supported" in response.json()["error"]["message"]

    def test_a_final_message_is_continued(self, scripted: Server, http: httpx.Client) -> None:
        messages = [user("Count."), {"role": "assistant", "content": "One, two,"}]
        body = {"model": "scripted", "messages": messages, "max_tokens": 8, "temperature": 0}
        body |= {"continue_final_message": True, "add_generation_prompt": False}
        rendered = "<user>Count.</><assistant>One, two,"
        chat = ask(http, PATH, body)
        text = ask(
            http, "/v1/completions", {"model": "scripted", "prompt": rendered, "max_tokens": 8, "temperature": 0}
        )
        assert chat["choices"][0]["message"]["content"] == text["choices"][0]["text"]
        assert chat["usage"]["prompt_tokens"] == len(rendered)

    def test_continuing_and_opening_a_turn_exclude_each_other(self, http: httpx.Client, body: dict[str, Any]) -> None:
        response = http.post(PATH, json=body | {"continue_final_message": True, "add_generation_prompt": True})
        assert response.status_code == 400


class TestLogprobs:
    def test_as_many_as_asked(self, http: httpx.Client, body: dict[str, Any]) -> None:
        answer = ask(http, PATH, body | {"logprobs": True, "top_logprobs": 5})
        content = answer["choices"][0]["logprobs"]["content"]
        assert len(content) == answer["usage"]["completion_tokens"]
        for entry in content:
            values = [top["logprob"] for top in entry["top_logprobs"]]
            assert len(values) == 5 and values == sorted(values, reverse=True)
            assert entry["token"] in [top["token"] for top in entry["top_logprobs"]]
            assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}

    def test_a_stream_brings_the_same(self, http: httpx.Client, body: dict[str, Any]) -> None:
        body |= {"logprobs": True, "top_logprobs": 2}
        whole = ask(http, PATH, body)["choices"][0]["logprobs"]["content"]
        parts = [choice["logprobs"] for choice in stream(http, PATH, body).choices() if choice["logprobs"]]
        assert [entry for part in parts for entry in part["content"]] == whole

    @pytest.mark.parametrize(
        ("wish", "status"),
        [
            ({"logprobs": False, "top_logprobs": 0}, 200),
            ({"logprobs": True, "top_logprobs": 0}, 200),
            ({"logprobs": True}, 200),
            ({"top_logprobs": 3}, 400),
            ({"logprobs": True, "top_logprobs": 21}, 400),
            ({"logprobs": True, "top_logprobs": -1}, 400),
            ({"logprobs": 1}, 400),
        ],
    )
    def test_which_wishes_are_valid(
        self, http: httpx.Client, body: dict[str, Any], wish: dict[str, Any], status: int
    ) -> None:
        assert http.post(PATH, json=body | wish).status_code == status
