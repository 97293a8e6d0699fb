"""What is read of a gateway, and when."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest

from gateway.top.address import parse_admin_address
from gateway.top.client import AdminClient, AdminError
from gateway.top.document import Document
from gateway.top.poller import Poller, Wanted
from gateway.top.view import CALLS, ENDPOINTS, MODELS
from tests.top import documents

PATIENCE = 10


class _Client(AdminClient):
    """A client of a gateway that is not there."""

    def __init__(self) -> None:
        super().__init__(parse_admin_address("127.0.0.1:1"))
        self.asked: list[tuple[str, Mapping[str, str]]] = []
        self.failure: Exception | None = None
        self.more: dict[str, Any] = {}

    def get(self, name: str, query: Mapping[str, str] | None = None) -> Document:
        self.asked.append((name, dict(query or {})))
        if self.failure:
            raise self.failure
        return documents.overview(**self.more) if name == "overview" else {"name": name}


@pytest.mark.parametrize(
    ("wanted", "asked"),
    [
        (Wanted(), [("journal", {"limit": "100"})]),
        (
            Wanted(ENDPOINTS, offset=100, limit=300),
            [("topology", {"limit": "300", "offset": "100"})],
        ),
        (Wanted(MODELS, "x"), [("models", {"limit": "200", "search": "x"})]),
        (Wanted(CALLS), [("calls", {"limit": "300"})]),
    ],
)
def test_the_overview_and_the_panel_are_read(wanted: Wanted, asked: list[Any]) -> None:
    client = _Client()
    poller = Poller(client, 1)
    poller.read(wanted)
    assert client.asked == [("overview", {}), *asked]
    snapshot = poller.snapshot
    assert (snapshot.overview, snapshot.failure) == (documents.overview(), "")
    assert list(snapshot.panels) == ([wanted.panel] if asked else [])


def test_gateway_without_a_journal_is_read_as_before() -> None:
    """Those before the journal have no such document."""

    class Older(_Client):
        def get(self, name: str, query: Mapping[str, str] | None = None) -> Document:
            if name == "journal":
                raise AdminError("status 404")
            return super().get(name, query)

    poller = Poller(Older(), 1)
    poller.read(Wanted())
    assert (poller.snapshot.overview, poller.snapshot.failure) == (documents.overview(), "")


def test_paused_calls_are_read_once() -> None:
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
        poller.read(wanted)
        assert sum(name == "calls" for name, _ in client.asked) == times


def test_a_failure_keeps_what_was_read() -> None:
    client = _Client()
    poller = Poller(client, 1)
    poller.read(Wanted(MODELS))
    read = poller.snapshot
    client.failure = AdminError("nobody listens")
    poller.read(Wanted(MODELS))
    failed = poller.snapshot
    assert (failed.failure, failed.overview, failed.panels) == (
        "nobody listens",
        read.overview,
        read.panels,
    )
    poller.read(Wanted(MODELS))
    assert poller.snapshot.failing_since == failed.failing_since
    client.failure = None
    poller.read(Wanted(MODELS))
    assert poller.snapshot.failure == ""


@pytest.mark.parametrize(
    ("more", "notice"),
    [
        ({}, ""),
        ({"version": "0.2.0"}, "version 0.2.0 of the gateway has replaced version 0.1.0"),
        ({"started_at": documents.NOW}, "this is another gateway process than before"),
    ],
)
def test_another_gateway_is_noticed(more: dict[str, Any], notice: str) -> None:
    client = _Client()
    poller = Poller(client, 1)
    poller.read(Wanted())
    client.more = more
    poller.read(Wanted())
    assert poller.snapshot.notice.startswith(notice)
    assert bool(poller.snapshot.notice) == bool(notice)
    poller.read(Wanted())
    assert poller.snapshot.notice.startswith(notice)


def test_another_panel_is_read_at_once_without_the_overview() -> None:
    client, read = _Client(), threading.Event()
    poller = Poller(client, 3600, read.set)
    poller.start()
    assert read.wait(PATIENCE)
    read.clear()
    poller.want(Wanted())
    poller.want(Wanted(MODELS))
    assert read.wait(PATIENCE)
    assert [name for name, _ in client.asked] == ["overview", "journal", "models"]


def test_an_error_of_our_own_ends_the_program() -> None:
    client, read = _Client(), threading.Event()
    client.failure = ZeroDivisionError()
    poller = Poller(client, 1, read.set)
    poller.start()
    assert read.wait(PATIENCE)
    with pytest.raises(ZeroDivisionError):
        _ = poller.snapshot
