import asyncio
from collections.abc import Sequence

import pytest

from gateway.errors import GatewayError, bad_response
from gateway.protocol.dialects import KSERVE, TRITON, Dialect
from gateway.protocol.operations import parse_operation
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.interfaces import Call
from gateway.proxy.passthrough import passthrough
from gateway.sizes import CONVERT_CHUNK
from tests.support.checks.time_slices import cancelled_after
from tests.support.doubles.streaming import (
    BodyStep,
    EventLog,
    ScriptedClientResponse,
    ScriptedEndpoint,
    ScriptedRequest,
    ScriptedUpstreamResponse,
    make_destination,
)

CHUNKED = {"Transfer-Encoding": "chunked"}


class _Scene:
    """One call and its log."""

    def __init__(
        self,
        *steps: ScriptedUpstreamResponse | BaseException,
        method: str = "POST",
        headers: dict[str, str] | None = None,
        body: Sequence[BodyStep] = (),
        fault: BaseException | None = None,
        ready: asyncio.Event | None = None,
        dialect: Dialect = TRITON,
    ) -> None:
        self.log = EventLog()
        self.request = ScriptedRequest(self.log, method, "/v2/x?y", headers, body)
        self.response = ScriptedClientResponse(self.log, fault, ready)
        self.endpoint = ScriptedEndpoint(self.log, *steps)
        self.destination = make_destination(self.endpoint, dialect=dialect)

    async def run(self, target: str | None = None) -> None:
        with Deadline(9, 9) as deadline:
            operation = parse_operation(self.request.method, self.request.target)
            call = Call(self.request, self.response, operation, self.destination, deadline)
            await passthrough(call, target)

    @property
    def outstanding(self) -> int:
        return sum(self.destination.upstream.pool.outstanding)


async def test_request_without_a_body_passes() -> None:
    scene = _Scene(ScriptedUpstreamResponse(204, {"X": "1"}), method="GET", headers={"X": "2"})
    await scene.run()
    assert scene.log == [
        "server is asked GET /v2/x?y",
        "server answers 204",
        "client gets 204",
        "client has got all",
        "server is let go",
    ]
    assert scene.endpoint.requests[0].body is None
    assert dict(scene.endpoint.requests[0].headers) == {"X": "2"}
    assert dict(scene.response.headers) == {"X": "1"}


async def test_body_passes_chunk_by_chunk() -> None:
    body = [b"a" * 40_000, b"b" * 30_000]
    scene = _Scene(ScriptedUpstreamResponse(200, {}, [b"a", b"bc"]), body=body)
    await scene.run()
    assert scene.log == [
        "server is asked POST /v2/x?y",
        "client sends 40000",
        "server gets 40000",
        "client sends 30000",
        "server gets 30000",
        "client has sent all",
        "server answers 200",
        "client gets 200",
        "server sends 1",
        "client gets 1",
        "server sends 2",
        "client gets 2",
        "client has got all",
        "server is let go",
    ]
    assert scene.endpoint.bodies == [b"".join(body)]
    assert scene.response.body == b"abc"


@pytest.mark.parametrize("steps", [[b"x"] * 50_000, [b"x", b"y" * 49_999], [b"z" * 50_000]])
async def test_small_chunks_are_joined_for_a_server_that_limits_chunks(
    steps: list[BodyStep],
) -> None:
    """Triton recurses for each chunk of a body."""
    scene = _Scene(ScriptedUpstreamResponse(), headers=CHUNKED, body=steps)
    await scene.run()
    sizes = [int(entry.split()[-1]) for entry in scene.log if entry.startswith("server gets")]
    assert len(sizes) <= 1 + 50_000 // CONVERT_CHUNK
    assert all(size >= CONVERT_CHUNK for size in sizes[:-1])
    assert scene.endpoint.bodies == [b"".join(step for step in steps if isinstance(step, bytes))]


@pytest.mark.parametrize(
    ("dialect", "headers"), [(KSERVE, CHUNKED), (TRITON, {})], ids=["chunked", "sized"]
)
async def test_small_chunks_pass_unjoined_to_other_servers(
    dialect: Dialect, headers: dict[str, str]
) -> None:
    body = [b"a" * 10, b"b" * 70_000]
    scene = _Scene(ScriptedUpstreamResponse(), headers=headers, body=body, dialect=dialect)
    await scene.run()
    assert scene.log.index("server gets 10") < scene.log.index("client sends 70000")
    assert scene.endpoint.bodies == [b"".join(body)]


async def test_joined_chunks_nested_too_deep_do_not_reach_the_server() -> None:
    scene = _Scene(ScriptedUpstreamResponse(), headers=CHUNKED, body=[b"["] * 65)
    with pytest.raises(GatewayError, match="nested deeper than 64"):
        await scene.run()
    assert scene.log.count_of("server gets") == 0


async def test_small_body_is_sent_fully_buffered() -> None:
    scene = _Scene(ScriptedUpstreamResponse(), body=[b"one", b"three"])
    await scene.run()
    assert scene.log[:4] == [
        "client sends 3",
        "client sends 5",
        "client has sent all",
        "server is asked POST /v2/x?y",
    ]
    assert scene.endpoint.requests[0].body == (b"onethree",)


async def test_empty_body_differs_from_no_body() -> None:
    scene = _Scene(ScriptedUpstreamResponse(), headers={"Content-Length": "0"})
    await scene.run()
    assert scene.endpoint.requests[0].body == (b"",)


async def test_target_can_be_replaced() -> None:
    scene = _Scene(ScriptedUpstreamResponse())
    await scene.run("/elsewhere")
    assert scene.endpoint.requests[0].target == "/elsewhere"


async def test_next_chunk_is_not_read_while_the_client_does_not_read() -> None:
    ready = asyncio.Event()
    scene = _Scene(ScriptedUpstreamResponse(body=[b"one", b"two", b"three"]), ready=ready)
    task = asyncio.create_task(scene.run())
    for _ in range(50):
        await asyncio.sleep(0)
    assert scene.log[-1] == "server sends 3"
    assert scene.log.count_of("server sends") == 1
    ready.set()
    await task
    assert scene.response.body == b"onetwothree"


async def test_server_that_fails_before_its_response() -> None:
    scene = _Scene(bad_response("it fell over"))
    with pytest.raises(GatewayError, match="it fell over"):
        await scene.run()
    assert scene.log == ["server is asked POST /v2/x?y"]
    assert not scene.response.started
    assert scene.outstanding == 0


async def test_server_that_fails_during_its_response() -> None:
    scene = _Scene(ScriptedUpstreamResponse(body=[b"begun", bad_response("it fell over")]))
    with pytest.raises(GatewayError, match="it fell over"):
        await scene.run()
    assert "client has got all" not in scene.log
    assert scene.log[-1] == "server is let go"
    assert scene.outstanding == 0


async def test_client_that_fails_to_read() -> None:
    scene = _Scene(ScriptedUpstreamResponse(body=[b"begun"]), fault=ConnectionResetError())
    with pytest.raises(ConnectionResetError):
        await scene.run()
    assert scene.log[-1] == "server is let go"
    assert scene.outstanding == 0


async def test_client_may_disconnect_at_any_time() -> None:
    for moment in range(100):
        scene = _Scene(ScriptedUpstreamResponse(body=[b"one", b"two"]), body=[b"three", b"four"])
        if not await cancelled_after(moment, scene.run()):
            break
        assert scene.log.count_of("server answers") == scene.log.count_of("server is let go")
        assert scene.outstanding == 0
    assert moment >= 10
