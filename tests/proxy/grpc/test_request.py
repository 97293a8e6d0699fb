"""The model of a gRPC call is found, and becomes that of its route, however the request is cut."""

from __future__ import annotations

import asyncio
import gzip
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.grpc.framing import frame
from gateway.protocol.grpc.methods import GrpcMethod, find_method
from gateway.protocol.grpc.model_scanner import ScannedModel
from gateway.protocol.grpc.wire import MAX_MESSAGE
from gateway.proxy.admission.conversion_scheduler import ConversionScheduler, TimeSliceWaiter
from gateway.proxy.admission.deadline import Deadline
from gateway.proxy.admission.memory_budget import MemoryBudget
from gateway.proxy.grpc.request import GrpcRequest, ModelRewriter
from gateway.proxy.interfaces import ClientRequest
from gateway.sizes import CONVERT_CHUNK
from tests.support.checks.refused import refused_with
from tests.support.checks.time_slices import others
from tests.support.doubles.streaming import LIMITS
from tests.support.grpc.proto_file import ModelInferRequest
from tests.support.grpc.wire_bytes import cuts, field

SERVICE = "/inference.GRPCInferenceService"
LARGE = bytes(CONVERT_CHUNK + 1)


class _Client(ClientRequest):
    """A request whose body comes in these pieces."""

    def __init__(self, pieces: Sequence[bytes], method: str, encoding: str = "") -> None:
        self.method = "POST"
        self.target = f"{SERVICE}/{method}"
        fields = {"Content-Type": "application/grpc"}
        if encoding:
            fields["grpc-encoding"] = encoding
        self.headers = CIMultiDictProxy(CIMultiDict(fields))
        self.content_length = None
        self.carries_trailers = True
        self._pieces = [piece for piece in pieces if piece]
        self.reads = 0

    async def read(self) -> bytes:
        self.reads += 1
        return self._pieces.pop(0) if self._pieces else b""


def _message(model: str = "m", version: str = "", data: bytes = b"") -> bytes:
    request = ModelInferRequest(model_name=model, model_version=version)
    if data:
        request.raw_input_contents.append(data)
    encoded = bytes(request.SerializeToString())
    return frame(len(encoded)) + encoded


def _grpc(
    *pieces: bytes, method: str = "ModelInfer", encoding: str = "", cap: int = 2**30
) -> GrpcRequest:
    return _request(_Client(pieces, method, encoding), cap, cap)


def _request(
    client: ClientRequest,
    ahead_cap: int = 2**30,
    cap: int = 2**30,
    next_slice: TimeSliceWaiter | None = None,
) -> GrpcRequest:
    if next_slice is None:
        next_slice = ConversionScheduler().next_slice
    limits = replace(LIMITS, max_request_bytes=cap, max_buffered_body_bytes=ahead_cap)
    return GrpcRequest(client, find_method(client.target), limits, next_slice)


async def _find(request: GrpcRequest) -> tuple[ScannedModel, tuple[str, ...]]:
    with Deadline(10, 10) as deadline, MemoryBudget(2**40).reserve() as reservation:
        return await request.find_model(deadline, reservation)


async def _rest(request: GrpcRequest) -> bytes:
    pieces = []
    while piece := await request.read():
        pieces.append(bytes(piece))
    return b"".join(pieces)


@given(data=st.data(), size=st.sampled_from([0, 100, len(LARGE)]))
async def test_model_is_found_and_the_body_passes_whole_however_it_is_cut(
    data: st.DataObject, size: int
) -> None:
    body = _message("model", "3", bytes(size))
    request = _grpc(*data.draw(cuts(body)))
    model, names = await _find(request)
    assert (model, names) == (ScannedModel("model", "3"), ("model",))
    assert await _rest(request) == body


async def test_large_body_is_read_until_it_names_a_model() -> None:
    body = _message(data=LARGE)
    client = _Client([body[:100], body[100:200], body[200:]], "ModelInfer")
    request = _request(client)
    assert (await _find(request))[0].name == "m"
    assert (client.reads, request.content_length) == (1, None)


@pytest.mark.parametrize("first", [1, 10, 30, 2 * len(LARGE)])
@pytest.mark.parametrize("size", [0, len(LARGE)], ids=["small", "large"])
async def test_each_further_message_of_a_stream_is_checked(first: int, size: int) -> None:
    """Also those that come in one piece with the first, which alone tells the route."""
    seen: list[ScannedModel] = []
    body = _message("one") + _message("two", data=bytes(size)) + _message("three")
    request = _grpc(body[:first], body[first:], method="ModelStreamInfer")
    assert (await _find(request))[0].name == "one"
    await request.route(2**30, lambda named: seen.append(named[0]))
    assert await _rest(request) == body
    assert [model.name for model in seen] == ["two", "three"]


async def test_large_message_behind_the_first_of_a_stream_tells_no_route() -> None:
    body = _message("one") + _message("two", data=LARGE)
    request = _grpc(body[:100], body[100:], method="ModelStreamInfer")
    assert (await _find(request))[0].name == "one"


async def test_uncompressed_message_behind_a_compressed_one_is_checked() -> None:
    seen: list[str | None] = []
    compressed = gzip.compress(_message("one")[5:])
    body = frame(len(compressed), is_compressed=True) + compressed + _message("two")
    request = _grpc(body, method="ModelStreamInfer", encoding="gzip")
    assert (await _find(request))[0].name == "one"
    await request.route(2**30, lambda named: seen.append(named[0].name))
    assert await _rest(request) == body
    assert seen == ["two"]


@pytest.mark.parametrize("cut", range(10, 16))
async def test_version_in_the_piece_after_the_name_is_found(cut: int) -> None:
    body = _message("model", "3", LARGE)
    request = _grpc(body[:cut], body[cut:])
    assert (await _find(request))[0] == ScannedModel("model", "3")
    assert await _rest(request) == body


async def test_last_member_of_gzip_names_the_model() -> None:
    """grpc-go and grpc-java read all members."""
    compressed = gzip.compress(_message("open")[5:]) + gzip.compress(_message("secret")[5:])
    request = _grpc(frame(len(compressed), is_compressed=True) + compressed, encoding="gzip")
    assert (await _find(request))[0].name == "secret"


def _compressed(data: bytes) -> bytes:
    return frame(len(data), is_compressed=True) + data


GZIPPED = _compressed(gzip.compress(b"\x0a\x01m")[:-4])
MIB, TWO_MIB = (_compressed(gzip.compress(_message(data=bytes(n * 2**20))[5:])) for n in (1, 2))


@pytest.mark.parametrize(
    ("pieces", "encoding", "kind", "text"),
    [
        ([b"\x02\0\0\0\0"], "", ErrorKind.BAD_REQUEST, "flag 2"),
        ([b"\0\0\0\0\x09abc"], "", ErrorKind.BAD_REQUEST, "ends after"),
        ([_message(), _message()], "", ErrorKind.BAD_REQUEST, "takes one message"),
        ([b"\0\xff\xff\xff\xff"], "", ErrorKind.TOO_LARGE, "limits.max_request_bytes"),
        ([_compressed(b"abc")], "", ErrorKind.UNSUPPORTED, "identity"),
        ([GZIPPED], "gzip", ErrorKind.BAD_REQUEST, "ends before its gzip data"),
        ([TWO_MIB], "gzip", ErrorKind.TOO_LARGE, "limits.max_decompression_ratio"),
        ([MIB], "gzip", ErrorKind.TOO_LARGE, "becomes larger"),
    ],
)
async def test_invalid_request_is_refused(
    pieces: list[bytes], encoding: str, kind: ErrorKind, text: str
) -> None:
    cap = 2**22 if "ratio" in text else 2**19
    with refused_with(kind, text):
        await _find(_grpc(*pieces, encoding=encoding, cap=cap))


async def test_large_message_without_a_model_is_not_buffered_for_ever() -> None:
    body = _message("", data=bytes(2**20))
    client = _Client(
        [body[start : start + 2**16] for start in range(0, len(body), 2**16)], "ModelInfer"
    )
    request = _request(client, 2**18)
    with pytest.raises(GatewayError, match="names no model in its first 262144 bytes"):
        await _find(request)


@pytest.mark.parametrize("encoding", ["", "gzip"])
async def test_messages_of_many_fields_share_one_time_slice(encoding: str) -> None:
    """However many streams a client opens, others wait for the scan of 2,000 fields or so."""
    message = b"\x1a\0" * 15_000  # empty fields
    data = gzip.compress(message) if encoding else message
    body = bytes((bool(encoding),)) + len(data).to_bytes(4) + data
    scheduler = ConversionScheduler()
    requests = [
        _request(_Client([body], "ModelInfer", encoding), next_slice=scheduler.next_slice)
        for _ in range(20)
    ]
    with others() as waiting:
        await asyncio.gather(*map(_find, requests))
    assert waiting.turns >= 20 * (len(message) // 2) // 2500


async def test_smaller_cap_of_the_route_applies() -> None:
    request = _grpc(_message(data=bytes(1000)))
    await _find(request)
    with pytest.raises(GatewayError, match="larger than 100 bytes"):
        await request.route(100, lambda _: None)


async def test_tiny_pieces_that_are_read_ahead_take_little_more_than_their_bytes() -> None:
    """An object for each of them would take twenty times as much as is reserved for them."""
    message = _message("m", data=bytes(50_000))
    request = _grpc(*[message[start : start + 2] for start in range(0, len(message), 2)])
    await _find(request)
    assert sum(map(sys.getsizeof, request._ready)) < 1.1 * len(message)
    assert await _rest(request) == message


# ------------------------------------------------------------------------------- rewritten

INFER = find_method("/inference.GRPCInferenceService/ModelStreamInfer")
LOAD = find_method("/inference.GRPCInferenceService/RepositoryModelLoad")
GZIP = CIMultiDictProxy(CIMultiDict({"grpc-encoding": "gzip"}))
LARGE_MESSAGE = _message(data=LARGE)[5:]


def _rewriter(
    budget: MemoryBudget, method: GrpcMethod = INFER, version: str = "", cap: int = 2**20
) -> ModelRewriter:
    limits = replace(LIMITS, max_buffered_body_bytes=cap)
    next_slice = ConversionScheduler().next_slice
    return ModelRewriter(method, "new", version, GZIP, limits, budget.reserve(), next_slice)


def _feed(
    rewriter: ModelRewriter, piece: bytes | memoryview, name_field: int
) -> list[bytes | memoryview]:
    return asyncio.run(rewriter.feed(piece, name_field))


def _framed(message: bytes, is_compressed: bool = False) -> bytes:
    sent = gzip.compress(message) if is_compressed else message
    return frame(len(sent), is_compressed) + sent


MESSAGES = st.lists(
    st.tuples(
        st.one_of(st.binary(max_size=20), st.sampled_from([0, CONVERT_CHUNK]).map(bytes)),
        st.booleans(),
    ),
    max_size=4,
)


@given(messages=MESSAGES, data=st.data())
def test_messages_are_the_same_wherever_the_body_is_cut(
    messages: list[tuple[bytes, bool]], data: st.DataObject
) -> None:
    budget = MemoryBudget(2**30)
    rewriter = _rewriter(budget, version="3")
    body = b"".join(_framed(*each) for each in messages)
    pieces = data.draw(cuts(body))
    sent = b"".join(bytes(chunk) for piece in pieces for chunk in _feed(rewriter, piece, 1))
    names = field(1, b"new") + field(2, b"3")
    assert sent == b"".join(_framed(message + names) for message, _ in messages)
    _feed(rewriter, b"", 1)
    assert budget.total == 0


@pytest.mark.parametrize("name_field", [1, 2])
def test_name_goes_where_it_was_found(name_field: int) -> None:
    message = field(name_field, b"old")
    sent = _feed(_rewriter(MemoryBudget(0), LOAD, "3"), _framed(message), name_field)
    assert sent == [_framed(message + field(name_field, b"new"))]


@pytest.mark.parametrize("cut", range(1, 8))
@pytest.mark.parametrize("second", [b"", _message()[5:]], ids=["empty", "small"])
async def test_rewritten_stream_goes_on_behind_a_large_message(second: bytes, cut: int) -> None:
    """An empty piece, as for a message of which only the size is there, would end the body."""
    messages = [_message()[5:], LARGE_MESSAGE, second, _message()[5:]]
    start = b"".join(map(_framed, messages[:2]))
    rest = b"".join(map(_framed, messages[2:]))
    request = _grpc(start + rest[:cut], rest[cut:], method="ModelStreamInfer")
    await _find(request)
    await request.route(2**30, lambda _: None, _rewriter(MemoryBudget(2**30)))
    renamed = [_framed(message + field(1, b"new")) for message in messages]
    assert await _rest(request) == b"".join(renamed)


def test_large_data_is_not_copied() -> None:
    body = memoryview(_framed(bytes(2 * CONVERT_CHUNK)))
    _, data, _ = _feed(_rewriter(MemoryBudget(0)), body, 1)
    assert isinstance(data, memoryview)
    assert data.obj is body.obj


async def test_other_calls_have_their_turn_while_a_message_is_decompressed() -> None:
    body = _framed(bytes(2**20), is_compressed=True)
    rewriter = _rewriter(MemoryBudget(2**30))
    with others() as waiting:
        await rewriter.feed(body, 1)
    assert waiting.turns >= 2**20 // CONVERT_CHUNK


def test_compressed_message_is_reserved_until_it_was_sent() -> None:
    budget = MemoryBudget(2**20)
    rewriter = _rewriter(budget)
    body = _framed(bytes(1000), is_compressed=True)
    assert _feed(rewriter, body[:-1], 1) == []
    assert _feed(rewriter, body[-1:], 1)
    assert budget.total == 1000
    _feed(rewriter, _framed(b""), 1)
    assert budget.total == 0


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (_framed(bytes(2000), is_compressed=True), ErrorKind.TOO_LARGE),
        (frame(3, is_compressed=True) + b"abc", ErrorKind.BAD_REQUEST),
        (frame(10, is_compressed=True) + gzip.compress(b"abc")[:10], ErrorKind.BAD_REQUEST),
        (frame(MAX_MESSAGE), ErrorKind.TOO_LARGE),
    ],
    ids=["beyond the cap", "broken", "cut short", "beyond protobuf"],
)
def test_message_that_cannot_be_rewritten_is_refused(body: bytes, kind: ErrorKind) -> None:
    with refused_with(kind):
        _feed(_rewriter(MemoryBudget(2**20), cap=1999), body, 1)


def test_overfull_gateway_refuses_a_compressed_message() -> None:
    with refused_with(ErrorKind.OVERLOADED):
        _feed(_rewriter(MemoryBudget(100)), _framed(bytes(101), is_compressed=True), 1)
