"""Probes of all used servers: which ones, in which order, and the exit status."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway.app.loaded_resources import load_resources
from gateway.app.preflight import probe as of_probe
from gateway.app.preflight.probe import ProbeResult, Report, Verdict, probe_servers
from gateway.demo.server.server import DemoServer
from gateway.settings.schema import Settings
from tests.support.certificates import (
    authority,
    ca_file,
    certificate_files,
    expired_certificate,
    server_certificate,
    server_context,
)
from tests.support.gateway import no_leaks, until
from tests.support.http_messages import http_response
from tests.support.servers.grpc_server import fail, grpc_server
from tests.support.servers.scripted_server import (
    Connection,
    ScriptedServer,
    always_respond,
    never_respond,
)

NOWHERE = "http://127.0.0.1:1"
KSERVE = always_respond(http_response(b'{"name":"kserve","version":"0.15.0"}'))
TENSOR = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [3]}]}


async def _probed(upstreams: dict[str, Any], time: float = 5.0, **more: Any) -> Report:
    settings = Settings.model_validate({"upstreams": upstreams, **more})
    async with no_leaks():
        return await probe_servers(load_resources(settings), time)


def _to(*names: str) -> list[dict[str, Any]]:
    return [{"upstream": [{"name": name, "weight": 1} for name in names]}]


async def test_report_lists_servers_and_models() -> None:
    async with DemoServer() as one, ScriptedServer(KSERVE) as two:
        report = await _probed(
            {
                "b": {"endpoints": [NOWHERE, one.url]},
                "a": {"endpoints": [two.url], "dialect": "triton"},
            },
            routes=_to("a", "b"),
        )
        assert list(report.lines()) == [
            "upstream b:",
            f"  {NOWHERE}: cannot connect to {NOWHERE}: Connection refused",
            f"  {one.url}: ready; dialect binary: it names itself 'tensorgate-demo', "
            "version '1.0' and lists binary_tensor_data",
            "upstream a:",
            f"  {two.url}: ready; dialect kserve, but triton is declared: it names itself "
            "'kserve', version '0.15.0'",
        ]
    assert report.exit_status == 3


async def test_http_server_at_a_grpc_address_is_told_from_a_broken_one() -> None:
    async with ScriptedServer(KSERVE) as server:
        url = server.url.replace("http:", "grpc:")
        report = await _probed({"u": {"endpoints": [url]}})
    assert list(report.lines())[1] == (
        f"  {url}: cannot connect to {url}: it responded in HTTP/1.1; the address of a server that "
        "speaks HTTP/1.1 begins with http:// or https://"
    )


async def test_control_characters_of_servers_are_replaced() -> None:
    async with ScriptedServer(
        always_respond(http_response(b"\x1b[2J\n\x00 \xff", status="500 Oh"))
    ) as server:
        lines = list((await _probed({"u": {"endpoints": [server.url]}})).lines())
    assert len(lines) == 2
    assert "".join(lines).isprintable()
    assert "GET /v2/health/ready returned 500 �[2J � �" in lines[1]


@pytest.mark.parametrize(
    ("routes", "asked"),
    [
        ([{"upstream": "b"}], "b"),
        (_to("b", "a"), "a b"),
        ([{"match": {"operations": ["health"]}, "upstream": "c"}], "c"),
        ([{"upstream": "a", "mirror": {"upstream": "c"}}], "a c"),
        ([{"upstream": [{"name": "a", "weight": 1}, {"name": "b", "weight": 0}]}], "a"),
        ([{"match": {"model": "m"}, "upstream": "a"}, *_to("c", "a")], "a c"),
    ],
    ids=str,
)
async def test_used_upstreams_are_probed_once(routes: list[dict[str, Any]], asked: str) -> None:
    async with AsyncExitStack() as stack:
        servers = {
            name: await stack.enter_async_context(ScriptedServer(KSERVE))
            for name in ("a", "b", "c")
        }
        upstreams = {name: {"endpoints": [server.url]} for name, server in servers.items()}
        report = await _probed(upstreams, routes=routes)
        assert [name for name, server in servers.items() if server.requests] == asked.split()
    assert [result.upstream for result in report.servers] == asked.split()
    assert report.exit_status == 0


async def test_probes_run_concurrently_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_probe, "_MAX_CONCURRENT", 3)
    go_on = asyncio.Event()

    async def wait(connection: Connection) -> None:
        await connection.request()
        await go_on.wait()
        await connection.send(http_response())
        await connection.request()
        await connection.send(http_response(b"{}"))

    async with ScriptedServer(wait, host="0.0.0.0") as server:
        urls = [f"http://127.0.0.{number}:{server.port}" for number in range(9, 0, -1)]
        probing = asyncio.create_task(_probed({"u": {"endpoints": urls}}))
        await until(lambda: len(server.requests) == 3)
        assert len(server.connections) == 3
        go_on.set()
        report = await probing
        assert len(server.connections) == 9
    assert [result.url for result in report.servers] == urls
    assert report.exit_status == 0


async def test_silent_server_is_not_asked_for_models() -> None:
    async with ScriptedServer(never_respond) as server:
        report = await _probed(
            {"u": {"endpoints": [server.url]}}, time=0.1, models={"m": TENSOR, "n": TENSOR}
        )
        assert len(server.connections) == 1
        assert list(report.lines()) == [
            "upstream u:",
            f"  {server.url}: no response within 0.1 s",
            "model m:",
            f"  {server.url} (upstream u): no response within 0.1 s",
            "model n:",
            f"  {server.url} (upstream u): no response within 0.1 s",
        ]
    assert report.exit_status == 4


async def test_names_are_not_resolved_to_several_endpoints() -> None:
    async with ScriptedServer(KSERVE) as server:
        url = server.url.replace("127.0.0.1", "localhost")
        supervision = {"dns_refresh": "1s", "health_check": {}, "model_discovery": True}
        report = await _probed({"u": {"endpoints": [url], **supervision}})
    assert [result.url for result in report.servers] == [url]
    assert report.exit_status == 0


async def test_tls_errors_name_endpoint_and_reason(tmp_path: Path) -> None:
    ca = {"ca": ca_file(tmp_path)}
    (tmp_path / "files").mkdir()
    certificate, key = certificate_files(tmp_path / "files")
    async with (
        ScriptedServer(KSERVE, ssl=server_context(server_certificate())) as well,
        ScriptedServer(KSERVE, ssl=server_context(expired_certificate())) as expired,
        ScriptedServer(KSERVE, ssl=server_context(clients=authority())) as asking,
        ScriptedServer(KSERVE) as plain,
    ):
        no_tls = plain.url.replace("http:", "https:")
        report = await _probed(
            {
                "known": {"endpoints": [well.url, expired.url, asking.url], "tls": ca},
                "other": {"endpoints": [well.url]},
                "named": {"endpoints": [well.url], "tls": {**ca, "server_name": "else.where"}},
                "shown": {
                    "endpoints": [asking.url],
                    "tls": {**ca, "certificate": certificate, "key": key},
                },
                "plain": {"endpoints": [no_tls], "tls": ca},
            },
            routes=_to("known", "other", "named", "shown", "plain"),
            limits={"connect_timeout": "1s"},
        )
        messages = [result.messages[-1] for result in report.servers]
    dialect = "dialect kserve: it names itself 'kserve', version '0.15.0'"
    assert messages[0] == dialect
    assert messages[1] == f"cannot connect to {expired.url}: its certificate has expired"
    assert messages[2].startswith(asking.url)  # why it closes, asyncio's servers do not say
    assert messages[3].startswith(f"cannot connect to {well.url}: its certificate is not trusted")
    assert messages[4] == f"cannot connect to {well.url}: its certificate does not name else.where"
    assert messages[5] == dialect
    assert messages[6].startswith(f"cannot connect to {no_tls}: ")
    assert report.exit_status == 4


def _result(verdict: Verdict) -> ProbeResult:
    return ProbeResult("u", NOWHERE, verdict, ())


@pytest.mark.parametrize(
    ("servers", "models", "status"),
    [
        ([Verdict.AS_DECLARED], {"m": [Verdict.AS_DECLARED]}, 0),
        ([Verdict.AS_DECLARED, Verdict.NOT_READY], {}, 4),
        ([Verdict.UNAVAILABLE], {}, 4),
        ([Verdict.NOT_READY, Verdict.MISMATCH, Verdict.UNAVAILABLE], {}, 3),
        ([Verdict.AS_DECLARED], {"m": [Verdict.UNAVAILABLE]}, 4),
        ([Verdict.NOT_READY], {"m": [Verdict.MISMATCH]}, 3),
        ([Verdict.MISMATCH], {"m": [Verdict.UNAVAILABLE]}, 3),
        ([Verdict.AS_DECLARED], {"m": []}, 3),
    ],
)
def test_exit_status_is_that_of_the_worst_result(
    servers: list[Verdict], models: dict[str, list[Verdict]], status: int
) -> None:
    of_models = {name: [_result(each) for each in found] for name, found in models.items()}
    assert Report([_result(each) for each in servers], of_models).exit_status == status


async def test_both_addresses_of_a_server_are_probed() -> None:
    busy = fail(grpc.StatusCode.UNAVAILABLE, "busy")
    with grpc_server() as ready, grpc_server(unary={"ServerReady": busy}) as unready:
        async with ScriptedServer(KSERVE) as http:
            grpc_urls = [ready.url, unready.url, "grpc://127.0.0.1:1"]
            endpoints = [{"http": http.url, "grpc": url} for url in grpc_urls]
            report = await _probed({"u": {"endpoints": endpoints, "dialect": "kserve"}})
    over_http = "ready; dialect kserve, as declared: it names itself 'kserve', version '0.15.0'"
    assert list(report.lines()) == [
        "upstream u:",
        f"  {http.url}: {over_http}",
        f"  {ready.url}: ready",
        f"  {http.url}: {over_http}",
        f'  {unready.url}: not ready: ServerReady returned 503 {{"error":"busy"}}',
        f"  {http.url}: {over_http}",
        "  grpc://127.0.0.1:1: cannot connect to grpc://127.0.0.1:1: Connection refused",
    ]
    assert report.exit_status == 4


async def test_late_grpc_address_is_unavailable() -> None:
    released = threading.Event()

    def hang(data: bytes, context: grpc.ServicerContext) -> bytes:
        released.wait(5)
        return b""

    with grpc_server(unary={"ServerReady": hang}) as late:
        async with ScriptedServer(KSERVE) as http:
            endpoint = {"http": http.url, "grpc": late.url}
            report = await _probed({"u": {"endpoints": [endpoint]}}, time=0.1)
        released.set()
    assert report.servers[1].verdict is Verdict.UNAVAILABLE
    assert report.servers[1].messages == ("no response within 0.1 s",)
