"""The OpenAI endpoints inside someone's own Quart app, beside its own routes."""

import sys

import trio
from hypercorn.config import Config as ServerConfig
from hypercorn.trio import serve
from quart_trio import QuartTrio

from runtime import load_config, open_runtime
from runtime_http import blueprint


async def main(bind: str = "127.0.0.1:8080", *settings: str) -> None:
    async with open_runtime(load_config(None, settings)) as runtime:
        app = QuartTrio("my-app")

        @app.get("/")
        async def home() -> str:
            return f"This app also serves {runtime.info.name} under /llm/v1."

        app.register_blueprint(blueprint(runtime.service), url_prefix="/llm")
        server = ServerConfig()
        server.bind = [bind]
        await serve(app, server)


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
