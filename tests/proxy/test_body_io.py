"""Bodies on their way: of calls that pass untouched, and as they are read, joined and counted."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gateway.errors import ErrorKind, GatewayError, bad_request
from gateway.protocol.dialects import KSERVE, TRITON, Dialect
from gateway.protocol.error_vocabulary import REQUEST
from gateway.protocol.grpc.framing import MessageReader, frame
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.admission.memory_budget import MemoryBudget
from gateway.proxy.body_chunks import ResponseChunks
from gateway.proxy.body_io import (
    ClientBody,
    ResponseRelay,
    buffer_chunks,
    read_messages,
    stream,
    write,
)
from gateway.sizes import CONVERT_CHUNK
from tests.support.checks.refused import refused_with
from tests.support.doubles.scripted_call import ScriptedCall
from tests.support.doubles.streaming import (
    SERVER,
    BodyStep,
    EventLog,
    ScriptedClientResponse,
    ScriptedRequest,
    ScriptedUpstreamResponse,
)

CHUNKED = {"Transfer-Encoding": "chunked"}


def _call(**more: Any) -> ScriptedCall:
    return ScriptedCall(ScriptedUpstreamResponse(body=[b"one", b"two"]), target="/v2/x?y", **more)


@pytest.mark.parametrize("steps", [[b"x"] * 50_000, [b"x", b"y" * 49_999]])
async def test_small_chunks_are_joined_for_a_server_that_limits_chunks(
    steps: list[BodyStep],
) -> None:
    """Triton recurses for each chunk of a body."""
    scene = _call(headers=CHUNKED, body=steps)
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
    scene = _call(headers=headers, body=body, dialect=dialect)
    await scene.run()
    assert scene.log.index("server gets 10") < scene.log.index("client sends 70000")
    assert scene.endpoint.bodies == [b"".join(body)]


async def test_joined_chunks_nested_too_deep_do_not_reach_the_server() -> None:
    scene = _call(headers=CHUNKED, body=[b"["] * 65)
    with pytest.raises(GatewayError, match="nested deeper than 64"):
        await scene.run()
    assert scene.log.count_of("server gets") == 0


def _request(*body: BodyStep, headers: dict[str, str] | None = None) -> ScriptedRequest:
    return ScriptedRequest(EventLog(), "POST", "/", headers, body)


@contextmanager
def _reading(*body: BodyStep, **headers: str) -> Iterator[ClientBody]:
    """Read the body of a client, of which 100 bytes may come."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    with Deadline(9, 9) as deadline:
        yield ClientBody(_request(*body, headers=named), 100, deadline)


async def test_client_body_below_the_minimum_rate_is_refused() -> None:
    late = asyncio.Event()
    asyncio.get_running_loop().call_later(0.02, late.set)
    with (
        pytest.raises(GatewayError, match=r"limits\.min_body_rate") as caught,
        Deadline(9, 9, min_body_rate=1_000_000) as deadline,
    ):
        await ClientBody(_request(late, b"one", headers=CHUNKED), 100, deadline).read()
    assert caught.value.kind is ErrorKind.CLIENT_TIMEOUT


async def test_client_body_is_read_in_the_size_that_the_reader_wants() -> None:
    with _reading(b"onetwo", b"three") as body:
        assert [await body.read(4) for _ in range(5)] == [b"onet", b"wo", b"thre", b"e", b""]
    with _reading(b"onetwo", b"three") as body:
        assert [piece async for piece in body.read_exactly(0)] == []
        assert [piece async for piece in body.read_exactly(7)] == [b"onetwo", b"t"]
        assert [piece async for piece in body.read_rest()] == [b"hree"]
    shorter = refused_with(ErrorKind.BAD_REQUEST, "is 2 bytes shorter than")
    with _reading(b"one", Transfer_Encoding="chunked") as body, shorter:
        assert [piece async for piece in body.read_exactly(5)] == []


async def test_small_pieces_of_a_client_body_are_joined() -> None:
    small = [b"%d" % (number % 10) for number in range(5000)]
    with Deadline(9, 9) as deadline:
        body = ClientBody(_request(*small, bytes(9000)), 10**6, deadline)
        assert await body.read_joined(10**6) == b"".join(small[:4096])
        assert await body.read_joined(10) == b"".join(small[4096:4106])
        assert len(await body.read_joined(5000)) == 5000
        assert len(await body.read_joined(10**6)) == 5000 + 9000 - 4096 - 10 - 5000
        assert await body.read_joined(10**6) == b""


@pytest.mark.parametrize(
    ("step", "kind"),
    [(bad_request("broken"), ErrorKind.BAD_REQUEST), (bytes(95), ErrorKind.TOO_LARGE)],
    ids=["broken", "too large"],
)
async def test_joined_pieces_come_before_an_error(step: BodyStep, kind: ErrorKind) -> None:
    with _reading(b"one", b"two", step, Transfer_Encoding="chunked") as body:
        assert await body.read_joined(10**6) == b"onetwo"
        for _ in range(2):
            with refused_with(kind):
                await body.read_joined(10**6)


async def _one(piece: memoryview) -> AsyncIterator[memoryview]:
    yield piece


async def _buffer(chunks: AsyncIterator[bytes | memoryview]) -> list[bytes]:
    with MemoryBudget(10**9).reserve() as reservation:
        return await buffer_chunks(chunks, reservation, 10**9, lambda cap: bad_request("too large"))


async def test_buffered_chunks_pin_no_extra_memory() -> None:
    large = memoryview(bytes(3 * CONVERT_CHUNK))[:CONVERT_CHUNK]

    async def pieces() -> AsyncIterator[bytes | memoryview]:
        for _ in range(1000):
            yield memoryview(b"one and more")[:3]
        yield large

    buffered = await _buffer(pieces())
    assert [len(piece) for piece in buffered] == [3000 + CONVERT_CHUNK]
    assert [type(piece) for piece in await _buffer(_one(large))] == [bytes]


async def test_body_over_the_cap_is_refused() -> None:
    log = EventLog()
    with Deadline(9, 9) as deadline, refused_with(ErrorKind.TOO_LARGE, "larger than 100 bytes"):
        ClientBody(ScriptedRequest(log, "POST", "/", {}, [bytes(101)]), 100, deadline)
    assert log == []
    with _reading(bytes(60), bytes(40), b"x", Transfer_Encoding="chunked") as body:
        assert body.size is None
        assert len(await body.read()) + len(await body.read()) == 100
        with refused_with(ErrorKind.TOO_LARGE):
            await body.read()


async def test_who_has_to_move_next_is_expected() -> None:
    response = ScriptedClientResponse(EventLog())
    with Deadline(9, 9) as deadline:
        deadline.expect_server(SERVER)
        await ClientBody(_request(b"x"), 100, deadline).read()
        assert deadline.timeout_error("").kind is ErrorKind.CLIENT_TIMEOUT
        chunks = ResponseChunks(ScriptedUpstreamResponse(body=[b"one", b"two"]), SERVER, deadline)
        assert [chunk async for chunk in chunks] == [b"one", b"two"]
        assert deadline.timeout_error("").kind is ErrorKind.SERVER_TIMEOUT
        await response.start(200, "OK", response.headers)
        await write(response, b"x", deadline)
        assert response.body == b"x"
        assert deadline.timeout_error("").kind is ErrorKind.CLIENT_TIMEOUT


async def test_messages_are_read_one_by_one_and_a_part_of_one_is_refused() -> None:
    async def decompress(data: bytes) -> bytes:
        return data.upper()

    body = frame(3) + b"one" + frame(3, is_compressed=True) + b"two" + frame(9) + b"cut"
    budget, seen = MemoryBudget(100), []
    with budget.reserve() as reservation, refused_with(ErrorKind.BAD_REQUEST, "ends after"):
        reader = MessageReader(9, "cap", REQUEST)
        pieces = stream([body[:4], body[4:7], body[7:]])
        async for message in read_messages(pieces, reader, reservation, decompress):
            seen.append(message)
            assert budget.total == len(message)
    assert (seen, budget.total) == ([b"one", b"TWO"], 0)


class _SentLater(ScriptedClientResponse):
    can_wait_until_sent = True

    async def wait_until_sent(self) -> None:
        self._log.append("client waits")
        raise ConnectionResetError


@pytest.mark.parametrize("written", [0, 1])
async def test_lent_memory_is_sent_before_the_call_is_over_or_never(written: int) -> None:
    scene = _call()
    response = _SentLater(scene.log)
    response.record.response_bytes = written
    with Deadline(9, 9) as deadline:
        relay = ResponseRelay(
            ScriptedUpstreamResponse(), SERVER, response, scene.destination, deadline
        )
        with pytest.raises(ConnectionResetError):
            await relay.until_sent(response.finish())
    # What is written already must not be sent from memory that is another call's then.
    assert scene.log == ["client has got all", "client waits", *["client is cut off"] * written]
