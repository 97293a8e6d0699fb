"""Calls whose small body comes after the head: they wait for it a moment."""

from __future__ import annotations

import asyncio

import pytest

from gateway.observe.call_record import CallRecord
from gateway.proxy.calls.planner import Planner
from gateway.proxy.filters.authentication import KeyGroup
from gateway.proxy.router import Route, Router
from gateway.routing.matcher import Match
from tests.listener.fast_path.fast_path_listener import (
    FastPathListener,
    echo_target,
    listening,
    serving,
)
from tests.support.gateway import until
from tests.support.http_messages import request
from tests.support.servers.scripted_server import ScriptedServer

POST = request("POST", "/v2/x", b"hello")
HEAD = POST[: -len(b"hello")]


def _is_deferred(here: FastPathListener) -> bool:
    call = here.connection.call
    return call is not None and call.is_deferred


async def test_body_in_other_writes_takes_the_fast_path(fast_path_requests: list[str]) -> None:
    async with serving(echo_target) as (here, client):
        for pieces in ([b"hello"], [b"he", b"llo"], [b"h", b"e", b"l", b"l", b"o"]):
            await client.send(HEAD)
            await until(lambda: _is_deferred(here))
            await client.send(*pieces)
            assert (await client.read_response()).body == b"/v2/x hello"
        assert fast_path_requests == ["/v2/x"] * 3
        assert here.listener.buffers.total == 0


async def test_late_body_takes_the_streaming_path(fast_path_requests: list[str]) -> None:
    async with serving(echo_target) as (here, client):
        await client.send(HEAD, b"he")
        await until(lambda: here.listener.requests == 1 and not _is_deferred(here))
        await client.send(b"llo")
        assert (await client.read_response()).body == b"/v2/x hello"
        assert fast_path_requests == []
        assert here.listener.deferrals.size == 0


async def test_next_request_behind_a_deferred_body_is_served(fast_path_requests: list[str]) -> None:
    async with serving(echo_target) as (here, client):
        await client.send(HEAD)
        await until(lambda: _is_deferred(here))
        await client.send(b"hello" + request("GET", "/v2/next"))
        assert (await client.read_response()).body == b"/v2/x hello"
        assert (await client.read_response()).body == b"/v2/next "
        assert fast_path_requests == ["/v2/x", "/v2/next"]


@pytest.mark.parametrize("reset", [False, True])
async def test_client_that_leaves_during_the_wait_is_observed(reset: bool) -> None:
    records: list[CallRecord] = []
    async with ScriptedServer(echo_target) as server, listening(server, (records.append,)) as here:
        async with here.client() as client:
            await client.send(HEAD)
            await until(lambda: _is_deferred(here))
            if reset:
                client.reset()
            else:
                await client.close()
            await until(lambda: not here.listener.connections)
        await here.until_idle()
        assert here.listener.deferrals.size == 0
        assert here.listener.buffers.total == 0
        assert (records[-1].status, records[-1].error) == (0, "the client closed the connection")
        assert len(server.requests) == 1


async def test_drain_waits_for_a_deferred_call() -> None:
    async with serving(echo_target) as (here, client):
        await client.send(HEAD)
        await until(lambda: _is_deferred(here))
        drain = asyncio.create_task(here.listener.drain(5))
        await asyncio.sleep(0.02)
        await client.send(b"hello")
        reply = await client.read_response()
        assert (reply.body, reply.head.get("Connection")) == (b"/v2/x hello", "close")
        assert await drain == 0


@pytest.mark.parametrize(
    "data",
    [
        request("POST", "/v2/x", headers={"Content-Length": "5", "Expect": "100-continue"}),
        request("POST", "/v2/x", headers={"Content-Length": "100000000"}),
        request("POST", "/v2/x", headers={"Content-Length": str(2**20)}),
    ],
    ids=["waits for 100", "too large for the gateway", "too large for the fast path"],
)
async def test_other_calls_do_not_wait(data: bytes) -> None:
    records: list[CallRecord] = []
    async with serving(echo_target, observers=(records.append,)) as (here, client):
        await client.send(data)
        await until(lambda: bool(here.listener.requests) or len(records) == 2)
        assert not _is_deferred(here)


async def test_head_that_was_read_before_a_reload_makes_no_plan_after_it() -> None:
    """Its parser did not know which headers decide now: others would be served by its plan."""
    async with serving(echo_target) as (here, client):
        data = request("POST", "/v2/x", b"hello", {"X-Key": "secret"})
        await client.send(data[:-5])
        await until(lambda: _is_deferred(here))
        group = KeyGroup("people", "X-Key", ["secret"])
        dropped = frozenset(("x-key",))
        route = Route(Match(), (here.destination,), keys=(group,), dropped_headers=dropped)
        router = Router([route])
        listener, fast_path = here.listener, Planner(router)
        listener.reconfigure(fast_path, (), None, listener.idle_timeouts, listener.forwarding)
        await client.send(data[-5:])
        await client.read_response()
        # What the streaming path of this listener still serves is not the point; no plan is.
        assert len(fast_path._plans) == 0
        without_key = listener.head_parser.parse_request(POST[: -len(b"hello")])
        assert fast_path.plan(without_key, "/v2/x") is None
        fast_path.close()
