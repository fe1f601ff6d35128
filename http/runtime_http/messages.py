"""Chat messages as clients send them, made plain for the chat template."""

from collections.abc import Sequence
from typing import Any

from runtime_http.errors import invalid, unsupported
from runtime_http.schema import Message

ROLES = {"system", "developer", "user", "assistant", "tool", "function"}
PARTS_TO_COME = {"image_url", "input_image", "input_audio", "audio_url", "video_url", "file", "input_file"}


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages with string content, or ApiError naming the part at fault."""
    if not messages:
        raise invalid("messages", "'messages' is empty; at least one message is needed.")
    return [plain_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def plain_message(message: Message, param: str) -> dict[str, Any]:
    if message.role not in ROLES:
        raise invalid(
            f"{param}.role",
            f"Invalid value for '{param}.role': {message.role!r}; allowed are {', '.join(sorted(ROLES))}.",
        )
    if message.content is None and not (message.role == "assistant" and message.tool_calls):
        raise invalid(
            f"{param}.content", f"Invalid value for '{param}.content': expected a string or a list, got null."
        )
    content = "" if message.content is None else plain_content(message.content, f"{param}.content")
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": content}
    for name in ("name", "tool_calls", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    return plain


def plain_content(content: str | list[dict[str, Any]], param: str) -> str:
    if isinstance(content, str):
        return content
    if not content:
        raise invalid(param, f"'{param}' is an empty list.")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type")
        if kind in PARTS_TO_COME:
            raise unsupported(f"{param}[{i}]", f"Message content of type '{kind}'")
        key = "refusal" if kind == "refusal" else "text"
        if kind not in ("text", "input_text", "output_text", "refusal") or not isinstance(part.get(key), str):
            raise invalid(
                f"{param}[{i}]", f"Invalid value for '{param}[{i}]': expected a part of type 'text' with a text."
            )
        texts.append(part[key])
    return "\n".join(texts)
