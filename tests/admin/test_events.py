"""Event streams of the admin address: what comes when, and what is left behind."""

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from gateway.admin import security, view
from gateway.admin.view import MAX_STREAMS
from gateway.app.journal import SETTINGS_RELOADED
from tests.admin.site import RunningSite, endpoint, running_site, upstream, worker_status
from tests.support.gateway import no_leaks, until
from tests.support.http_messages import Head, request
from tests.support.raw_client import RawClient

LOCAL = {"Host": "localhost"}


@pytest.fixture
async def site(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunningSite]:
    """A site whose streams send something fifty times a second."""
    monkeypatch.setattr(view, "INTERVAL", 0.02)
    async with no_leaks(), running_site() as running:
        yield running


class _Stream:
    """A page that follows events."""

    def __init__(self, client: RawClient, head: Head) -> None:
        self.client = client
        self.head = head
        self._text = ""

    async def next_message(self) -> str:
        while "\n\n" not in self._text:
            part = await self.client.chunk()
            assert part, "the stream has ended"
            self._text += part.decode()
        message, self._text = self._text.split("\n\n", 1)
        return message

    async def next_event(self) -> tuple[str, Any]:
        event, data = (await self.next_message()).split("\n")
        return event.removeprefix("event: "), json.loads(data.removeprefix("data: "))


@asynccontextmanager
async def _following(site: RunningSite, query: str = "") -> AsyncIterator[_Stream]:
    async with site.client() as client:
        await client.send(request("GET", f"/api/events{query}", headers=LOCAL))
        stream = _Stream(client, await client.head())
        assert stream.head.status == 200
        assert await stream.next_message() == "retry: 2000"
        yield stream


async def test_first_events_come_at_once_with_the_headers_of_protection(
    site: RunningSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A topic that is named twice is sent once."""
    monkeypatch.setattr(view, "INTERVAL", 3600)
    async with _following(site, "?topics=overview,topology,overview,models,calls") as stream:
        for name, value in security.HEADERS.items():
            assert stream.head.get(name) == value
        assert stream.head.get("Content-Type") == "text/event-stream"
        assert stream.head.get("Cache-Control") == "no-store"
        assert stream.head.get("X-Accel-Buffering") == "no"
        names = [(await stream.next_event())[0] for _ in range(3)]
        assert names == ["overview", "topology", "models"]
        assert await stream.next_message() == ": nothing new"


async def test_changes_are_seen(site: RunningSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.admin.view._CACHE_SECONDS", 0.0)
    async with _following(site) as stream:
        await stream.next_event()
        site.source.statuses = [worker_status(connections=99)]
        async with asyncio.timeout(5):
            while (await stream.next_event())[1]["now"]["connections"] != 99:
                pass


async def test_parameters_of_a_topic_begin_with_its_name(site: RunningSite) -> None:
    endpoints = [endpoint(url=f"http://h:{port}") for port in (1, 2, 33)]
    site.source.statuses = [worker_status({"u": upstream(*endpoints)})]
    query = "?topics=overview,topology&topology.search=h:33&search=nothing&overview.x=y"
    async with _following(site, query) as stream:
        await stream.next_event()
        _, document = await stream.next_event()
    (found,) = document["upstreams"]
    assert [each["url"] for each in found["endpoints"]] == ["http://h:33"]


async def test_each_call_is_sent_once(site: RunningSite) -> None:
    for number in range(3):
        site.source.add_call(id=f"{number}", time=number)
    async with _following(site, "?topics=calls") as stream:
        name, document = await stream.next_event()
        assert name == "calls"
        assert [each["id"] for each in document["calls"]] == ["2", "1", "0"]
        assert await stream.next_message() == ": nothing new"
        for number in (3, 4):
            site.source.add_call(id=f"{number}", time=number)
        sent: list[str] = []
        while len(sent) < 2:
            message = await stream.next_message()
            if message != ": nothing new":
                data = json.loads(message.partition("data: ")[2])
                sent += [each["id"] for each in data["calls"]]
        assert sorted(sent) == ["3", "4"]
        assert await stream.next_message() == ": nothing new"


async def test_journal_is_sent_when_something_has_happened(site: RunningSite) -> None:
    journal = site.source.journal
    journal.record(SETTINGS_RELOADED, who="SIGHUP")
    async with _following(site, "?topics=journal") as stream:
        name, document = await stream.next_event()
        assert name == "journal"
        assert [each["who"] for each in document["events"]] == ["SIGHUP"]
        assert await stream.next_message() == ": nothing new"
        journal.record(SETTINGS_RELOADED, who="file watch")
        while (message := await stream.next_message()) == ": nothing new":
            pass
        found = json.loads(message.partition("data: ")[2])["events"]
        assert [each["who"] for each in found] == ["file watch", "SIGHUP"]


async def test_names_that_a_client_chose_cannot_end_an_event(site: RunningSite) -> None:
    text = 'a\n\nevent: end\ndata: {}\n\n\r\u2028"</script>'
    site.source.add_call(target=text)
    async with _following(site, "?topics=calls") as stream:
        name, document = await stream.next_event()
        assert (name, document["calls"][0]["target"]) == ("calls", text)


async def test_streams_end_when_the_gateway_stops() -> None:
    async with no_leaks(), AsyncExitStack() as stack:
        async with running_site() as site:
            streams = [await stack.enter_async_context(_following(site)) for _ in range(5)]
            for stream in streams:
                await stream.next_event()
        for stream in streams:
            assert await stream.next_event() == ("end", {})
            assert await stream.client.chunk() == b""
            assert await stream.client.rest() == b""


async def test_further_streams_are_refused(site: RunningSite) -> None:
    """Also if all come at once; one that ends makes room."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(site.client()) for _ in range(MAX_STREAMS + 8)]
        for client in clients:
            client.send_nowait(request("GET", "/api/events", headers=LOCAL))
        heads = [await client.head() for client in clients]
        statuses = [head.status for head in heads]
        assert statuses.count(200) == MAX_STREAMS
        assert statuses.count(503) == 8
        refused = clients[statuses.index(503)]
        body = await refused.reader.readuntil(b"\n")
        assert json.loads(body) == {"error": "there are 32 event streams already"}
        await clients[statuses.index(200)].close()
        async with asyncio.timeout(5):
            while (await refused.call("GET", "/live")).status != 200:
                pass
            while True:
                await refused.send(request("GET", "/api/events", headers=LOCAL))
                if (await refused.head()).status == 200:
                    break
                await refused.reader.readuntil(b"\n")
                await asyncio.sleep(0.02)


async def test_client_that_leaves_leaves_nothing_behind(
    site: RunningSite, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        async with _following(site, "?topics=overview,calls") as stream:
            await stream.next_event()
    await until(lambda: not site.connections)
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


async def test_refused_streams_do_not_count(site: RunningSite) -> None:
    async with site.client() as client:
        for _ in range(MAX_STREAMS + 1):
            for query in ("topics=x", "topics=calls&calls.limit=x"):
                response = await client.call("GET", f"/api/events?{query}", headers=LOCAL)
                assert response.status == 400
        site.source.error = RuntimeError("nonsense")
        for _ in range(MAX_STREAMS + 1):
            assert (await client.call("GET", "/api/events", headers=LOCAL)).status == 500
        site.source.error = None
    async with _following(site) as stream:
        await stream.next_event()


async def test_slow_reader_is_cut_off(site: RunningSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "SEND_TIMEOUT", 0.05)
    monkeypatch.setattr(view, "INTERVAL", 0.0001)
    monkeypatch.setattr("gateway.admin.view._CACHE_SECONDS", 3600)
    endpoints = [endpoint(url=f"http://h:{port}/{'x' * 500}") for port in range(1000)]
    site.source.statuses = [worker_status({"u": upstream(*endpoints)})]
    address, _, port = site.url.removeprefix("http://").partition(":")
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        await asyncio.get_running_loop().sock_connect(slow, (address, int(port)))
        query = "?topics=topology&topology.limit=1000"
        slow.send(request("GET", f"/api/events{query}", headers=LOCAL))
        await until(lambda: site.connections == 1)
        await until(lambda: site.connections == 0)


async def test_stream_that_fails_is_cut_off_and_logged_once(
    site: RunningSite, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No second response may come within the first one."""
    monkeypatch.setattr("gateway.admin.view._CACHE_SECONDS", 0.0)
    async with _following(site) as stream:
        await stream.next_event()
        site.source.error = RuntimeError("nonsense")
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):  # noqa: PT012
            for _ in range(100):
                await stream.next_message()
    errors = [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]
    assert errors == ["an event stream failed"]
