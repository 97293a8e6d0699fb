"""Routes, several servers and mirrors: what clients get, and what servers see."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from gateway.demo.server.server import DemoServer
from gateway.observe.call_record import CallRecord
from tests.support.checks.call_records import call_records as call_records
from tests.support.gateway import RunningGateway, gateway_client, running_gateway, served, until
from tests.support.http_messages import chunk, chunked, http_response, message, request
from tests.support.inference_messages import (
    FLOATS,
    INFER,
    binary_header,
    binary_response,
    infer_binary,
    infer_json,
    infer_raw,
    json_request,
    metadata,
)
from tests.support.raw_client import ReceivedResponse
from tests.support.servers.model_scripts import infer_floats
from tests.support.servers.scripted_server import (
    Connection,
    Script,
    ScriptedServer,
    always_respond,
    never_respond,
)

pytestmark = pytest.mark.usefixtures("one_identity")

JSON = json_request()
WARM = "/v2/warm"


async def _stalling(connection: Connection) -> None:
    """Respond to one request only."""
    await connection.request()
    await connection.send(http_response())
    await connection.wait_for_close()


@asynccontextmanager
async def _gateway(
    routes: Sequence[dict[str, Any]], **servers: ScriptedServer
) -> AsyncIterator[RunningGateway]:
    """Run a gateway with an idle connection to each server."""
    upstreams = {
        name: {"endpoints": [server.url], "dialect": "triton"} for name, server in servers.items()
    }
    warm = [{"match": {"headers": {"x-warm": name}}, "upstream": name} for name in servers]
    general = {"upstreams": upstreams, "routes": [*warm, *routes]}
    async with running_gateway(general=general) as running:
        async with running.client() as client:
            for name in servers:
                assert (await client.call("GET", WARM, headers={"x-warm": name})).status == 200
        yield running


def _received(server: ScriptedServer) -> list[str]:
    return [each.head.target for each in server.requests if each.head.target != WARM]


def _post(target: str, **headers: str) -> bytes:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return request("POST", target, JSON, named)


def _values(reply: ReceivedResponse) -> object:
    assert reply.status == 200
    return reply.json["outputs"][0]["data"]


async def test_model_has_its_own_server(
    path: Callable[[bytes], bytes], fast_path_requests: list[str]
) -> None:
    async with ScriptedServer(infer_floats) as one, ScriptedServer(infer_floats) as two:
        routes = [
            {"match": {"model": "resnet*"}, "upstream": "one"},
            {"match": {"model": "re:bert-[0-9]+", "version": "2"}, "upstream": "two"},
            {"match": {"operations": ["health", "metadata"]}, "upstream": "two"},
        ]
        async with _gateway(routes, one=one, two=two) as gateway, gateway.client() as client:
            for target in ("/v2/models/resnet50/infer", "/v2/models/bert-7/versions/2/infer"):
                assert _values(await client.ask(path(_post(target)))) == [1.5, -2, 3e30]
            await client.call("GET", "/v2/models/resnet50")
            await client.call("GET", "/v2/models/vgg")
        assert _received(one) == ["/v2/models/resnet50/infer", "/v2/models/resnet50"]
        assert _received(two) == ["/v2/models/bert-7/versions/2/infer", "/v2/models/vgg"]
        fast_path = path is bytes
        assert ("/v2/models/resnet50/infer" in fast_path_requests) is fast_path
        assert ("/v2/models/bert-7/versions/2/infer" in fast_path_requests) is fast_path


async def test_denied_operation_is_a_403(path: Callable[[bytes], bytes]) -> None:
    denied = {
        "/v2/repository/index": "repository",
        "/v2/models/m/config": "config",
        "/v2/models/m/%69nfer": "other",
    }
    async with ScriptedServer(infer_floats) as server:
        deny = ["repository", "config", "other"]
        routes = [{"upstream": "one", "deny_operations": deny}]
        async with _gateway(routes, one=server) as gateway, gateway.client() as client:
            for target, word in denied.items():
                reply = await client.ask(path(_post(target)))
                assert reply.status == 403
                assert reply.error == f"operation '{word}' is denied on this route"
                assert server.url not in str(reply)
            assert _values(await client.ask(path(_post(INFER)))) == [1.5, -2, 3e30]
        assert _received(server) == [INFER]


async def test_rewrite_gives_a_model_an_alias(
    path: Callable[[bytes], bytes], fast_path_requests: list[str]
) -> None:
    async with ScriptedServer(infer_floats) as server:
        rewrite = {"model": "m", "version": "3"}
        route = {"match": {"model": "classifier"}, "upstream": "one", "rewrite": rewrite}
        async with _gateway([route], one=server) as gateway, gateway.client() as client:
            reply = await client.ask(path(_post("/v2/models/classifier/infer?a=classifier")))
            assert _values(reply) == [1.5, -2, 3e30]
            assert reply.json["model_name"] == "m"
            await client.ask(path(_post("/v2/models/classifier/versions/9/generate")))
            await client.ask(path(_post("/v2/models/classifier/trace")))
            raw = infer_raw(FLOATS.tobytes()).replace(
                INFER.encode(), b"/v2/models/classifier/infer"
            )
            assert (await client.ask(path(raw))).status == 200
        infer = "/v2/models/m/versions/3/infer"
        assert _received(server) == [
            f"{infer}?a=classifier",
            "/v2/models/m/versions/3/generate",
            "/v2/models/m/trace/setting",
            "/v2/models/m/versions/3",
            "/v2/models/m/versions/3/config",
            infer,
        ]
        assert server.requests[-1].body.endswith(FLOATS.tobytes())
        assert (f"{infer}?a=classifier" in fast_path_requests) is (path is bytes)


async def test_route_has_its_own_limits(path: Callable[[bytes], bytes]) -> None:
    async with ScriptedServer(infer_floats) as server, ScriptedServer(_stalling) as slow:
        routes: list[dict[str, Any]] = [
            {"match": {"model": "small"}, "upstream": "one", "limits": {"max_request_bytes": 1024}},
            {"match": {"model": "shallow"}, "upstream": "one", "limits": {"max_json_depth": 1}},
            {"match": {"model": "hasty"}, "upstream": "slow", "limits": {"idle_timeout": "30ms"}},
            {"upstream": "one"},
        ]
        body = json_request(*range(500))
        async with _gateway(routes, one=server, slow=slow) as gateway, gateway.client() as client:
            for target, status in [
                ("/v2/models/small/infer", 413),
                ("/v2/models/small/generate", 413),
                ("/v2/models/m/infer", 200),
                ("/v2/models/shallow/infer", 400),
            ]:
                # The gateway refuses a large body before its end.
                async with gateway.client() as other:
                    reply = await other.ask(path(request("POST", target, body)))
                assert reply.status == status
            reply = await client.ask(path(_post("/v2/models/hasty/infer")))
            assert reply.status == 504
            assert "limits.idle_timeout" in reply.error


LOAD = "/v2/repository/models/m/load"
INDEX = "/v2/repository/index"
READY = "/v2/health/ready"


async def test_client_disconnect_during_a_broadcast_frees_everything() -> None:
    async with (
        ScriptedServer(always_respond(http_response(b""))) as works,
        ScriptedServer(never_respond) as one,
        ScriptedServer(never_respond) as two,
        running_gateway(works.url, one.url, two.url) as gateway,
        gateway.client() as client,
    ):
        await client.send(request("POST", LOAD, bytes(100_000)))
        await until(lambda: works.requests and gateway.outstanding == 2)
        await client.close()
        for server in (one, two):
            async with asyncio.timeout(5):
                await (await server.connection()).left.wait()
        await gateway.until_idle()


async def test_index_and_statistics_are_those_of_all() -> None:
    async with DemoServer() as one, DemoServer() as two, DemoServer() as three:
        routes = [
            {"match": {"model": "identity_fp16"}, "upstream": "servers"},
            {"match": {"operations": ["repository", "statistics"]}, "upstream": "more"},
        ]
        others = {"more": {"endpoints": [two.url, three.url], "dialect": "triton"}}
        async with (
            running_gateway(one.url, others=others, general={"routes": routes}) as gateway,
            gateway.client() as client,
        ):
            unload = "/v2/repository/models/identity_fp16/unload"
            assert (await client.call("POST", unload)).status == 200
            reply = await client.call("POST", INDEX, b'{"ready": true}')
            names = {name: set[str]() for name in ("servers", "more")}
            for entry in reply.json:
                names[entry["upstream"]].add(entry["name"])
                assert entry["state"] == "READY"
            assert names["more"] - names["servers"] == {"identity_fp16"}
            stats = (await client.call("GET", "/v2/models/stats")).json["model_stats"]
            sources = {(entry["upstream"], entry["endpoint"]) for entry in stats}
            assert sources == {("servers", one.url), ("more", two.url), ("more", three.url)}


async def test_connection_of_a_readiness_check_is_kept() -> None:
    """Even if the server sends a body with its 200."""
    async with served(always_respond(http_response(b'{"ready":true}'))) as (server, _, client):
        assert (await client.call("GET", READY)).status == 200
        assert (await client.call("GET", "/v2/models/m/ready")).json == {"ready": True}
        assert len(server.connections) == 1


# The gateway rewrites the second one, with the value of the client.
@pytest.mark.parametrize("header", ["X-User", "X-Request-Id"])
async def test_hash_header_keeps_a_value_on_one_endpoint(
    header: str, path: Callable[[bytes], bytes]
) -> None:
    script, policy = always_respond(binary_response(bytes(4))), {"hash_header": header}
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(ScriptedServer(script)) for _ in range(3)]
        urls = [server.url for server in servers]
        balanced = gateway_client(*urls, upstream={"load_balancing": policy})
        client = await stack.enter_async_context(balanced)
        # So many that each endpoint gets some: the hash depends on the ports.
        users = [f"user-{number}" for number in range(60)]
        for user in users * 3:
            assert (await client.ask(path(infer_json(headers={header: user})))).status == 200
        seen = [{each.head.get(header) for each in server.requests} for server in servers]
        assert sum(map(len, seen)) == len(users)  # no value was at two endpoints
        assert all(seen)


MIB = 2**20
MOST = 64
NOWHERE = "http://127.0.0.1:1"
GENERATE = "/v2/models/m/generate"
STREAM = GENERATE + "_stream"
EVENTS = {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"}
TENSOR = random.Random(7).randbytes(MIB)
BINARY = infer_binary(binary_header(MIB), TENSOR)


async def model(connection: Connection) -> None:
    """Respond as a server with a model."""
    responses = {
        INFER: binary_response(FLOATS.tobytes()),
        STREAM: message("HTTP/1.1 200 OK", EVENTS, chunked(b"data: 1\n\n", b"data: 2\n\n")),
        "/v2/models/m": http_response(metadata(-1)),
    }
    other = http_response(b'{"text_output":"y"}')
    while True:
        target = (await connection.request()).head.target
        await connection.send(responses.get(target, other))


_HANGS = "copies stay at a mirror that hangs until the gateway stops"


@asynccontextmanager
async def mirrored(
    server: str, shadow: str | None, unchecked: str = _HANGS, **limits: Any
) -> AsyncIterator[RunningGateway]:
    """Run a gateway with a mirror or without; closing it waits for no mirror."""
    route = {} if shadow is None else {"mirror": {"upstream": "shadow", "percent": "100%"}}
    others = {"shadow": {"endpoints": [shadow or NOWHERE], "dialect": "triton"}}
    # Else no two requests would be equal.
    general = {"request_id": False, "forwarded": {"headers": False, "via": False}}
    async with running_gateway(
        server, route=route, others=others, general=general, unchecked=unchecked, **limits
    ) as gateway:
        yield gateway


def _state(gateway: RunningGateway) -> tuple[int, int]:
    """Return the copies in flight, and their bytes."""
    mirror = gateway.gateway.active_config.router.routes[0].mirror
    if mirror is None:
        return 0, 0
    return mirror.in_flight, mirror.destination.memory_budget.total


COPIED = [
    infer_json(headers={"X-User": "u"}),
    infer_json(json_request(*range(50_000))),
    BINARY,
    infer_raw(FLOATS.tobytes()),
    request("POST", STREAM, b"{}"),
    request("POST", GENERATE, TENSOR),
    message(f"POST {GENERATE} HTTP/1.1", EVENTS | {"Host": "h"}, chunked(TENSOR[:9], TENSOR[9:])),
]
REQUESTS = [*COPIED, request("GET", "/v2/models/m/stats"), infer_json(b"no JSON"), infer_json()]


async def closes_during_its_response(connection: Connection) -> None:
    await connection.request()
    await connection.send(http_response(bytes(1000))[:-500])


async def reads_slowly(connection: Connection) -> None:
    """Read a few bytes at a time until the other side closes."""
    while await connection.reader.read(1000):  # noqa: ASYNC110  # that is what slow means
        await asyncio.sleep(0.01)


async def never_ends_its_response(connection: Connection) -> None:
    await connection.request()
    await connection.send(message("HTTP/1.1 200 OK", EVENTS), *[chunk(bytes(10_000))] * 50)
    await never_respond(connection)


SHADOWS: dict[str, Script | None] = {
    "cannot be reached": None,
    "answers": model,
    "hangs": never_respond,
    "closes within its answer": closes_during_its_response,
    "reads slowly": reads_slowly,
    "never ends its answer": never_ends_its_response,
}


def _requests_of(server: ScriptedServer) -> list[tuple[str, list[tuple[str, str]], bytes]]:
    """Return what a server got; the fast path sends headers in an order of its own."""
    own = server.url.removeprefix("http://")  # the Host of the gateway's own requests
    return [
        (
            each.head.first,
            sorted((name, value.replace(own, "server")) for name, value in each.head.headers),
            each.body,
        )
        for each in server.requests
    ]


async def _everything(shadow: str | None) -> tuple[list[Any], list[Any]]:
    """Return the responses to successive requests, and what the server got."""
    async with (
        ScriptedServer(model) as server,
        mirrored(server.url, shadow) as gateway,
        gateway.client() as client,
    ):
        seen = []
        for data in REQUESTS:
            reply = await client.ask(data)
            headers = [header for header in reply.head.headers if header[0] != "date"]
            seen.append((reply.head.first, headers, reply.body))
        assert not gateway.gateway.listener._active_calls
        assert gateway.gateway.active_config.upstreams["servers"].pool.outstanding == [0]
        return seen, _requests_of(server)


@pytest.mark.parametrize("script", SHADOWS.values(), ids=SHADOWS)
async def test_client_gets_the_same_as_without_a_mirror_which_gets_the_same_as_the_server(
    script: Script | None, unused_backlog: str
) -> None:
    alone = await _everything(None)
    if script is None:
        for url in (NOWHERE, unused_backlog):
            assert await _everything(url) == alone
        return
    async with ScriptedServer(script) as shadow:
        assert await _everything(shadow.url) == alone
        assert shadow.connections
        if script is model:
            await until(lambda: len(_posts(_requests_of(shadow))) == len(COPIED) + 1)
            assert sorted(_posts(_requests_of(shadow))) == sorted(_posts(alone[1]))


def _posts(received: list[Any]) -> list[Any]:
    return [each for each in received if each[0].startswith("POST")]


async def test_clients_continue_when_the_mirror_is_at_its_cap(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A hanging mirror takes no slots and no memory of clients."""
    caplog.set_level(logging.WARNING)
    large = infer_json(json_request(*[1.5] * 200_000))  # 800 kB in binary form
    limits: dict[str, Any] = {"max_requests": 1, "max_queue": 0, "max_buffered_bytes": "1MiB"}
    async with (
        ScriptedServer(model) as server,
        ScriptedServer(never_respond) as shadow,
        mirrored(server.url, shadow.url, **limits) as gateway,
    ):
        async with gateway.client() as client:
            for number in range(MOST + 5):
                assert (await client.ask(infer_json(json_request(number)))).status == 200
            await until(lambda: len(shadow.connections) == MOST)
            for _ in range(3):
                assert (await client.ask(large)).status == 200
        assert _state(gateway)[0] == MOST
    assert (
        "requests failed, 1 were not sent, last: 64 copies are in progress (mirror.max_concurrent)"
        in caplog.messages[0]
    )


@pytest.mark.parametrize("data", [BINARY, request("POST", GENERATE, TENSOR)], ids=["binary", "any"])
async def test_client_disconnect_within_its_body_sends_nothing_to_the_mirror(data: bytes) -> None:
    async with ScriptedServer(model) as server, ScriptedServer(model) as shadow:
        async with mirrored(server.url, shadow.url, unchecked="") as gateway:
            async with gateway.client() as client:
                await client.send(data[:-1000])
                await until(lambda: _state(gateway)[1] > len(data) - 1500)
                client.reset()
                await gateway.until_idle()
            assert _state(gateway) == (0, 0)
        assert shadow.connections == []


async def test_hanging_mirror_does_not_delay_a_drain(call_records: list[CallRecord]) -> None:
    async with ScriptedServer(model) as server, ScriptedServer(never_respond) as shadow:
        async with asyncio.timeout(5):
            async with mirrored(server.url, shadow.url, drain_timeout=30) as gateway:
                async with gateway.client() as client:
                    for data in (infer_json(), request("POST", GENERATE, TENSOR)):
                        assert (await client.ask(data)).status == 200
                await until(lambda: len(shadow.connections) == 2)
                assert not gateway.gateway.listener._active_calls
            assert gateway.gateway.dropped == 0
            for connection in shadow.connections:
                await connection.left.wait()
    assert len(call_records) == 2, "observers see the clients' calls, not the copies"
