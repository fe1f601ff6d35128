"""What a request may ask for: refused in words that name the field, before anything runs."""

import math
from typing import Any

import pytest

from runtime.limits import check_options, checked
from runtime.messages import SamplingParams
from runtime.service import BadRequest, ModelInfo

INFO = ModelInfo("tiny", 64, 100, (2,), 0, max_prompt_tokens=48)


def refused(param: str | None, prompt: Any = (5, 6), code: str | None = None, **fields: Any) -> str:
    with pytest.raises(BadRequest) as caught:
        checked(INFO, prompt, SamplingParams(**fields))
    assert (caught.value.param, caught.value.code) == (param, code)
    return caught.value.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", "many"),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "warm"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -1),
        ("top_k", 2**31),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("seed", -1),
        ("seed", 2**64),
        ("logprobs", 21),
        ("logprobs", -2),
        ("prompt_logprobs", 21),
        ("stop", "END"),
        ("stop", ("",)),
        ("stop", ("x" * 1025,)),
        ("stop", tuple(map(str, range(65)))),
        ("stop_token_ids", (100,)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", ("a",)),
        ("logit_bias", {100: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {5: math.nan}),
        ("logit_bias", {5: 101}),
        ("logit_bias", {"x": 1.0}),
    ],
)
def test_a_field_out_of_range_is_refused_by_its_name(field: str, value: Any) -> None:
    assert field in refused(field, **{field: value})


def test_what_is_allowed_at_the_edges_passes() -> None:
    edges: list[dict[str, Any]] = [
        {"max_tokens": 0},
        {"max_tokens": 62},
        {"min_tokens": 16},
        {"temperature": 0},
        {"top_p": 1, "top_k": 2**31 - 1, "min_p": 1},
        {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 0.5},
        {"seed": 2**64 - 1, "logprobs": 20, "prompt_logprobs": 0},
        {"stop_token_ids": (0, 99), "logit_bias": {0: -100, 99: 100}},
    ]
    for fields in edges:
        assert checked(INFO, [0, 99], SamplingParams(**fields)) == SamplingParams(**fields)


def test_lists_become_tuples_and_a_nearly_cold_request_greedy() -> None:
    params = checked(INFO, [1], SamplingParams(stop=["a"], stop_token_ids=[3], temperature=1e-5))  # type: ignore[arg-type]
    assert params == SamplingParams(stop=("a",), stop_token_ids=(3,), temperature=0.0)


@pytest.mark.parametrize("prompt", [[], [5, 100], [-1], [2**40], [1.5], ["a"]], ids=str)
def test_a_prompt_of_anything_but_known_ids_is_refused(prompt: Any) -> None:
    refused("prompt", prompt)


def test_too_long_says_whose_fault_it_is() -> None:
    assert "64 tokens" in refused("max_tokens", [5] * 40, "context_length_exceeded", max_tokens=25)
    refused("prompt", [5] * 64, "context_length_exceeded", max_tokens=1)
    assert "KV memory holds 48" in refused("prompt", [5] * 49, "context_length_exceeded", max_tokens=1)


@pytest.mark.parametrize(
    ("param", "options"),
    [
        ("priority", (1.5, "", None)),
        ("priority", (2**31, "", None)),
        ("cache_salt", (0, 7, None)),
        ("deadline_s", (0, "", 0)),
        ("deadline_s", (0, "", math.nan)),
        ("deadline_s", (0, "", "soon")),
    ],
)
def test_options_of_the_wrong_kind_are_refused(param: str, options: tuple[Any, Any, Any]) -> None:
    check_options(3, "tenant", 1.5)
    with pytest.raises(BadRequest) as caught:
        check_options(*options)
    assert caught.value.param == param and param in caught.value.message
