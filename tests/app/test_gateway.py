import asyncio
import gc
import os
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.app import standalone
from gateway.app.build import upstreams as build_upstreams
from gateway.app.build.listening import UnusableSettingsError
from gateway.app.preflight.settings_checks import settings_warnings
from gateway.app.shared_memory import SharedMemory
from gateway.app.standalone import StandaloneGateway
from gateway.errors import GatewayError
from gateway.observe.call_record import CallRecord
from gateway.settings.load import load
from gateway.settings.schema import Settings
from gateway.workers.control import Question
from tests.app.reloading import NOWHERE, settings_for
from tests.support.addresses import free_address
from tests.support.certificates import certificate_files, server_certificate
from tests.support.checks.call_records import call_records as call_records
from tests.support.gateway import gateway_of, no_leaks, until, worker_client, worker_of
from tests.support.http_messages import request
from tests.support.raw_client import connect
from tests.support.servers.name_service import NameService
from tests.support.servers.scripted_server import ScriptedServer, never_respond

CONFIG = Path(__file__).parents[2] / "config"


async def test_ipv6_addresses_are_shown_as_urls() -> None:
    try:
        async with gateway_of(settings_for(listen="[::1]:0")) as gateway:
            assert gateway.addresses[0].startswith("http://[::1]:")
            async with connect(gateway.addresses[0]) as client:
                assert (await client.call("GET", "/")).status == 503
    except UnusableSettingsError:
        pytest.skip("no IPv6 here")


async def _refused(settings: Settings) -> str:
    async with no_leaks():
        with pytest.raises(UnusableSettingsError) as caught:
            async with gateway_of(settings):
                pass
        gc.collect()
    return str(caught.value)


async def test_address_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = "{}:{}".format(*taken.getsockname())
        expected = f"cannot listen on {address}: Address already in use"
        assert await _refused(settings_for(listen=address)) == expected
        # The sockets that were opened before are closed.
        assert await _refused(settings_for(listen=["127.0.0.1:0", address])) == expected
        # Operators are served later, but their address is taken before clients are served.
        assert await _refused(settings_for(admin=address)) == expected


@pytest.mark.parametrize("is_stopped", [False, True], ids=["served", "stopped meanwhile"])
async def test_clients_are_served_before_operators(
    is_stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What operators need takes a while to load; who connects meanwhile waits."""
    may_load = threading.Event()
    monkeypatch.setattr(standalone, "import_module", lambda _: may_load.wait(5))
    admin = free_address()
    async with (
        no_leaks(),
        gateway_of(settings_for(admin=admin)) as gateway,
        connect(gateway.addresses[0]) as client,
        connect(f"http://{admin}") as operator,
    ):
        await operator.send(request("GET", "/live"))
        assert (await client.call("GET", "/v2")).status == 503
        if not is_stopped:
            may_load.set()
            await gateway.operators_served
            assert (await operator.read_response()).status == 200
    may_load.set()


async def test_route_without_limits_has_those_of_all_routes() -> None:
    own = {"max_json_depth": 3, "idle_timeout": 2}
    routes = [{"upstream": "u", "match": {"model": "m"}, "limits": own}, {"upstream": "u"}]
    limits = {"max_json_depth": 9, "request_timeout": 7}
    async with gateway_of(settings_for(routes=routes, limits=limits)) as gateway:
        first, second = gateway.active_config.planner.router.routes
    assert (second.limits.max_json_depth, second.limits.request_timeout) == (9, 7)
    assert first.limits == replace(second.limits, max_json_depth=3, idle_timeout=2)


async def test_mirror_has_the_policies_of_its_route_and_limits_of_its_own() -> None:
    route = {"upstream": "u", "nonfinite": "null", "limits": {"max_json_depth": 3}}
    settings = Settings.model_validate(
        {
            "listen": "127.0.0.1:0",
            "upstreams": {
                "u": {"endpoints": [NOWHERE]},
                "next": {"endpoints": [NOWHERE], "concurrency": {"max_requests": 5}},
            },
            "routes": [
                {**route, "match": {"model": "m"}, "mirror": {"upstream": "next", "percent": "7%"}},
                {**route, "match": {"model": "n"}, "mirror": {"upstream": "next"}},
                {"upstream": "u"},
            ],
            "concurrency": {"max_requests": 10},
            "limits": {"max_buffered_bytes": "4MiB"},
            "workers": 2,
        }
    )
    async with gateway_of(settings) as gateway:
        first, second, third = gateway.active_config.router.routes
        assert third.mirror is None
        assert first.mirror is not None
        assert second.mirror is not None
        assert (first.mirror.share, second.mirror.share) == (0.07, 1.0)
        (own,), copied = first.destinations, first.mirror.destination
        assert (copied.policies, copied.limits) == (own.policies, own.limits)
        upstream = gateway.active_config.upstreams["next"]
        assert copied.upstream is upstream
        assert len(own.concurrency_limits) == 1  # the gateway's, where copies take no slots
        assert copied.concurrency_limits == (upstream.concurrency_limit,)
        # Copies share a budget of their own.
        assert own.scheduler is second.destinations[0].scheduler
        assert copied.scheduler is second.mirror.destination.scheduler
        assert copied.scheduler is not own.scheduler
        assert copied.memory_budget is second.mirror.destination.memory_budget
        assert copied.memory_budget is not own.memory_budget
        copied.memory_budget.adjust(2**19)
        with pytest.raises(GatewayError, match="at most 524288 bytes may be buffered"):
            copied.memory_budget.adjust(1)
        copied.memory_budget.adjust(-(2**19))


@pytest.mark.parametrize(
    ("method", "target", "headers", "found"),
    [
        ("POST", "/v2/models/classifier/infer", {}, "vision /v2/models/resnet50/versions/3/infer"),
        ("POST", "/v2/models/resnet18/infer", {"X-Release": "next"}, "vision-next"),
        ("GET", "/v2/models/resnet18/config", {"X-Release": "next"}, "403"),
        ("POST", "/v2/models/resnet18/infer", {"X-User": "user-22"}, "vision-next"),
        ("POST", "/v2/models/llama-7b/generate_stream", {}, "text"),
        ("POST", "/v2/models/llama/generate", {}, "404"),
        ("GET", "/v2/health/ready", {}, "vision"),
    ],
)
async def test_example_settings_route_several_models(
    method: str, target: str, headers: dict[str, str], found: str
) -> None:
    settings = load(CONFIG / "models.yaml", {"LISTEN": "127.0.0.1:0"})
    async with gateway_of(settings) as gateway:
        routes = gateway.active_config.planner.router
        try:
            way = routes.find(method, target, CIMultiDictProxy(CIMultiDict(headers)))
        except GatewayError as error:
            shown = str(error.kind.value.status)
        else:
            upstream = way.choice.take().upstream.name
            shown = upstream if way.target == target else f"{upstream} {way.target}"
    assert shown == found


@pytest.mark.parametrize("with_tls", [False, True], ids=["plain", "TLS"])
async def test_gateway_serves_and_counts_connections_accepted_elsewhere(
    tmp_path: Path, with_tls: bool
) -> None:
    certificate, key = certificate_files(tmp_path, server_certificate())
    settings = settings_for(tls={"certificate": certificate, "key": key} if with_tls else None)
    closed: list[None] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()
        async with no_leaks(), worker_of(settings, on_closed=lambda: closed.append(None)) as worker:
            with socket.create_connection(address) as gone:  # without a handshake
                gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1] + [0] * 7))
            worker.take(listening.accept()[0])
            await until(lambda: len(closed) == 1)
            scheme = "https" if with_tls else "http"
            client = asyncio.create_task(_status("{}://{}:{}".format(scheme, *address)))
            worker.take(await asyncio.to_thread(lambda: listening.accept()[0]))
            assert await client == 503
            await until(lambda: len(closed) == 2)
            ours, theirs = socket.socketpair()
            await worker.reply(Question.CONNECT, theirs)  # of operators, which nobody counts
            ours.close()
            await until(lambda: not worker.listener.connections)
            with socket.create_connection(address) as silent:
                worker.take(listening.accept()[0])
                assert len(closed) == 2
                silent.setblocking(False)
    assert len(closed) == 3


async def test_workers_learn_since_when_a_call_waits_for_a_silent_endpoint() -> None:
    shared = SharedMemory()
    async with (
        no_leaks(),
        ScriptedServer(never_respond) as server,
        worker_of(settings_for(server.url), shared) as worker,
        worker_client(worker) as client,
    ):
        begun = time.monotonic()
        call = asyncio.create_task(client.call("POST", "/v2/models/m/generate", body=b"{}"))
        await until(lambda: shared.waiting.read(time.monotonic()))
        (sent_at,) = shared.waiting.read(time.monotonic()).values()
        assert begun <= sent_at <= time.monotonic()
        call.cancel()


async def test_tls_is_spoken_on_tcp_addresses_alone(tmp_path: Path) -> None:
    certificate, key = certificate_files(tmp_path, server_certificate())
    unix = f"unix:{tmp_path / 's'}"
    settings = settings_for(
        listen=["127.0.0.1:0", unix], tls={"certificate": certificate, "key": key}
    )
    async with no_leaks(), gateway_of(settings) as gateway:
        first, second = gateway.addresses
        assert first.startswith("https://127.0.0.1:")
        assert second == unix
        for url in gateway.addresses:
            assert await _status(url) == 503


async def _status(url: str) -> int:
    async with connect(url) as client:
        return (await client.call("GET", "/v2")).status


@pytest.mark.parametrize(("mode", "is_warned"), [(0o640, False), (0o644, True)])
def test_key_that_every_user_can_read_is_warned_of(
    mode: int, is_warned: bool, tmp_path: Path
) -> None:
    certificate, key = certificate_files(tmp_path, server_certificate())
    os.chmod(key, mode)
    settings = settings_for(tls={"certificate": certificate, "key": key})
    warning = ("tls", "key"), f"every user of this machine can read {key}"
    assert list(settings_warnings(settings)) == [warning] * is_warned


async def test_cancelled_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    names = NameService()
    names.ready.clear()
    monkeypatch.setattr(build_upstreams, "resolve_host", names)
    address = free_address()
    upstreams = {"u": {"endpoints": ["http://triton:1"], "dns_refresh": "1s", "health_check": {}}}
    settings = settings_for(listen=address, upstreams=upstreams)
    async with no_leaks():
        start = asyncio.create_task(StandaloneGateway(settings).__aenter__())
        await until(lambda: names.under_way)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert not names.under_way
        names.ready.set()
        async with gateway_of(settings) as gateway:
            assert gateway.addresses == [f"http://{address}"]


async def test_access_log_can_be_turned_off(call_records: list[CallRecord]) -> None:
    for wanted in (True, False):
        call_records.clear()
        async with (
            gateway_of(settings_for(log={"access": wanted})) as gateway,
            connect(gateway.addresses[0]) as client,
        ):
            await client.call("GET", "/v2")
        assert bool(call_records) is wanted
