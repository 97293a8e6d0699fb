"""Forwarded headers for servers, the request id in errors, and loops that Via ends."""

from __future__ import annotations

import re
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gateway.observe.call_record import CallRecord
from gateway.settings.schema import Settings
from tests.support.addresses import free_address
from tests.support.certificates import certificate_files, server_certificate
from tests.support.checks.call_records import call_records as call_records
from tests.support.gateway import LIMITS, RunningGateway, checked_gateway, served, until
from tests.support.gateway_process import gateway_process, write_settings
from tests.support.http_messages import Head, http_response, message, request
from tests.support.inference_messages import (
    HEADER_LENGTH,
    binary_header,
    infer_binary,
    infer_json,
    infer_raw,
)
from tests.support.raw_client import RawClient, connect
from tests.support.servers.model_scripts import infer_floats
from tests.support.servers.scripted_server import Connection, Script, ScriptedServer, always_respond

EVERY_OPERATION = {
    "GET": request("GET", "/v2/x"),
    "POST": request("POST", "/v2/x", b"hello"),
    "JSON": infer_json(),
    "binary": infer_binary(binary_header(4), bytes(4)),
    "raw": infer_raw(bytes(8)),
    "server metadata": request("GET", "/v2"),
    "trace settings": request("GET", "/v2/trace"),
    "load": request("POST", "/v2/repository/models/m/load", b"{}"),
    "HEAD": request("HEAD", "/v2/x"),
}


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


async def test_every_request_has_forwarded_headers(path: Callable[[bytes], bytes]) -> None:
    async with _served() as (server, client):
        for name, data in EVERY_OPERATION.items():
            await client.send(path(data))
            head = await client.head() if name == "HEAD" else (await client.read_response()).head
            assert head.status == 200, name
            # A client gets the request id, but no other header that the server did not send.
            assert [each for each in ADDED if head.all(each)] == ["X-Request-Id"]
            told = _forwarded(server.requests[-1].head)
            assert told.pop("X-Request-Id") == head.get("X-Request-Id")
            assert ID.fullmatch(head.get("X-Request-Id") or "")
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


PSEUDONYM = re.compile(r"1\.1 tensorgate-[0-9a-f]{16}")


def _settings(listen: str, server: str, **more: Any) -> Settings:
    return Settings.model_validate(
        {
            "listen": listen,
            "offload": 0,
            "upstreams": {"servers": {"endpoints": [f"http://{server}"], "dialect": "triton"}},
            "limits": LIMITS,
            **more,
        }
    )


_ITS_OWN_CLIENT = "it keeps an idle connection to itself, or to the gateway after it"


@asynccontextmanager
async def _chain(*addresses: str, **more: Any) -> AsyncIterator[list[RunningGateway]]:
    """Run gateways, each in front of the next address."""
    async with AsyncExitStack() as stack:
        running = [
            await stack.enter_async_context(
                checked_gateway(_settings(own, after, **more), unchecked=_ITS_OWN_CLIENT)
            )
            for own, after in pairwise(addresses)
        ]
        yield running
        for gateway in running:
            await gateway.until_idle()


@pytest.mark.parametrize("via", [True, False], ids=["via", "without via"])
@pytest.mark.parametrize("dialect", ["triton", "auto"])
async def test_gateway_in_front_of_itself_is_a_508(
    dialect: str, via: bool, path: Callable[[bytes], bytes], call_records: list[CallRecord]
) -> None:
    address = free_address()
    upstreams = {"servers": {"endpoints": [f"http://{address}"], "dialect": dialect}}
    async with _chain(address, address, upstreams=upstreams, forwarded={"via": via}) as (gateway,):
        for name, data in EVERY_OPERATION.items():
            call_records.clear()
            async with gateway.client() as client:
                await client.send(path(data))
                assert (await client.head()).status == 508, name
            await gateway.until_idle()
            # One request of each is the gateway's own, to detect the dialect.
            assert len(call_records) <= 2 + 2 * (dialect == "auto")


async def test_gateway_in_front_of_itself_is_not_ready(call_records: list[CallRecord]) -> None:
    address = free_address()
    async with _chain(address, address) as (gateway,):
        async with gateway.client() as client:
            reply = await client.call("GET", "/v2/health/ready")
            assert (reply.status, reply.error.startswith("not ready: upstream ")) == (503, True)
        await gateway.until_idle()
    assert len(call_records) == 2
    assert any("returned 508" in record.error for record in call_records)


@pytest.mark.parametrize("via", [True, False], ids=["via", "without via"])
async def test_chain_of_gateways_is_no_loop(via: bool) -> None:
    async with ScriptedServer(always_respond(http_response(b"{}"))) as server:
        end = server.url.removeprefix("http://")
        addresses = (free_address(), free_address(), free_address(), end)
        async with _chain(*addresses, forwarded={"via": via}) as gateways:
            async with gateways[0].client() as client:
                for _ in range(3):
                    assert (await client.call("GET", "/v2/x")).status == 200
            for gateway in gateways:
                await gateway.until_idle()
        named = server.requests[-1].head.get("Via" if via else "CDN-Loop")
        assert named is not None
        assert len(set(re.findall("tensorgate-[0-9a-f]{16}", named))) == 3


async def test_reload_keeps_the_gateways_name_in_via() -> None:
    async with ScriptedServer(always_respond(http_response(b"{}"))) as server:
        address, end = free_address(), server.url.removeprefix("http://")
        async with _chain(address, end) as (running,):
            async with running.client() as client:
                await client.call("GET", "/v2/x")
                await running.gateway.reload(_settings(address, end, log={"access": False}))
                await client.call("GET", "/v2/x")
            await running.until_idle()
        before, after = [each.head.get("Via") for each in server.requests]
        assert before is not None
        assert PSEUDONYM.fullmatch(before)
        assert after == before


async def test_workers_share_one_name_in_via(tmp_path: Path) -> None:
    """A request comes back to the other worker, which has fewer connections."""
    address = free_address()
    config = write_settings(tmp_path / "g.yaml", f"http://{address}", address, "workers: 2\n")
    async with gateway_process(config) as (process, url):
        for _ in range(8):
            async with connect(url) as client:
                await client.send(request("GET", "/v2/x"))
                assert (await client.read_response()).status == 508
        process.signal(signal.SIGTERM)
        _, _, said = await process.end()
    assert said.count('"GET /v2/x" 508') == 16, said
