"""Fuzzing requests with odd headers at a gateway in which all is on that reads headers."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from tests.support.addresses import free_address
from tests.support.gateway import RunningGateway, running_gateway
from tests.support.http_messages import chunked, http_response, request
from tests.support.inference_messages import (
    FLOATS,
    binary_header,
    binary_response,
    infer_json,
    json_request,
)
from tests.support.scale import fuzz_seconds
from tests.support.servers.scripted_server import Connection, ScriptedServer

pytestmark = pytest.mark.usefixtures("clean")

_CONCURRENCY = 16

_NAMES = [
    *(b"Host", b"X-Forwarded-For", b"X-Forwarded-Proto", b"X-Forwarded-Host", b"Forwarded"),
    *(b"Via", b"CDN-Loop", b"X-Request-Id", b"traceparent", b"tracestate", b"Connection"),
    *(b"Authorization", b"X-Key", b"X-Stick", b"X-Hash", b"X-Route", b"Accept-Encoding"),
    *(b"Content-Type", b"Content-Encoding", b"Inference-Header-Content-Length", b"Expect"),
    *(b"grpc-timeout", b"TE", b"Trailer", b"Upgrade", b"Accept", b"Cookie", b"Date", b"!#$%&'*+"),
]
_VALUES = [
    *(b"", b" ", b",", b",,,", b";", b"=", b'"', b"\\", b"%", b"%zz", b"\xff\xfe", b"\x80", b"\t"),
    *(b"1.2.3.4", b"fe80::1%eth0", b"[::1]:80", b"999.1.1.1", b"unknown", b"_hidden", b"for=,"),
    *(b'for="[::', b"for=1.2.3.4;proto=\xe4", b"http", b"https", b"x:99999", b"[", b"]", b"a b"),
    *(b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01", b"00-0-0-0", b"ff-" + b"a" * 32, b"00-"),
    *(b"00-" + b"\xb2" * 32 + b"-" + b"b" * 16 + b"-01", b"a=b,c=d", b"a=" + b"b" * 300, b"=,="),
    *(b"Bearer", b"Bearer key", b"Bearer \xff", b"bearer  key", b"Basic a2V5", b"key", b"keys"),
    *(b"gzip", b"gzip;q=0", b"gzip;q=1e9", b"gzip;q=nan", b"deflate;q=-1", b"*;q=0.5", b"identity"),
    *(b"0", b"-1", b"+1", b"1_0", b"9" * 20, b"9" * 5000, b"0x10", b"1e5", b"\xb2", b"nan", b"5"),
    *(b"application/json", b"application/octet-stream", b"application/grpc"),
    b"text/plain;charset=x",
    *(b"application/json; charset=\xff", b"multipart/form-data; boundary=", b"/", b"1S", b"0n"),
    *(b"close", b"keep-alive", b"X-Key, Host, Content-Length", b"close, X-Request-Id"),
    b"\xe4, \xf6",
    *(b"100-continue", b"trailers", b"x" * 129, b"x" * 3000, b"1.1 tensorgate"),
    b"1.1 tensorgate-x",
]
_TARGETS = [
    *(b"/v2", b"/v2/health/ready", b"/v2/models/m", b"/v2/models/m/infer", b"/v1/models/m:predict"),
    *(b"/v2/models/m/generate", b"/v2/models/m/generate_stream", b"/v2/models/%ff/infer", b"/"),
    *(b"/v2/models/m/versions/1/infer", b"/v2/models/m/versions/%00/infer", b"/v2/models//infer"),
    *(b"/v2/models/" + b"m" * 3000 + b"/infer", b"/v2/models/%2e%2e/infer"),
    b"/v2/models/m/infer?%",
    *(b"/v2/repository/index", b"/v1/models", b"*", b"//", b"/%", b"/a#b"),
    b"/v2/models/secret/infer",
    *(b"http://[::1/v2", b"http://x/v2/models/m/infer", b"http://y:1", b"/v2/models/{}|^`/infer"),
    *(b"/inference.GRPCInferenceService/ModelInfer", b"/v2/models/m/infer/", b"/v2/logging"),
]
_METHODS = [b"GET", b"POST", b"POST", b"POST", b"HEAD", b"OPTIONS", b"PUT", b"DELETE"]
_BODIES = [
    *(b"", b"{", b"hello", json_request(), binary_header(8) + FLOATS.tobytes()),
    *(b'{"instances": [1.5]}', b'{"text_input": "\xff"}', b'{"text_input": "a"}', b"\0" * 70_000),
]


def _request(chance: random.Random) -> bytes:
    """Make a request whose framing is right, and little else."""
    names = chance.choices(_NAMES, k=chance.choice((0, 1, 1, 2, 3, 8)))
    lines = [b"%s: %s" % (name, _value(chance)) for name in names]
    if chance.random() < 0.9:
        lines.insert(chance.randrange(len(lines) + 1), b"Host: x")
    if chance.random() < 0.1:
        lines.append(b"X: " + b"x" * 3000)  # the head is not cached
    body = chance.choice(_BODIES)
    if chance.random() < 0.2:
        lines.append(b"Transfer-Encoding: chunked")
        body = chunked(body, b"x") if body else chunked()
    elif body or chance.random() < 0.5:
        lines.append(b"Content-Length: %d" % len(body))
    chance.shuffle(lines)
    version = chance.choice((b"1.1",) * 9 + (b"1.0",))
    first = b"%s %s HTTP/%s" % (chance.choice(_METHODS), chance.choice(_TARGETS), version)
    data = b"\r\n".join((first, *lines, b"", body))
    return data[: chance.randrange(len(data))] if chance.random() < 0.1 else data


def _value(chance: random.Random) -> bytes:
    value = chance.choice(_VALUES)
    if chance.random() < 0.1:
        value += bytes([chance.choice((0x09, 0x20, *range(0x21, 0x7F), *range(0x80, 0x100)))])
    return value


async def _serve(connection: Connection) -> None:
    """Respond to each request as a server that has all models."""
    while True:
        received = await connection.request()
        if received.head.target.endswith("/infer"):
            await connection.send(binary_response(FLOATS.tobytes()))
        else:
            await connection.send(http_response(b"{}", {"Content-Type": "application/json"}))


@asynccontextmanager
async def _gateway_with_all(folder: Path) -> AsyncIterator[RunningGateway]:
    """Run a gateway with keys, mirrors, traces, logs, forwarded headers, and two servers."""
    keys = folder / "keys"
    keys.write_text("key\n")
    mirror = {"upstream": "copies"}
    shared = {"upstream": "servers", "mirror": mirror, "compression": ["gzip", "deflate"]}
    async with ScriptedServer(_serve) as one, ScriptedServer(_serve) as two:
        general = {
            "api_keys": {
                "bearers": {"file": str(keys)},
                "own": {"file": str(keys), "header": "X-Key"},
            },
            "forwarded": {"trusted_proxies": "all"},
            "log": {"access": {"format": "json", "path": str(folder / "access.log")}},
            "tracing": {"endpoint": f"http://{free_address()}"},
            "routes": [
                {"match": {"model": "secret"}, "auth": ["bearers", "own"], **shared},
                {"match": {"headers": {"X-Route": "re:.*5"}}, "server_timing": True, **shared},
                {"sticky_header": "X-Stick", "server_timing": True, **shared},
            ],
        }
        async with running_gateway(
            one.url,
            two.url,
            upstream={"load_balancing": {"hash_header": "X-Hash"}},
            others={"copies": {"endpoints": [two.url], "dialect": "triton"}},
            general=general,
            idle_timeout="2s",
        ) as gateway:
            yield gateway


_LAST = request("GET", "/v2", headers={"Connection": "close"})


async def _send(gateway: RunningGateway, data: bytes, is_patient: bool) -> None:
    with suppress(ConnectionError, asyncio.IncompleteReadError, TimeoutError):
        async with gateway.client() as client:
            client.send_nowait(data + _LAST)
            if is_patient:
                async with asyncio.timeout(0.2):
                    await client.reader.read()


def _rounds() -> Iterator[random.Random]:
    end, chance = time.monotonic() + fuzz_seconds(6), random.Random(33)
    while time.monotonic() < end:
        yield chance


async def test_odd_headers_leave_nothing_behind(tmp_path: Path) -> None:
    async with _gateway_with_all(tmp_path) as gateway:
        for chance in _rounds():
            sent = [
                (
                    b"".join(_request(chance) for _ in range(chance.choice((1, 1, 3)))),
                    bool(turn % 4),
                )
                for turn in range(_CONCURRENCY)
            ]
            await asyncio.gather(*(_send(gateway, *each) for each in sent))
            try:
                await gateway.remains.until_nothing()
            except AssertionError as error:
                error.add_note(f"sent: {sent}")
                raise
            async with gateway.client() as innocent:
                assert (await innocent.ask(infer_json())).status == 200
                assert (await innocent.ask(request("GET", "/v2"))).status == 200
