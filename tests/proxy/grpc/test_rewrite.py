"""A message gets the model of its route, wherever the body is cut."""

from __future__ import annotations

import asyncio
import gzip
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.grpc.framing import frame
from gateway.protocol.grpc.methods import GrpcMethod, find_method
from gateway.protocol.grpc.wire import MAX_MESSAGE
from gateway.proxy.admission.conversion_scheduler import ConversionScheduler
from gateway.proxy.admission.memory_budget import MemoryBudget
from gateway.proxy.grpc.rewrite import ModelRewriter
from gateway.sizes import CONVERT_CHUNK
from tests.support.checks.time_slices import others
from tests.support.doubles.streaming import LIMITS
from tests.support.grpc.wire_bytes import field

INFER = find_method("/inference.GRPCInferenceService/ModelStreamInfer")
LOAD = find_method("/inference.GRPCInferenceService/RepositoryModelLoad")
GZIP = CIMultiDictProxy(CIMultiDict({"grpc-encoding": "gzip"}))


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


@given(messages=MESSAGES, cuts=st.lists(st.integers(0, 2 * CONVERT_CHUNK), max_size=6))
def test_messages_are_the_same_wherever_the_body_is_cut(
    messages: list[tuple[bytes, bool]], cuts: list[int]
) -> None:
    budget = MemoryBudget(2**30)
    rewriter = _rewriter(budget, version="3")
    body = b"".join(_framed(*each) for each in messages)
    ends = sorted(min(cut, len(body)) for cut in cuts)
    pieces = [body[start:end] for start, end in zip([0, *ends], [*ends, len(body)], strict=True)]
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
    with pytest.raises(GatewayError) as refused:
        _feed(_rewriter(MemoryBudget(2**20), cap=1999), body, 1)
    assert refused.value.kind is kind


def test_overfull_gateway_refuses_a_compressed_message() -> None:
    budget = MemoryBudget(100)
    with pytest.raises(GatewayError) as refused:
        _feed(_rewriter(budget), _framed(bytes(101), is_compressed=True), 1)
    assert refused.value.kind is ErrorKind.OVERLOADED
