import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack

import pytest

from gateway.system.hangups import HangupWatch
from tests.support.checks.descriptors import no_descriptors
from tests.support.gateway import until


@pytest.fixture
async def hangups() -> AsyncIterator[HangupWatch]:
    watch = HangupWatch()
    yield watch
    watch.close()


async def test_peer_that_closes_after_unread_bytes_is_noticed(hangups: HangupWatch) -> None:
    ours, peer = socket.socketpair()
    gone: list[str] = []
    with ours:
        hangups.watch(ours.fileno(), lambda: gone.append("gone"))
        peer.send(b"unread")
        await asyncio.sleep(0.02)
        assert not gone
        peer.close()
        await until(lambda: gone)
        await asyncio.sleep(0.02)
        assert gone == ["gone"]


async def test_peer_that_closes_its_sending_side_is_noticed(hangups: HangupWatch) -> None:
    ours, peer = socket.socketpair()
    gone: list[str] = []
    with ours, peer:
        hangups.watch(ours.fileno(), lambda: gone.append("gone"))
        peer.shutdown(socket.SHUT_WR)
        await until(lambda: gone)


async def test_unwatched_peer_is_not_reported(hangups: HangupWatch) -> None:
    ours, peer = socket.socketpair()
    gone: list[str] = []

    def note() -> None:
        gone.append("gone")

    with ours:
        hangups.watch(ours.fileno(), note)
        hangups.unwatch(ours.fileno(), note)
        peer.close()
        await asyncio.sleep(0.02)
        assert not gone


async def test_reused_descriptor_reports_to_its_new_watcher(
    hangups: HangupWatch,
) -> None:
    old, old_peer = socket.socketpair()
    gone: list[str] = []

    def old_is_gone() -> None:
        gone.append("old")

    def new_is_gone() -> None:
        gone.append("new")

    with old_peer:
        descriptor = old.detach()
        hangups.watch(descriptor, old_is_gone)
        os.close(descriptor)  # without unwatch
        new, new_peer = socket.socketpair()
        with new:
            assert new.fileno() == descriptor
            hangups.watch(descriptor, new_is_gone)
            hangups.unwatch(descriptor, old_is_gone)  # too late
            new_peer.close()
            await until(lambda: gone)
    assert gone == ["new"]


async def test_peers_are_not_watched_without_descriptors(hangups: HangupWatch) -> None:
    ours, peer = socket.socketpair()
    gone: list[str] = []

    def note() -> None:
        gone.append("gone")

    with ours, peer:
        with no_descriptors():
            hangups.watch(ours.fileno(), note)
        hangups.unwatch(ours.fileno(), note)
        hangups.watch(ours.fileno(), note)
        peer.shutdown(socket.SHUT_WR)
        await until(lambda: gone)


async def test_callback_that_fails_keeps_no_other_from_being_called(hangups: HangupWatch) -> None:
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    gone: list[str] = []

    def note() -> None:
        gone.append("gone")
        raise ZeroDivisionError

    with ExitStack() as stack:
        for _ in range(3):
            ours, peer = socket.socketpair()
            stack.enter_context(ours)
            hangups.watch(ours.fileno(), note)
            peer.close()
        await until(lambda: len(gone) == len(errors) == 3)
