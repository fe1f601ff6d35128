"""What a request may ask for. Every door checks it here, in words, so that the engine may trust what comes in.

The HTTP layer refuses most of this earlier, in the words of its own protocol; embedders and scripts come straight here.
"""

import math
import re
from array import array
from collections.abc import Sequence

import msgspec

from .messages import SamplingParams
from .service import BadRequest, ModelInfo

MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
COLD = 1e-3  # at lower temperatures float32 leaves one token anyway: greedy, without the overflow

ABOVE_ZERO = math.ulp(0.0)  # the least where zero itself is refused
RANGES: dict[str, tuple[float, float]] = {  # least, most
    "max_tokens": (0, math.inf),
    "min_tokens": (0, math.inf),
    "temperature": (0, 100),
    "top_p": (ABOVE_ZERO, 1),
    "top_k": (0, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 10),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "seed": (0, 2**64 - 1),
    "logprobs": (-1, MAX_LOGPROBS),
    "prompt_logprobs": (-1, MAX_LOGPROBS),
}
_MAX_BIAS = 100


def check_prompt(info: ModelInfo, prompt: Sequence[int], max_tokens: int = 0) -> None:
    """Raises BadRequest for a prompt that can't be taken, or that leaves no room for ``max_tokens`` more."""
    if not len(prompt):
        raise BadRequest("The prompt is empty: give at least one token.", "prompt")
    try:
        ids = array("i", prompt)
    except TypeError:
        raise BadRequest("The prompt must be token ids, which are integers.", "prompt") from None
    except OverflowError:
        raise BadRequest(f"Token ids must lie between 0 and {info.vocab_size - 1}.", "prompt") from None
    if min(ids) < 0 or max(ids) >= info.vocab_size:
        wrong = next(token for token in ids if not 0 <= token < info.vocab_size)
        raise BadRequest(f"Token ids must lie between 0 and {info.vocab_size - 1}, not {wrong}.", "prompt")
    if len(ids) + max_tokens > info.context_tokens:
        raise BadRequest(
            f"This model's maximum context length is {info.context_tokens} tokens. However, you requested "
            f"{len(ids) + max_tokens} tokens ({len(ids)} in the prompt, {max_tokens} in the completion). Shorten the "
            "prompt or lower max_tokens.",
            "max_tokens" if len(ids) < info.context_tokens else "prompt",
            "context_length_exceeded",
        )
    if info.max_prompt_tokens and len(ids) > info.max_prompt_tokens:
        raise BadRequest(
            f"The prompt has {len(ids)} tokens, but this server's KV memory holds {info.max_prompt_tokens}.",
            "prompt",
            "context_length_exceeded",
        )


def checked(info: ModelInfo, prompt: Sequence[int], params: SamplingParams) -> SamplingParams:
    """The parameters in the form the engine takes. Raises BadRequest, whose ``param`` is the field at fault."""
    params = _typed(params)
    for name, (least, most) in RANGES.items():
        value = getattr(params, name)
        if not least <= value <= most:
            raise BadRequest(f"{name} must be {_words(least, most)}, not {value}.", name)
    if params.min_tokens > params.max_tokens:
        what = f"min_tokens is {params.min_tokens}, more than max_tokens, which is {params.max_tokens}."
        raise BadRequest(what, "min_tokens")
    _check_stops(params.stop)
    _check_ids(info, "stop_token_ids", params.stop_token_ids)
    _check_ids(info, "logit_bias", params.logit_bias)
    for token, bias in params.logit_bias.items():
        if not -_MAX_BIAS <= bias <= _MAX_BIAS:
            what = f"logit_bias must lie between -{_MAX_BIAS} and {_MAX_BIAS}, not {bias} as for token {token}."
            raise BadRequest(what, "logit_bias")
    check_prompt(info, prompt, params.max_tokens)
    if 0 < params.temperature < COLD:
        return msgspec.structs.replace(params, temperature=0.0)
    return params


def check_options(priority: int, cache_salt: str, deadline_s: float | None) -> None:
    """Raises BadRequest for what goes along with a request and is no number or text as it should be."""
    if type(priority) is not int or not -(2**31) <= priority < 2**31:
        raise BadRequest(f"priority must be an integer of 32 bits, not {priority!r}.", "priority")
    if not isinstance(cache_salt, str):
        raise BadRequest(f"cache_salt must be a text, not {cache_salt!r}.", "cache_salt")
    if deadline_s is not None and not (isinstance(deadline_s, int | float) and 0 < deadline_s < math.inf):
        raise BadRequest(f"deadline_s must be a positive number of seconds, not {deadline_s!r}.", "deadline_s")


def _typed(params: SamplingParams) -> SamplingParams:
    """The same with every field of its declared type: a list for a tuple is taken, a text for a number is not."""
    try:
        return msgspec.convert(msgspec.to_builtins(params), SamplingParams)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at ")
        found = re.search(r"\$\.(\w+)", where)
        name = found[1] if found else None
        raise BadRequest(f"{name or 'a parameter'} has the wrong type: {what.lower()}.", name) from None
    except TypeError as error:
        raise BadRequest(f"A parameter is of a type that can't be sent: {error}.") from None


def _words(least: float, most: float) -> str:
    lower = "above 0" if least == ABOVE_ZERO else f"at least {least}"
    return lower if most == math.inf else f"{lower} and at most {most}"


def _check_stops(stops: tuple[str, ...]) -> None:
    if len(stops) > MAX_STOPS:
        raise BadRequest(f"stop has {len(stops)} strings; at most {MAX_STOPS} are allowed.", "stop")
    if "" in stops:
        raise BadRequest("stop has an empty string, which would match everywhere.", "stop")
    if any(len(text) > MAX_STOP_CHARS for text in stops):
        raise BadRequest(f"stop has a string of more than {MAX_STOP_CHARS} characters.", "stop")


def _check_ids(info: ModelInfo, name: str, ids: Sequence[int] | dict[int, float]) -> None:
    for token in ids:
        if not 0 <= token < info.vocab_size:
            what = f"{name} has token id {token}, but this model's ids are 0 to {info.vocab_size - 1}."
            raise BadRequest(what, name)
