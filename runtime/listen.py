"""The listening socket. It is bound before anything else is done: a busy port is found in milliseconds."""

import socket

BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket, close-on-exec. Raises OSError with a sentence that says what to do."""
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except socket.gaierror as error:
        raise OSError(f"http.host {host!r} is no address of this machine: {error.strerror}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(
            error.errno, f"can't listen on {host}:{port}: {error.strerror}. Choose another port (--port)."
        ) from error
    listener.setblocking(False)
    return listener
