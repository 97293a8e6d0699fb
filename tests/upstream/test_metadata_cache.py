import asyncio
from collections.abc import AsyncIterator, Awaitable

import pytest

from gateway.errors import ErrorKind, GatewayError, ServerName, bad_response
from gateway.protocol.datatypes import DATATYPES
from gateway.protocol.tensors import ModelMetadata, TensorSpec
from gateway.upstream.metadata_cache import (
    RECHECK_INTERVAL,
    MetadataCache,
    UpstreamResponseError,
    fetch_max_batch_size,
    fetch_metadata,
)
from gateway.upstream.transport import UpstreamEndpoint, UpstreamRequest, UpstreamResponse
from tests.support.doubles.iterations import iterations
from tests.support.doubles.streaming import (
    URL,
    EventLog,
    ScriptedEndpoint,
    ScriptedUpstreamResponse,
)
from tests.support.inference_messages import metadata
from tests.upstream.pools import ManualClock

TTL = 60.0


class _Server(UpstreamEndpoint):
    """A server that knows every model and records its requests."""

    def __init__(self) -> None:
        self.url = URL
        self.name = ServerName(URL, "upstream 'servers'")
        self.asked: list[str] = []
        self.ready = asyncio.Event()
        self.ready.set()
        self.fault: BaseException | None = None

    async def send(self, request: UpstreamRequest) -> UpstreamResponse:
        assert request.method == "GET"
        assert not request.headers
        self.asked.append(request.target)
        await self.ready.wait()
        if self.fault is not None:
            raise self.fault
        if request.target.endswith("/config"):
            return ScriptedUpstreamResponse(200, {}, [b'{"max_batch_size":', b"4}"])
        return ScriptedUpstreamResponse(200, {}, [metadata(-1, 3)])

    async def close(self) -> None:
        raise AssertionError("not the cache's to close")

    def fetches(self, path: str = "/v2/models/m") -> int:
        """Count the requests for a model's metadata; its config is requested each time."""
        assert self.ready.is_set()
        if self.fault is None:
            assert self.asked.count(path) == self.asked.count(path + "/config")
        return self.asked.count(path)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def cache(clock: ManualClock) -> AsyncIterator[MetadataCache]:
    cache = MetadataCache(TTL, 3, 30, clock)
    yield cache
    await cache.close()


@pytest.fixture
async def server() -> _Server:
    return _Server()


@pytest.mark.parametrize(
    ("document", "outputs"),
    [
        (
            b'{"inputs":[],"outputs":[{"name":"y","datatype":"BYTES","shape":["-1",2]}]}',
            (TensorSpec("y", DATATYPES["BYTES"], (-1, 2)),),
        ),
        (b'{"inputs":null}', ()),
        (
            b'{"inputs":[],"outputs":[{"name":"x","datatype":"FP32","shape":[1]},'
            b'{"name":"y","datatype":"FP31","shape":[1]}]}',
            (),
        ),
    ],
)
async def test_outputs_are_read_if_they_are_valid(
    document: bytes, outputs: tuple[TensorSpec, ...]
) -> None:
    server = ScriptedEndpoint(
        EventLog(),
        ScriptedUpstreamResponse(200, {}, [document]),
        ScriptedUpstreamResponse(404, {}, []),
    )
    assert await fetch_metadata("m", None, server) == ModelMetadata("m", (), None, outputs)


@pytest.mark.parametrize(
    ("status", "config", "size"),
    [
        (200, b'{"max_batch_size":4}', 4),
        (200, b'{"max_batch_size":-1}', 0),
        (200, b"[]", 0),
        (200, b'{"max_batch_size":null}', 0),
        (501, b'{"max_batch_size":4}', None),
    ],
)
async def test_max_batch_size_is_read_from_the_config(
    status: int, config: bytes, size: int | None
) -> None:
    server = ScriptedEndpoint(EventLog(), ScriptedUpstreamResponse(status, {}, [config]))
    assert await fetch_max_batch_size("m", "1", server) == size


async def test_model_is_fetched_once(cache: MetadataCache, server: _Server) -> None:
    server.ready.clear()
    gets = [asyncio.create_task(cache.get("m", None, server)) for _ in range(100)]
    await iterations(10)
    server.ready.set()
    results = await asyncio.gather(*gets)
    assert all(result is results[0] for result in results)
    expected = ModelMetadata("m", (TensorSpec("IN", DATATYPES["FP32"], (-1, 3)),), True)
    assert results[0] == expected
    assert await cache.get("m", None, server) is results[0]
    assert server.asked == ["/v2/models/m", "/v2/models/m/config"]


async def test_entry_expires_after_its_ttl(
    cache: MetadataCache, server: _Server, clock: ManualClock
) -> None:
    await cache.get("m", None, server)
    clock.now += TTL - 0.001
    await cache.get("m", None, server)
    assert server.fetches() == 1
    clock.now += 0.001
    await cache.get("m", None, server)
    assert server.fetches() == 2
    # The TTL starts at the fetch, not at the last use.
    clock.now += TTL - 0.001
    await cache.get("m", None, server)
    assert server.fetches() == 2


async def test_least_recently_used_entry_is_evicted_first(
    cache: MetadataCache, server: _Server
) -> None:
    for model in "abc":
        await cache.get(model, None, server)
    await cache.get("a", None, server)
    await cache.get("d", None, server)  # evicts b
    for model in "acd":
        await cache.get(model, None, server)
    assert [server.fetches(f"/v2/models/{model}") for model in "abcd"] == [1, 1, 1, 1]
    await cache.get("b", None, server)
    assert server.fetches("/v2/models/b") == 2


async def test_invalidated_model_is_fetched_again(cache: MetadataCache, server: _Server) -> None:
    for _ in range(2):
        for model, version in (("m", None), ("m", "1"), ("n", None)):
            await cache.get(model, version, server)
        cache.invalidate("m")
    assert server.fetches("/v2/models/m") == 2
    assert server.fetches("/v2/models/m/versions/1") == 2
    assert server.fetches("/v2/models/n") == 1
    # With and without the config: a recheck may have found another server meanwhile.
    server.asked.clear()
    assert (await cache.get("m", None, server, has_config=False)).batching is None
    assert (await cache.get("m", None, server, has_config=True)).batching
    cache.invalidate("m")
    await cache.get("m", None, server, has_config=False)
    assert server.asked.count("/v2/models/m") == 3


async def test_invalidation_discards_a_fetch_in_flight(
    cache: MetadataCache, server: _Server
) -> None:
    server.ready.clear()
    before = asyncio.create_task(cache.get("m", None, server))
    await iterations(10)
    cache.invalidate("m")
    after = asyncio.create_task(cache.get("m", None, server))
    await iterations(10)
    server.ready.set()
    # Calls from before the invalidation get the old metadata, which is not cached.
    await before
    kept = await after
    assert await cache.get("m", None, server) is kept
    assert server.fetches() == 2


async def test_recheck_fetches_once_in_an_interval(
    cache: MetadataCache, server: _Server, clock: ManualClock
) -> None:
    await cache.get("m", None, server)
    await cache.get("n", None, server)
    cache.recheck("m", "1")  # a version that is not cached
    for _ in range(100):
        cache.recheck("m", None)
        await cache.get("m", None, server)
        clock.now += RECHECK_INTERVAL / 101
    assert server.fetches() == 2
    clock.now += RECHECK_INTERVAL / 50
    for _ in range(100):
        cache.recheck("m", None)
        await cache.get("m", None, server)
    assert server.fetches() == 3
    await cache.get("n", None, server)
    assert server.fetches("/v2/models/n") == 1
    cache.invalidate("m")  # it was loaded
    await cache.get("m", None, server)
    cache.recheck("m", None)
    await cache.get("m", None, server)
    assert server.fetches() == 5


async def test_recheck_keeps_a_fetch_in_flight(
    cache: MetadataCache, server: _Server, clock: ManualClock
) -> None:
    server.ready.clear()
    gets = []
    for _ in range(10):
        gets.append(asyncio.create_task(cache.get("m", None, server)))
        await iterations(10)
        clock.now += RECHECK_INTERVAL
        cache.recheck("m", None)
    server.ready.set()
    await asyncio.gather(*gets)
    await cache.get("m", None, server)
    assert server.fetches() == 1


async def test_fetch_that_all_clients_left_is_still_cached(
    cache: MetadataCache, server: _Server
) -> None:
    server.ready.clear()
    get = asyncio.create_task(cache.get("m", None, server))
    await iterations(10)
    get.cancel()
    await iterations(10)
    server.ready.set()
    await iterations(10)
    await cache.get("m", None, server)
    assert server.fetches() == 1


async def test_failure_reaches_all_waiting_calls_and_is_not_cached(
    cache: MetadataCache, server: _Server
) -> None:
    fault = server.fault = UpstreamResponseError(404, "text/plain", b"unknown")
    server.ready.clear()
    gets = [asyncio.create_task(cache.get("m", None, server)) for _ in range(5)]
    await iterations(10)
    server.ready.set()
    results = await asyncio.gather(*gets, return_exceptions=True)
    assert all(result is fault for result in results)
    assert server.asked == ["/v2/models/m"]
    server.fault = None
    await cache.get("m", None, server)
    assert server.asked == ["/v2/models/m", "/v2/models/m", "/v2/models/m/config"]


async def test_failure_without_waiting_calls_is_not_reported(
    cache: MetadataCache, server: _Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.ready.clear()
    server.fault = bad_response("fell over")
    get = asyncio.create_task(cache.get("m", None, server))
    await iterations(10)
    get.cancel()
    server.ready.set()
    await iterations(10)
    assert not cache._tasks
    assert not caplog.records


async def test_fetch_fails_after_its_timeout(clock: ManualClock, server: _Server) -> None:
    cache = MetadataCache(TTL, 3, 1.0, clock)
    server.ready.clear()
    with pytest.raises(GatewayError, match=f"{URL} returned no metadata of model 'm' in 1 s") as e:
        await cache.get("m", None, server)
    assert e.value.kind is ErrorKind.SERVER_TIMEOUT
    server.ready.set()
    await cache.get("m", None, server)


async def test_close_cancels_fetches(cache: MetadataCache, server: _Server) -> None:
    server.ready.clear()
    gets = [asyncio.create_task(cache.get(model, None, server)) for model in "abc"]
    await iterations(10)
    await cache.close()
    await iterations(10)
    assert all(get.done() for get in gets)
    assert not cache._tasks
    await asyncio.gather(*gets, return_exceptions=True)


def _fetch(*turns: ScriptedUpstreamResponse) -> Awaitable[ModelMetadata]:
    return fetch_metadata("m", "7", ScriptedEndpoint(EventLog(), *turns))


@pytest.mark.parametrize(
    ("status", "headers", "is_config"), [(404, {}, False), (500, {"Content-Type": "text/x"}, True)]
)
async def test_error_response_of_the_server_is_passed_on(
    status: int, headers: dict[str, str], is_config: bool
) -> None:
    """Without the config, the gateway would guess the batch dimension, and guess wrong."""
    refusal = ScriptedUpstreamResponse(status, headers, [b'{"error":', b'"no"}'])
    known = [ScriptedUpstreamResponse(200, {}, [metadata(-1)])] * is_config
    with pytest.raises(UpstreamResponseError) as caught:
        await _fetch(*known, refusal)
    error = caught.value
    content_type = headers.get("Content-Type", "application/json")
    assert (error.status, error.content_type, error.body) == (
        status,
        content_type,
        b'{"error":"no"}',
    )


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b'{"inputs":7}',
        b'{"inputs":[{"name":"IN","datatype":"FP31","shape":[1]}]}',
        b'{"inputs":[{"name":"A","datatype":"FP32","shape":["x"]}]}',
    ],
)
async def test_error_of_invalid_metadata_names_the_server_and_the_inputs(document: bytes) -> None:
    with pytest.raises(GatewayError) as caught:
        await _fetch(ScriptedUpstreamResponse(200, {}, [document]), ScriptedUpstreamResponse(404))
    assert caught.value.kind is ErrorKind.BAD_RESPONSE
    inputs = document[len(b'{"inputs":') : -1].decode()
    assert caught.value.message == (
        f"{URL} returned invalid inputs in the metadata of model 'm': {inputs}"
        if inputs.startswith("[")
        else f"{URL} returned no metadata of model 'm'"
    )
