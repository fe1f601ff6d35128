"""Text to token ids and back, and chats to prompts: what transformers' tokenizers do, from the same files.

``tokenizers`` and Jinja do the work; importing transformers would cost seconds at every start.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from runtime.chat import ChatTemplate, TemplateError
from runtime.pieces import Pieces, UnsupportedDecoder

__all__ = ["TemplateError", "Tokenizer", "TokenizerError"]

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerError(ValueError):
    """The tokenizer's files can't be used; one sentence that names the file."""


class Tokenizer:
    """The tokenizer of a model folder. Its methods may be called from several threads at once.

    Raises TokenizerError where a file is missing or damaged, TemplateError where the template doesn't compile.
    """

    def __init__(self, folder: str | Path, chat_template: str | Path = "", model_folder: str | Path = "") -> None:
        """``chat_template``: a file that replaces the model's. ``model_folder``: where config.json is, if elsewhere."""
        self.folder = Path(folder)
        config = _read_json(self.folder / "tokenizer_config.json")
        self._tokenizer = _load(self.folder / "tokenizer.json")
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._add_tokens(config)
        self.special_tokens: dict[str, str] = {
            name: text for name in _SPECIAL_NAMES if (text := _token_text(config.get(name))) is not None
        }
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        try:
            self.pieces = Pieces(self._tokenizer, self.special_ids)
        except UnsupportedDecoder as error:
            raise TokenizerError(f"{self.folder / 'tokenizer.json'} can't be used: {error}") from error
        self.bos_id = self.token_id(self.special_tokens.get("bos_token"))
        self.eos_ids = self._find_ends(Path(model_folder or folder))
        self._templates = _templates(self.folder, config, Path(chat_template) if chat_template else None)

    # -- ids and text

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """The ids of a text. ``add_special`` puts the begin mark in front where tokenizer.json says so."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special).ids
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of ids that begin a text. Bytes that are not UTF-8 become U+FFFD."""
        return self.pieces.decode(ids, skip_special)

    def token_bytes(self, ids: Iterable[int]) -> list[bytes]:
        """What each token adds to a text, special tokens included; b"" for an id without a token."""
        return [self.pieces.bytes[id] for id in ids]

    def token_id(self, token: str | None) -> int | None:
        """The id of a token by its name in the vocabulary."""
        number: int | None = None if token is None else self._tokenizer.token_to_id(token)
        return number

    # -- chats

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        /,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """The prompt text of a chat, by default up to where the answer begins.

        ``continue_final_message`` ends it inside the last message instead. ``template_kwargs`` go to the template.
        Raises TemplateError, with a sentence for the client.
        """
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise TemplateError("this model has no chat template: use completions, or set model.chat_template")
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        return template.render(
            messages,
            tools,
            {**self.special_tokens, **template_kwargs},
            add_generation_prompt=not continue_final_message
            if add_generation_prompt is None
            else add_generation_prompt,
            continue_final_message=continue_final_message,
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        /,
        **kwargs: Any,
    ) -> list[int]:
        """The ids of ``render_chat``; the template itself writes the special tokens."""
        return self.encode(self.render_chat(messages, tools, **kwargs), add_special=False)

    # -- loading

    def _add_tokens(self, config: Mapping[str, Any]) -> None:
        """Tokens that only tokenizer_config.json knows."""
        known = self._tokenizer.get_added_tokens_decoder()
        for number, token in sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0])):
            if int(number) not in known:
                flags = {name: bool(token.get(name)) for name in ("single_word", "lstrip", "rstrip", "normalized")}
                added = tokenizers.AddedToken(token["content"], special=bool(token.get("special")), **flags)
                self._tokenizer.add_tokens([added])

    def _find_ends(self, model_folder: Path) -> tuple[int, ...]:
        """Every token that ends an answer: by generation_config.json, else by config.json; and the tokenizer's."""
        found: list[int] = []
        for name in ("generation_config.json", "config.json"):
            ends = _read_json(model_folder / name).get("eos_token_id")
            if ends is not None and ends != []:
                found += ends if isinstance(ends, list) else [ends]
                break
        own = self.token_id(self.special_tokens.get("eos_token"))
        return tuple(dict.fromkeys([*found, *([own] if own is not None else [])]))


def _load(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise TokenizerError(f"{path} is missing: the model needs its tokenizer")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exceptions
        raise TokenizerError(f"{path} can't be used: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} doesn't hold a JSON object")
    return value


def _token_text(token: Any) -> str | None:
    """A special token is given as text, or as an object with its flags."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _templates(folder: Path, config: Mapping[str, Any], chosen: Path | None) -> dict[str, ChatTemplate]:
    """Name -> template. A file given by the user wins, then chat_template.jinja, then tokenizer_config.json."""
    file = chosen or folder / "chat_template.jinja"
    texts: dict[str, str] = {}
    if chosen or file.is_file():
        try:
            texts["default"] = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"the chat template {file} can't be read: {error}") from error
        for more in sorted((folder / "additional_chat_templates").glob("*.jinja")) if not chosen else ():
            texts[more.stem] = more.read_text(encoding="utf-8")
    elif isinstance(found := config.get("chat_template"), str):
        texts["default"] = found
    elif isinstance(found, list):
        texts = {item["name"]: item["template"] for item in found}
    return {name: ChatTemplate(text) for name, text in texts.items()}
