"""An LLM serving runtime whose every component is a supervised actor.

``open_runtime`` embeds the serving tree in a trio or asyncio program, ``Engine`` is the engine alone for scripts, and
``runtime serve`` is the server. Names are imported when first used: the command line's ``--help`` loads no torch.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .config import Config, ConfigError, load_config
    from .embed import Runtime, open_runtime
    from .messages import SamplingParams, TokenLogprobs
    from .offline import Completion, Engine
    from .service import BadRequest, Delta, ModelInfo, Unavailable

_HOMES = {
    "Config": "config",
    "ConfigError": "config",
    "load_config": "config",
    "Runtime": "embed",
    "open_runtime": "embed",
    "SamplingParams": "messages",
    "TokenLogprobs": "messages",
    "Completion": "offline",
    "Engine": "offline",
    "BadRequest": "service",
    "Delta": "service",
    "ModelInfo": "service",
    "Unavailable": "service",
}

__all__ = [
    "BadRequest",
    "Completion",
    "Config",
    "ConfigError",
    "Delta",
    "Engine",
    "ModelInfo",
    "Runtime",
    "SamplingParams",
    "TokenLogprobs",
    "Unavailable",
    "__version__",
    "load_config",
    "open_runtime",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
