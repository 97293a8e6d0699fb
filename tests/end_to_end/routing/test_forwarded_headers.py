"""Forwarded headers for servers, and the request id in the log."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.observe.call_record import CallRecord
from tests.end_to_end.routing.every_operation import EVERY_OPERATION
from tests.support.certificates import certificate_files, server_certificate
from tests.support.checks.call_records import call_records as call_records
from tests.support.gateway import until
from tests.support.http_messages import Head, http_response, message, request
from tests.support.inference_messages import HEADER_LENGTH, infer_json, infer_raw
from tests.support.raw_client import RawClient
from tests.support.servers.model_scripts import infer_floats
from tests.support.servers.scripted_server import Connection, Script, ScriptedServer
from tests.support.servers.served import served

ID = re.compile("[0-9a-f]{32}")
GATEWAY = "tensorgate-of-this-test"
ADDED = ("X-Forwarded-For", "X-Forwarded-Proto", "X-Forwarded-Host", "Via", "X-Request-Id")


@asynccontextmanager
async def _served(
    script: Script = infer_floats, **settings: Any
) -> AsyncIterator[tuple[ScriptedServer, RawClient]]:
    """Run a gateway with an idle connection to its server."""
    async with served(script, general=settings) as (server, gateway, client):
        async with gateway.client() as first:
            assert (await first.call("GET", "/v2/warm")).status == 200
        yield server, client


def _forwarded(head: Head) -> dict[str, str]:
    """Return the headers that the gateway added for the server, each once.

    Every gateway has its own name in Via; the names are normalized here.
    """
    told = {name: value for name in ADDED if (value := head.get(name)) is not None}
    return {name: re.sub("tensorgate-[0-9a-f]{16}", GATEWAY, told[name]) for name in told}


def _with(data: bytes, *lines: str) -> bytes:
    first, _, rest = data.partition(b"\r\n")
    return b"\r\n".join((first, *(line.encode("latin-1") for line in lines), rest))


@pytest.mark.parametrize("data", EVERY_OPERATION.values(), ids=EVERY_OPERATION)
async def test_every_request_has_forwarded_headers(
    data: bytes, path: Callable[[bytes], bytes]
) -> None:
    async with _served() as (server, client):
        await client.send(path(data))
        if data.startswith(b"HEAD"):
            await client.head()
        else:
            reply = await client.read_response()
            assert reply.status == 200
            # A client gets the request id, but no other header that the server did not send.
            assert [name for name in ADDED if reply.head.all(name)] == ["X-Request-Id"]
        told = _forwarded(server.requests[-1].head)
        request_id = told.pop("X-Request-Id")
        assert ID.fullmatch(request_id)
        if not data.startswith(b"HEAD"):
            assert reply.head.get("X-Request-Id") == request_id
        assert told == {
            "X-Forwarded-For": "127.0.0.1",
            "X-Forwarded-Proto": "http",
            "X-Forwarded-Host": "localhost",
            "Via": f"1.1 {GATEWAY}",
        }


async def test_own_request_of_the_gateway_names_the_gateway_alone() -> None:
    async with _served() as (server, client):
        assert (await client.ask(infer_raw(bytes(8)))).status == 200
        asked = [each for each in server.requests if each.head.target.startswith("/v2/models/m")]
        own = {"Via": f"1.1 {GATEWAY}"}
        assert [_forwarded(each.head) == own for each in asked] == [True, True, False]


CLAIMS = (
    "X-Forwarded-For: 203.0.113.1",
    "X-Forwarded-For: 203.0.113.2",
    "X-Forwarded-Proto: https",
    "X-Forwarded-Host: public.example",
    'Forwarded: for="[2001:db8::1]"',
    "Via: 2 front",
    "X-Request-Id: from-the-client",
    # Connection cannot drop the added headers.
    "Connection: x-forwarded-for, Forwarded, via, X-Request-Id",
)
REPLACED = {
    "X-Forwarded-For": "127.0.0.1",
    "X-Forwarded-Proto": "http",
    "X-Forwarded-Host": "localhost",
    "Via": f"2 front, 1.1 {GATEWAY}",
    "X-Request-Id": "from-the-client",
}
ADDED_TO = {
    **REPLACED,
    "X-Forwarded-For": "203.0.113.1, 203.0.113.2, 127.0.0.1",
    "X-Forwarded-Proto": "https",
    "X-Forwarded-Host": "public.example",
}
OWN = "for=127.0.0.1;host=localhost;proto=http"


@pytest.mark.parametrize(
    ("trust", "told", "forwarded"),
    [("none", REPLACED, OWN), ("127.0.0.1", ADDED_TO, f'for="[2001:db8::1]", {OWN}')],
)
async def test_only_trusted_proxies_are_believed(
    trust: object, told: dict[str, str], forwarded: str, path: Callable[[bytes], bytes]
) -> None:
    async with _served(forwarded={"trusted_proxies": trust}) as (server, client):
        for data in (request("POST", "/v2/x", b"hello"), infer_json()):
            assert (await client.ask(path(_with(data, *CLAIMS)))).status == 200
            head = server.requests[-1].head
            assert _forwarded(head) == told
            assert head.get("Forwarded") == forwarded


async def test_tls_client_has_the_https_scheme(tmp_path: Path) -> None:
    files = certificate_files(tmp_path, server_certificate())
    tls = dict(zip(("certificate", "key"), files, strict=True))
    async with _served(tls=tls) as (server, client):
        assert (await client.ask(_with(infer_json(), "Forwarded: for=a"))).status == 200
        head = server.requests[-1].head
        assert head.get("X-Forwarded-Proto") == "https"
        assert head.get("Forwarded") == "for=127.0.0.1;host=localhost;proto=https"


LIE = message("HTTP/1.1 200 OK", {HEADER_LENGTH: "x", "Transfer-Encoding": "chunked"})


@pytest.mark.parametrize("given", ["my-own", None])
@pytest.mark.parametrize(
    ("data", "sent", "status"),
    [
        (infer_json(b"{"), b"", 400),
        (request("POST", "/v2/x", b"x"), b"", 502),
        (infer_json(), LIE, 502),
    ],
    ids=["bad request", "no response", "lie to come"],
)
async def test_error_of_the_gateway_has_the_request_id(
    data: bytes,
    sent: bytes,
    status: int,
    given: str | None,
    call_records: list[CallRecord],
    path: Callable[[bytes], bytes],
) -> None:
    async def script(connection: Connection) -> None:
        while (await connection.request()).head.target == "/v2/warm":
            await connection.send(http_response())
        await connection.send(sent)

    async with _served(script) as (_, client):
        reply = await client.ask(path(_with(data, *([f"X-Request-Id: {given}"] if given else []))))
        assert reply.status == status
        assert reply.error
        shown = reply.head.get("X-Request-Id")
        assert shown == given if given else ID.fullmatch(shown or "")
        await until(lambda: call_records[-1].request_id == shown)
