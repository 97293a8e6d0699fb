"""To unregister all regions of a server takes none of the gateway's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.upstream.shared_memory import SharedMemoryLane, SharedMemoryLanes, SharedMemoryPolicy
from tests.support.doubles.cluster import (
    B,
    Cluster,
    ServerStep,
    connect_error,
    one_upstream,
    scripted_response,
)

ALL = "/v2/systemsharedmemory"
STATUS = f"GET {ALL}/status"
OK = scripted_response(b"")
UNKNOWN = scripted_response(b'{"error":"unknown"}', 404)
INVALID = scripted_response(b'{"error":"unknown"}', 400)
BROKEN = scripted_response(b'{"error":"broken"}', 500, {"X-A": "1"})


def _cluster(*, is_guarded: bool = True, **turns: Any) -> Cluster:
    """Make servers that may have regions of the gateway."""
    lanes = SharedMemoryLanes(SharedMemoryPolicy(1, 1))
    cluster = one_upstream(lanes=lanes, **turns)
    for each in cluster.endpoints:
        each.shared_memory = SharedMemoryLane(each, lanes, is_guarded=is_guarded)
    return cluster


def _regions(*names: object) -> ServerStep:
    return scripted_response(json.dumps([{"name": each} for each in names]).encode())


def _unregister(*names: str) -> list[str]:
    return [f"POST {ALL}/region/{each}/unregister" for each in names]


async def test_every_endpoint_loses_the_regions_of_clients_alone() -> None:
    names = ("tensorgate-x-1", "other", "tensorgate")
    cluster = _cluster(a=(_regions("my%20own", *names), *[OK] * 4), b=(_regions("b"), *[OK] * 4))
    response = await cluster.ask("POST", f"{ALL}/unregister?x", b"{}")
    assert (response.status, response.body) == (200, b"")
    assert dict(response.headers) == {"Content-Type": "application/json", "Content-Length": "0"}
    asked = [STATUS, *_unregister("b", "my%20own", "other", "tensorgate")]
    assert cluster.received == [asked] * 2
    assert [each.bodies for each in cluster.endpoints] == [[b""] * 5] * 2


async def test_server_without_regions_of_clients_is_only_asked_for_them() -> None:
    cluster = _cluster(a=_regions("tensorgate-x-1"))
    assert (await cluster.ask("POST", f"{ALL}/unregister")).status == 200
    assert cluster.received == [[STATUS]]


async def test_region_that_has_gone_meanwhile_is_no_error() -> None:
    cluster = _cluster(a=(_regions("a", "b", "c"), UNKNOWN, INVALID, OK))
    assert (await cluster.ask("POST", f"{ALL}/unregister")).status == 200
    assert cluster.received == [[STATUS, *_unregister("a", "b", "c")]]


@pytest.mark.parametrize("turns", [(BROKEN,), (_regions("a", "b"), BROKEN, OK)])
async def test_error_of_a_server_passes_as_it_is(turns: tuple[ServerStep, ...]) -> None:
    cluster = _cluster(a=turns)
    response = await cluster.ask("POST", f"{ALL}/unregister")
    assert (response.status, response.body) == (500, b'{"error":"broken"}')
    assert dict(response.headers) == {"X-A": "1"}
    assert len(cluster.endpoints[0].requests) == len(turns)


async def test_error_of_one_endpoint_is_told_and_the_others_lose_their_regions() -> None:
    down = connect_error(B)
    cluster = _cluster(a=(_regions("mine"), OK), b=(down, down))
    response = await cluster.ask("POST", f"{ALL}/unregister")
    assert response.status == 502
    assert json.loads(response.body)["error"] == (
        f"POST {ALL}/unregister succeeded at upstream 'a'; "
        "failed: cannot connect to upstream 'b': Connection refused"
    )
    assert cluster.received[0] == [STATUS, *_unregister("mine")]


@pytest.mark.parametrize("listed", [_regions(1), scripted_response(b"{"), scripted_response(b"1")])
async def test_list_of_regions_that_is_none_is_an_error(listed: ServerStep) -> None:
    cluster = _cluster(a=listed)
    response = await cluster.ask("POST", f"{ALL}/unregister")
    error = "upstream 'a' sent no list of shared memory regions"
    assert (response.status, json.loads(response.body)) == (502, {"error": error})
    assert cluster.received == [[STATUS]]


NAMES = ["a/b", "a b", "..", "a?", "a\r\nHost: b", "\u00fc", "", "z" * 8200]


@pytest.mark.parametrize("name", NAMES)
async def test_name_that_fits_into_no_path_is_refused(name: str) -> None:
    cluster = _cluster(a=_regions("a", name))
    response = await cluster.ask("POST", f"{ALL}/unregister")
    assert response.status == 501
    assert b"a name that fits into no path" in response.body
    assert cluster.received == [[STATUS]]


async def test_other_method_is_refused() -> None:
    cluster = _cluster(a=OK)
    assert (await cluster.ask("GET", f"{ALL}/unregister")).status == 405
    assert cluster.received == [[]]


async def test_request_passes_where_the_server_can_have_no_region() -> None:
    cluster = _cluster(is_guarded=False, a=BROKEN)
    assert (await cluster.ask("POST", f"{ALL}/unregister", b"{}")).status == 500
    assert cluster.received == [[f"POST {ALL}/unregister"]]
    assert cluster.endpoints[0].bodies == [b"{}"]
