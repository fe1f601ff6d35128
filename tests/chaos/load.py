"""A mixed load with known answers, and what a client can tell from an answer."""

import json
import threading
from dataclasses import dataclass, field
from typing import Any

from serve.servekit import MODEL, Reply, Server, StreamReply

STORY = "Once upon a time there was a small town by the sea, and in it"
LONG = " ".join(f"Item {number}: the keeper counts {number * 7 % 100} boats." for number in range(60))

Outcome = dict[int, tuple[str, str | None, tuple[Any, ...]]]


def requests(stop: str) -> list[tuple[str, dict[str, Any]]]:
    """(path, body) of each request. ``stop``: a string that some come to, and come close to before."""
    chat = [{"role": "user", "content": "Name three fruits."}]
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    found: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": STORY, "max_tokens": 40, **usage}),
        ("/v1/completions", {"prompt": STORY + " lived", "max_tokens": 24, "logprobs": 2}),
        ("/v1/completions", {"prompt": STORY, "max_tokens": 60, "stop": [stop, stop[:-1] + "~"], **usage}),
        ("/v1/completions", {"prompt": STORY, "max_tokens": 60, "stop": [stop]}),
        ("/v1/completions", {"prompt": "The cat", "max_tokens": 24, "n": 2, "temperature": 0.9, "seed": 3, **usage}),
        ("/v1/completions", {"prompt": LONG, "max_tokens": 8, "ignore_eos": True}),
        ("/v1/chat/completions", {"messages": chat, "max_tokens": 30, **usage}),
        ("/v1/chat/completions", {"messages": chat, "max_tokens": 30, "temperature": 1.0, "seed": 11}),
        ("/generate", {"text": STORY, "sampling_params": {"max_new_tokens": 24, "temperature": 0}}),
    ]
    return [(path, body if path == "/generate" else {"model": MODEL, "temperature": 0, **body}) for path, body in found]


@dataclass
class Answer:
    """One request under way, and what came of it. ``error``: why there is no whole answer."""

    path: str
    body: dict[str, Any]
    stream: StreamReply | None = None
    reply: Reply | None = None
    error: str = ""
    thread: threading.Thread | None = None

    def start(self, server: Server) -> "Answer":
        if self.body.get("stream"):
            fields = {key: value for key, value in self.body.items() if key != "prompt"}
            self.stream = server.stream(self.body.get("prompt"), self.path, **fields)
        else:
            self.thread = threading.Thread(target=self._ask, args=(server,), daemon=True)
            self.thread.start()
        return self

    def _ask(self, server: Server) -> None:
        try:
            self.reply = server.request("POST", self.path, self.body, timeout_s=120)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    def outcome(self) -> Outcome | None:
        """Index of the choice -> (text, finish reason, what else must be the same); None where ``error`` says why."""
        if self.stream is not None:
            self.stream.wait_end(120)
            if self.stream.error is not None:
                self.error = str(self.stream.error)
            elif not (self.stream.done and self.stream.whole):
                self.error = self.stream.failure or "cut off"
            return None if self.error else _canonical(self.stream.events)
        assert self.thread is not None
        self.thread.join(150)
        assert not self.thread.is_alive(), f"no answer to {self.body}"
        if self.reply is not None and self.reply.status != 200:
            self.error = json.dumps(self.reply.json)
        return None if self.reply is None or self.error else _canonical([self.reply.json])


def _canonical(events: list[dict[str, Any]]) -> Outcome:
    if "output_ids" in events[0]:
        answer = events[-1]
        meta = answer["meta_info"]
        return {0: (answer["text"], str(meta["finish_reason"]), (*answer["output_ids"], meta["prompt_tokens"]))}
    texts: dict[int, str] = {}
    finish: dict[int, str] = {}
    tokens: dict[int, list[Any]] = {}
    usage: dict[str, Any] = {}
    for event in events:
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            at = choice["index"]
            part = choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""
            texts[at] = texts.get(at, "") + part
            if choice.get("finish_reason"):
                assert at not in finish, "two ends"
                finish[at] = choice["finish_reason"]
            tokens.setdefault(at, []).extend((choice.get("logprobs") or {}).get("tokens", ()))
    counts = (usage["prompt_tokens"], usage["completion_tokens"])
    return {at: (text, finish.get(at), (*tokens[at], *counts)) for at, text in texts.items()}


@dataclass
class Load:
    """All the requests at once. ``expected`` is what an undisturbed server answers."""

    server: Server
    expected: list[Outcome] = field(default_factory=list)
    stop: str = ""

    def learn(self) -> None:
        text = self.server.complete(STORY, max_tokens=60)["choices"][0]["text"]
        self.stop = text[len(text) // 2 :][:9]
        for answer in self.start():
            outcome = answer.outcome()
            assert outcome is not None, answer.error
            self.expected.append(outcome)

    def start(self) -> list[Answer]:
        return [Answer(path, body).start(self.server) for path, body in requests(self.stop)]

    def check(self, answers: list[Answer], *, may_fail: bool = False) -> int:
        """Each is right to the letter. ``may_fail``: or it says that it failed. Returns how many did."""
        failed = 0
        for answer, expected in zip(answers, self.expected, strict=True):
            outcome = answer.outcome()
            if outcome is None:
                assert may_fail, f"{answer.path} {answer.body}: {answer.error}"
                failed += 1
            else:
                assert outcome == expected, f"{answer.path} {answer.body}"
        return failed
