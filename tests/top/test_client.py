"""What is read of a gateway, and what is said of other servers and of no server at all."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gateway.top.client import (
    AdminAddress,
    AdminClient,
    AdminError,
    Poller,
    Wanted,
    parse_admin_address,
)
from gateway.top.document import Document
from gateway.top.view import CALLS, ENDPOINTS, MODELS
from tests.support.addresses import free_address
from tests.support.http_messages import chunk, http_response, message
from tests.support.servers.scripted_server import (
    Connection,
    ScriptedServer,
    always_respond,
    never_respond,
)
from tests.top import documents

QUESTION = "; is it the admin address of a Tensorgate?"


@pytest.mark.parametrize(
    ("text", "shown", "url"),
    [
        ("127.0.0.1:9080", "127.0.0.1:9080", "http://127.0.0.1:9080"),
        ("[::1]:9080", "[::1]:9080", "http://[::1]:9080"),
        ("http://host:9080/#calls", "http://host:9080", "http://host:9080"),
        ("http://host/a/b/", "http://host/a/b", "http://host/a/b"),
        ("https://host", "https://host", "https://host"),
    ],
)
def test_addresses_are_parsed(text: str, shown: str, url: str) -> None:
    assert parse_admin_address(text) == AdminAddress(shown, url)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("host", "expected HOST:PORT"),
        ("host:0", "expected a port from 1 to 65535"),
        ("host:99999", "expected a port up to 65535"),
        ("http://host:99999", "(?i)port"),
        ("http://a b/", "expected"),
        ("http://user:pass@host", "a user name or password"),
        ("http://host/?x=1", "expected no query"),
        ("http://", "a host is missing"),
        ("ftp://host:1", "expected HOST:PORT"),
        ("unix:relative", "expected unix: and the absolute path"),
    ],
)
def test_other_texts_are_refused_with_a_reason(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        parse_admin_address(text)


async def _get(url: str, name: str = "overview", seconds: float = 2, **query: str) -> Document:
    async with AdminClient(parse_admin_address(url), seconds) as client:
        return await client.get(name, query)


async def _error(url: str, seconds: float = 2) -> str:
    with pytest.raises(AdminError) as raised:
        await _get(url, seconds=seconds)
    return str(raised.value)


async def test_documents_are_read_with_their_query_below_the_path_of_the_url() -> None:
    async with ScriptedServer(always_respond(http_response(b'{"a": 1}'))) as server:
        assert await _get(f"{server.url}/gate/", "calls", search="a b&\x1b") == {"a": 1}
        assert server.requests[0].head.target == "/gate/api/calls?search=a+b%26%1B"


@pytest.mark.parametrize(
    ("response", "said"),
    [
        (message("HTTP/1.1 403 F", body=b'{"error": "\\u001b[2J"}'), r"to answer: \x1b[2J"),
        (message("HTTP/1.1 403 F", body=b"no"), "refuses to answer: it gives no reason"),
        (message("HTTP/1.1 401 U", body=b""), "wants a login, which this program does not have"),
        (message("HTTP/1.1 407 P", body=b""), "wants a login, which this program does not have"),
        (
            message("HTTP/1.1 404 N", body=b'{"error": "no such path"}'),
            f"status 404: no such path{QUESTION}",
        ),
        (
            message("HTTP/1.1 302 F", {"Location": "/"}, b""),
            f"answers with status 302{QUESTION}",
        ),
        (
            message("HTTP/1.1 200 OK", body=b"<html>"),
            f"answers with another kind of document{QUESTION}",
        ),
        (message("HTTP/1.1 200 OK", body=b"[" * 100_000), f"another kind of document{QUESTION}"),
        (message("HTTP/1.1 500 E", body=b'{"error": "it failed"}'), "status 500: it failed"),
        (message("HTTP/1.1 503 E", body=b"[3]"), "answers with status 503"),
        (b"SSH-2.0-OpenSSH\r\n", "does not speak HTTP as expected"),
        (b"", "closed the connection before it answered"),
    ],
)
async def test_other_answers_are_said_in_a_sentence(response: bytes, said: str) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        if response:
            await connection.send(response)

    async with ScriptedServer(script) as server:
        error = await _error(server.url)
    assert error.endswith(said)
    assert "\x1b" not in error
    assert server.url in error


async def test_an_address_without_a_gateway_is_said(tmp_path: Path) -> None:
    async def speak_http(connection: Connection) -> None:
        await connection.send(http_response())

    refused, socket, folder = free_address(), f"unix:{tmp_path}/none.sock", f"unix:{tmp_path}"
    async with ScriptedServer(speak_http) as server:
        https = server.url.replace("http:", "https:")
        for address, said in (
            (refused, f"no gateway has its admin address at {refused}: the connection was refused"),
            (socket, f"no gateway has its admin address at {socket}: there is no such socket"),
            (folder, f"no gateway has its admin address at {folder}: the connection was refused"),
            ("name.invalid:9080", "the host of name.invalid:9080 is not known: "),
            (https, f"no TLS connection to {https}: "),
        ):
            assert (await _error(address)).startswith(said)


async def test_a_document_that_does_not_end_is_not_read_on() -> None:
    async def endless(connection: Connection) -> None:
        await connection.request()
        await connection.send(message("HTTP/1.1 200 OK", {"Transfer-Encoding": "chunked"}))
        while True:
            await connection.send(chunk(b" " * 65536))

    async with ScriptedServer(endless) as server:
        error = await _error(server.url, seconds=60)
        assert error == f"{server.url} answers with more than 4194304 bytes"


async def test_a_server_that_does_not_answer_in_time_is_said() -> None:
    async def drip(connection: Connection) -> None:
        await connection.request()
        await connection.send(message("HTTP/1.1 200 OK", {"Content-Length": "1000"}))
        while True:
            await connection.send(b" ")
            await asyncio.sleep(0.02)

    for script in (never_respond, drip):
        async with ScriptedServer(script) as server:
            assert (await _error(server.url, 0.2)).endswith("did not answer within 0.2 s")


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
