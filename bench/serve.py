"""Load on a running server: N concurrent streams; tokens/s, time to first token and gaps between tokens.

    python bench/serve.py http://127.0.0.1:8000 --streams 16 --requests 32 --max-tokens 128 --prompt-words 64

Works against any OpenAI-compatible server. Raw sockets and no JSON in the loop: the client shares the machine with the
server, and must not become what is measured. Every prompt is different, save for ``--shared-words`` at its head.
"""

import argparse
import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from urllib.parse import SplitResult, urlsplit

VOWELS, CONSONANTS = "aeiou", "bdfghklmnprstvw"


def words(seed: int, count: int) -> str:
    """``count`` pronounceable words, the same for the same seed."""
    draw = random.Random(seed)
    return " ".join(
        "".join(draw.choice(CONSONANTS) + draw.choice(VOWELS) for _ in range(draw.randint(1, 3))) for _ in range(count)
    )


@dataclass
class Answer:
    sent: float
    chunks: list[float] = field(default_factory=list)  # arrival times of chunks with text
    usage: dict[str, int] = field(default_factory=dict)
    failure: str = ""


async def ask(url: SplitResult, path: str, body: dict[str, object], answer: Answer | None = None) -> Answer:
    """One streamed request on a connection of its own. ``answer`` grows as chunks come. Cancelling hangs up."""
    data = json.dumps(body).encode()
    answer = Answer(0.0) if answer is None else answer
    answer.sent = time.perf_counter()
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    try:
        writer.write(
            f"POST {path} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode()
            + data
        )
        status = await reader.readline()
        if b" 200 " not in status:
            answer.failure = (status + await reader.read(500)).decode(errors="replace")
        if not await _read_events(reader, answer) and not answer.failure:
            answer.failure = "the stream ended without [DONE]"
    finally:
        writer.close()
    return answer


async def _read_events(reader: asyncio.StreamReader, answer: Answer) -> bool:
    """Whether the stream came to its proper end."""
    while line := await reader.readline():
        if not line.startswith(b"data:"):
            continue
        now = time.perf_counter()
        if b"[DONE]" in line:
            return True
        if b'"error"' in line[:40]:
            answer.failure = line.decode(errors="replace")
        elif b'"usage":{' in line.replace(b'": {', b'":{'):
            answer.usage = json.loads(line[5:])["usage"]
            if b'"choices":[]' not in line.replace(b": ", b":"):
                answer.chunks.append(now)
        else:
            answer.chunks.append(now)
    return False


@dataclass
class Load:
    """What one run yielded."""

    wall_s: float
    answers: list[Answer]

    @property
    def tokens(self) -> int:
        return sum(answer.usage.get("completion_tokens", len(answer.chunks)) for answer in self.answers)

    @property
    def failures(self) -> list[str]:
        return [answer.failure for answer in self.answers if answer.failure]

    def ttft_ms(self, share: float) -> float:
        return percentile([answer.chunks[0] - answer.sent for answer in self.answers if answer.chunks], share)

    def gap_ms(self, share: float) -> float:
        gaps = [b - a for answer in self.answers for a, b in zip(answer.chunks, answer.chunks[1:], strict=False)]
        return percentile(gaps, share)

    def line(self) -> str:
        prompt = sum(answer.usage.get("prompt_tokens", 0) for answer in self.answers)
        return (
            f"{self.wall_s:.2f} s  {self.tokens} tokens  {self.tokens / self.wall_s:.1f} tok/s  "
            f"prompt {prompt} tokens  "
            f"TTFT {self.ttft_ms(0.5):.0f}/{self.ttft_ms(0.99):.0f} ms  "
            f"gap {self.gap_ms(0.5):.1f}/{self.gap_ms(0.99):.1f} ms (p50/p99)  failed {len(self.failures)}"
            + (f"  first failure: {self.failures[0][:200]}" if self.failures else "")
        )


def percentile(seconds: list[float], share: float) -> float:
    """In milliseconds."""
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1e3 if ordered else float("nan")


async def load(
    url: str,
    model: str,
    *,
    streams: int,
    requests: int,
    max_tokens: int,
    prompt_words: int,
    shared_words: int = 0,
    path: str = "/v1/completions",
    seed: int = 0,
) -> Load:
    """``requests`` requests over ``streams`` concurrent streams, greedy and without end-of-text."""
    target = urlsplit(url)
    head = words(-1 - seed, shared_words)
    numbers = iter(range(requests))
    answers: list[Answer] = []

    async def stream() -> None:
        for number in numbers:
            prompt = f"{head} {words(seed * 1_000_003 + number, prompt_words)}".strip()
            body: dict[str, object] = {
                "model": model,
                "prompt": prompt,
                "max_tokens": max_tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                "ignore_eos": True,
            }
            answers.append(await ask(target, path, body))

    began = time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(streams)))
    return Load(time.perf_counter() - began, answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--prompt-words", type=int, default=64)
    parser.add_argument("--shared-words", type=int, default=0)
    parser.add_argument("--path", default="/v1/completions")
    parser.add_argument("--seed", type=int, default=0, help="other prompts for another seed")
    args = parser.parse_args()
    result = asyncio.run(
        load(
            args.url,
            args.model,
            streams=args.streams,
            requests=args.requests,
            max_tokens=args.max_tokens,
            prompt_words=args.prompt_words,
            shared_words=args.shared_words,
            path=args.path,
            seed=args.seed,
        )
    )
    print(f"{args.streams} streams, {args.requests} requests: {result.line()}")


if __name__ == "__main__":
    main()
