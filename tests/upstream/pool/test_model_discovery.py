"""Which models endpoints have ready, by their lists."""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import pytest

from gateway.upstream.pool.checks import (
    ModelDiscovery,
    PoolSupervisor,
    fetch_ready_models,
    may_have_model,
    parse_ready_models,
)
from gateway.upstream.pool.member import ANY_MODEL, ReadyModels
from gateway.upstream.pool.pool import Pool
from tests.support.doubles.streaming import ready
from tests.support.gateway import until
from tests.support.http_messages import http_response
from tests.support.servers.scripted_server import (
    Connection,
    ScriptedServer,
    always_respond,
    never_respond,
)
from tests.upstream.endpoints import EndpointAt
from tests.upstream.pools import leased, running

Discovering = Callable[..., AbstractAsyncContextManager[Pool]]


def _index(*names: str, **others: str) -> bytes:
    entries = [{"name": name, "version": "1", "state": "READY"} for name in names]
    entries += [{"name": name, "state": state} for name, state in others.items()]
    return http_response(json.dumps(entries).encode())


class _Repository:
    """Responds with its current index."""

    def __init__(self, *names: str) -> None:
        self.index = _index(*names)

    async def __call__(self, connection: Connection) -> None:
        while True:
            await connection.request()
            await connection.send(self.index)


@pytest.fixture
def discovering(endpoint_at: EndpointAt) -> Discovering:
    """Make pools with model discovery."""

    def discovering(*urls: str, interval: float = 0.01) -> AbstractAsyncContextManager[Pool]:
        supervisor = PoolSupervisor(model_discovery=ModelDiscovery(interval, random=lambda: 0.9))
        return running(Pool([endpoint_at(url) for url in urls], supervisor=supervisor))

    return discovering


def _is_asked(server: ScriptedServer, times: int) -> bool:
    return len(server.requests) >= times


def _models(pool: Pool) -> list[tuple[str, ...] | None]:
    return [state.models for state in pool.snapshot()]


async def test_server_is_asked_whether_it_has_a_model(
    endpoint_at: EndpointAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.upstream.pool.checks._LIST_TIMEOUT", 0.05)
    plain = always_respond(http_response(b"none", status="404 Not Found"))
    for serve, b in ((_Repository("a"), False), (plain, True), (never_respond, True)):
        async with ScriptedServer(serve) as server:
            endpoint = endpoint_at(server.url)
            assert [await may_have_model(endpoint, model) for model in "ab"] == [True, b]
            await endpoint.close()


async def test_refresh_asks_all_endpoints_at_once(discovering: Discovering) -> None:
    one = _Repository("a")
    async with (
        ScriptedServer(one) as server,
        ScriptedServer() as other,
        discovering(server.url, other.url, interval=60) as pool,
    ):
        await until(lambda: _models(pool)[0] == ("a",))
        one.index = _index("b")
        pool.refresh_models()
        await until(lambda: _models(pool)[0] == ("b",))
        await until(lambda: len(other.requests) == 2)
        assert len(server.requests) == 2


async def test_refresh_during_a_request_asks_again(discovering: Discovering) -> None:
    go_on = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        await go_on.wait()
        await connection.send(_index("old"))
        await connection.request()
        await connection.send(_index("new"))
        await connection.wait_for_close()

    async with ScriptedServer(script) as server, discovering(server.url, interval=60) as pool:
        await until(lambda: server.requests)
        for _ in range(5):
            pool.refresh_models()
        go_on.set()
        await until(lambda: _models(pool) == [("new",)])
        assert len(server.requests) == 2


@pytest.mark.parametrize("status", ["404 Not Found", "501 Not Implemented"])
async def test_server_without_index_may_have_any_model(
    discovering: Discovering, status: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        ScriptedServer(_Repository("a")) as one,
        ScriptedServer(always_respond(http_response(status=status))) as two,
        discovering(one.url, two.url) as pool,
    ):
        await until(lambda: len(two.requests) > 6 and _models(pool)[0])
        assert leased(pool, "a") == leased(pool, "b") | {one.url} == {one.url, two.url}
        assert _models(pool)[1] is None
    message = (
        f"{two.url} serves no repository index, nor a list as KServe's: any model may be there"
    )
    assert [record.getMessage() for record in caplog.records] == [message]


async def test_known_models_stay_after_an_error(
    discovering: Discovering, caplog: pytest.LogCaptureFixture
) -> None:
    one = _Repository("a")
    async with (
        ScriptedServer(_Repository("b")) as other,
        ScriptedServer(one) as server,
        discovering(server.url, other.url) as pool,
    ):
        await until(lambda: _models(pool) == [("a",), ("b",)])
        for index in (
            http_response(status="503 Busy"),
            http_response(b'{"no": "index"}'),
            http_response(b"no JSON"),
            http_response(bytes(4 * 1024 * 1024 + 1)),
            b"what?\r\n\r\n",
        ):
            one.index = index
            most = len(server.requests) + 3
            await until(partial(_is_asked, server, most))
        assert leased(pool, "a") == {server.url}
        asked = server.requests[0]
        assert asked.head.first == "POST /v2/repository/index HTTP/1.1"
        assert json.loads(asked.body) == {"ready": True}
    said = [record.getMessage() for record in caplog.records]
    start = f"{server.url} does not say which models it has: {server.url}"
    assert said[:2] == [
        f"{start}/v2/repository/index returned 503",
        f"{start}/v2/repository/index is no index of models",
    ]
    assert "is larger than 4194304 bytes" in said[2]
    assert said[3].startswith(f"{start} sent an invalid HTTP response")


class _V1:
    """A server without repository index, with this response at the path of the V1 list."""

    def __init__(self, listed: bytes) -> None:
        self.listed = listed

    async def __call__(self, connection: Connection) -> None:
        while True:
            asked = await connection.request()
            is_v1 = asked.head.first == "GET /v1/models HTTP/1.1"
            await connection.send(self.listed if is_v1 else http_response(status="404 Not Found"))


async def test_v1_list_is_read_from_a_server_without_index(
    discovering: Discovering, caplog: pytest.LogCaptureFixture
) -> None:
    kserve = _V1(http_response(b'{"models":["b","c"]}'))
    async with (
        ScriptedServer(_Repository("a", "b")) as one,
        ScriptedServer(kserve) as two,
        discovering(one.url, two.url) as pool,
    ):
        await until(lambda: _models(pool) == [("a", "b"), ("b", "c")])
        assert leased(pool, "a") == {one.url}
        assert leased(pool, "c") == {two.url}
        kserve.listed = http_response(b'{"models":["d"]}')
        await until(lambda: _models(pool)[1] == ("d",))
        # After an error, the known models stay.
        kserve.listed = http_response(status="503 Busy")
        await until(partial(_is_asked, two, len(two.requests) + 4))
        assert leased(pool, "d") == {two.url}
    fault = f"{two.url} does not say which models it has: {two.url}/v1/models returned 503"
    assert [record.getMessage() for record in caplog.records] == [fault]


@pytest.mark.parametrize(
    "data",
    [
        http_response(b'{"object":"list","data":[{"id":"m","object":"model"}]}'),
        http_response(status="403 Forbidden"),
    ],
    ids=lambda data: data[-40:],
)
async def test_other_list_of_models_is_ignored(endpoint_at: EndpointAt, data: bytes) -> None:
    async with ScriptedServer(_V1(data)) as server:
        assert await fetch_ready_models(endpoint_at(server.url)) is ANY_MODEL
        assert len(server.requests) == 2


def _ready_entry(name: str, version: object = None, state: str = "READY") -> dict[str, Any]:
    return {"name": name, "version": version, "state": state}


@pytest.mark.parametrize(
    ("document", "models"),
    [
        ([], ready()),
        ([{"name": "m"}], ready("m")),
        (
            [_ready_entry("m", "1"), _ready_entry("m", "2"), _ready_entry("n", "1")],
            ready("m/1", "m/2", "n/1"),
        ),
        ([_ready_entry("m", 7)], ready("m/7")),
        (
            [
                _ready_entry("m", "1"),
                _ready_entry("m", "2", "UNAVAILABLE"),
                _ready_entry("n", "1", "LOADING"),
            ],
            ready("m/1"),
        ),
        # One entry without a version is enough: the model may have other versions.
        ([_ready_entry("m", "1"), _ready_entry("m")], ready("m")),
        ([_ready_entry("m", "")], ready("m")),
        ({"models": ["a", "b"]}, ready("a", "b")),
    ],
)
def test_lists_of_models_are_parsed(document: Any, models: ReadyModels) -> None:
    assert parse_ready_models(document) == models


@pytest.mark.parametrize("document", [5, {}, {"models": [1]}, [1], [{"state": "READY"}]], ids=repr)
def test_other_documents_are_errors(document: Any) -> None:
    with pytest.raises((TypeError, KeyError, AttributeError)):
        parse_ready_models(document)


def test_names_are_sorted() -> None:
    assert ready("b/1", "a/2", "a/1").names == ("a", "b")
    assert ANY_MODEL.names is None
