"""The tokenizer inside a GGUF file as tokenizer.json and tokenizer_config.json.

GGUF keeps the vocabulary and the merges, but names the text's pre-splitting only by a word (``tokenizer.ggml.pre``).
A wrong guess there gives text that is subtly off, so a word we don't know is an error.
"""

import json
from pathlib import Path
from typing import Any

from runtime.gguf_file import GgufError

# Token types of GGUF.
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION_AND_SPACES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# Word in the file -> the pattern that cuts text before the merges; None = GPT-2's own, after single digits.
_PATTERNS: dict[str, str | None] = {
    "smollm": None,
    "starcoder": None,
    "llama-bpe": _CONTRACTIONS + _WORDS + r"|\p{N}{1,3}" + _PUNCTUATION_AND_SPACES,
    "qwen2": _CONTRACTIONS + _WORDS + r"|\p{N}" + _PUNCTUATION_AND_SPACES,
    "tekken": (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
_WHOLE_WORDS_FIRST = {"llama-bpe", "tekken"}  # a word that is a token is not built by merges
_BEGIN_BY_DEFAULT = {"llama-bpe", "tekken"}


def write_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    """Write both files into ``folder``. Raises GgufError for a tokenizer that is missing or not supported."""
    for name, content in tokenizer_files(metadata).items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def tokenizer_files(metadata: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """File name -> content. Raises GgufError for a tokenizer that is missing or not supported."""
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens") or []
    if not tokens:
        raise GgufError("it holds no tokenizer")
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    match metadata.get("tokenizer.ggml.model"):
        case "gpt2":
            parts, begin = _byte_level(metadata, tokens)
        case "llama":
            parts, begin = _sentencepiece(metadata, tokens, types)
        case model:
            raise GgufError(f"its tokenizer model {model!r} is not supported; supported: gpt2, llama")
    begin = bool(metadata.get("tokenizer.ggml.add_bos_token", begin))
    end = bool(metadata.get("tokenizer.ggml.add_eos_token", False))

    def named(key: str) -> str | None:
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        return tokens[number] if number is not None and number < len(tokens) else None

    special = {"bos_token": named("bos"), "eos_token": named("eos")}
    special |= {"unk_token": named("unknown"), "pad_token": named("padding")}
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": _added(tokens, types), **parts}
    whole["post_processor"] = _framed(
        special["bos_token"] if begin else None, special["eos_token"] if end else None, tokens
    )
    config: dict[str, Any] = {name: token for name, token in special.items() if token is not None}
    config |= {"add_bos_token": begin, "add_eos_token": end, "clean_up_tokenization_spaces": False}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return {"tokenizer.json": whole, "tokenizer_config.json": config}


def _added(tokens: list[str], types: list[int]) -> list[dict[str, Any]]:
    """Tokens that are found in text as they stand, before anything is cut or merged."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": number, "content": token, **plain, "special": kind != _USER_DEFINED}
        for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_CONTROL, _USER_DEFINED, _UNKNOWN)
    ]


def _framed(begin: str | None, end: str | None, tokens: list[str]) -> dict[str, Any] | None:
    marks = [mark for mark in (begin, end) if mark is not None]
    if not marks:
        return None

    def template(*sequences: tuple[str, int]) -> list[dict[str, Any]]:
        pieces: list[dict[str, Any]] = []
        for name, kind in sequences:
            pieces += [{"SpecialToken": {"id": begin, "type_id": kind}}] if begin is not None else []
            pieces += [{"Sequence": {"id": name, "type_id": kind}}]
            pieces += [{"SpecialToken": {"id": end, "type_id": kind}}] if end is not None else []
        return pieces

    return {
        "type": "TemplateProcessing",
        "single": template(("A", 0)),
        "pair": template(("A", 0), ("B", 1)),
        "special_tokens": {mark: {"id": mark, "ids": [tokens.index(mark)], "tokens": [mark]} for mark in marks},
    }


def _byte_level(metadata: dict[str, Any], tokens: list[str]) -> tuple[dict[str, Any], bool]:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in _PATTERNS:
        raise GgufError(f"its pre-tokenizer {pre!r} is not supported; supported: {', '.join(_PATTERNS)}")
    pattern = _PATTERNS[pre]
    bytes_: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    first = (
        {"type": "Digits", "individual_digits": True}
        if pattern is None
        else {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    )
    return {
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [first, {**bytes_, "use_regex": pattern is None}]},
        "decoder": {**bytes_, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in metadata.get("tokenizer.ggml.merges", ())],
            "ignore_merges": pre in _WHOLE_WORDS_FIRST,
        },
    }, pre in _BEGIN_BY_DEFAULT


def _sentencepiece(metadata: dict[str, Any], tokens: list[str], types: list[int]) -> tuple[dict[str, Any], bool]:
    """SentencePiece's BPE: the merges are not stored, but follow from the scores."""
    scores: list[float] | None = metadata.get("tokenizer.ggml.scores")
    if scores is None:
        raise GgufError("the value tokenizer.ggml.scores is missing from its metadata")
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*([{"type": "Prepend", "prepend": "▁"}] if prefix else []), spaces],
        },
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                back,
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *([{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []),
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": _BYTE in types,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": _merges(tokens, types, scores),
        },
    }, True


def _merges(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to join two tokens into a third; the better the third's score, the earlier it is done."""
    ids = {
        token: number
        for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind not in (_UNKNOWN, _CONTROL, _BYTE)
    }
    found = [
        (-scores[number], number, ids[token[:cut]], ids[token[cut:]])
        for token, number in ids.items()
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    return [(tokens[left], tokens[right]) for _, _, left, right in sorted(found)]
