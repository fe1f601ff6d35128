"""HTTP/1.1 by hand, so that tests see what is on the wire."""

import json
import socket
from typing import Any, BinaryIO


def request(path: str, body: Any = None, *, headers: dict[str, str] | None = None, version: str = "1.1") -> bytes:
    """A request as bytes; with a body it is a POST."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"{'GET' if body is None else 'POST'} {path} HTTP/{version}", "Host: test"]
    if body is not None:
        head += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
    head += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + data


class Answer:
    def __init__(self, status: int, headers: dict[str, str], body: bytes, *, whole: bool) -> None:
        self.status = status
        self.headers = headers
        self.body = body
        self.whole = whole  # ended as its framing says

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of server-sent events; [DONE] as it is."""
        found = []
        for block in self.body.decode().split("\n\n"):
            if block:
                assert block.startswith("data: "), block
                found.append("[DONE]" if block == "data: [DONE]" else json.loads(block[6:]))
        return found

    @property
    def text(self) -> str:
        return "".join(event["choices"][0]["text"] for event in self.events if event != "[DONE]" and event["choices"])


class Connection:
    """A client's end of a connection; answers are read one by one."""

    def __init__(self, port: int, receive_buffer: int | None = None) -> None:
        self.sock = socket.socket()
        if receive_buffer is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sock.settimeout(10)
        self.sock.connect(("127.0.0.1", port))
        self.file: BinaryIO = self.sock.makefile("rb")

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self.file.close()
        self.sock.close()

    def reset(self) -> None:
        """Close with a RST."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        self.close()

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def ask(self, path: str, body: Any = None, **more: Any) -> "Answer":
        self.send(request(path, body, **more))
        return self.answer()

    def begin(self, path: str, body: Any = None) -> bytes:
        """Send a request for a stream and wait for its first chunk."""
        self.send(request(path, body))
        status, headers = self.head()
        assert status == 200 and headers["transfer-encoding"] == "chunked"
        chunk = self.chunk()
        assert chunk
        return chunk

    def head(self) -> tuple[int, dict[str, str]]:
        line = self.file.readline()
        assert line.startswith(b"HTTP/1.1 "), line
        headers = {}
        while (line2 := self.file.readline()) not in (b"\r\n", b""):
            name, _, value = line2.decode().partition(":")
            headers[name.lower()] = value.strip()
        return int(line.split()[1]), headers

    def chunk(self) -> bytes | None:
        """One chunk; b"" is the end, None is none."""
        size = self.file.readline()
        if not size.endswith(b"\r\n"):
            return None
        data = self.file.read(int(size, 16) + 2)
        return data[:-2] if data.endswith(b"\r\n") and len(data) == int(size, 16) + 2 else None

    def answer(self) -> Answer:
        status, headers = self.head()
        body, whole = b"", True
        if headers.get("transfer-encoding") == "chunked":
            while chunk := self.chunk():
                body += chunk
            whole = chunk == b""
        elif "content-length" in headers:
            body = self.file.read(int(headers["content-length"]))
            whole = len(body) == int(headers["content-length"])
        else:
            body = self.file.read()
        return Answer(status, headers, body, whole=whole)

    def eof(self) -> bool:
        """Whether nothing but the end follows. Waits for it."""
        try:
            return self.file.read(1) == b""
        except ConnectionResetError:
            return True
