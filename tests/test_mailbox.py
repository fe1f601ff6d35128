"""Mailboxes: nothing lost, nothing stuck, on trio and asyncio; what is no message harms nobody."""

import socket
import threading
from collections.abc import Iterator

import anyio
import pytest
import zmq

from runtime.mailbox import DRAIN, DataPlane, LocalMailbox, SocketMailbox, SocketOutbox
from runtime.messages import Abort, Flush, SamplingParams, Submit, ToScheduler

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["trio", "asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def plane() -> Iterator[DataPlane]:
    made = DataPlane()
    yield made
    made.close()


def abort(number: int) -> Abort:
    return Abort("origin", number, 1)


async def numbers(mailbox: SocketMailbox[Abort] | LocalMailbox[Abort], count: int) -> list[int]:
    got: list[int] = []
    with anyio.fail_after(20):
        while len(got) < count:
            batch = await mailbox.receive()
            assert 1 <= len(batch) <= DRAIN
            got += [message.id for message in batch]
    return got


@pytest.mark.parametrize("local", [True, False])
async def test_every_message_arrives_once_and_in_order(plane: DataPlane, local: bool) -> None:
    with plane.bind(Abort, local=local) as mailbox:
        outbox = plane.connect(mailbox.address)
        for number in range(1000):
            assert outbox.send_nowait(abort(number))
        assert await numbers(mailbox, 1000) == list(range(1000))


async def test_a_reader_that_sleeps_is_woken_by_each_message(plane: DataPlane) -> None:
    # The socket's fd is edge-triggered: a wake-up that was spent on something else must not be missed.
    with plane.bind(Abort, local=False) as mailbox:
        outbox = plane.connect(mailbox.address)
        replies = plane.bind(Abort, local=False)
        back = plane.connect(replies.address)

        async def echo() -> None:
            while True:
                for message in await mailbox.receive():
                    back.send_nowait(message)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(echo)
            for number in range(300):
                outbox.send_nowait(abort(number))
                assert await numbers(replies, 1) == [number]
            tasks.cancel_scope.cancel()
        replies.close()


async def test_many_producers_in_other_threads(plane: DataPlane) -> None:
    with plane.bind(Abort, local=False) as mailbox:

        def produce(base: int) -> None:
            outbox = SocketOutbox(plane.context, mailbox.address)
            for number in range(500):
                while not outbox.send_nowait(abort(base + number)):
                    pass
            sent.wait(20)
            outbox.close()

        sent = threading.Event()
        threads = [threading.Thread(target=produce, args=(1000 * at,)) for at in range(4)]
        for thread in threads:
            thread.start()
        got = await numbers(mailbox, 2000)
        sent.set()
        for thread in threads:
            thread.join()
        assert sorted(got) == sorted(1000 * at + number for at in range(4) for number in range(500))
        for at in range(4):
            assert [n for n in got if n // 1000 == at] == [1000 * at + number for number in range(500)]


async def test_a_cancelled_wait_loses_nothing(plane: DataPlane) -> None:
    with plane.bind(Abort, local=False) as mailbox:
        outbox = plane.connect(mailbox.address)
        with anyio.move_on_after(0.01) as scope:
            await mailbox.receive()
        assert scope.cancelled_caught
        outbox.send_nowait(abort(1))
        assert await numbers(mailbox, 1) == [1]


async def test_other_tasks_get_their_turn_under_a_flood(plane: DataPlane) -> None:
    with plane.bind(Abort, local=True) as mailbox:
        outbox = plane.connect(mailbox.address)
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await anyio.lowlevel.checkpoint()

        for number in range(20 * DRAIN):
            outbox.send_nowait(abort(number))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(other)
            await numbers(mailbox, 20 * DRAIN)
            tasks.cancel_scope.cancel()
        assert turns >= 15


async def test_what_is_no_message_is_counted_and_dropped(plane: DataPlane) -> None:
    with SocketMailbox[ToScheduler](plane.context, ToScheduler) as mailbox:
        outbox = plane.connect(mailbox.address)
        assert isinstance(outbox, SocketOutbox)
        for garbage in (b"", b"\x00", b"garbage", b"\xc1" * 1000):
            outbox.socket.send(garbage)
        outbox.send_nowait(Flush())
        with anyio.fail_after(10):
            assert list(await mailbox.receive()) == [Flush()]
        assert mailbox.garbage == 4


async def test_a_stranger_gets_no_word_in(plane: DataPlane) -> None:
    with SocketMailbox[ToScheduler](plane.context, ToScheduler) as mailbox:
        endpoint = mailbox.address.partition("#")[0]
        stranger = plane.context.socket(zmq.PUSH)
        stranger.set(zmq.LINGER, 0)
        stranger.connect(endpoint)  # without the key that the address carries
        stranger.send(b"let me in", zmq.NOBLOCK)
        raw = socket.socket(socket.AF_UNIX)
        raw.connect("\0" + endpoint.removeprefix("ipc://@"))
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 1000)
        friend = plane.connect(mailbox.address)
        friend.send_nowait(Flush())
        with anyio.fail_after(10):
            assert list(await mailbox.receive()) == [Flush()]
        assert mailbox.garbage == 0  # ZeroMQ itself turned both away
        raw.close()
        stranger.close()


async def test_a_consumer_that_is_too_far_behind_is_told_of(plane: DataPlane) -> None:
    with SocketMailbox[ToScheduler](plane.context, ToScheduler) as mailbox:
        outbox = plane.connect(mailbox.address)
        submit = Submit("o", 1, 1, bytes(100_000), params=_params())
        sent = 0
        while outbox.send_nowait(submit) and sent < 50_000:
            sent += 1
        assert 0 < sent < 50_000


def test_no_files_are_left(plane: DataPlane) -> None:
    with plane.bind(Abort, local=False) as mailbox:
        assert mailbox.address.startswith("ipc://@")  # Linux's abstract namespace


def _params() -> SamplingParams:

    return SamplingParams()
