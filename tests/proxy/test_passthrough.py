import asyncio
from collections.abc import Sequence

import pytest

from gateway.errors import GatewayError
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


@pytest.mark.parametrize("steps", [[b"x"] * 50_000, [b"x", b"y" * 49_999]])
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


async def test_client_may_disconnect_at_any_time() -> None:
    for moment in range(100):
        scene = _Scene(ScriptedUpstreamResponse(body=[b"one", b"two"]), body=[b"three", b"four"])
        if not await cancelled_after(moment, scene.run()):
            break
        assert scene.log.count_of("server answers") == scene.log.count_of("server is let go")
        assert scene.outstanding == 0
    assert moment >= 10
