"""/v1/completions. What needs no script runs against any server."""

from typing import Any

import httpx
import pytest
from frontkit import Server
from sse import ask, stream

PATH = "/v1/completions"


@pytest.fixture
def body(model: str) -> dict[str, Any]:
    return {"model": model, "prompt": "Count: one, two, three,", "max_tokens": 40, "temperature": 0}


def test_an_answer_has_the_published_shape(http: httpx.Client, body: dict[str, Any], model: str) -> None:
    answer = ask(http, PATH, body)
    assert answer["object"] == "text_completion" and answer["model"] == model and answer["id"].startswith("cmpl-")
    assert isinstance(answer["created"], int)
    (choice,) = answer["choices"]
    assert set(choice) == {"index", "text", "logprobs", "finish_reason"}
    assert choice["index"] == 0 and choice["logprobs"] is None and choice["finish_reason"] in ("stop", "length")
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens"] > 0 and 0 < usage["completion_tokens"] <= 40


def test_joined_deltas_are_the_unstreamed_text(http: httpx.Client, body: dict[str, Any]) -> None:
    answer = ask(http, PATH, body)
    events = stream(http, PATH, body)
    assert events.done
    assert events.text() == answer["choices"][0]["text"]
    assert events.finish_reasons() == [answer["choices"][0]["finish_reason"]]
    assert len({chunk["id"] for chunk in events.chunks}) == 1
    assert all("usage" not in chunk for chunk in events.chunks)


def test_text_comes_in_pieces_of_whole_characters(scripted: Server, http: httpx.Client, body: dict[str, Any]) -> None:
    events = stream(http, PATH, body | {"max_tokens": 200})
    text = events.text()
    assert {"世", "😀", "é"} & set(text)
    assert "\ufffd" not in text[:-1]
    assert len([choice for choice in events.choices() if choice["text"]]) > 0.9 * len(text)


def test_the_limit_is_kept_and_told(http: httpx.Client, body: dict[str, Any]) -> None:
    answer = ask(http, PATH, body | {"max_tokens": 5, "ignore_eos": True})
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 5
    events = stream(http, PATH, body | {"max_tokens": 5, "ignore_eos": True})
    assert events.finish_reasons() == ["length"]


def test_sixteen_tokens_are_the_default(http: httpx.Client, model: str) -> None:
    answer = ask(http, PATH, {"model": model, "prompt": "Hi", "temperature": 0, "ignore_eos": True})
    assert answer["usage"]["completion_tokens"] == 16


class TestUsage:
    def test_asked_for_it_is_the_last_chunk(self, http: httpx.Client, body: dict[str, Any]) -> None:
        events = stream(http, PATH, body | {"stream_options": {"include_usage": True}})
        *before, last = events.chunks
        assert last["choices"] == [] and last["usage"] == ask(http, PATH, body)["usage"] | {
            "prompt_tokens_details": last["usage"]["prompt_tokens_details"]
        }
        assert all(chunk["usage"] is None for chunk in before)

    def test_continuous_usage_grows(self, http: httpx.Client, body: dict[str, Any]) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = stream(http, PATH, body | {"stream_options": options})
        counts = [chunk["usage"]["completion_tokens"] for chunk in events.chunks]
        assert counts == sorted(counts) and counts[-1] > 0

    def test_cached_tokens_are_shown(self, http: httpx.Client, body: dict[str, Any]) -> None:
        body |= {"prompt": "a prompt long enough to be kept in a cache of some pages " * 8}
        ask(http, PATH, body)
        usage = ask(http, PATH, body)["usage"]
        assert 0 < usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]


class TestPrompts:
    def test_text_and_its_tokens_are_the_same_prompt(self, http: httpx.Client, body: dict[str, Any]) -> None:
        tokens = ask(http, "/tokenize", {"prompt": body["prompt"]})["tokens"]
        by_text, by_tokens = ask(http, PATH, body), ask(http, PATH, body | {"prompt": tokens})
        assert by_tokens["choices"] == by_text["choices"]
        assert by_tokens["usage"]["prompt_tokens"] == by_text["usage"]["prompt_tokens"] == len(tokens)

    def test_a_list_of_prompts_with_n(self, http: httpx.Client, body: dict[str, Any]) -> None:
        prompts = ["Count: one, two, three,", "The capital of France is"]
        answer = ask(http, PATH, body | {"prompt": prompts, "n": 2})
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        alone = [ask(http, PATH, body | {"prompt": prompt}) for prompt in prompts]
        for i, choice in enumerate(answer["choices"]):
            assert choice["text"] == alone[i // 2]["choices"][0]["text"]
        assert answer["usage"]["prompt_tokens"] == sum(each["usage"]["prompt_tokens"] for each in alone)
        assert answer["usage"]["completion_tokens"] == 2 * sum(each["usage"]["completion_tokens"] for each in alone)

        events = stream(http, PATH, body | {"prompt": prompts, "n": 2})
        for i in range(4):
            assert events.text(i) == answer["choices"][i]["text"]
            assert events.finish_reasons(i) == [answer["choices"][i]["finish_reason"]]
        assert events.done

    def test_lists_of_tokens(self, http: httpx.Client, body: dict[str, Any]) -> None:
        answer = ask(http, PATH, body | {"prompt": [[10, 11, 12], [13, 14]], "max_tokens": 3})
        assert len(answer["choices"]) == 2 and answer["usage"]["prompt_tokens"] == 5

    def test_echo(self, http: httpx.Client, body: dict[str, Any]) -> None:
        plain = ask(http, PATH, body)["choices"][0]["text"]
        assert ask(http, PATH, body | {"echo": True})["choices"][0]["text"] == body["prompt"] + plain
        assert stream(http, PATH, body | {"echo": True}).text() == body["prompt"] + plain


class TestChoices:
    def test_a_seed_repeats_and_choices_differ(self, http: httpx.Client, body: dict[str, Any]) -> None:
        body |= {"temperature": 1.0, "seed": 42, "n": 4, "max_tokens": 24, "prompt": "Once upon a time there was"}
        first, second = ask(http, PATH, body), ask(http, PATH, body)
        assert [c["text"] for c in first["choices"]] == [c["text"] for c in second["choices"]]
        assert len({choice["text"] for choice in first["choices"]}) > 1
        alone = ask(http, PATH, body | {"n": 1})
        assert alone["choices"][0]["text"] == first["choices"][0]["text"]

    def test_without_a_seed_samples_differ(self, http: httpx.Client, body: dict[str, Any]) -> None:
        body |= {"temperature": 1.0, "max_tokens": 24, "prompt": "Once upon a time there was"}
        assert len({ask(http, PATH, body)["choices"][0]["text"] for _ in range(4)}) > 1


class TestStop:
    def test_text_ends_before_the_stop_string(self, http: httpx.Client, body: dict[str, Any]) -> None:
        full = ask(http, PATH, body)["choices"][0]["text"]
        stop = full[9:13]
        want = full[: full.index(stop)]
        for stops in (stop, ["@@@@", "ZQXJ", "<never>", stop]):
            answer = ask(http, PATH, body | {"stop": stops})["choices"][0]
            assert (answer["text"], answer["finish_reason"]) == (want, "stop")
            events = stream(http, PATH, body | {"stop": stops})
            assert (events.text(), events.finish_reasons()) == (want, ["stop"])
        kept = ask(http, PATH, body | {"stop": stop, "include_stop_str_in_output": True})["choices"][0]["text"]
        assert kept == want + stop

    def test_strings_that_never_come_change_nothing(self, http: httpx.Client, body: dict[str, Any]) -> None:
        never = body | {"stop": ["@@@@", "\n\n\n\n\n", "ZQXJ", "<never>"]}
        assert ask(http, PATH, never)["choices"] == ask(http, PATH, body)["choices"]

    def test_a_stop_token_leaves_no_text(self, http: httpx.Client, body: dict[str, Any]) -> None:
        answer = ask(http, PATH, body | {"logit_bias": {"65": 100}, "stop_token_ids": [65]})
        assert answer["choices"][0]["text"] == "" and answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 1


class TestLogprobs:
    def test_none_unless_asked(self, http: httpx.Client, body: dict[str, Any]) -> None:
        assert ask(http, PATH, body)["choices"][0]["logprobs"] is None

    def test_zero_gives_the_tokens_own(self, http: httpx.Client, body: dict[str, Any]) -> None:
        answer = ask(http, PATH, body | {"logprobs": 0, "max_tokens": 4, "ignore_eos": True})
        logprobs = answer["choices"][0]["logprobs"]
        assert len(logprobs["token_logprobs"]) == len(logprobs["tokens"]) == len(logprobs["text_offset"]) == 4
        assert all(value <= 0 for value in logprobs["token_logprobs"])
        assert logprobs["top_logprobs"] is None

    def test_alternatives_are_never_fewer(self, http: httpx.Client, body: dict[str, Any]) -> None:
        answer = ask(http, PATH, body | {"logprobs": 5, "max_tokens": 20})
        logprobs = answer["choices"][0]["logprobs"]
        for token, value, top in zip(*(logprobs[k] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True):
            assert len(top) in (5, 6) and top[token] == value

    def test_a_stream_brings_the_same(self, http: httpx.Client, body: dict[str, Any]) -> None:
        body |= {"logprobs": 2}
        whole = ask(http, PATH, body)["choices"][0]["logprobs"]
        parts = [choice["logprobs"] for choice in stream(http, PATH, body).choices() if choice["logprobs"]]
        assert len(parts) > 1
        for name, values in whole.items():
            assert [value for part in parts for value in part[name]] == values

    def test_bytes_of_one_character_do_not_collapse(self, scripted: Server, http: httpx.Client, model: str) -> None:
        body = {"model": model, "prompt": "Hi", "logprobs": 8, "max_tokens": 200, "temperature": 0}
        for top in ask(http, PATH, body)["choices"][0]["logprobs"]["top_logprobs"]:
            assert len(top) == 8

    def test_scoring_a_prompt(self, http: httpx.Client, model: str) -> None:
        body = {"model": model, "prompt": "Your answer: Yes", "max_tokens": 0, "echo": True, "logprobs": 1}
        answer = ask(http, PATH, body)
        choice, usage = answer["choices"][0], answer["usage"]
        assert choice["text"] == "Your answer: Yes" and choice["finish_reason"] == "length"
        assert usage["completion_tokens"] == 0 and usage["total_tokens"] == usage["prompt_tokens"]
        first, *rest = choice["logprobs"]["token_logprobs"]
        assert first is None and len(rest) == usage["prompt_tokens"] - 1 and all(value <= 0 for value in rest)
        assert stream(http, PATH, body).text() == "Your answer: Yes"

    def test_scoring_a_batch_of_token_lists(self, http: httpx.Client, model: str) -> None:
        prompts = [[100, 101, 102], [103, 104, 105, 106, 107, 108]]
        body = {"model": model, "prompt": prompts, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
        answer = ask(http, PATH, body | {"seed": 1234, "ignore_eos": True})
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        for prompt, choice in zip(prompts, answer["choices"], strict=True):
            logprobs = choice["logprobs"]
            assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == len(prompt) + 1
            for value, top in list(zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True))[1:]:
                assert max(top.values()) >= value


class TestErrors:
    def test_an_engine_fault_before_the_first_token_has_a_status(self, scripted: Server, http: httpx.Client) -> None:
        for flag in (False, True):
            body = {"model": "scripted", "prompt": "[[fail:0]]", "stream": flag}
            response = http.post(PATH, json=body)
            assert response.status_code == 500
            assert response.json()["error"]["message"] == "The engine died; please retry."

    def test_one_in_the_stream_is_an_event_and_the_end(self, scripted: Server, http: httpx.Client) -> None:
        events = stream(http, PATH, {"model": "scripted", "prompt": "[[fail:5]]", "max_tokens": 50})
        assert not events.done and events.finish_reasons() == []
        assert events.chunks[-1]["error"]["message"] == "The engine died; please retry."
        assert events.text()

    def test_a_full_queue(self, scripted: Server, http: httpx.Client) -> None:
        for flag in (False, True):
            response = http.post(PATH, json={"model": "scripted", "prompt": ["Hi", "[[full]]"], "stream": flag})
            assert response.status_code == 429 and response.headers["retry-after"] == "2"
            assert response.json()["error"]["code"] == "queue_full"
        scripted.wait_until(lambda: not scripted.service.live)


def test_priority_and_salt_reach_the_engine(scripted: Server, http: httpx.Client) -> None:
    ask(http, PATH, {"model": "scripted", "prompt": "Hi", "priority": 3, "cache_salt": "mine"})
    assert scripted.service.opened[-1][1:] == (3, "mine")
