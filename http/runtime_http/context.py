"""What a handler works with: one call of an endpoint."""

import hmac
import secrets
import time
from typing import Any, cast

import anyio
from quart import Request

from runtime.service import ModelInfo, TokenizerClient
from runtime_http.errors import ApiError, invalid
from runtime_http.exchange import KEY, Exchange
from runtime_http.front import Front
from runtime_http.job import SANE_ID
from runtime_http.options import Options
from runtime_http.schema import describe, parse_object
from runtime_http.tokens import TokenTexts

RETRY_AFTER_S = 2.0
LEAST_BODY_RATE = 1024  # bytes/s, after the first minute


class Call:
    """One request to an endpoint of the API."""

    def __init__(self, front: Front, request: Request) -> None:
        self.front = front
        self.request = request
        self.exchange: Exchange = cast(dict[str, Any], request.scope)[KEY]
        self.now = int(time.time())

    @property
    def options(self) -> Options:
        return self.front.options

    @property
    def tokenizer(self) -> TokenizerClient:
        return self.front.service.tokenizer

    @property
    def texts(self) -> TokenTexts:
        return self.front.texts

    @property
    def info(self) -> ModelInfo:
        info = self.front.service.info
        if info is None:
            raise not_ready("The model is still being loaded.")
        return info

    def authorize(self) -> None:
        """Raises ApiError unless a configured key, if there are any, came along."""
        keys = self.options.api_keys
        if not keys:
            return
        scheme, _, given = self.request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            raise ApiError(
                401,
                "You didn't provide an API key. Send it in an Authorization header: 'Authorization: Bearer KEY'.",
                type="invalid_request_error",
                code="invalid_api_key",
            )
        candidate = given.strip().encode("latin-1")  # as the bytes came
        # All are compared, so that the time tells nothing of which one, or how much of it, was right.
        if not sum([hmac.compare_digest(candidate, key.encode()) for key in keys]):
            raise ApiError(401, "Incorrect API key provided.", type="invalid_request_error", code="invalid_api_key")

    def require_ready(self) -> None:
        if self.front.draining:
            raise not_ready("The server is shutting down.")
        service = self.front.service
        if not (service.ready() or service.recovering()):
            raise not_ready("The server takes no requests at present; GET /ready tells why.")

    async def body(self) -> bytes:
        """The request's body. Raises ApiError if it is too large or does not come."""
        limit = self.options.max_body_bytes
        too_large = ApiError(413, f"The request's body is larger than {limit} bytes.", code="request_too_large")
        if (self.request.content_length or 0) > limit:
            raise too_large
        received = bytearray()
        parts = self.request.body.__aiter__()
        began = anyio.current_time()
        while True:
            spent_s = anyio.current_time() - began
            wait_s = min(self.options.body_idle_s, 60 + len(received) / LEAST_BODY_RATE - spent_s)
            try:
                with anyio.fail_after(max(0, wait_s)):
                    received += await parts.__anext__()
            except StopAsyncIteration:
                return bytes(received)
            except TimeoutError:
                raise ApiError(408, "The request's body did not arrive in time.", code="request_timeout") from None
            if len(received) > limit:
                raise too_large

    async def json(self) -> dict[str, Any]:
        """The JSON object in the body."""
        mimetype = self.request.mimetype
        if mimetype and mimetype != "application/json" and not mimetype.endswith("+json"):
            raise ApiError(
                415,
                f"Unsupported content type '{mimetype}': send the body as 'application/json'.",
                code="unsupported_media_type",
            )
        return parse_object(await self.body())

    def for_model(self, body: dict[str, Any], *, required: bool = True) -> dict[str, Any]:
        """The body, if it asks for the model that is served."""
        model = body.get("model")
        if model is None and not required:
            return body
        if model is None or model == "":
            raise invalid("model", "You must provide a model parameter.", "missing_required_parameter")
        if not isinstance(model, str):
            raise invalid("model", f"Invalid type for 'model': expected a string, but got {describe(model)} instead.")
        self.known_model(model)
        return body

    def known_model(self, model: str) -> None:
        if model != self.info.name:
            raise ApiError(
                404,
                f"The model '{model}' does not exist; this server serves '{self.info.name}'.",
                param="model",
                code="model_not_found",
                type="invalid_request_error",
            )

    def new_id(self, prefix: str) -> str:
        """An id for the answer: the client's own, where it sent a usable one, else a random one."""
        given = self.request.headers.get("X-Request-Id", "")
        return prefix + (given if SANE_ID.fullmatch(given) else secrets.token_hex(12))


def not_ready(message: str) -> ApiError:
    return ApiError(503, message, code="not_ready", retry_after_s=RETRY_AFTER_S)
