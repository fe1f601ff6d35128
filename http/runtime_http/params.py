"""From a client's wishes to SamplingParams: ranges, defaults, limits. Every refusal names the parameter."""

import math
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from runtime.limits import COLD, MAX_STOP_CHARS, MAX_STOPS
from runtime.messages import SamplingParams
from runtime.service import ModelInfo
from runtime_http.errors import context_exceeded, invalid, unsupported
from runtime_http.schema import Sampling

MAX_N = 128
SEED_BITS = 63


def between(name: str, value: float | None, low: float, high: float, default: float, *, above: bool = False) -> float:
    if value is None:
        return default
    if not math.isfinite(value) or value > high or value < low or (above and value == low):
        lower = f"above {low:g}" if above else f"at least {low:g}"
        upper = f" and at most {high:g}" if high < math.inf else ""
        raise invalid(name, f"Invalid value for '{name}': must be {lower}{upper}, got {value:g}.", "invalid_value")
    return value


def whole_between(name: str, value: int, low: int, high: int | None = None) -> int:
    if value < low or (high is not None and value > high):
        upper = f" and at most {high}" if high is not None else ""
        raise invalid(name, f"Invalid value for '{name}': must be at least {low}{upper}, got {value}.", "invalid_value")
    return value


def stop_strings(name: str, stop: str | list[str] | None) -> tuple[str, ...]:
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS:
        raise invalid(name, f"'{name}' has {len(stops)} strings; at most {MAX_STOPS} are allowed.")
    if "" in stops:
        raise invalid(name, f"'{name}' has an empty string, which would match everywhere.")
    if any(len(text) > MAX_STOP_CHARS for text in stops):
        raise invalid(name, f"'{name}' has a string of more than {MAX_STOP_CHARS} characters.")
    return stops


def known_tokens(name: str, tokens: Sequence[Any], info: ModelInfo) -> list[int]:
    """Checked token ids."""
    if not tokens:
        return []
    if set(map(type, tokens)) != {int}:
        raise invalid(name, f"'{name}' must hold token ids, which are integers.", "invalid_type")
    least, most = min(tokens), max(tokens)
    if least < 0 or most >= info.vocab_size:
        wrong = least if least < 0 else most
        raise invalid(name, f"'{name}' has token id {wrong}, but this model's ids are 0 to {info.vocab_size - 1}.")
    return list(tokens)


def logit_bias(name: str, bias: dict[str, float] | None, info: ModelInfo) -> dict[int, float]:
    found: dict[int, float] = {}
    for key, value in (bias or {}).items():
        if not key.isascii() or not key.isdigit():
            raise invalid(name, f"'{name}' has the key {key!r}, which is no token id.")
        (token,) = known_tokens(name, [int(key)], info)
        found[token] = between(name, value, -100, 100, 0)
    return found


def response_format(value: dict[str, Any] | None) -> None:
    """Only plain text can be promised so far."""
    if value is None:
        return
    kind = value.get("type")
    if kind == "json_schema" and not isinstance(value.get("json_schema"), dict):
        raise invalid("response_format.json_schema", "Missing required parameter: 'response_format.json_schema'.")
    if kind in ("json_schema", "json_object"):
        raise unsupported("response_format", f"'response_format' of type '{kind}'")
    if kind != "text":
        raise invalid("response_format.type", f"Invalid value for 'response_format.type': {kind!r}; 'text' is allowed.")


def sampling_params(
    wish: Sampling, info: ModelInfo, *, logprobs: int, prompt_logprobs: int = -1, prefix: str = ""
) -> SamplingParams:
    """Everything but ``max_tokens``, which depends on the prompt."""

    def name(field: str) -> str:
        return prefix + wish.spelled(field)

    temperature = between(name("temperature"), wish.temperature, 0, 2, 1.0)
    top_p = between(name("top_p"), wish.top_p, 0, 1, 1.0)
    if temperature < COLD or top_p == 0:
        temperature, top_p = 0.0, 1.0
    seed = secrets.randbits(SEED_BITS) if wish.seed is None else wish.seed & ((1 << SEED_BITS) - 1)
    return SamplingParams(
        min_tokens=whole_between(name("min_tokens"), wish.min_tokens, 0),
        temperature=temperature,
        top_p=top_p,
        top_k=max(0, whole_between(name("top_k"), wish.top_k if wish.top_k is not None else 0, -1)),
        min_p=between(name("min_p"), wish.min_p, 0, 1, 0.0),
        repetition_penalty=between(name("repetition_penalty"), wish.repetition_penalty, 0, 10, 1.0, above=True),
        presence_penalty=between(name("presence_penalty"), wish.presence_penalty, -2, 2, 0.0),
        frequency_penalty=between(name("frequency_penalty"), wish.frequency_penalty, -2, 2, 0.0),
        seed=seed,
        stop=stop_strings(name("stop"), wish.stop),
        include_stop=wish.include_stop,
        stop_token_ids=tuple(known_tokens(name("stop_token_ids"), wish.stop_token_ids or (), info)),
        ignore_eos=wish.ignore_eos,
        logit_bias=logit_bias(name("logit_bias"), wish.logit_bias, info),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=wish.skip_special_tokens,
    )


def fit(
    params: SamplingParams,
    info: ModelInfo,
    prompt_tokens: int,
    *,
    wanted: int | None,
    default: int | None,
    param: str,
    limit_name: str,
) -> SamplingParams:
    """The parameters with ``max_tokens`` set: what is wanted, or the default as far as the context has room for it."""
    if prompt_tokens == 0:
        raise invalid(param, f"'{param}' is empty: there is nothing to continue.")
    room = info.context_tokens - prompt_tokens
    tokens = wanted if wanted is not None else room if default is None else min(default, room)
    if tokens > room or room < 1:
        raise context_exceeded(info.context_tokens, prompt_tokens, max(1, tokens), param)
    if params.min_tokens > tokens:
        raise invalid(
            "min_tokens", f"The least number of tokens, {params.min_tokens}, is more than '{limit_name}', {tokens}."
        )
    return msgspec.structs.replace(params, max_tokens=tokens)
