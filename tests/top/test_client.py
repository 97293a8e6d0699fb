"""What the client says of gateways, of other servers, and of no server at all."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.top.address import parse_admin_address
from gateway.top.client import AdminClient, AdminError
from gateway.top.document import Document
from tests.support.addresses import free_address
from tests.support.http_messages import http_response, message
from tests.support.servers.scripted_server import (
    Connection,
    ScriptedServer,
    always_respond,
    never_respond,
)


async def _get(url: str, name: str = "overview", **query: str) -> Document:
    client = AdminClient(parse_admin_address(url), timeout=2)
    try:
        return await asyncio.to_thread(client.get, name, query)
    finally:
        client.close()


async def _error(url: str) -> str:
    with pytest.raises(AdminError) as raised:
        await _get(url)
    return str(raised.value)


async def test_documents_are_read_with_their_query() -> None:
    async with ScriptedServer(always_respond(http_response(b'{"a": 1}'))) as server:
        assert await _get(server.url, "calls", search="a b&\x1b") == {"a": 1}
        (request,) = server.requests
        assert request.head.target == "/api/calls?search=a+b%26%1B"


async def test_a_url_may_have_a_path() -> None:
    async with ScriptedServer(always_respond(http_response(b"{}"))) as server:
        assert await _get(f"{server.url}/tensorgate/") == {}
        assert server.requests[0].head.target == "/tensorgate/api/overview"


async def test_a_connection_is_used_again_and_opened_anew_if_it_was_closed() -> None:
    async def once(connection: Connection) -> None:
        for _ in range(2):
            await connection.request()
            await connection.send(http_response(b"{}"))

    async with ScriptedServer(once) as server:
        client = AdminClient(parse_admin_address(server.url))
        for _ in range(5):
            assert await asyncio.to_thread(client.get, "overview") == {}
        client.close()
        assert len(server.requests) == 5


@pytest.mark.parametrize(
    ("response", "said"),
    [
        (
            message("HTTP/1.1 403 F", body=b'{"error": "\\u001b[2J"}'),
            r"refuses to answer: \x1b[2J",
        ),
        (
            message("HTTP/1.1 403 F", body=b'{"error": "the host name is not known"}'),
            "refuses to answer: the host name is not known",
        ),
        (message("HTTP/1.1 403 F", body=b"no"), "refuses to answer: it gives no reason"),
        (message("HTTP/1.1 401 U", body=b""), "wants a login"),
        (
            message("HTTP/1.1 404 N", body=b"no"),
            "answers with status 404; is it the admin address of a Tensorgate?",
        ),
        (
            message("HTTP/1.1 302 F", body=b""),
            "answers with status 302; is it the admin address of a Tensorgate?",
        ),
        (message("HTTP/1.1 200 OK", body=b"<html>"), "answers with another kind of document"),
        (message("HTTP/1.1 200 OK", body=b"[1]"), "answers with another kind of document"),
        (message("HTTP/1.1 200 OK", body=b"[" * 100_000), "another kind of document"),
        (message("HTTP/1.1 500 E", body=b'{"error": "it failed"}'), "status 500: it failed"),
        (message("HTTP/1.1 503 E", body=b'{"error": 3}'), "answers with status 503"),
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
    assert said in error or ("not the admin address" in error and said == "use")
    assert "\x1b" not in error
    assert server.url in error


async def test_an_address_where_nobody_listens_is_said(tmp_path: Path) -> None:
    address = free_address()
    refused = f"no gateway has its admin address at {address}: the connection was refused"
    assert await _error(address) == refused
    socket = f"unix:{tmp_path}/none.sock"
    assert await _error(socket) == (
        f"no gateway has its admin address at {socket}: there is no such socket"
    )


async def test_a_host_that_is_not_known_is_said() -> None:
    assert (await _error("name.invalid:9080")).startswith("the host of name.invalid:9080")


async def test_a_server_that_does_not_answer_is_said() -> None:
    async with ScriptedServer(never_respond) as server:
        client = AdminClient(parse_admin_address(server.url), timeout=0.1)
        with pytest.raises(AdminError, match=r"did not answer within 0\.1 s"):
            await asyncio.to_thread(client.get, "overview")


async def test_a_document_that_takes_too_much_memory_is_not_read() -> None:
    body = b'{"problems": [' + b"{}," * 1_500_000 + b"{}]}"
    async with ScriptedServer(always_respond(http_response(body))) as server:
        assert await _error(server.url) == f"{server.url} answers with more than 4194304 bytes"


async def test_a_server_that_sends_a_byte_now_and_then_is_said() -> None:
    async def drip(connection: Connection) -> None:
        await connection.request()
        await connection.send(message("HTTP/1.1 200 OK", {"Content-Length": "1000"}))
        while True:
            await connection.send(b" ")
            await asyncio.sleep(0.02)

    async with ScriptedServer(drip) as server:
        client = AdminClient(parse_admin_address(server.url), timeout=0.2)
        with pytest.raises(AdminError, match=r"did not answer within 0\.2 s"):
            await asyncio.to_thread(client.get, "overview")


async def test_a_server_without_tls_is_said() -> None:
    async def speak_http(connection: Connection) -> None:
        await connection.send(http_response())

    async with ScriptedServer(speak_http) as server:
        assert "no TLS connection to" in await _error(server.url.replace("http:", "https:"))


async def test_a_folder_is_no_socket(tmp_path: Path) -> None:
    assert (await _error(f"unix:{tmp_path}")).startswith("no gateway has its admin address at")
