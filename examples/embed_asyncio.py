"""The runtime inside an asyncio program, with HTTP: the front runs in a process of its own, since it needs trio."""

import asyncio
import json
import sys
import urllib.request

from runtime import load_config, open_runtime


async def main(*settings: str) -> None:
    config = load_config(None, ["http.port=0", *settings])
    async with open_runtime(config, http=True) as runtime:
        answer = await runtime.complete("The capital of France is", max_tokens=4, temperature=0.0)
        print("embedded:", answer.text.strip())

        body = {"model": runtime.info.name, "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        request = urllib.request.Request(
            f"{runtime.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        reply = json.loads(await asyncio.to_thread(lambda: urllib.request.urlopen(request).read()))
        print("over HTTP:", reply["choices"][0]["text"].strip())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
