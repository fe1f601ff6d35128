"""Chat templates: messages to text, as transformers' ``apply_chat_template`` renders them, without importing it.

Templates come with models, so they run in Jinja's immutable sandbox, and see nothing but plain data.
"""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateError(ValueError):
    """The template is broken or refuses these messages; one sentence for the client."""


class ChatTemplate:
    """One compiled template. Raises TemplateError if it doesn't compile."""

    def __init__(self, text: str) -> None:
        try:
            self._template = _environment().from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"the chat template is broken in line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        values: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
    ) -> str:
        """The text of a chat. ``values`` are further names that the template may ask for.

        ``continue_final_message`` ends the text inside the last message, for the model to go on with it.
        """
        chat = [_message(message) for message in messages]
        if continue_final_message:
            if add_generation_prompt:
                raise TemplateError("add_generation_prompt and continue_final_message exclude each other: choose one")
            _mark_end(chat)
        try:
            text = self._template.render(
                **{
                    "documents": None,
                    **values,
                    "messages": chat,
                    "tools": list(tools) if tools else None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template refuses these messages: {error.message}") from error
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            raise TemplateError(f"the chat template can't render these messages: {error}") from error
        return _cut_at_mark(text) if continue_final_message else text


# Stands in a rendered text where the last message ends. Templates may strip its space together with the message's own.
_MARK = "THE_FINAL_MESSAGE_ENDS_HERE "


def _mark_end(chat: list[dict[str, Any]]) -> None:
    if not chat or not isinstance(chat[-1].get("content"), str):
        raise TemplateError("continue_final_message is set, but the last message has no text to continue")
    chat[-1]["content"] += _MARK


def _cut_at_mark(text: str) -> str:
    before, mark, after = text.rpartition(_MARK.strip())
    if not mark:
        raise TemplateError("this model's chat template leaves out the last message, so it can't be continued")
    return before if after.startswith(" ") else before.rstrip()


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: no empty fields, text parts joined, tool arguments as an object."""
    plain = {key: value for key, value in message.items() if value is not None}
    content = plain.get("content")
    if isinstance(content, list) and all(_is_text(part) for part in content):
        plain["content"] = "".join(part["text"] for part in content)
    if calls := plain.get("tool_calls"):
        plain["tool_calls"] = [_tool_call(call) for call in calls]
    return plain


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _tool_call(call: Any) -> Any:
    """OpenAI's API has a call's arguments as a string of JSON; templates want what it says."""
    match call:
        case {"function": {"arguments": str(arguments)} as function}:
            with contextlib.suppress(ValueError):
                return {**call, "function": {**function, "arguments": json.loads(arguments)}}
    return call


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


class _Generation(jinja2.ext.Extension):
    """``{% generation %} ... {% endgeneration %}`` marks, for training, what the model wrote; here only its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class has it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()
