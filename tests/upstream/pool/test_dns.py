import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.errors import ErrorKind, GatewayError
from gateway.upstream.address import ServerAddress, TcpAddress, parse_server_url
from gateway.upstream.control_client import send_control_request
from gateway.upstream.exchange import EndpointOptions
from gateway.upstream.http.endpoint import HttpEndpoint
from gateway.upstream.pool import checks
from gateway.upstream.pool.checks import PoolSupervisor
from gateway.upstream.pool.dns import Resolver
from gateway.upstream.pool.pool import Pool
from tests.support.certificates import server_certificate, server_context
from tests.support.doubles.streaming import EventLog, ScriptedEndpoint
from tests.support.gateway import no_leaks, until
from tests.support.servers.name_service import UNKNOWN_NAME, Answer, NameService
from tests.support.servers.scripted_server import ScriptedServer
from tests.upstream.endpoints import trusting_context


def _connect(address: ServerAddress) -> HttpEndpoint:
    return HttpEndpoint(address, EndpointOptions(5))


@asynccontextmanager
async def _pool(names: NameService, *urls: str, time: float = 5) -> AsyncIterator[Pool]:
    """Run a pool that looks names up with short pauses; nothing may be left of it."""
    async with no_leaks():
        servers = [parse_server_url(url, trusting_context()) for url in urls]
        resolver = Resolver(servers, 0.01, _connect, names, time, lambda: 0.0)
        supervisor_ = PoolSupervisor(resolver=resolver)
        pool = Pool(resolver.endpoints, supervisor=supervisor_, upstream="u")
        await pool.start()
        try:
            yield pool
        finally:
            await pool.close()
    assert not names.under_way


async def _looked_up(names: NameService) -> None:
    """Wait until the pool uses the current addresses of the name service."""
    asked = names.asked
    await until(lambda: names.asked > asked + 2)


def _urls(pool: Pool) -> list[str]:
    return [endpoint.url for endpoint in pool.endpoints]


async def test_each_address_is_an_endpoint_and_known_ones_stay() -> None:
    names = NameService(triton=["127.0.0.1", "127.0.0.1"])
    async with _pool(names, "http://triton:8000") as pool:
        assert pool.has_single_endpoint
        (first,) = pool.members
        names.answers["triton"] = ["127.0.0.3", "127.0.0.1", "127.0.0.2"]
        await until(lambda: len(pool.endpoints) == 3)
        assert _urls(pool) == [f"http://triton:8000 (127.0.0.{number})" for number in (1, 2, 3)]
        assert pool.members[0] is first
        names.answers["triton"] = ["127.0.0.3"]
        await until(lambda: _urls(pool) == ["http://triton:8000 (127.0.0.3)"])


async def test_failing_look_up_keeps_the_addresses(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tensorgate.upstream")
    names = NameService(triton=["127.0.0.1", "127.0.0.2"])
    async with _pool(names, "http://triton:8000") as pool:
        before = pool.members
        answers: list[Answer] = [UNKNOWN_NAME, OSError("no"), [], UnicodeError("label too long")]
        for said in (*answers, ["127.0.0.2", "127.0.0.1"]):
            names.answers["triton"] = said
            await _looked_up(names)
            assert pool.members == before
    assert [record.getMessage() for record in caplog.records] == [
        "http://triton:8000 resolves to 127.0.0.1, 127.0.0.2",
        "http://triton:8000: DNS lookup failed: Name or service not known"
        "; keeping the previous 2 addresses",
        "http://triton:8000 resolves to 127.0.0.1, 127.0.0.2",
    ]


@pytest.mark.parametrize(
    ("known", "fault"),
    [
        (UNKNOWN_NAME, "Name or service not known"),
        ([], "its name has no address"),
        (UnicodeError("label too long"), "label too long"),
    ],
)
async def test_error_without_addresses_tells_why(known: list[str], fault: str) -> None:
    names = NameService(triton=known)
    async with _pool(names, "http://triton:8000", "https://other:1") as pool:
        with pytest.raises(GatewayError) as caught:
            pool.lease()
        assert caught.value.kind is ErrorKind.UNREACHABLE
        assert caught.value.message == (
            f"cannot connect to http://triton:8000: {fault}"
            "; https://other:1: Name or service not known"
        )
        assert caught.value.public_message == (
            "cannot connect to upstream 'u': no address of it is known"
        )
        assert not pool.has_alternative([])
        names.answers["other"] = ["127.0.0.1"]
        await until(lambda: _urls(pool) == ["https://other:1 (127.0.0.1)"])
        assert pool.lease().endpoint is pool.endpoints[0]


async def test_start_waits_only_a_moment_for_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "START_DNS_TIMEOUT", 0.01)
    names = NameService(triton=["127.0.0.1"])
    names.ready.clear()
    async with _pool(names, "http://triton:8000") as pool:
        with pytest.raises(GatewayError) as caught:
            pool.lease()
        assert caught.value.message == (
            "cannot connect to http://triton:8000: its name has not been looked up yet"
        )
        names.ready.set()
        await until(lambda: pool.endpoints)


async def test_look_up_that_times_out_is_not_started_twice() -> None:
    names = NameService(triton=["127.0.0.1"])
    names.ready.clear()
    async with _pool(names, "http://triton:8000", time=0.01) as pool:
        with pytest.raises(GatewayError) as caught:
            pool.lease()
        assert caught.value.message.endswith("no response of the name service within 0.01 s")
        await asyncio.sleep(0.05)
        assert names.asked == 1
        names.ready.set()
        await until(lambda: pool.endpoints)


async def test_slow_look_up_does_not_delay_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    names = NameService(triton=["127.0.0.1"])

    async def lookup(host: str) -> list[str]:
        if host == "silent":
            await asyncio.Event().wait()
        return list(await names(host))

    found: list[tuple[str, ...]] = []
    servers = [parse_server_url("http://silent:1"), parse_server_url("http://triton:2")]
    resolver = Resolver(servers, 0.01, _connect, lookup, random=lambda: 0.0)
    supervisor = PoolSupervisor(resolver=resolver)
    monkeypatch.setattr(checks, "START_DNS_TIMEOUT", 0.01)
    async with no_leaks():
        await supervisor.resolve_names(
            lambda endpoints: found.append(tuple(each.url for each in endpoints))
        )
        await until(lambda: found == [("http://triton:2 (127.0.0.1)",)])
        names.answers["triton"] = ["127.0.0.2"]
        await until(lambda: len(found) == 2)
        assert not resolver.all_resolved.is_set()
        await supervisor.close()


async def test_ip_address_is_not_looked_up() -> None:
    urls = ["http://127.0.0.1:1", "http://[::1]:2", "unix:/s"]
    names = NameService(triton=["127.0.0.9", "::1"])
    async with _pool(names, *urls[:2], "http://triton:3", urls[2]) as pool:
        assert _urls(pool) == [
            *urls[:2],
            "http://triton:3 (127.0.0.9)",
            "http://triton:3 (::1)",
            urls[2],
        ]
        static = pool.members[:2]
        names.answers["triton"] = ["127.0.0.8"]
        await until(lambda: _urls(pool)[2:] == ["http://triton:3 (127.0.0.8)", urls[2]])
        assert pool.members[:2] == static
        assert names.asked >= 2


async def test_number_of_addresses_is_limited(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tensorgate.upstream")
    many = [f"127.0.{i // 250}.{i % 250 + 1}" for i in range(300)]
    names = NameService(triton=many)
    async with _pool(names, "http://triton:1") as pool:
        members = pool.members
        assert len(members) == 256
        names.answers["triton"] = many[::-1]
        await _looked_up(names)
        assert pool.members == members
    (record,) = caplog.records
    assert record.getMessage().endswith(", 256 of 300")


async def test_certificate_must_have_the_host_name() -> None:
    names = NameService(localhost=["127.0.0.2"])
    server = ScriptedServer(ssl=server_context(server_certificate("localhost")), host="127.0.0.2")
    async with server, _pool(names, f"https://localhost:{server.port}") as pool:
        assert (await send_control_request(pool.endpoints[0], "/v2", 100)).status == 200
        assert _urls(pool) == [f"https://localhost:{server.port} (127.0.0.2)"]


async def test_each_address_of_a_server_with_two_ports_has_both() -> None:
    names = NameService(triton=["127.0.0.1", "127.0.0.2"])
    made: list[ServerAddress] = []

    def connect(address: ServerAddress) -> ScriptedEndpoint:
        made.append(address)
        return ScriptedEndpoint(EventLog(), url=address.url)

    resolver = Resolver(
        [TcpAddress("triton", 8000, grpc=TcpAddress("triton", 8001, scheme="grpc"))],
        10,
        connect,
        names,
        5,
        lambda: 0.0,
    )
    supervisor = PoolSupervisor(resolver=resolver)
    await supervisor.resolve_names(lambda endpoints: None)
    await supervisor.close()
    assert [(each.url, each.grpc_address) for each in made] == [
        (
            f"http://triton:8000 ({address})",
            TcpAddress("triton", 8001, address=address, scheme="grpc"),
        )
        for address in ("127.0.0.1", "127.0.0.2")
    ]


async def test_adopted_addresses_are_used_until_a_look_up() -> None:
    names = NameService(triton=["127.0.0.1", "127.0.0.2"])
    async with _pool(names, "http://triton:1000", "http://other:1000") as before:
        names.ready.clear()
        urls = ["https://triton:2000", "http://other:1000", "http://new:1000", "http://127.0.0.9:1"]
        servers = [parse_server_url(url, trusting_context()) for url in urls]
        resolver = Resolver(servers, 0.01, _connect, names, 5, lambda: 0.0)
        supervisor_ = PoolSupervisor(resolver=resolver)
        pool = Pool(resolver.endpoints, supervisor=supervisor_, upstream="u")
        pool.adopt_addresses(before)
        assert _urls(pool) == [
            "https://triton:2000 (127.0.0.1)",
            "https://triton:2000 (127.0.0.2)",
            "http://127.0.0.9:1",
        ]
        await pool.close()
        names.ready.set()


async def test_failure_of_the_gateway_itself_ends_no_look_ups(
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = NameService(a=ZeroDivisionError("a bug"), b=["10.0.0.2"])
    async with _pool(names, "http://a:1", "http://b:1") as pool:
        await until(lambda: "a bug" in caplog.text)
        names.answers["a"] = ["10.0.0.1"]
        await until(lambda: len(pool.endpoints) == 2)
