"""The runtime inside a trio program: the whole serving tree runs in this program's nursery."""

import sys

import trio

from runtime import load_config, open_runtime


async def main(*settings: str) -> None:
    async with open_runtime(load_config(None, settings)) as runtime:
        print("serving", runtime.info.name)
        async for delta in runtime.generate("Once upon a time", max_tokens=16, temperature=0.0):
            print(delta.text, end="", flush=True)
        print()

        # Many at once share the engine's batch; a cancelled one frees its place at once.
        async with trio.open_nursery() as nursery:
            for city in ("Paris", "Rome", "Oslo"):
                nursery.start_soon(ask, runtime, city)


async def ask(runtime, city: str) -> None:
    question = [{"role": "user", "content": f"In which country is {city}? Answer in one word."}]
    answer = await runtime.complete(question, max_tokens=8, temperature=0.0)
    print(f"{city}: {answer.text.strip()}")


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
