"""The endpoints beside generation: state, models, tokens, cache, aborts."""

from typing import Any, cast

import msgspec
from quart import Response

from runtime.service import ModelInfo
from runtime_http import params as p
from runtime_http.chat import template_kwargs
from runtime_http.context import RETRY_AFTER_S, Call
from runtime_http.errors import ApiError, invalid
from runtime_http.messages import plain_messages
from runtime_http.schema import AbortRequest, DetokenizeRequest, TokenizeRequest, convert


def answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, content_type="application/json")


async def health(call: Call) -> Response:
    """Alive: the front answers. It asks nobody else."""
    return answer({"status": "ok", "ready": call.front.service.ready() and not call.front.draining})


async def ready(call: Call) -> Response:
    """Ready to serve, or what is missing."""
    status = dict(await call.front.service.status())
    if call.front.draining:
        status["state"] = "draining"
    elif call.front.service.ready():
        return answer(status)
    return answer(status, 503, {"Retry-After": f"{RETRY_AFTER_S:.0f}"})


async def metrics(call: Call) -> Response:
    page = await call.front.service.metrics()
    if page and not page.endswith(b"\n"):
        page += b"\n"
    return Response(page + call.front.stats.prometheus(), content_type="text/plain; version=0.0.4; charset=utf-8")


async def server_info(call: Call) -> Response:
    """Everything that helps to understand a server from outside; no secrets."""
    front = call.front
    info = front.service.info
    return answer(
        {
            "model": None
            if info is None
            else card(info) | {"device": info.device, "dtype": info.dtype, "quantization": info.quantization},
            "status": await front.service.status(),
            "http": front.stats.to_dict() | {"running": len(front.jobs), "draining": front.draining},
        }
    )


def card(info: ModelInfo) -> dict[str, Any]:
    return {
        "id": info.name,
        "object": "model",
        "created": info.created,
        "owned_by": "runtime",
        "max_model_len": info.context_tokens,
    }


async def models(call: Call) -> Response:
    return answer({"object": "list", "data": [card(call.info)]})


async def model(call: Call, name: str) -> Response:
    call.known_model(name)
    return answer(card(call.info))


async def tokenize(call: Call) -> Response:
    request = convert(call.for_model(await call.json(), required=False), TokenizeRequest)
    if (request.prompt is None) == (request.messages is None):
        raise invalid("prompt", "Exactly one of 'prompt' and 'messages' is needed.")
    tokens: Any
    if request.messages is not None:
        kwargs = template_kwargs(
            request.chat_template_kwargs, request.add_generation_prompt, request.continue_final_message
        )
        tokens = await call.tokenizer.encode_chat(plain_messages(request.messages), None, kwargs)
        count: Any = len(tokens)
    elif isinstance(request.prompt, list):
        tokens = [await call.tokenizer.encode(text, request.add_special_tokens) for text in request.prompt]
        count = [len(each) for each in tokens]
    else:
        assert request.prompt is not None
        tokens = await call.tokenizer.encode(request.prompt, request.add_special_tokens)
        count = len(tokens)
    return answer({"tokens": tokens, "count": count, "max_model_len": call.info.context_tokens})


async def detokenize(call: Call) -> Response:
    request = convert(call.for_model(await call.json(), required=False), DetokenizeRequest)
    text = await call.tokenizer.decode(p.known_tokens("tokens", request.tokens, call.info))
    return answer({"prompt": text, "text": text})


async def flush_cache(call: Call) -> Response:
    """Drop cached prefixes that no running request uses."""
    flush = getattr(call.front.service, "flush_cache", None)
    if flush is None:
        raise ApiError(501, "This server cannot flush its cache.")
    result = await flush()
    return answer({"flushed": True} | (result if isinstance(result, dict) else {}))


async def fault(call: Call) -> Response:
    """The debug door (``supervision.debug_faults``): provoke a fault in an actor."""
    await cast(Any, call.front.service).fault(await call.json())
    return answer({"done": True})


async def abort_request(call: Call) -> Response:
    """End running requests by the id they were given, or all of them."""
    request = convert(await call.json(), AbortRequest)
    if not request.rid and not request.abort_all:
        raise invalid("rid", "'rid' or 'abort_all' is needed.")
    found = [job for job in call.front.jobs if request.abort_all or job.answers_to(request.rid)]
    for job in found:
        job.fail(ApiError(499, "The request was aborted.", code="aborted", type="aborted"))
    return answer({"aborted": len(found)})
