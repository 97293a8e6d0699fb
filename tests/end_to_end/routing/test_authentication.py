"""API keys over real sockets: who is served, which errors, and what servers see."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.app import loaded_resources
from tests.support.gateway import RunningGateway, running_gateway, until
from tests.support.http_messages import request
from tests.support.raw_client import RawClient
from tests.support.servers.scripted_server import ScriptedServer

CHALLENGE = (
    'Bearer realm="tensorgate", error="invalid_token", ApiKey realm="tensorgate",'
    ' header="X-Api-Key"'
)
NEEDED = "a valid API key is needed: as 'Authorization: Bearer KEY' or in the header X-Api-Key"

A = {"Authorization": "Bearer key-of-a"}
B = {"Authorization": "Bearer key-of-b"}
ROBOT = {"X-Api-Key": "key-of-robot"}
WRONG = {"Authorization": "Bearer wrong-key"}

ROUTES: list[dict[str, Any]] = [
    {"match": {"model": "a"}, "auth": ["team-a", "robots"], "deny_operations": ["config"]},
    {"match": {"model": "b"}, "auth": "team-b"},
    {"match": {"operations": ["health"]}},
]
"""Other requests have no route."""


@asynccontextmanager
async def _gateway(server: ScriptedServer, folder: Path) -> AsyncIterator[RunningGateway]:
    """Run a gateway with an idle connection to its server."""
    for team in "ab":
        (folder / team).write_text(f"# team {team}\nkey-of-{team}\n")
        (folder / team).chmod(0o600)
    keys: dict[str, dict[str, str]] = {
        "team-a": {"file": str(folder / "a")},
        "team-b": {"file": str(folder / "b")},
        "robots": {"environment": "ROBOT_KEYS", "header": "X-Api-Key"},
    }
    general = {
        "log": {"access": {"path": str(folder / "access.log")}},
        "api_keys": keys,
        "routes": [{**route, "upstream": "servers"} for route in ROUTES],
    }
    async with running_gateway(server.url, general=general) as running:
        async with running.client() as client:
            assert (await client.call("GET", "/v2/models/x/ready")).status == 200
        yield running


@asynccontextmanager
async def _client_of(server: ScriptedServer, folder: Path) -> AsyncIterator[RawClient]:
    async with _gateway(server, folder) as gateway, gateway.client() as client:
        yield client


@pytest.fixture(autouse=True)
def robots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the robots' keys in the environment."""
    monkeypatch.setenv("ROBOT_KEYS", "key-of-robot, another-key")


def _post(model: str, headers: dict[str, str]) -> bytes:
    return request("POST", f"/v2/models/{model}/generate", b"hello", headers)


@pytest.mark.parametrize("headers", [A, {**WRONG, "x-api-key": "another-key"}])
async def test_authenticated_client_is_served(
    headers: dict[str, str],
    tmp_path: Path,
    path: Callable[[bytes], bytes],
    fast_path_requests: list[str],
) -> None:
    async with ScriptedServer() as server, _client_of(server, tmp_path) as client:
        for _ in range(2):
            assert (await client.ask(path(_post("a", {"X-Kept": "1", **headers})))).status == 200
        assert len(server.requests) == 3
        for received in server.requests[1:]:
            # A key is for the gateway: no header that holds one goes to the server.
            assert received.head.all("Authorization") == received.head.all("X-Api-Key") == []
            assert "key" not in str(received)
            assert received.head.get("X-Kept") == "1"
    _warm_up, *targets = fast_path_requests
    assert len(targets) == 2 * (path is bytes)


async def test_unauthenticated_client_gets_the_same_error_for_every_path(
    tmp_path: Path, path: Callable[[bytes], bytes]
) -> None:
    async with ScriptedServer() as server, _client_of(server, tmp_path) as client:
        asked = [
            *(_post(model, WRONG) for model in ("a", "b", "unknown")),
            request("GET", "/v2/models/a/config", headers=WRONG),  # a denied operation
            request("POST", "/v2/repository/index", b"", WRONG),
        ]
        replies = [await client.ask(path(data)) for data in asked]
        for reply in replies:
            assert (reply.status, reply.error) == (401, NEEDED)
            assert reply.head.get("WWW-Authenticate") == CHALLENGE
            names = [name for name, _ in reply.head.headers]
            assert names == [name for name, _ in replies[0].head.headers]
        # A large body is refused before it comes.
        head = {"Content-Length": "50000000", "Expect": "100-continue"}
        await client.send(request("POST", "/v2/models/a/infer", headers=head))
        reply = await client.read_response()
        assert (reply.status, reply.head.get("Connection")) == (401, "close")
        assert [each.head.target for each in server.requests] == ["/v2/models/x/ready"]


async def test_removed_key_authenticates_no_more(
    tmp_path: Path,
    path: Callable[[bytes], bytes],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(loaded_resources, "POLL_INTERVAL", 0.001)
    new = {"Authorization": "Bearer new-key-of-a"}
    async with (
        ScriptedServer() as server,
        _gateway(server, tmp_path) as gateway,
        gateway.client() as client,
        gateway.client() as other,
    ):
        assert (await client.ask(path(_post("a", A)))).status == 200
        assert (await other.ask(path(_post("a", new)))).status == 401
        (tmp_path / "next").write_text("new-key-of-a")
        (tmp_path / "next").rename(tmp_path / "a")
        await until(lambda: any(": keys loaded from " in each for each in caplog.messages))
        # The same heads on the same connections, so that plans are cached.
        assert (await client.ask(path(_post("a", A)))).status == 401
        assert (await other.ask(path(_post("a", new)))).status == 200
        assert (await client.ask(path(_post("b", B)))).status == 200
        assert (await client.ask(path(_post("a", ROBOT)))).status == 200


async def test_key_is_never_logged(
    tmp_path: Path, path: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with ScriptedServer() as server, _client_of(server, tmp_path) as client:
        for headers in (A, B, ROBOT, WRONG):
            for model in "abx":
                reply = await client.ask(path(_post(model, headers)))
                assert "key-of" not in reply.body.decode() + str(reply.head)
                assert "wrong" not in reply.body.decode() + str(reply.head)
    accesses = (tmp_path / "access.log").read_text()
    assert accesses.count("\n") >= 12
    logged = accesses + "".join(f"{each.getMessage()} {each.args}" for each in caplog.records)
    assert "key-of" not in logged
    assert "wrong-key" not in logged
