import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator

import pytest

from gateway.system.hangups import HangupWatch
from tests.support.checks.descriptors import no_descriptors
from tests.support.gateway import until

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
async def hangups() -> AsyncIterator[HangupWatch]:
    watch = HangupWatch()
    yield watch
    watch.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two connected sockets: that which is watched, and its peer."""
    ours, peer = socket.socketpair()
    with ours, peer:
        yield ours, peer


class Note:
    """What is called when a peer is gone, and fails if it ``fails``."""

    def __init__(self, fails: bool = False) -> None:
        self.calls: int = 0
        self._fails = fails

    def __call__(self) -> None:
        self.calls += 1
        if self._fails:
            raise ZeroDivisionError


async def test_peer_that_closes_after_unread_bytes_is_noticed(
    hangups: HangupWatch, pair: Pair
) -> None:
    ours, peer = pair
    gone = Note()
    hangups.watch(ours.fileno(), gone)
    peer.send(b"unread")
    await asyncio.sleep(0.02)
    assert gone.calls == 0
    peer.close()
    await until(lambda: gone.calls)
    await asyncio.sleep(0.02)
    assert gone.calls == 1


async def test_unwatched_peer_is_not_reported(hangups: HangupWatch, pair: Pair) -> None:
    ours, peer = pair
    gone = Note()
    hangups.watch(ours.fileno(), gone)
    hangups.unwatch(ours.fileno(), gone)
    peer.close()
    await asyncio.sleep(0.02)
    assert gone.calls == 0


async def test_reused_descriptor_reports_to_its_new_watcher(
    hangups: HangupWatch, pair: Pair
) -> None:
    descriptor = pair[0].detach()
    old_is_gone, new_is_gone = Note(), Note()
    hangups.watch(descriptor, old_is_gone)
    os.close(descriptor)  # without unwatch
    new, new_peer = socket.socketpair()
    with new:
        assert new.fileno() == descriptor
        hangups.watch(descriptor, new_is_gone)
        hangups.unwatch(descriptor, old_is_gone)  # too late
        new_peer.close()
        await until(lambda: new_is_gone.calls)
    assert not old_is_gone.calls


async def test_peers_are_not_watched_without_descriptors(hangups: HangupWatch, pair: Pair) -> None:
    ours, peer = pair
    gone = Note()
    with no_descriptors():
        hangups.watch(ours.fileno(), gone)
    hangups.unwatch(ours.fileno(), gone)
    hangups.watch(ours.fileno(), gone)
    peer.shutdown(socket.SHUT_WR)  # the sending side alone
    await until(lambda: gone.calls)


async def test_callback_that_fails_keeps_no_other_from_being_called(hangups: HangupWatch) -> None:
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    pairs = [socket.socketpair() for _ in range(3)]
    for ours, peer in pairs:
        hangups.watch(ours.fileno(), Note(fails=True))
        peer.close()
    await until(lambda: len(errors) == 3)
    for ours, _ in pairs:
        ours.close()
