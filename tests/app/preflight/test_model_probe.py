"""Probes of declared models: their differences, and the exit status."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import pytest

from gateway.app.loaded_resources import load_resources
from gateway.app.preflight.probe import ProbeResult, Report, probe_servers
from gateway.settings.schema import Settings
from tests.support.certificates import ca_file, server_certificate, server_context
from tests.support.gateway import no_leaks
from tests.support.http_messages import http_response
from tests.support.servers.scripted_server import Connection, ScriptedServer, never_respond

NOWHERE = "http://127.0.0.1:1"
MODEL = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [3]}]}
SAME = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[3]}],"outputs":[]}'
BATCHED = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[-1,3]}],"outputs":[]}'


class Server:
    """A server that is ready, and has metadata and a config for each model, or 404."""

    def __init__(self, **documents: bytes) -> None:
        self._documents = documents | {"_v2": b"{}", "_v2_health_ready": b""}

    async def play(self, connection: Connection) -> None:
        while True:
            target = (await connection.request()).head.target.removeprefix("/v2/models/")
            document = self._documents.get(target.replace("/", "_"))
            if document is None:
                await connection.send(
                    http_response(b'{"error":\n"not found"}', status="404 Not Found")
                )
            else:
                await connection.send(http_response(document))


async def _probed(
    *endpoints: str,
    models: dict[str, Any] | None = None,
    time: float = 5.0,
    **more: Any,
) -> Report:
    settings = {
        "upstreams": {"u": {"endpoints": list(endpoints)}},
        "models": {"m": MODEL} if models is None else models,
        **more,
    }
    async with no_leaks():
        return await probe_servers(load_resources(Settings.model_validate(settings)), time)


def _findings(report: Report) -> list[ProbeResult]:
    return [finding for of_model in report.models.values() for finding in of_model]


def _messages(report: Report) -> list[str]:
    """Return the messages of models, without the endpoints' URLs."""
    return ["; ".join(finding.messages) for finding in _findings(report)]


def _lines(report: Report) -> list[str]:
    """Return the printed lines of models."""
    lines = list(report.lines())
    return lines[next(i for i, line in enumerate(lines) if line.startswith("model ")) :]


@pytest.mark.parametrize(
    ("documents", "status", "expected"),
    [
        ({"m": SAME}, 0, ""),
        ({"m": SAME, "m_config": b'{"max_batch_size":4}'}, 3, "max_batch_size is 4, declared 0"),
        ({"m": BATCHED}, 3, "input 'x' is FP32 [-1, 3], declared FP32 [3]"),
        ({"m": b'{"inputs":[]}'}, 0, "does not say what it takes: what is declared is used"),
        ({}, 3, 'does not know it: 404 {"error": "not found"}'),
    ],
)
async def test_differences_of_a_model_are_reported(
    documents: dict[str, bytes], status: int, expected: str
) -> None:
    async with ScriptedServer(Server(**documents).play) as server:
        report = await _probed(server.url)
    assert _messages(report) == [expected]
    assert report.exit_status == status
    assert _lines(report) == [
        "model m:",
        f"  {server.url} (upstream u): {expected or 'as declared'}",
    ]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (http_response(b"{}", status="503 Oh"), "returned 503 {}"),
        (http_response(b"no JSON"), "returned no metadata of model 'm'"),
        (b"", "closed the connection before it responded"),
    ],
)
async def test_failing_server_is_unavailable_and_no_mismatch(data: bytes, expected: str) -> None:
    async def fail(connection: Connection) -> None:
        while True:
            await connection.request()
            if not data:
                return
            await connection.send(data)

    async with ScriptedServer(fail) as server:
        report = await _probed(server.url)
    assert expected in _messages(report)[0]
    assert report.exit_status == 4


async def test_every_endpoint_is_probed_until_it_fails() -> None:
    models = {"m": MODEL, "n": MODEL}

    async def hang_later(connection: Connection) -> None:
        for body in (b"", b"{}"):
            await connection.request()
            await connection.send(http_response(body))
        await never_respond(connection)

    async with (
        ScriptedServer(Server(m=SAME, n=BATCHED).play) as one,
        ScriptedServer(hang_later) as two,
    ):
        report = await _probed(one.url, two.url, NOWHERE, models=models, time=0.2)
        assert len(two.connections) == 1
    assert report.exit_status == 3
    lines = _lines(report)
    assert [line for line in lines if not line.startswith(" ")] == ["model m:", "model n:"]
    assert lines[1:3] == [
        f"  {one.url} (upstream u): as declared",
        f"  {two.url} (upstream u): no response within 0.2 s",
    ]
    assert lines[3].startswith(f"  {NOWHERE} (upstream u): cannot connect to {NOWHERE}")
    assert lines[5].endswith("declared FP32 [3]")
    assert lines[6:] == [line.replace("model m", "model n") for line in lines[2:4]]


async def test_probe_uses_tls_and_dns(tmp_path: Any) -> None:
    tls = server_context(server_certificate())
    async with ScriptedServer(Server(m=SAME).play, ssl=tls) as server:
        url = server.url.replace("127.0.0.1", "localhost")
        supervision = {"dns_refresh": "1s", "health_check": {}, "model_discovery": True}
        upstream = {"endpoints": [url], "tls": {"ca": ca_file(tmp_path)}, **supervision}
        report = await _probed(upstreams={"u": upstream})
    assert (_messages(report), report.exit_status) == ([""], 0)


ROUTES = [
    ([{"upstream": "a"}], "a"),
    ([{"match": {"model": "n"}, "upstream": "a"}, {"upstream": "b"}], "b"),
    ([{"match": {"model": "m*", "version": "2"}, "upstream": "a"}, {"upstream": "b"}], "a b"),
    ([{"match": {"headers": {"x": "*"}}, "upstream": "a"}, {"upstream": "b"}], "a b"),
    ([{"match": {"operations": ["generate"]}, "upstream": "a"}, {"upstream": "b"}], "b"),
    ([{"upstream": [{"name": "a", "weight": 0}, {"name": "b", "weight": 1}]}], "b"),
    ([{"upstream": "a", "mirror": {"upstream": "b"}}], "a b"),
    ([{"upstream": "a", "rewrite": {"model": "n"}}], ""),
    (
        [{"match": {"model": "m"}, "upstream": "a", "rewrite": {"model": "n"}}, {"upstream": "b"}],
        "",
    ),
    (
        [
            {"match": {"model": "m"}, "upstream": "a"},
            {"match": {"model": "alias"}, "upstream": "b", "rewrite": {"model": "m"}},
        ],
        "a b",
    ),
]


@pytest.mark.parametrize(("routes", "asked"), ROUTES)
async def test_upstreams_that_serve_the_model_are_probed(
    routes: list[dict[str, Any]], asked: str
) -> None:
    async with AsyncExitStack() as stack:
        servers = {
            name: await stack.enter_async_context(ScriptedServer(Server(m=SAME).play))
            for name in "ab"
        }
        upstreams = {name: {"endpoints": [server.url]} for name, server in servers.items()}
        report = await _probed(upstreams=upstreams, routes=routes)
    assert " ".join(finding.upstream for finding in _findings(report)) == asked
    assert report.exit_status == (0 if asked else 3)
    if not asked:
        assert _lines(report) == ["model m: no route leads to it"]
