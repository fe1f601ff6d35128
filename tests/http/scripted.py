"""A service whose model is a script: deterministic text, byte tokens, faults on request.

Words in the prompt command it: ``[[fail:N]]`` dies after N tokens, ``[[hang]]`` gives none, ``[[full]]`` finds the
queue full, ``[[burst:N]]`` gets N tokens a step, ``[[refuse]]`` (in a chat) is refused by the chat template.
"""

import codecs
import hashlib
import re
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import anyio

from runtime.messages import SamplingParams, TokenLogprobs
from runtime.service import BadRequest, Delta, ModelInfo, QueueFull, Sink, Unavailable

EOS = 256
WORDS = ["one", "two", "naïve", "世界", "😀", "three", '"quoted"', "back\\slash", "end.\n", "four", "é", "\t<five>"]
REPLY_WORDS = 40


def reply(prompt: Sequence[int], seed: int) -> bytes:
    """The whole answer to a prompt, as bytes = tokens."""
    state = hashlib.sha256(bytes(token % 256 for token in prompt) + seed.to_bytes(16, "little")).digest()
    words = [WORDS[byte % len(WORDS)] for byte in state + hashlib.sha256(state).digest()]
    return " ".join(words[:REPLY_WORDS]).encode()


class ScriptedTokenizer:
    async def encode(self, text: str, add_special: bool = True) -> list[int]:
        await anyio.lowlevel.checkpoint()
        return list(text.encode())

    async def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")

    async def encode_chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, kwargs: Mapping[str, Any]
    ) -> list[int]:
        text = "".join(f"<{message['role']}>{message['content']}</>" for message in messages)
        if "[[refuse]]" in text:
            raise BadRequest("The chat template refuses: System role not supported", "messages")
        if kwargs["continue_final_message"]:
            text = text.removesuffix("</>")
        if kwargs["add_generation_prompt"]:
            text += "<assistant>"
        return await self.encode(text)

    def token_bytes(self, tokens: Sequence[int]) -> list[bytes]:
        return [bytes([token]) if token < 256 else b"<eos>" for token in tokens]


class ScriptedGeneration:
    def __init__(self, service: "ScriptedService", prompt: list[int], params: SamplingParams, sink: Sink) -> None:
        self.service = service
        self.params = params
        self.sink = sink
        self.prompt = prompt
        self.prompt_tokens = len(prompt)
        self.cached_tokens = len(prompt) - 1 if tuple(prompt) in service.seen else 0
        self.completion_tokens = 0
        text = bytes(token % 256 for token in prompt).decode("utf-8", "replace")
        self.fail_after = int(found[1]) if (found := re.search(r"\[\[fail:(\d+)\]\]", text)) else None
        self.burst = int(found[1]) if (found := re.search(r"\[\[burst:(\d+)\]\]", text)) else 1
        self.hang = "[[hang]]" in text
        self._script = reply(prompt, params.seed if params.temperature > 0 else 0)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # may be the beginning of a stop string
        self._sent_prompt = False

    async def __aenter__(self) -> "ScriptedGeneration":
        return self

    async def __aexit__(self, *exc: Any) -> None:
        self.abort()

    def abort(self) -> None:
        if self in self.service.live:
            self.service.live.discard(self)
            self.service.aborted += 1

    def __aiter__(self) -> "ScriptedGeneration":
        return self

    async def __anext__(self) -> Delta:
        raise NotImplementedError("the front takes everything through its sink")

    def step(self) -> Delta | None:
        """What one step brings; None: nothing."""
        if self.hang:
            return None
        tokens: list[int] = []
        text, finish, match = "", None, None
        for _ in range(self.burst):
            if self.fail_after is not None and self.completion_tokens >= self.fail_after:
                return Delta(text=text, tokens=tuple(tokens), finish="error", error="The engine died; please retry.")
            token = self._next_token()
            tokens.append(token)
            self.completion_tokens += 1
            more, finish, match = self._take(token)
            text += more
            if finish is not None:
                break
        prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
        if self.params.prompt_logprobs >= 0 and not self._sent_prompt:
            rest = [entry(token, self.params.prompt_logprobs) for token in self.prompt[1:]]
            prompt_logprobs, self._sent_prompt = (None, *rest), True
        logprobs = tuple(entry(token, self.params.logprobs) for token in tokens) if self.params.logprobs >= 0 else ()
        return Delta(text, tuple(tokens), logprobs, prompt_logprobs, finish, stop_match=match)

    def _next_token(self) -> int:
        forced = [token for token, bias in self.params.logit_bias.items() if bias >= 100]
        if forced and not (forced == [EOS] and self.completion_tokens < self.params.min_tokens):
            return forced[0]
        at = self.completion_tokens
        if at < len(self._script):
            return self._script[at]
        if self.params.ignore_eos or at < self.params.min_tokens:
            return self._script[at % len(self._script)]
        return EOS

    def _take(self, token: int) -> tuple[str, Any, Any]:
        enough = self.completion_tokens >= self.params.min_tokens
        if token == EOS and not self.params.ignore_eos:
            return self._flush(), "stop", None
        if enough and token in self.params.stop_token_ids:
            return self._flush(), "stop", token
        self._held += self._decoder.decode(bytes([token % 256]))
        for stop in self.params.stop:
            at = self._held.find(stop)
            if at >= 0:
                text = self._held[: at + len(stop) if self.params.include_stop else at]
                return text, "stop", stop
        if self.completion_tokens >= self.params.max_tokens:
            return self._flush(), "length", None
        keep = max((n for s in self.params.stop for n in range(len(s)) if self._held.endswith(s[:n])), default=0)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text, None, None

    def _flush(self) -> str:
        return self._held + self._decoder.decode(b"", True)


def entry(token: int, top: int) -> TokenLogprobs:
    tokens = tuple((token + j) % 256 for j in range(top))
    logprobs = tuple(-0.5 - j for j in range(top))
    return TokenLogprobs(token, -0.5, tokens, logprobs)


class ScriptedService:
    def __init__(self, *, step_s: float = 0.0, context_tokens: int = 8192, ready: bool = True) -> None:
        self.config = SimpleNamespace(
            http=SimpleNamespace(api_keys=[], max_body_bytes=1 << 20, keep_alive_s=75, request_timeout_s=0),
            supervision=SimpleNamespace(drain_timeout_s=5),
        )
        self.tokenizer = ScriptedTokenizer()
        self.info: ModelInfo | None = ModelInfo("scripted", context_tokens, 257, (EOS,), 1_700_000_000)
        self.step_s = step_s
        self.is_ready = ready
        self.live: set[ScriptedGeneration] = set()
        self.seen: set[tuple[int, ...]] = set()
        self.opened: list[tuple[SamplingParams, int, str]] = []
        self.aborted = 0
        self.flushed = 0
        self._work = anyio.Event()

    async def run(self) -> None:
        """The step loop: one delta a step for every live request, all pushed by this task."""
        while True:
            if not any(not generation.hang for generation in self.live):
                self._work = anyio.Event()
                await self._work.wait()
            for generation in sorted(self.live, key=id):
                delta = generation.step()
                if delta is None:
                    continue
                if delta.finish is not None:
                    self.live.discard(generation)
                    self.seen.add(tuple(generation.prompt))
                generation.sink.push(delta)
            await anyio.sleep(self.step_s)

    def recovering(self) -> bool:
        return False

    def ready(self) -> bool:
        return self.is_ready

    def release(self) -> None:
        """End the hanging of those that hang."""
        for generation in self.live:
            generation.hang = False
        self._work.set()

    async def status(self) -> dict[str, Any]:
        actor = {"path": "replica0/scheduler0", "state": "starting", "phase": "weights", "progress": [3, 7]}
        return {"state": "ready" if self.is_ready else "starting", "actors": [actor]}

    async def metrics(self) -> bytes:
        what = "# HELP scripted_running Live requests.\n# TYPE scripted_running gauge\n"
        return f"{what}scripted_running {len(self.live)}\n".encode()

    async def flush_cache(self) -> None:
        self.flushed += 1
        self.seen.clear()

    def open(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        deadline_s: float | None = None,
        sink: Sink | None = None,
    ) -> ScriptedGeneration:
        assert sink is not None
        if not self.is_ready:
            raise Unavailable("The engine is starting.", 3.0)
        if b"[[full]]" in bytes(token % 256 for token in prompt):
            raise QueueFull("1024 requests wait already; try again later.", 1.5)
        generation = ScriptedGeneration(self, prompt, params, sink)
        self.opened.append((params, priority, cache_salt))
        self.live.add(generation)
        self._work.set()
        return generation
