"""The native endpoint, in the shape of SGLang."""

from itertools import pairwise
from typing import Any

import httpx
import pytest
from sse import ask, stream

PATH = "/generate"


def native(**sampling: Any) -> dict[str, Any]:
    given = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True} | sampling
    return {"text": "Count: one, two, three,", "sampling_params": given}


def test_an_answer(http: httpx.Client) -> None:
    answer = ask(http, PATH, native() | {"return_logprob": True})
    assert isinstance(answer["text"], str) and len(answer["output_ids"]) == 8
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert meta["completion_tokens"] == 8 and meta["prompt_tokens"] > 0 and meta["id"]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(logprob <= 0 for logprob, _, _ in meta["output_token_logprobs"])


def test_frames_hold_the_text_so_far(http: httpx.Client) -> None:
    answer, events = ask(http, PATH, native()), stream(http, PATH, native())
    assert events.done
    texts = [chunk["text"] for chunk in events.chunks]
    assert texts[-1] == answer["text"]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert events.chunks[-1]["output_ids"] == answer["output_ids"]
    assert [bool(chunk["meta_info"]["finish_reason"]) for chunk in events.chunks].count(True) == 1


def test_a_list_gives_a_list(http: httpx.Client) -> None:
    body = native()
    answers = ask(http, PATH, body | {"text": ["Hi", body["text"]]})
    assert len(answers) == 2
    assert answers[1]["text"] == ask(http, PATH, body)["text"]
    assert len(ask(http, PATH, body | {"text": ["Hi"]})) == 1


def test_token_ids(http: httpx.Client) -> None:
    body = native() | {"text": None}
    assert ask(http, PATH, body | {"input_ids": [65, 66]})["meta_info"]["prompt_tokens"] == 2
    answers = ask(http, PATH, body | {"input_ids": [[65, 66], [65, 66, 67]]})
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [2, 3]


def test_several_samples(http: httpx.Client) -> None:
    body = native(n=3, max_new_tokens=6)
    answers = ask(http, PATH, body)
    assert len(answers) == 3 and len({answer["meta_info"]["id"] for answer in answers}) == 3
    events = stream(http, PATH, body)
    assert {chunk["index"] for chunk in events.chunks} == {0, 1, 2} and events.done


def test_the_clients_own_ids(http: httpx.Client) -> None:
    assert ask(http, PATH, native() | {"rid": "mine"})["meta_info"]["id"] == "mine"
    answers = ask(http, PATH, native() | {"text": ["Hi", "Ho"], "rid": ["a", "b"]})
    assert [answer["meta_info"]["id"] for answer in answers] == ["a", "b"]


@pytest.mark.parametrize("rid", ["a\r\nSet-Cookie: x=1", "über", "x" * 10_000, ""])
def test_ids_unfit_for_a_header_stay_out_of_it(http: httpx.Client, rid: str) -> None:
    response = http.post(PATH, json=native() | {"rid": rid})
    assert response.status_code == 200 and response.json()["meta_info"]["id"] == rid
    assert "set-cookie" not in response.headers and "x-request-id" not in response.headers


def test_input_logprobs(http: httpx.Client) -> None:
    body = native() | {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    meta = ask(http, PATH, body)["meta_info"]
    assert len(meta["input_token_logprobs"]) == len(meta["input_top_logprobs"]) == meta["prompt_tokens"]
    assert meta["input_token_logprobs"][0][0] is None
    assert all(len(top) == 2 for top in meta["output_top_logprobs"])


def test_a_stop_is_told(http: httpx.Client) -> None:
    text = ask(http, PATH, native(max_new_tokens=20))["text"]
    answer = ask(http, PATH, native(max_new_tokens=20, stop=[text[4:7]]))
    assert answer["text"] == text[: text.index(text[4:7])]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": text[4:7]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": ["a"]}, "input_ids"),
        ({"input_ids": [[1], 2]}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"temperature": "hot"}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"max_tokens": 5}}, "sampling_params.max_tokens"),
        ({"text": "a", "sampling_params": {"regex": "a+"}}, "sampling_params.regex"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
        ({"text": "a", "image_data": ["x"]}, "image_data"),
    ],
)
def test_refusals(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    response = http.post(PATH, json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param
