"""The engine alone, in a script: no server, no event loop."""

import sys

from runtime import Engine

with Engine(None, *sys.argv[1:]) as engine:
    prompts = ["Once upon a time", "The capital of France is", "Water boils at"]
    for prompt, answer in zip(prompts, engine.generate(prompts, max_tokens=12, temperature=0.0), strict=True):
        print(f"{prompt!r} -> {answer.text!r} ({answer.finish})")

    for delta in engine.stream([{"role": "user", "content": "Say hello."}], max_tokens=12, temperature=0.0):
        print(delta.text, end="", flush=True)
    print()
