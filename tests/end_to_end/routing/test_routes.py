"""Routes to real servers: what clients get, and what servers see."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from gateway.proxy.router import Router
from tests.support.gateway import RunningGateway, running_gateway
from tests.support.http_messages import http_response, request
from tests.support.inference_messages import FLOATS, INFER, infer_raw, json_request
from tests.support.raw_client import ReceivedResponse
from tests.support.servers.model_scripts import infer_floats
from tests.support.servers.scripted_server import Connection, ScriptedServer

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


async def test_canary_gets_its_share(
    path: Callable[[bytes], bytes], fast_path_requests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two more are for the gateway's own calls, and for that which ends each test.
    numbers = np.random.default_rng(7).random(62).tolist()
    expected = sum(number >= 0.75 for number in numbers[:60])
    drawn = iter(numbers)
    plain = Router.__init__

    def scripted(routes: Router, rules: Any, **others: Any) -> None:
        # The routes for the warm-up have one upstream each.
        plain(routes, rules, lambda: next(drawn), **others)

    monkeypatch.setattr(Router, "__init__", scripted)
    async with ScriptedServer(infer_floats) as one, ScriptedServer(infer_floats) as two:
        upstream = [{"name": "one", "weight": 75}, {"name": "two", "weight": 25}]
        routes = [{"upstream": upstream}]
        async with _gateway(routes, one=one, two=two) as gateway, gateway.client() as client:
            for number in range(60):
                # The same head many times, with others in between.
                target = INFER if number % 3 else "/v2/models/m/versions/1/infer"
                assert _values(await client.ask(path(_post(target)))) == [1.5, -2, 3e30]
        assert (len(_received(one)), len(_received(two))) == (60 - expected, expected)
        assert len([each for each in fast_path_requests if each != WARM]) == 60 * (path is bytes)


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
