"""The HTTP front: an OpenAI-compatible API before a serving tree, on Quart and hypercorn's trio worker."""

from runtime_http.app import blueprint, create_app, front_of
from runtime_http.options import Options
from runtime_http.serve import bind, serve

__all__ = ["Options", "bind", "blueprint", "create_app", "front_of", "serve"]
