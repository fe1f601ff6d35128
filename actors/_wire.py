"""What crosses a control channel: frames (4-byte length + msgpack), and values with their types.

Frames are arrays tagged with their kind. Values travel as bytes inside them, so that a hop forwards without decoding.
"""

from __future__ import annotations

import enum
import importlib
import struct
import sys
from functools import lru_cache
from typing import Any, Literal, TypeAlias

import msgspec

from ._exit import ExitReason, Progress, RemoteErrorData, Returned
from ._notices import Event

MAIN_SCRIPT = "__actors_main__"
WINDOW = 512  # casts per path that may be on their way over one link
MAX_FRAME_BYTES = 64 * 1024 * 1024
_LENGTH = struct.Struct(">I")

Overflow: TypeAlias = Literal["wait", "fail", "drop-oldest"]


class Frame(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


# -- life of a process actor, child to parent ---
class Boot(Frame, frozen=True, tag="boot"):
    """The interpreter answered. Written by hand in `_child.py`, before anything but the stdlib is imported."""

    pid: int
    protocol: int


class Phase(Frame, frozen=True, tag="progress"):
    progress: Progress


class Started(Frame, frozen=True, tag="started"):
    value: bytes


class Beat(Frame, frozen=True, tag="beat"):
    phase: str


class Bye(Frame, frozen=True, tag="bye"):
    """The target has ended with this reason; the process follows."""

    reason: ExitReason


class Reported(Frame, frozen=True, tag="event"):
    """What a supervisor inside the child reports. From these, too, the parent knows which generations there were."""

    event: Event


# -- life of a process actor, parent to child ---
class Launch(Frame, frozen=True, tag="launch"):
    path: str
    generation: int
    target: str
    args: list[bytes]
    mailbox: int
    overflow: Overflow
    drain: bool
    grace_s: float
    generations: dict[str, int]


class Stop(Frame, frozen=True, tag="stop"):
    by: str
    budget_s: float | None
    drain: bool


# -- messages between actors, both ways ---
class Call(Frame, frozen=True, tag="call"):
    id: int
    path: str
    generation: int
    method: str
    caller: str
    budget_s: float | None
    payload: bytes


class CallError(msgspec.Struct, frozen=True, array_like=True):
    """Why a message has no result: kind is "died", "nosuch", "raised", "full" or "cancelled"."""

    kind: str
    path: str
    generation: int = 0
    reason: ExitReason | None = None
    error: RemoteErrorData | None = None


class Reply(Frame, frozen=True, tag="reply"):
    id: int
    result: bytes | None
    error: CallError | None = None


class Cancel(Frame, frozen=True, tag="cancel"):
    id: int


class Cast(Frame, frozen=True, tag="cast"):
    path: str
    generation: int
    payload: bytes


class Taken(Frame, frozen=True, tag="taken"):
    """So many casts for this path left the sender's window; `refused`: some found no actor, or no room."""

    path: str
    count: int
    refused: bool = False


class Watch(Frame, frozen=True, tag="watch"):
    path: str
    on: bool


class Told(Frame, frozen=True, tag="told"):
    """An actor came up (`reason` is None) or went down."""

    path: str
    generation: int
    value: bytes
    reason: ExitReason | None


AnyFrame: TypeAlias = (
    Boot | Phase | Started | Beat | Bye | Reported | Launch | Stop
    | Call | Reply | Cancel | Cast | Taken | Watch | Told
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyFrame] = msgspec.msgpack.Decoder(AnyFrame)


class ProtocolError(Exception):
    """The peer sent something that is no frame."""


def encode_frame(frame: Frame) -> bytes:
    body = _encoder.encode(frame)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def decode_frame(body: bytes | memoryview) -> AnyFrame:
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as exc:
        raise ProtocolError(f"no frame: {exc}") from None


class FrameReader:
    """Bytes in, frames out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[AnyFrame]:
        """The frames that `data` completes. Raises ProtocolError."""
        buffer = self._buffer
        buffer += data
        frames: list[AnyFrame] = []
        at, end = 0, len(buffer)
        view = memoryview(buffer)
        try:
            while end - at >= 4:
                (size,) = _LENGTH.unpack_from(buffer, at)
                if size > MAX_FRAME_BYTES:
                    raise ProtocolError(f"a frame of {size} bytes is announced; the limit is {MAX_FRAME_BYTES}")
                if end - at - 4 < size:
                    break
                frames.append(decode_frame(view[at + 4 : at + 4 + size]))
                at += 4 + size
        finally:
            view.release()
        del buffer[:at]
        return frames


# -- values ---
def dump(value: Any) -> bytes:
    """`value` with its type when that is a Struct, a dataclass or an enum. Raises what the encoder raises."""
    kind = type(value)
    name = f"{kind.__module__}:{kind.__qualname__}" if _is_typed(kind) else None
    return _encoder.encode((name, value))


def load(data: bytes) -> Any:
    """The value of `dump`. A type that can't be imported here leaves the plain builtins."""
    name, value = msgspec.msgpack.decode(data)
    kind = None if name is None else _resolve(name)
    if kind is None:
        return value
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:  # another version of the class
        return value


def _is_typed(kind: Any) -> bool:
    return issubclass(kind, msgspec.Struct | enum.Enum) or hasattr(kind, "__dataclass_fields__")


@lru_cache(1024)
def _resolve(name: str) -> type | None:
    module, _, qualname = name.partition(":")
    if module in ("__main__", MAIN_SCRIPT):  # the parent's main module is an imported one in its children
        module = MAIN_SCRIPT if MAIN_SCRIPT in sys.modules else "__main__"
    try:
        found: Any = importlib.import_module(module)
        for part in qualname.split("."):
            found = getattr(found, part)
    except Exception:
        return None
    return found if isinstance(found, type) and _is_typed(found) else None


def portable(reason: ExitReason) -> ExitReason:
    """`reason` so that it can be encoded: a value that can't be is replaced by its repr."""
    if isinstance(reason, Returned):
        try:
            _encoder.encode(reason.value)
        except Exception:
            return Returned(repr(reason.value)[:1000])
    return reason


class Parcel:
    """A value on its way: an object inside a process, bytes between processes; converted once, when needed."""

    __slots__ = ("_bytes", "_is_object", "_value")

    def __init__(self, value: Any = None, data: bytes | None = None) -> None:
        self._value = value
        self._bytes = data
        self._is_object = data is None

    def load(self) -> Any:
        if not self._is_object:
            assert self._bytes is not None
            self._value = load(self._bytes)
            self._is_object = True
        return self._value

    def dump(self) -> bytes:
        if self._bytes is None:
            self._bytes = dump(self._value)
        return self._bytes
