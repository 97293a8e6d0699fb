"""What is read of a gateway, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from gateway.top.client import AdminClient, AdminError, parse_admin_address
from gateway.top.document import Document
from gateway.top.poller import Poller, Wanted
from gateway.top.view import CALLS, ENDPOINTS, MODELS
from tests.top import documents


class _Client(AdminClient):
    """A client of a gateway that is not there."""

    def __init__(self) -> None:
        super().__init__(parse_admin_address("127.0.0.1:1"))
        self.asked: list[tuple[str, Mapping[str, str]]] = []
        self.failures: dict[str, AdminError] = {}
        self.more: dict[str, Any] = {}

    async def get(self, name: str, query: Mapping[str, str] | None = None) -> Document:
        self.asked.append((name, dict(query or {})))
        if name in self.failures:
            raise self.failures[name]
        return documents.overview(**self.more) if name == "overview" else {"name": name}


@pytest.mark.parametrize(
    ("wanted", "asked"),
    [
        (Wanted(), ("journal", {"limit": "100"})),
        (Wanted(ENDPOINTS, offset=100, limit=300), ("topology", {"limit": "300", "offset": "100"})),
        (Wanted(MODELS, "x"), ("models", {"limit": "200", "search": "x"})),
        (Wanted(CALLS), ("calls", {"limit": "300"})),
    ],
)
async def test_the_overview_and_the_panel_are_read(wanted: Wanted, asked: Any) -> None:
    client = _Client()
    poller = Poller(client, 1)
    await poller.read(wanted)
    assert client.asked == [("overview", {}), asked]
    assert (poller.snapshot.overview, poller.snapshot.failure) == (documents.overview(), "")
    assert poller.snapshot.panels[wanted.panel].wanted == wanted


async def test_paused_calls_are_read_once() -> None:
    client = _Client()
    poller = Poller(client, 1)
    for wanted, times in [
        (Wanted(CALLS), 1),
        (Wanted(CALLS), 2),
        (Wanted(CALLS, follows=False), 3),
        (Wanted(CALLS, follows=False), 3),
        (Wanted(CALLS, "x", follows=False), 4),
        (Wanted(CALLS, "x"), 5),
    ]:
        await poller.read(wanted)
        assert sum(name == "calls" for name, _ in client.asked) == times


async def test_a_failure_keeps_what_was_read() -> None:
    client = _Client()
    client.failures["journal"] = AdminError("status 404")  # of a gateway before the journal
    poller = Poller(client, 1)
    await poller.read(Wanted())
    read = poller.snapshot
    assert read.failure == ""
    client.failures["overview"] = AdminError("nobody listens")
    await poller.read(Wanted())
    failed = poller.snapshot
    assert (failed.failure, failed.overview) == ("nobody listens", read.overview)
    assert failed.panels == read.panels
    await poller.read(Wanted())
    assert poller.snapshot.failing_since == failed.failing_since
    client.failures.clear()
    await poller.read(Wanted())
    assert poller.snapshot.failure == ""


@pytest.mark.parametrize(
    ("more", "notice"),
    [
        ({}, ""),
        ({"version": "0.2.0"}, "version 0.2.0 of the gateway has replaced version 0.1.0"),
        ({"started_at": documents.NOW}, "this is another gateway process than before"),
    ],
)
async def test_another_gateway_is_noticed(more: dict[str, Any], notice: str) -> None:
    client = _Client()
    poller = Poller(client, 1)
    await poller.read(Wanted())
    client.more = more
    for _ in range(2):
        await poller.read(Wanted())
        assert poller.snapshot.notice.startswith(notice)
        assert bool(poller.snapshot.notice) == bool(notice)


async def test_another_panel_is_read_at_once_without_the_overview() -> None:
    client, read = _Client(), asyncio.Event()
    poller = Poller(client, 3600, read.set)
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        polling = group.create_task(poller.run())
        await read.wait()
        read.clear()
        poller.want(Wanted())
        poller.want(Wanted(MODELS))
        await read.wait()
        polling.cancel()
    assert [name for name, _ in client.asked] == ["overview", "journal", "models"]
