"""Probes of servers: readiness and dialect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from gateway.app.preflight.probe import Verdict, probe_server
from gateway.upstream.address import parse_server_url
from gateway.upstream.http.endpoint import HttpEndpoint
from tests.support.http_messages import http_response
from tests.support.servers.scripted_server import Connection, ScriptedServer, never_respond

OF_TRITON = ["binary_tensor_data", "model_configuration", "schedule_policy", "sequence", "trace"]
TRITON = {"name": "triton", "version": "2.51.0", "extensions": OF_TRITON}
OTHER_TRITON = {**TRITON, "name": "mine"}
KSERVE = {"name": "kserve", "version": "0.15.0"}
OLD_KSERVE = {"name": "kserve", "version": "0.13.0"}
OPENVINO = {"name": "OpenVINO Model Server", "version": "2024.1"}
MLSERVER = {"name": "mlserver", "version": "1.7.1", "extensions": []}
UNKNOWN = {"name": "x", "extensions": ["binary_tensor_data"]}
NOTHING = {"error": "not found"}
NOWHERE = "http://127.0.0.1:1"

WELL, EXIT_MISMATCH = Verdict.AS_DECLARED, Verdict.MISMATCH


class Server:
    """A server with a given document and readiness, and a status for each."""

    def __init__(
        self, document: Mapping[str, object], status: str = "200 OK", ready: str = "200 OK"
    ) -> None:
        self._answers = {
            "/v2/health/ready": http_response(
                b"" if ready == "200 OK" else b"starting", status=ready
            ),
            "/v2": http_response(json.dumps(document).encode(), status=status),
        }

    async def play(self, connection: Connection) -> None:
        while True:
            await connection.send(self._answers[(await connection.request()).head.target])


async def _probed(url: str, declared: str = "auto", time: float = 5.0) -> tuple[Verdict, list[str]]:
    endpoint = HttpEndpoint(parse_server_url(url), 5.0)
    try:
        verdict, messages = await probe_server(endpoint, declared, time)
    finally:
        await endpoint.close()
    return verdict, list(messages)


@pytest.mark.parametrize(
    ("document", "declared", "verdict", "messages"),
    [
        (TRITON, "auto", WELL, "dialect triton: it names itself 'triton', version '2.51.0'"),
        (TRITON, "triton", WELL, "dialect triton, as declared: it names itself 'triton'"),
        (OTHER_TRITON, "triton", WELL, "dialect triton, as declared: it names itself 'mine'"),
        ({**TRITON, "extensions": OF_TRITON[:4]}, "triton", WELL, "dialect triton, as declared: "),
        (
            TRITON,
            "kserve",
            EXIT_MISMATCH,
            "dialect triton, but kserve is declared: it names itself ",
        ),
        (OPENVINO, "openvino", WELL, "dialect openvino, as declared: "),
        (OLD_KSERVE, "auto", WELL, "dialect kserve without the binary form: it names itself "),
        (OLD_KSERVE, "json", WELL, "dialect json, as declared: it names itself 'kserve'"),
        (
            OLD_KSERVE,
            "kserve",
            EXIT_MISMATCH,
            "dialect kserve without the binary form, but kserve is declared: it names itself ",
        ),
        (
            MLSERVER,
            "triton",
            EXIT_MISMATCH,
            "dialect json, but triton is declared: it names itself ",
        ),
        # A server with the binary form and an unknown name may be any of them.
        (UNKNOWN, "auto", WELL, "dialect binary: it names itself 'x' and lists "),
        (
            UNKNOWN,
            "triton",
            WELL,
            "dialect triton is declared, but the server does not confirm it: ",
        ),
        (
            UNKNOWN,
            "json",
            EXIT_MISMATCH,
            "dialect binary, but json is declared: it names itself 'x' ",
        ),
    ],
)
async def test_dialect_is_compared_with_the_declared_one(
    document: Mapping[str, object], declared: str, verdict: Verdict, messages: str
) -> None:
    async with ScriptedServer(Server(document).play) as server:
        found, (ready, dialect) = await _probed(server.url, declared)
        assert [each.head.first for each in server.requests] == [
            "GET /v2/health/ready HTTP/1.1",
            "GET /v2 HTTP/1.1",
        ]
        assert len(server.connections) == 1
    assert (found, ready) == (verdict, "ready")
    assert dialect.startswith(messages)


@pytest.mark.parametrize("declared", ["triton", "json"])
async def test_dialect_that_the_server_does_not_show_is_no_mismatch(declared: str) -> None:
    async with ScriptedServer(Server(NOTHING, "404 Not Found").play) as server:
        verdict, messages = await _probed(server.url, declared)
    assert verdict is WELL
    assert messages == [
        "ready",
        f"dialect {declared} is declared, but the server does not confirm it: "
        "it returned 404 to GET /v2: nothing shows that it takes the binary form",
    ]


@pytest.mark.parametrize(
    ("declared", "verdict"), [("auto", Verdict.NOT_READY), ("json", EXIT_MISMATCH)]
)
async def test_server_that_is_not_ready_shows_its_dialect(declared: str, verdict: Verdict) -> None:
    async with ScriptedServer(Server(KSERVE, ready="503 Oh").play) as server:
        found, messages = await _probed(server.url, declared)
    assert found is verdict
    assert messages[0] == "not ready: GET /v2/health/ready returned 503 starting"
    assert messages[1].startswith("dialect kserve")


async def test_ready_server_may_not_show_its_dialect() -> None:
    async with ScriptedServer(Server(NOTHING, "500 Oh").play) as server:
        messages = ["ready", f"dialect detection failed: {server.url} returned 500 to GET /v2"]
        assert await _probed(server.url) == (Verdict.NOT_READY, messages)


async def test_server_that_stops_answering_is_unavailable() -> None:
    async def once(connection: Connection) -> None:
        await connection.request()
        await connection.send(http_response())
        await never_respond(connection)

    async with ScriptedServer(once) as server:
        messages = ["ready", "no response to GET /v2 within 0.2 s"]
        assert await _probed(server.url, time=0.2) == (Verdict.NOT_READY, messages)


async def test_silent_server_is_unavailable() -> None:
    async with ScriptedServer(never_respond) as server:
        messages = ["no response within 0.2 s"]
        assert await _probed(server.url, time=0.2) == (Verdict.UNAVAILABLE, messages)


async def test_missing_server_is_unavailable(tmp_path: Path) -> None:
    for url in (NOWHERE, f"unix:{tmp_path}/none"):
        verdict, (messages,) = await _probed(url)
        assert verdict is Verdict.UNAVAILABLE
        assert messages.startswith(f"cannot connect to {url}: ")
