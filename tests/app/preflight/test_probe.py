"""Probes of servers and declared models: who is asked, what differs, and the exit status."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway.app.loaded_resources import load_resources
from gateway.app.preflight import probe
from gateway.app.preflight.probe import Report, Verdict, probe_servers
from gateway.app.preflight.settings_checks import find_self_references
from gateway.settings.schema import Settings
from tests.support.certificates import (
    authority,
    ca_file,
    certificate_files,
    server_certificate,
    server_context,
)
from tests.support.gateway import no_leaks, until
from tests.support.http_messages import http_response
from tests.support.servers.grpc_server import fail, grpc_server
from tests.support.servers.scripted_server import Connection, ScriptedServer, never_respond

NOWHERE = "http://127.0.0.1:1"
MODEL = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [3]}]}
SAME = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[3]}],"outputs":[]}'
BATCHED = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[-1,3]}],"outputs":[]}'
KSERVE = {"name": "kserve", "version": "0.15.0"}
OF_KSERVE = "it names itself 'kserve', version '0.15.0'"


class Server(ScriptedServer):
    """A server that is ready, has a document for each path or model, and else responds with 404."""

    def __init__(self, documents: Mapping[str, bytes] | None = None, **more: Any) -> None:
        self._responses = {
            "/v2": http_response(json.dumps(KSERVE).encode()),
            "/v2/health/ready": http_response(),
        }
        for path, document in (documents or {}).items():
            self.say(path if path.startswith("/") else f"/v2/models/{path}", document)
        super().__init__(self._answer, **more)

    def say(self, path: str, document: bytes, status: str = "200 OK") -> Server:
        """Respond so to a path."""
        self._responses[path] = http_response(document, status=status)
        return self

    async def _answer(self, connection: Connection) -> None:
        none = http_response(b'{"error":\n"not found"}', status="404 Not Found")
        while True:
            target = (await connection.request()).head.target
            await connection.send(self._responses.get(target, none))


async def _probed(*endpoints: object, time: float = 5.0, **more: Any) -> Report:
    """Probe these endpoints of an upstream; ``more`` are settings."""
    upstream = {"endpoints": list(endpoints), **more.pop("upstream", {})}
    settings = {"upstreams": {"u": upstream}, **more}
    async with no_leaks():
        return await probe_servers(load_resources(Settings.model_validate(settings)), time)


def _said(report: Report) -> list[str]:
    """Return what is printed of servers and models, without the names."""
    return [line.partition("127.0.0.1:")[2].partition(": ")[2] for line in report.lines()]


def _to(*names: str) -> list[dict[str, Any]]:
    return [{"upstream": [{"name": name, "weight": 1} for name in names]}]


# --------------------------------------------------------------------------------- the servers


async def test_report_lists_upstreams_as_routes_and_settings_have_them() -> None:
    async with Server() as one, Server() as two:
        report = await _probed(
            upstreams={
                "b": {"endpoints": [NOWHERE, one.url]},
                "a": {"endpoints": [two.url], "dialect": "triton"},
            },
            routes=_to("a", "b"),
        )
    assert list(report.lines()) == [
        "upstream b:",
        f"  {NOWHERE}: cannot connect to {NOWHERE}: Connection refused",
        f"  {one.url}: ready; dialect kserve: {OF_KSERVE}",
        "upstream a:",
        f"  {two.url}: ready; dialect kserve, but triton is declared: {OF_KSERVE}",
    ]
    assert report.exit_status == 3


TRITON = {
    "name": "triton",
    "version": "2.51.0",
    "extensions": [
        *("binary_tensor_data", "model_configuration", "schedule_policy", "sequence", "trace")
    ],
}
OLD_KSERVE = {"name": "kserve", "version": "0.13.0"}
UNKNOWN = {"name": "x", "extensions": ["binary_tensor_data"]}
UNSHOWN = (
    "is declared, but the server does not confirm it: "
    "it returned 404 to GET /v2: nothing shows that it takes the binary form"
)


@pytest.mark.parametrize(
    ("document", "declared", "status", "said"),
    [
        (TRITON, "auto", 0, "dialect triton: it names itself 'triton', version '2.51.0'"),
        (TRITON, "kserve", 3, "dialect triton, but kserve is declared: it names itself "),
        (OLD_KSERVE, "json", 0, "dialect json, as declared: it names itself 'kserve'"),
        (OLD_KSERVE, "kserve", 3, "dialect kserve without the binary form, but kserve is declare"),
        # A server with the binary form and an unknown name may be any of them.
        (UNKNOWN, "auto", 0, "dialect binary: it names itself 'x' and lists "),
        (UNKNOWN, "triton", 0, "dialect triton is declared, but the server does not confirm it: "),
        (UNKNOWN, "json", 3, "dialect binary, but json is declared: it names itself 'x' "),
        (None, "triton", 0, f"dialect triton {UNSHOWN}"),
    ],
)
async def test_dialect_is_compared_with_the_declared_one(
    document: Mapping[str, object] | None, declared: str, status: int, said: str
) -> None:
    """A dialect that the server does not show is no mismatch."""
    made = Server({"/v2": json.dumps(document).encode()})
    if document is None:
        made.say("/v2", b"{}", "404 Not Found")
    async with made as server:
        report = await _probed(server.url, upstream={"dialect": declared})
        assert len(server.connections) == 1
    assert _said(report)[1].startswith(f"ready; {said}")
    assert report.exit_status == status


@pytest.mark.parametrize(("declared", "status"), [("auto", 4), ("json", 3)])
async def test_server_that_is_not_ready_shows_its_dialect(declared: str, status: int) -> None:
    async with Server().say("/v2/health/ready", b"\x1b[2J\n\x00 \xff", "503 Oh") as server:
        report = await _probed(server.url, upstream={"dialect": declared})
    ready, dialect = _said(report)[1].split("; ")
    # Control characters of servers do not get to the terminal.
    assert ready == "not ready: GET /v2/health/ready returned 503 �[2J � �"
    assert dialect.startswith("dialect kserve")
    assert report.exit_status == status


async def test_ready_server_may_not_show_its_dialect() -> None:
    async def once(connection: Connection) -> None:
        await connection.request()
        await connection.send(http_response())
        await never_respond(connection)

    async with Server().say("/v2", b"", "500 Oh") as failing, ScriptedServer(once) as silent:
        report = await _probed(failing.url, silent.url, time=0.3)
    assert _said(report)[1:] == [
        f"ready; dialect detection failed: {failing.url} returned 500 to GET /v2",
        "ready; no response to GET /v2 within 0.3 s",
    ]
    assert [each.verdict for each in report.servers] == [Verdict.NOT_READY] * 2
    assert report.exit_status == 4


async def test_silent_or_missing_server_is_asked_for_no_models(tmp_path: Path) -> None:
    missing = f"unix:{tmp_path}/none"
    async with ScriptedServer(never_respond) as server:
        report = await _probed(server.url, missing, time=0.1, models={"m": MODEL, "n": MODEL})
        assert len(server.connections) == 1
    for results in (report.servers, *report.models.values()):
        assert [each.verdict for each in results] == [Verdict.UNAVAILABLE] * 2
        silent, refused = [each.messages[0] for each in results]
        assert silent == "no response within 0.1 s"
        assert refused.startswith(f"cannot connect to {missing}: ")
    assert report.exit_status == 4


async def test_probes_run_concurrently_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "MAX_CONCURRENT", 3)
    go_on = asyncio.Event()

    async def wait(connection: Connection) -> None:
        await connection.request()
        await go_on.wait()
        await connection.send(http_response())
        await connection.request()
        await connection.send(http_response(b"{}"))

    async with ScriptedServer(wait, host="0.0.0.0") as server:
        urls = [f"http://127.0.0.{number}:{server.port}" for number in range(9, 0, -1)]
        probing = asyncio.create_task(_probed(*urls))
        await until(lambda: len(server.requests) == 3)
        assert len(server.connections) == 3
        go_on.set()
        report = await probing
        assert len(server.connections) == 9
    assert [result.url for result in report.servers] == urls
    assert report.exit_status == 0


async def test_tls_errors_name_endpoint_and_reason(tmp_path: Path) -> None:
    ca = {"ca": ca_file(tmp_path)}
    (tmp_path / "files").mkdir()
    certificate, key = certificate_files(tmp_path / "files")
    async with (
        Server(ssl=server_context(server_certificate())) as well,
        Server(ssl=server_context(clients=authority())) as asking,
    ):
        shown = {**ca, "certificate": certificate, "key": key}
        report = await _probed(
            upstreams={
                "other": {"endpoints": [well.url]},
                "named": {"endpoints": [well.url], "tls": {**ca, "server_name": "else.where"}},
                "shown": {"endpoints": [asking.url], "tls": shown},
            },
            routes=_to("other", "named", "shown"),
        )
    untrusted, misnamed, trusted = [result.messages[-1] for result in report.servers]
    assert untrusted.startswith(f"cannot connect to {well.url}: its certificate is not trusted")
    assert misnamed == f"cannot connect to {well.url}: its certificate does not name else.where"
    assert trusted == f"dialect kserve: {OF_KSERVE}"
    assert report.exit_status == 4


async def test_both_addresses_of_a_server_are_probed() -> None:
    released = threading.Event()

    def hang(data: bytes, context: grpc.ServicerContext) -> bytes:
        released.wait(5)
        return b""

    busy = fail(grpc.StatusCode.UNAVAILABLE, "busy")
    with (
        grpc_server() as ready,
        grpc_server(unary={"ServerReady": busy}) as unready,
        grpc_server(unary={"ServerReady": hang}) as late,
    ):
        async with Server() as http, ScriptedServer() as other:
            of_http = other.url.replace("http:", "grpc:")
            urls = [ready.url, unready.url, late.url, "grpc://127.0.0.1:1", of_http]
            report = await _probed(
                *({"http": http.url, "grpc": url} for url in urls),
                upstream={"dialect": "kserve"},
                time=0.5,
            )
        released.set()
    assert _said(report)[1::2] == [f"ready; dialect kserve, as declared: {OF_KSERVE}"] * 5
    assert _said(report)[2::2] == [
        "ready",
        'not ready: ServerReady returned 503 {"error":"busy"}',
        "no response within 0.5 s",
        "cannot connect to grpc://127.0.0.1:1: Connection refused",
        f"cannot connect to {of_http}: it responded in HTTP/1.1; the address of a server that "
        "speaks HTTP/1.1 begins with http:// or https://",
    ]
    assert report.exit_status == 4


# ---------------------------------------------------------------------------------- the models


@pytest.mark.parametrize(
    ("documents", "status", "expected"),
    [
        ({"m": SAME}, 0, "as declared"),
        ({"m": SAME, "m/config": b'{"max_batch_size":4}'}, 3, "max_batch_size is 4, declared 0"),
        ({"m": BATCHED}, 3, "input 'x' is FP32 [-1, 3], declared FP32 [3]"),
        ({"m": b'{"inputs":[]}'}, 0, "does not say what it takes: what is declared is used"),
        ({}, 3, 'does not know it: 404 {"error": "not found"}'),
        ({"m": b"no JSON"}, 4, "returned no metadata of model 'm'"),
    ],
)
async def test_differences_of_a_model_are_reported(
    documents: dict[str, bytes], status: int, expected: str
) -> None:
    async with Server(documents) as server:
        report = await _probed(server.url, models={"m": MODEL})
    *_, name, line = report.lines()
    assert name == "model m:"
    assert line.startswith(f"  {server.url} (upstream u): ")
    assert line.endswith(expected)
    assert report.exit_status == status


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (http_response(b"{}", {"Connection": "close"}, status="503 Oh"), "returned 503 {}"),
        (b"", "closed the connection before it responded"),
    ],
)
async def test_failing_server_is_unavailable_and_no_mismatch(data: bytes, expected: str) -> None:
    async def fail_always(connection: Connection) -> None:
        await connection.request()
        await connection.send(data)

    async with ScriptedServer(fail_always) as server:
        report = await _probed(server.url, models={"m": MODEL})
    assert expected in report.models["m"][0].messages[0]
    assert report.exit_status == 4


async def test_every_endpoint_is_asked_for_each_model_until_it_fails() -> None:
    async def hang_later(connection: Connection) -> None:
        for body in (b"", b"{}"):
            await connection.request()
            await connection.send(http_response(body))
        await never_respond(connection)

    async with Server({"m": SAME, "n": BATCHED}) as one, ScriptedServer(hang_later) as two:
        models = {"m": MODEL, "n": MODEL}
        report = await _probed(one.url, two.url, NOWHERE, models=models, time=0.2)
        assert len(two.connections) == 1
    said = {name: [each.messages for each in found] for name, found in report.models.items()}
    late, refused = ("no response within 0.2 s",), report.servers[2].messages
    assert said == {
        "m": [[], late, refused],
        "n": [["input 'x' is FP32 [-1, 3], declared FP32 [3]"], late, refused],
    }
    assert report.exit_status == 3


async def test_names_are_resolved_to_one_endpoint(tmp_path: Path) -> None:
    async with Server({"m": SAME}, ssl=server_context(server_certificate())) as server:
        url = server.url.replace("127.0.0.1", "localhost")
        supervision = {"dns_refresh": "1s", "health_check": {}, "model_discovery": True}
        upstream = {"tls": {"ca": ca_file(tmp_path)}, **supervision}
        report = await _probed(url, upstream=upstream, models={"m": MODEL})
    assert [result.url for result in report.servers] == [url]
    assert report.exit_status == 0


ONE, OTHER = {"match": {"model": "m"}, "upstream": "a"}, {"upstream": "b"}
ROUTES: list[tuple[list[dict[str, Any]], str, str]] = [
    (_to("b", "a"), "a b", "a b"),
    ([{"match": {"operations": ["health"]}, "upstream": "c"}], "c", ""),
    ([{"upstream": "a", "mirror": {"upstream": "c"}}], "a c", "a c"),
    ([{"upstream": [{"name": "a", "weight": 1}, {"name": "b", "weight": 0}]}], "a", "a"),
    ([ONE, *_to("c", "a")], "a c", "a"),
    ([{"match": {"model": "n"}, "upstream": "a"}, OTHER], "a b", "b"),
    ([{"match": {"headers": {"x": "*"}}, "upstream": "a"}, OTHER], "a b", "a b"),
    ([{"match": {"operations": ["generate"]}, "upstream": "a"}, OTHER], "a b", "b"),
    ([ONE | {"rewrite": {"model": "n"}}, OTHER], "a b", ""),
    ([ONE, OTHER | {"match": {"model": "alias"}, "rewrite": {"model": "m"}}], "a b", "a b"),
]


@pytest.mark.parametrize(("routes", "probed", "asked"), ROUTES, ids=str)
async def test_used_upstreams_are_probed_and_those_that_serve_the_model_are_asked_for_it(
    routes: list[dict[str, Any]], probed: str, asked: str
) -> None:
    async with AsyncExitStack() as stack:
        servers = {name: await stack.enter_async_context(Server({"m": SAME})) for name in "abc"}
        upstreams = {name: {"endpoints": [server.url]} for name, server in servers.items()}
        report = await _probed(upstreams=upstreams, routes=routes, models={"m": MODEL})
        assert [name for name, server in servers.items() if server.requests] == probed.split()
    assert [found.upstream for found in report.servers] == probed.split()
    assert {found.upstream for found in report.models["m"]} == set(asked.split())
    assert report.exit_status == (0 if asked else 3)
    if not asked:
        assert list(report.lines())[-1] == "model m: no route leads to it"


# ------------------------------------------------------------ endpoints that are the gateway itself


def _own(listen: object, *endpoints: object) -> list[str]:
    settings = Settings.model_validate(
        {"listen": listen, "upstreams": {"u": {"endpoints": endpoints}}}
    )
    return [why.split()[0] for _, why in find_self_references(settings)]


@pytest.mark.parametrize(
    ("listen", "endpoint"),
    [
        ("127.0.0.1:80", "http://127.0.0.1:80"),
        ("127.0.0.1:80", "http://localhost:80"),
        ("127.0.0.1:80", "http://0.0.0.0:80"),
        ("localhost:80", "http://LocalHost.:80"),
        ("0.0.0.0:80", "http://127.1.2.3:80"),
        ("0.0.0.0:80", f"http://{socket.gethostname()}:80"),
        ("[::]:80", "http://[::1]:80"),
        (["127.0.0.1:79", "127.0.0.1:80"], "http://127.0.0.1:80"),
        ("unix:/run/a", "unix:/run/a"),
    ],
)
def test_endpoint_at_a_listening_address_is_found(listen: object, endpoint: str) -> None:
    assert _own(listen, "http://other:80", endpoint) == [endpoint]


@pytest.mark.parametrize(
    ("listen", "endpoint"),
    [
        ("127.0.0.1:80", "http://127.0.0.1:81"),
        ("0.0.0.0:80", "http://triton:80"),
        ("0.0.0.0:80", "http://192.0.2.1:80"),
        ("0.0.0.0:80", "http://[::1]:80"),
        ("[::]:80", "http://127.0.0.1:80"),
        ("192.0.2.1:80", "http://127.0.0.1:80"),
        ("unix:/run/a", "http://127.0.0.1:80"),
    ],
)
def test_endpoint_at_another_address_is_not_found(listen: object, endpoint: str) -> None:
    assert _own(listen, endpoint) == []


@pytest.mark.parametrize(
    ("listen", "own"), [(80, "http://localhost:80"), (81, "grpc://localhost:81")]
)
def test_both_addresses_of_an_endpoint_are_looked_at(listen: int, own: str) -> None:
    both = {"http": "http://localhost:80", "grpc": "grpc://localhost:81"}
    assert _own(f"127.0.0.1:{listen}", both) == [own]
