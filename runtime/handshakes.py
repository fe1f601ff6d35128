"""What the actors of the serving tree give when they are up: the values of their handshakes."""

import msgspec

from .service import ModelInfo


class DetokenizerUp(msgspec.Struct, frozen=True):
    """``address``: where the scheduler sends its steps."""

    address: str


class FrontendUp(msgspec.Struct, frozen=True):
    """``origin``: where this frontend hears of its requests, and their name."""

    origin: str


class SchedulerUp(msgspec.Struct, frozen=True):
    """``address``: where frontends send their requests. ``phases_s``: what the start took."""

    address: str
    model: ModelInfo
    phases_s: dict[str, float] = {}
