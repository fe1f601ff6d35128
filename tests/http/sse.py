"""Streams, read with an ordinary client."""

import json
from typing import Any

import httpx


class Events:
    """What a stream brought."""

    def __init__(self, response: httpx.Response, lines: list[str]) -> None:
        self.response = response
        assert response.headers["content-type"].startswith("text/event-stream")
        data = [line.removeprefix("data: ") for line in lines if line]
        assert len(data) == sum(line.startswith("data: ") for line in lines)
        self.done = bool(data) and data[-1] == "[DONE]"
        self.chunks: list[dict[str, Any]] = [json.loads(each) for each in data if each != "[DONE]"]
        assert data.count("[DONE]") == (1 if self.done else 0)

    def choices(self, index: int = 0) -> list[dict[str, Any]]:
        return [choice for chunk in self.chunks for choice in chunk.get("choices", ()) if choice["index"] == index]

    def text(self, index: int = 0) -> str:
        return "".join(
            choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            for choice in self.choices(index)
        )

    def finish_reasons(self, index: int = 0) -> list[str]:
        return [choice["finish_reason"] for choice in self.choices(index) if choice["finish_reason"] is not None]


def stream(client: httpx.Client, path: str, body: dict[str, Any]) -> Events:
    with client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        return Events(response, list(response.iter_lines()))


def ask(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()
