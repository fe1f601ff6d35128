"""Tokens and their logarithms of probability, as the dialects show them."""

from collections.abc import Sequence
from typing import Any

from runtime.messages import TokenLogprobs
from runtime.service import TokenizerClient

FLOOR = -9999.0  # stands for minus infinity, which JSON cannot say


def finite(logprob: float) -> float:
    return logprob if logprob > FLOOR else FLOOR


class TokenTexts:
    """How tokens read; remembers those it was asked for."""

    def __init__(self, tokenizer: TokenizerClient) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}

    def of(self, token: int) -> tuple[str, bytes]:
        """A token's text and bytes. Bytes that are no whole characters are spelled out: no two tokens look alike."""
        known = self._known.get(token)
        if known is None:
            (raw,) = self._tokenizer.token_bytes((token,))
            try:
                text = raw.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join([f"\\x{byte:02x}" for byte in raw])
            known = self._known[token] = text, raw
        return known

    def text(self, token: int) -> str:
        return self.of(token)[0]


def chat_logprobs(texts: TokenTexts, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """The ``logprobs`` object of a chat choice."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        text, raw = texts.of(token)
        return {"token": text, "logprob": finite(logprob), "bytes": list(raw)}

    content = [
        one(entry.token, entry.logprob)
        | {"top_logprobs": [one(*top) for top in zip(entry.top_tokens, entry.top_logprobs, strict=True)]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """The ``logprobs`` object of a completions choice, part by part."""

    __slots__ = ("alternatives", "offset", "texts")

    def __init__(self, texts: TokenTexts, alternatives: int) -> None:
        self.texts = texts
        self.alternatives = alternatives
        self.offset = 0  # characters before the next token

    def part(self, tokens: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """For some positions; a prompt's first one has no entry."""
        names, logprobs, tops, offsets = [], [], [], []
        for token, entry in zip(tokens, entries, strict=True):
            name = self.texts.text(token)
            names.append(name)
            logprobs.append(None if entry is None else finite(entry.logprob))
            tops.append(None if entry is None else self._map(entry))
            offsets.append(self.offset)
            self.offset += len(name)
        return {
            "tokens": names,
            "token_logprobs": logprobs,
            "top_logprobs": tops if self.alternatives else None,
            "text_offset": offsets,
        }

    def _map(self, entry: TokenLogprobs) -> dict[str, float]:
        """The alternatives by text, the token's own among them."""
        pairs = dict(zip(entry.top_tokens, entry.top_logprobs, strict=True))
        pairs.setdefault(entry.token, entry.logprob)
        found: dict[str, float] = {}
        for token, logprob in pairs.items():
            name = self.texts.text(token)
            found[f"token_id:{token}" if name in found else name] = finite(logprob)
        return found
