"""Tokens as bytes: what each adds to a text.

The decoders of the models we serve (byte-level BPE, and SentencePiece with byte fallback) are concatenation: a text is
the bytes of its tokens in a row, read as UTF-8. That makes decoding a table look-up that needs no context, which is
what lets ``runtime.detokenize`` stream for the price of a look-up per token. (One difference from ``tokenizers``: where
bytes of a byte fallback are not UTF-8, it replaces the whole run of them, we replace what is wrong in it.)
"""

import json
from collections.abc import Iterable
from typing import Any

import tokenizers


class UnsupportedDecoder(ValueError):
    """The tokenizer puts its texts together in a way that is not concatenation; one sentence."""


class _Bytes(dict[int, bytes]):
    """id -> bytes, filled as ids are asked for."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, decoder: "_Decoder", blank: frozenset[int]) -> None:
        self._tokenizer, self._decoder = tokenizer, decoder
        self.update(dict.fromkeys(blank, b""))

    def __missing__(self, id: int) -> bytes:
        token = self._tokenizer.id_to_token(id) if id >= 0 else None
        value = self[id] = b"" if token is None else self._decoder.token_bytes(token)
        return value


class Pieces:
    """The bytes of every token of a tokenizer. Raises UnsupportedDecoder."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, special_ids: frozenset[int]) -> None:
        decoder = _Decoder(tokenizer)
        self.strips_first_space = decoder.strips_first_space
        self.bytes = _Bytes(tokenizer, decoder, frozenset())
        self.bytes_without_special = _Bytes(tokenizer, decoder, special_ids)

    def of(self, skip_special: bool) -> _Bytes:
        """The table to look ids up in."""
        return self.bytes_without_special if skip_special else self.bytes

    def decode(self, ids: Iterable[int], skip_special: bool) -> str:
        """The text of ids that begin a text."""
        table = self.of(skip_special)
        text = b"".join([table[id] for id in ids]).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_first_space else text


class _Decoder:
    """What the ``decoder`` part of a tokenizer.json does to one token."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self.strips_first_space = False
        self._byte_level: dict[str, int] | None = None
        self._byte_fallback = self._fused = False
        self._replaced: list[tuple[str, str]] = []
        whole: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {"type": "None"}
        for part in whole.get("decoders", [whole]):
            self._take(part)

    def _take(self, part: dict[str, Any]) -> None:
        match part:
            case {"type": "ByteLevel"}:
                self._byte_level = _byte_level_alphabet()
            case {"type": "ByteFallback"}:
                self._byte_fallback = True
            case {"type": "Fuse"}:
                self._fused = True
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                self._replaced.append((old, new))
            case {"type": "Metaspace", "replacement": mark}:
                self._replaced.append((mark, " "))
                self.strips_first_space = part.get("prepend_scheme", "always") != "never"
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0} if self._fused:
                self.strips_first_space = True
            case _:
                raise UnsupportedDecoder(f"the tokenizer's decoder {part.get('type')!r} is not supported")

    def token_bytes(self, token: str) -> bytes:
        for old, new in self._replaced:
            token = token.replace(old, new)
        if self._byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        if self._byte_level is not None:
            try:
                return bytes([self._byte_level[character] for character in token])
            except KeyError:
                pass  # an added token with characters of its own: it stands for itself
        return token.encode("utf-8", "replace")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones for themselves, the rest from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(rest)}
