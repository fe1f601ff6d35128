"""Text as it comes: token ids in, the newly certain characters out.

A stream gives out a character once its bytes are whole, and text once it can't be the beginning of a stop string. What
has been given out never changes, and how ids are grouped into calls makes no difference to the text: whoever replays
the same ids gets the same characters.
"""

import codecs
from collections.abc import Sequence

from runtime.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class TextStream:
    """The text of one answer. Not shared between threads."""

    __slots__ = ("_in_prompt", "_pending", "_stops", "_strip", "_table", "offset")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_tail: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        """``prompt_tail`` holds the last ids of the prompt: a character may begin there, and so does the text."""
        pieces = tokenizer.pieces
        self._table = pieces.of(skip_special_tokens)
        context, self._pending = _decode(b"".join([self._table[id] for id in prompt_tail]))
        # Bytes in _pending are the prompt's. If what follows doesn't complete them, their U+FFFD isn't ours to give.
        self._in_prompt = bool(self._pending)
        self._strip = pieces.strips_first_space and not context
        self._stops = _StopScanner(stop, include_stop) if any(stop) else None
        self.offset = 0  # characters given out so far

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.matched if self._stops else None

    @property
    def held(self) -> str:
        """Whole characters that are kept back, because a stop string may begin there."""
        return self._stops.held if self._stops else ""

    def push(self, ids: Sequence[int]) -> str:
        """The characters that became certain with these ids. Empty after a stop string was found."""
        table = self._table
        data = table[ids[0]] if len(ids) == 1 else b"".join([table[id] for id in ids])
        text, self._pending = _decode(self._pending + data)
        return self._give(text, last=False)

    def finish(self) -> str:
        """What was kept back: no more ids come. Bytes that never made a character become U+FFFD."""
        text, self._pending = self._pending.decode("utf-8", "replace"), b""
        return self._give(text, last=True)

    def _give(self, text: str, last: bool) -> str:
        if text:
            if self._in_prompt:
                self._in_prompt = False
                text = text.removeprefix(_REPLACEMENT)
            if self._strip and text:
                self._strip = False
                text = text.removeprefix(" ")
        if self._stops is not None:
            text = self._stops.scan(text, last)
        self.offset += len(text)
        return text


def _decode(data: bytes) -> tuple[str, bytes]:
    """The text of the whole characters, and the bytes of one that is still incomplete."""
    text, used = codecs.utf_8_decode(data, "replace", False)
    return text, data[used:]


class _StopScanner:
    """Cuts a text at the first stop string that is complete; of two that end together, the longer one counts."""

    __slots__ = ("_begins", "_first", "_include", "_longest", "_stops", "held", "matched")

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._include = include
        self._longest = max(map(len, self._stops)) - 1  # of a stop string that is not complete
        self._begins = {stop[:length] for stop in self._stops for length in range(1, len(stop))}
        self._first = {stop[0] for stop in self._stops}
        self.held = ""
        self.matched: str | None = None

    def scan(self, new: str, last: bool) -> str:
        if self.matched is not None:
            return ""
        text = self.held + new
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, start, self.matched = min(found)
            self.held = ""
            return text[: end if self._include else start]
        keep = 0 if last else self._begun(text)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _begun(self, text: str) -> int:
        """The length of the longest end of ``text`` that begins a stop string."""
        longest = min(self._longest, len(text))
        if longest == 0 or self._first.isdisjoint(text[-longest:]):
            return 0
        for length in range(longest, 0, -1):
            if text[-length:] in self._begins:
                return length
        return 0
