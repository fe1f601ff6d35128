"""Token counts of an answer."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime_http.job import Choice


def usage(choices: "Sequence[Choice]", n: int, *, completion_tokens: int | None = None) -> dict[str, Any]:
    """OpenAI's usage object. Each prompt counts once, however many choices continue it; outputs all count."""
    firsts = choices[::n]
    prompt = sum(choice.generation.prompt_tokens for choice in firsts)
    cached = sum(choice.generation.cached_tokens for choice in firsts)
    if completion_tokens is None:
        completion_tokens = sum(choice.generation.completion_tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
