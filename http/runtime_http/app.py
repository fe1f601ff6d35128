"""The Quart app, and the blueprint for someone else's."""

from collections.abc import Awaitable, Callable
from typing import Any, cast

from quart import Blueprint, Quart, Request, Response, has_request_context, request
from quart_trio import QuartTrio
from quart_trio.asgi import TrioASGIHTTPConnection
from werkzeug.exceptions import HTTPException

from runtime.service import Service, ServiceError
from runtime_http import ops
from runtime_http.chat import chat_completions
from runtime_http.completions import completions
from runtime_http.context import Call
from runtime_http.errors import ApiError, from_http, from_service
from runtime_http.exchange import ExchangeLayer
from runtime_http.front import Front, log
from runtime_http.lean import LeanConnection
from runtime_http.native import generate
from runtime_http.options import Options

Handler = Callable[..., Awaitable[Response]]

ROUTES: tuple[tuple[str, str, Handler, str], ...] = (
    # path, methods, handler, what it needs: nothing, a key, or a key and a ready server
    ("/health", "GET", ops.health, ""),
    ("/ready", "GET", ops.ready, ""),
    ("/metrics", "GET", ops.metrics, "key"),
    ("/server_info", "GET", ops.server_info, "key"),
    ("/v1/models", "GET", ops.models, "ready"),
    ("/v1/models/<path:name>", "GET", ops.model, "ready"),
    ("/v1/chat/completions", "POST", chat_completions, "ready"),
    ("/v1/completions", "POST", completions, "ready"),
    ("/generate", "POST", generate, "ready"),
    ("/tokenize", "POST", ops.tokenize, "ready"),
    ("/v1/tokenize", "POST", ops.tokenize, "ready"),
    ("/detokenize", "POST", ops.detokenize, "ready"),
    ("/v1/detokenize", "POST", ops.detokenize, "ready"),
    ("/flush_cache", "POST", ops.flush_cache, "ready"),
    ("/abort_request", "POST", ops.abort_request, "ready"),
)


DEBUG_ROUTES: tuple[tuple[str, str, Handler, str], ...] = (("/debug/fault", "POST", ops.fault, "key"),)


def create_app(service: Service, options: Options | None = None) -> QuartTrio:
    """An app of its own that serves ``service``. ``runtime_http.serve`` runs it; so does any ASGI server on trio."""
    app = QuartTrio("runtime_http", static_folder=None)
    front = _front(service, options)
    app.config.update(RESPONSE_TIMEOUT=None, BODY_TIMEOUT=None, MAX_CONTENT_LENGTH=None)
    app.register_blueprint(_blueprint(front))
    app.register_error_handler(HTTPException, _on_http_error(front))
    app.extensions["runtime_http"] = front
    return app


def blueprint(service: Service, options: Options | None = None) -> Blueprint:
    """The endpoints, to be registered in a Quart app (on trio or asyncio), with or without a prefix.

    Registering wraps the app's ``asgi_app``; do it after other middleware, or streams take a slower way out.
    """
    return _blueprint(_front(service, options))


def front_of(app: Quart) -> Front:
    """The state behind an app made by ``create_app``."""
    return cast(Front, app.extensions["runtime_http"])


def _front(service: Service, options: Options | None) -> Front:
    return Front(service, options or Options.of(service.config), [path for path, *_ in ROUTES])


def _blueprint(front: Front) -> Blueprint:
    found = Blueprint("runtime_http", __name__)
    for path, methods, handler, needs in (*ROUTES, *(DEBUG_ROUTES if front.options.debug_faults else ())):
        found.add_url_rule(path, path, _view(front, handler, needs), methods=methods.split())
    found.register_error_handler(ApiError, _on_api_error(front))
    found.register_error_handler(ServiceError, _on_api_error(front))
    found.register_error_handler(HTTPException, _on_http_error(front))
    found.register_error_handler(Exception, _on_api_error(front))

    @found.after_request
    async def _share(response: Any) -> Any:
        return share(front, response)

    @found.record_once
    def _wrap(state: Any) -> None:
        app: Quart = state.app
        app.asgi_app = ExchangeLayer(app.asgi_app, front)  # type: ignore[assignment, method-assign, arg-type]
        if isinstance(app, QuartTrio) and app.asgi_http_class is TrioASGIHTTPConnection:
            app.asgi_http_class = LeanConnection

    return found


def _view(front: Front, handler: Handler, needs: str) -> Handler:
    async def view(**arguments: str) -> Response:
        call = Call(front, cast(Request, request._get_current_object()))  # type: ignore[attr-defined]
        if needs:
            call.authorize()
        if needs == "ready":
            call.require_ready()
        return await handler(call, **arguments)

    return view


def _on_api_error(front: Front) -> Callable[[Exception], Awaitable[Response]]:
    async def handle(error: Exception) -> Response:
        match error:
            case ApiError():
                refusal = error
            case ServiceError():
                refusal = from_service(error)
            case _:
                log.error("%s %s failed", request.method, request.path, exc_info=error)
                refusal = ApiError(500, "The server had an error while processing your request.")
        return refuse(refusal)

    return handle


def _on_http_error(front: Front) -> Callable[[HTTPException], Awaitable[Any]]:
    async def handle(error: HTTPException) -> Any:
        if error.code is None or error.code < 400 or not has_request_context():  # a redirect, a WebSocket
            return error.get_response()
        return share(front, refuse(from_http(error, request.method, request.path)))

    return handle


def refuse(error: ApiError) -> Response:
    return Response(error.body(), error.status, error.headers, content_type="application/json")


def share(front: Front, response: Any) -> Any:
    """Let web pages of the configured origins call us."""
    origins = front.options.cors_origins
    origin = request.headers.get("Origin")
    if origin is None or not origins or "Access-Control-Allow-Origin" in response.headers:
        return response
    if "*" not in origins and origin not in origins:
        return response
    headers = response.headers
    headers["Access-Control-Allow-Origin"] = "*" if "*" in origins else origin
    headers["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After"
    if "*" not in origins:
        headers["Vary"] = "Origin"
    if request.method == "OPTIONS":
        headers["Access-Control-Allow-Methods"] = headers.get("Allow", "GET, POST, OPTIONS")
        headers["Access-Control-Allow-Headers"] = request.headers.get(
            "Access-Control-Request-Headers", "authorization, content-type"
        )
        headers["Access-Control-Max-Age"] = "600"
    return response
