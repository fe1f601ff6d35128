"""What a long prompt does to streams that run: the gaps between their tokens before it comes and while it is computed.

    python bench/fairness.py [MODEL] [--streams 8] [--prompt-tokens 4096] [--mixed 32 64 128 256] [--set ...]

One server for each value of engine.mixed_tokens (none given: the default's). Over HTTP, streaming.
"""

import argparse
import asyncio
from pathlib import Path
from urllib.parse import urlsplit

from serve import Answer, ask, percentile, words
from servers import ours

from runtime.names import DEFAULT_SOURCE, derive_name
from runtime.sources import resolve
from runtime.tokenizer import Tokenizer

USUAL_S = 3.0  # how long the streams run undisturbed


def gaps(answers: list[Answer], since: float, until: float) -> list[float]:
    """Between consecutive chunks, those that end in the span."""
    return [
        b - a
        for answer in answers
        for a, b in zip(answer.chunks, answer.chunks[1:], strict=False)
        if since < b <= until
    ]


async def disturb(
    url: str, model: str, streams: int, prompt: list[int], runs: int
) -> tuple[list[float], list[float], float]:
    """The usual gaps, those while the prompt is computed, and its time to first token."""
    target, path = urlsplit(url), "/v1/completions"
    body: dict[str, object] = {"model": model, "temperature": 0, "stream": True, "ignore_eos": True}
    usual, disturbed, firsts = list[float](), list[float](), list[float]()
    for run in range(runs):
        running = [Answer(0.0) for _ in range(streams)]
        tasks = [
            asyncio.create_task(
                ask(target, path, {**body, "prompt": words(1000 * run + at, 10), "max_tokens": 2000}, running[at])
            )
            for at in range(streams)
        ]
        loop = asyncio.get_running_loop()
        began = loop.time()
        while not all(len(answer.chunks) > 3 for answer in running):
            await asyncio.sleep(0.01)
            if loop.time() > began + 120:
                raise SystemExit("the streams did not start within two minutes")
        quiet_from = max(answer.chunks[3] for answer in running)
        await asyncio.sleep(USUAL_S)
        # Each run's prompt is another one: nothing of it is cached.
        long = await ask(target, path, {**body, "prompt": [run + 5, *prompt], "max_tokens": 1})
        if long.failure:
            raise SystemExit(long.failure)
        usual += gaps(running, quiet_from, long.sent)
        disturbed += gaps(running, long.sent, long.chunks[0])
        firsts.append(long.chunks[0] - long.sent)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return usual, disturbed, sorted(firsts)[len(firsts) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT_SOURCE)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--mixed", type=int, nargs="*", default=[], help="values of engine.mixed_tokens")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value")
    args = parser.parse_args()
    text = words(7, args.prompt_tokens)
    prompt = Tokenizer(Path(resolve(args.model).tokenizer)).encode(text)[: args.prompt_tokens - 1]
    print(f"{args.streams} streams, a prompt of {args.prompt_tokens} tokens among them; gaps in ms")
    print("mixed_tokens  usual p50     p99 | meanwhile p50     p99   p99/usual | first token")
    for mixed in args.mixed or [0]:
        with ours(args.model, [*args.set, f"engine.mixed_tokens={mixed}"]) as url:
            usual, disturbed, first = asyncio.run(
                disturb(url, derive_name(args.model), args.streams, prompt, args.runs)
            )
        typical, worst = percentile(usual, 0.5), percentile(disturbed, 0.99)
        print(
            f"{mixed or 'default':>12} {typical:10.1f} {percentile(usual, 0.99):7.1f} | "
            f"{percentile(disturbed, 0.5):13.1f} {worst:7.1f} {worst / typical:10.2f}x | {first:.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
