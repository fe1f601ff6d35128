"""Refusals in the shape that OpenAI clients understand: ``{"error": {message, type, param, code}}``."""

import math

import msgspec
from werkzeug.exceptions import HTTPException

from runtime.service import BadRequest, Delta, QueueFull, ServiceError, Unavailable

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """A refusal or a failure, as the client is told."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        type: str | None = None,
        retry_after_s: float | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.type = type or TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.headers: dict[str, str] = {}
        if retry_after_s is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
        if allow is not None:
            self.headers["Allow"] = allow
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"

    def body(self) -> bytes:
        return msgspec.json.encode(
            {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}
        )


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """The client's request is at fault, in the part named ``param``."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, what: str) -> ApiError:
    return ApiError(400, f"{what} is not supported by this server yet.", param=param, code="unsupported_parameter")


def context_exceeded(context_tokens: int, prompt_tokens: int, output_tokens: int, param: str) -> ApiError:
    """As OpenAI words it; clients look for the code, people for the numbers."""
    return invalid(
        param,
        f"This model's maximum context length is {context_tokens} tokens. However, you requested "
        f"{prompt_tokens + output_tokens} tokens ({prompt_tokens} in the {param}, {output_tokens} in the completion). "
        f"Please reduce the length of the {param} or completion.",
        "context_length_exceeded",
    )


def from_engine(delta: Delta) -> ApiError:
    """What ended a request that had been taken."""
    message = delta.error or "The request was aborted."
    match delta.code:
        case "queue_full":
            return ApiError(429, message, code=delta.code, retry_after_s=1.0)
        case "too_long":
            return invalid(None, message, "context_length_exceeded")
        case "deadline":
            return ApiError(504, message, code="deadline_exceeded", type="timeout_error")
        case "shutdown":
            return ApiError(503, message, code="shutting_down", retry_after_s=1.0)
        case _:
            return ApiError(500, message, code=delta.code or f"generation_{delta.finish}")


def from_service(error: ServiceError) -> ApiError:
    match error:
        case BadRequest():
            return invalid(error.param, error.message, error.code)
        case QueueFull():
            return ApiError(429, error.message, code="queue_full", retry_after_s=error.retry_after_s)
        case Unavailable():
            return ApiError(503, error.message, code="unavailable", retry_after_s=error.retry_after_s)
        case _:
            return ApiError(500, error.message)


def from_http(error: HTTPException, method: str, path: str) -> ApiError:
    """Routing and protocol refusals of the web framework."""
    status = error.code or 500
    match status:
        case 404:
            return ApiError(
                404, f"Unknown request URL: {method} {path}.", code="unknown_url", type="invalid_request_error"
            )
        case 405:
            allowed = ", ".join(sorted(getattr(error, "valid_methods", None) or ())) or "another method"
            return ApiError(
                405, f"{path} does not take {method}; it takes {allowed}.", code="method_not_allowed", allow=allowed
            )
        case _:
            return ApiError(status, error.description or error.name)
