"""What clients may send, typed; and the sentences for what they may not.

Three kinds of fields: those that are served (the structs below), those that are known and change nothing here
(``HARMLESS``), and those that would change the answer if only we could (``UNSUPPORTED``: refused unless they ask for
nothing). A name that is none of these is ignored, as such servers do, unless it looks like a slip of the pen.
"""

import difflib
import re
from typing import Any, TypeVar

import msgspec

from runtime_http.errors import ApiError, invalid, unsupported

HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "prediction",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "verbosity",
        "reasoning_effort",
        "parallel_tool_calls",
        "request_id",
        "return_text_in_logprobs",
        "log_metrics",
        "spaces_between_special_tokens",
    }
)
UNSUPPORTED: dict[str, tuple[Any, ...]] = {  # and the values that ask for nothing
    "best_of": (),
    "suffix": ("",),
    "echo": (False,),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "prompt_logprobs": (),
    "chat_template": (),
    "documents": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "regex": (),
    "ebnf": (),
    "json_schema": (),
    "stop_regex": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "lora_path": (),
    "session_params": (),
    "image_data": ([],),
    "video_data": ([],),
    "audio_data": ([],),
    "input_embeds": (),
    "custom_logit_processor": (),
    "return_hidden_states": (False,),
}

NAMES = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are to be chosen, in every dialect. None: not given."""

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop: bool = False
    ignore_eos: bool = False
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool = True

    @classmethod
    def spelled(cls, field: str) -> str:
        """A field's name in the dialect."""
        return cls.__struct_encode_fields__[cls.__struct_fields__.index(field)]


class OpenAiRequest(Sampling, frozen=True, kw_only=True):
    """What completions and chat have in common."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    include_stop: bool = msgspec.field(default=False, name="include_stop_str_in_output")
    priority: int = 0
    cache_salt: str = ""
    response_format: dict[str, Any] | None = None


class CompletionRequest(OpenAiRequest, frozen=True, kw_only=True):
    prompt: str | list[Any]
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool = True


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatRequest(OpenAiRequest, frozen=True, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}


class NativeSampling(Sampling, frozen=True, kw_only=True):
    """``sampling_params`` of the native endpoint."""

    max_tokens: int | None = msgspec.field(default=128, name="max_new_tokens")
    min_tokens: int = msgspec.field(default=0, name="min_new_tokens")
    seed: int | None = msgspec.field(default=None, name="sampling_seed")
    include_stop: bool = msgspec.field(default=False, name="no_stop_trim")


class NativeRequest(msgspec.Struct, frozen=True, kw_only=True):
    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool = False
    top_logprobs_num: int = 0
    logprob_start_len: int = -1
    stream: bool = False
    priority: int = 0
    cache_salt: str = ""


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    prompt: str | list[str] | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[int]


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True):
    rid: str = ""
    abort_all: bool = False


Request = TypeVar("Request", bound=msgspec.Struct)


def parse_object(raw: bytes) -> dict[str, Any]:
    """A request body's JSON object."""
    if not raw.strip():
        raise invalid(None, "The request has no body; a JSON object is expected.")
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise invalid(None, f"We could not parse the JSON body of your request: {why}.") from None
    if not isinstance(body, dict):
        raise invalid(None, f"The body must be a JSON object, not {describe(body)}.")
    return body


def convert(body: dict[str, Any], into: type[Request], prefix: str = "") -> Request:
    """The typed request. Null at the top level means not given."""
    given = {name: value for name, value in body.items() if value is not None}
    for name in given.keys() - frozenset(into.__struct_encode_fields__):
        check_unknown(name, given[name], into, prefix)
    try:
        return msgspec.convert(given, into)
    except msgspec.ValidationError as error:
        raise explain(error, prefix) from None
    except RecursionError:
        raise invalid(None, "The body is nested too deeply.") from None


def check_unknown(name: str, value: Any, into: type[msgspec.Struct], prefix: str) -> None:
    if name in UNSUPPORTED:
        if not any(value == neutral for neutral in UNSUPPORTED[name]):
            raise unsupported(prefix + name, f"'{prefix}{name}'")
    elif name not in HARMLESS:
        ours = dict(zip(into.__struct_fields__, into.__struct_encode_fields__, strict=True))
        near = [ours[name]] if name in ours else difflib.get_close_matches(name, ours.values(), n=1, cutoff=0.87)
        if near:
            raise invalid(
                prefix + name,
                f"Unrecognized request argument supplied: {prefix}{name}. Did you mean {prefix}{near[0]}?",
                "unknown_parameter",
            )


def explain(error: msgspec.ValidationError, prefix: str) -> ApiError:
    """msgspec's sentence in the client's words."""
    what, _, where = str(error).partition(" - at `")
    param = prefix + where.removesuffix("`").removeprefix("$").removeprefix(".")
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", what):
        param = f"{param}.{missing[1]}".removeprefix(".")
        return invalid(param, f"Missing required parameter: '{param}'.", "missing_required_parameter")
    if kinds := re.fullmatch(r"Expected `(.+)`, got `(\w+)`", what):
        wanted = " or ".join(NAMES.get(kind, kind) for kind in kinds[1].split(" | ") if kind != "null")
        got = NAMES.get(kinds[2], kinds[2])
        return invalid(param, f"Invalid type for '{param}': expected {wanted}, but got {got} instead.", "invalid_type")
    return invalid(param or None, f"Invalid value for '{param}': {what}.")


def describe(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "a list"
        case _:
            return "an object"
