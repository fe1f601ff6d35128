"""Connections whose clients have gone end at once.

hypercorn 0.18 stops reading at a connection's end and then waits for its keep-alive timer before it closes the socket
(5 s by default, 75 here): a client that makes a connection a request would leave one open file behind for each.
"""

import hypercorn.trio.run
from hypercorn.events import Event, Updated
from hypercorn.trio.tcp_server import TCPServer


class Connection(TCPServer):
    """hypercorn's connection, with no timer after its client's end."""

    _gone = False

    async def _read_data(self) -> None:
        await super()._read_data()
        self._gone = True
        await self.idle_task.stop()

    async def protocol_send(self, event: Event) -> None:
        if not (self._gone and isinstance(event, Updated)):
            await super().protocol_send(event)


def install() -> None:
    """Have hypercorn's trio worker use it, in this process."""
    hypercorn.trio.run.TCPServer = Connection  # type: ignore[attr-defined]
