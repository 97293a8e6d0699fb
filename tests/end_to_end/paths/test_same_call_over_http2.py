"""The same call over HTTP/1.1 and HTTP/2: the same response, record and request to the server."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from gateway.observe.call_record import CallRecord
from tests.support.checks.call_records import call_records as call_records
from tests.support.gateway import running_gateway, until
from tests.support.http2_client import Http2Client, connect_http2
from tests.support.http_messages import http_response
from tests.support.inference_messages import (
    HEADER_LENGTH,
    INFER,
    binary_header,
    binary_response,
    json_request,
)
from tests.support.raw_client import RawClient
from tests.support.servers.model_scripts import model_script
from tests.support.servers.scripted_server import ScriptedServer

JSON = {"content-type": "application/json"}
LONG_HEAD = {"x-long": "x" * 2048}
LENGTH = HEADER_LENGTH.lower()

_VOLATILE = (
    *("started", "seconds", "sent_at", "first_byte_seconds", "server_seconds", "prepare_seconds"),
    *("queue_seconds", "request_id", "noted", "labels", "other_attempts", "endpoint", "reserved"),
)
_OWN_HEADERS = frozenset(("date", "connection", "transfer-encoding", "x-request-id", ":status"))

Reply = tuple[int, list[tuple[str, str]], bytes]


def _binary(size: int) -> tuple[bytes, dict[str, str]]:
    header = binary_header(size, binary_output=True)
    return header + bytes(size), {LENGTH: str(len(header)), "content-type": "x/y"}


Call = tuple[str, str, bytes | None, Mapping[str, str]]

CALLS: dict[str, Call] = {
    "metadata": ("GET", "/v2", None, {}),
    "head": ("HEAD", "/v2/health/live", None, {}),
    "index": ("POST", "/v2/repository/index", b"{}", JSON),
    "json": ("POST", INFER, json_request(), JSON),
    "large json": ("POST", INFER, json_request(*range(100_000)), JSON),
    "binary": ("POST", INFER, *_binary(64)),
    "medium binary": ("POST", INFER, *_binary(400_000)),
    "raw": ("POST", INFER, bytes(64), {LENGTH: "0"}),
    "v1": ("POST", "/v1/models/m:predict", b'{"instances": [1.5, 2.5]}', JSON),
    "no such model": ("POST", "/v2/models/none/infer", json_request(), JSON),
    "not JSON": ("POST", INFER, b"{what?", JSON),
    "invalid element": ("POST", INFER, json_request().replace(b"1.5", b'"x"'), JSON),
    "compressed": ("POST", INFER, json_request(), {**JSON, "accept-encoding": "gzip"}),
    "unknown method": ("NONE", "/v2", None, {}),
    "expect": ("POST", INFER, json_request(), {**JSON, "expect": "100-continue"}),
}


def _seen(status: int, headers: list[tuple[str, str]], body: bytes) -> Reply:
    return status, sorted(line for line in headers if line[0] not in _OWN_HEADERS), body


async def _over_http1(client: RawClient, call: Call) -> Reply:
    method, target, body, headers = call
    lines = [f"{method} {target} HTTP/1.1", "Host: localhost"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    client.send_nowait("\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b""))
    head = await client.head()
    if head.status == 100:
        head = await client.head()
    if head.get("Transfer-Encoding") == "chunked":
        received = await client.whole_body()
    else:
        size = 0 if method == "HEAD" else int(head.get("Content-Length") or 0)
        received = await client.reader.readexactly(size)
    return _seen(head.status, list(head.headers), received)


async def _over_http2(client: Http2Client, call: Call) -> Reply:
    method, target, body, headers = call
    reply = await client.call(method, target, body, list(headers.items()))
    assert reply.reset in (None, 0)
    return _seen(reply.status, reply.headers, reply.body)


def _told(record: CallRecord) -> dict[str, object]:
    labels = record.labels
    names = ("route", "operation", "model", "version", "client_form")
    values = {name: getattr(record, name) for name in dir(record) if name[0] != "_"}
    told = {
        name: value
        for name, value in values.items()
        if name not in _VOLATILE and not callable(value)
    }
    return {**told, "labels": [getattr(labels, name) for name in names]}


MODEL = model_script(
    infer=binary_response(bytes(12_000)),
    other=http_response(b'{"name": "triton", "extensions": []}'),
)
ON_THE_STREAMING_PATH = ("metadata", "json", "binary", "raw", "v1", "not JSON", "compressed")


@pytest.mark.parametrize(
    ("name", "more"),
    [*((name, {}) for name in CALLS), *((name, LONG_HEAD) for name in ON_THE_STREAMING_PATH)],
)
async def test_http2_differs_in_nothing(
    name: str, more: Mapping[str, str], call_records: list[CallRecord]
) -> None:
    method, target, body, headers = CALLS[name]
    call = (method, target, body, {**headers, **more})
    replies: list[Reply] = []
    async with ScriptedServer(MODEL) as server:
        # Each has a gateway of its own, which knows nothing of the calls before.
        for over_http2 in (False, True):
            async with running_gateway(server.url, route={"compression": ["gzip"]}) as gateway:
                if over_http2:
                    async with connect_http2(gateway.url) as http2:
                        replies.append(await _over_http2(http2, call))
                else:
                    async with gateway.client() as http1:
                        replies.append(await _over_http1(http1, call))
                await gateway.until_idle()
    assert replies[0] == replies[1]
    first, second = map(_told, call_records)
    assert first == second


@pytest.mark.parametrize("more", [{}, LONG_HEAD], ids=["fast path", "streaming path"])
async def test_server_gets_the_same_request(
    more: Mapping[str, str], one_identity: None, fast_path_requests: list[str]
) -> None:
    call = ("POST", "/v2/models/m/stats", b"{}", {"x-name": "v", "x-request-id": "1", **more})
    async with ScriptedServer() as server, running_gateway(server.url) as gateway:
        async with gateway.client() as http1:
            await _over_http1(http1, call)
        async with connect_http2(gateway.url) as http2:
            await _over_http2(http2, call)
            await until(lambda: len(server.requests) == 2)
        first, second = server.requests
    assert first.head.first == second.head.first
    assert first.body == second.body
    assert first.head.get("Via") == second.head.get("Via").replace("2.0", "1.1", 1)  # type: ignore[union-attr]
    assert sorted(line for line in first.head.headers if line[0] != "via") == sorted(
        line for line in second.head.headers if line[0] != "via"
    )
    # The first one connects to the server.
    assert len(fast_path_requests) == (0 if more else 2)
