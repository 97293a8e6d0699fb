"""Results and errors do not depend on where and when numbers are converted."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gateway.codec.elements.decode import decode_numbers
from gateway.codec.elements.encode import NumberEncoder, OffloadedText, TextChunk
from gateway.codec.json import array_scanner
from gateway.codec.offload_interface import Offloader, OffloadFuture
from gateway.codec.policies import JsonPolicies, Nonfinite
from gateway.codec.v2.binary_request import write_binary_header
from gateway.codec.v2.request import InferRequestReader
from gateway.codec.v2.response import json_converter
from gateway.errors import GatewayError
from gateway.protocol.datatypes import Datatype
from tests.codec import strategies
from tests.codec.strategies import output, response_body

HEADER_CAP = 1 << 20
DEPTH_CAP = 12
WINDOWS = (24, 64, array_scanner.WINDOW)


class _RandomFuture(OffloadFuture):
    done = False

    def __init__(self, convert: Callable[[], bytes | None]) -> None:
        self._convert = convert
        self._result: bytes | None = None

    def end(self, has_failed: bool) -> None:
        self.done = True
        with suppress(GatewayError):
            self._result = None if has_failed else self._convert()

    def take_result(self) -> bytes | None:
        return self._result

    async def wait(self) -> None:
        raise AssertionError("nobody waits here")


class _RandomOffloader(Offloader):
    """Accepts some jobs, runs them in any order, and fails some of them."""

    def __init__(self, seed: int, accept_rate: float = 0.7, failure_rate: float = 0.1) -> None:
        self._rng = random.Random(seed)
        self._accept_rate = accept_rate
        self._failure_rate = failure_rate
        self._pending: list[_RandomFuture] = []
        self.count = 0

    def decode(
        self, text: memoryview, datatype: Datatype, open_before: int, open_after: int
    ) -> OffloadFuture | None:
        whole = b"[" * open_before + text + b"]" * open_after
        return self._submit(lambda: decode_numbers(whole, datatype))

    def encode(
        self, data: bytes | memoryview, datatype: Datatype, nonfinite: Nonfinite, continued: bool
    ) -> OffloadFuture | None:
        encoder = NumberEncoder("", datatype, nonfinite)
        return self._submit(lambda: bytes(encoder.encode(data, continued=continued)))

    def _submit(self, convert: Callable[[], bytes | None]) -> OffloadFuture | None:
        if self._rng.random() >= self._accept_rate:
            return None
        self.count += 1
        future = _RandomFuture(convert)
        self._pending.append(future)
        while self._pending and self._rng.random() < 0.5:
            self.run_one()
        return future

    def run_one(self) -> None:
        """Run any one of the jobs."""
        future = self._pending.pop(self._rng.randrange(len(self._pending)))
        future.end(self._rng.random() < self._failure_rate)


def convert_request(pieces: list[bytes], offloader: _RandomOffloader | None) -> Any:
    """Convert a request; return everything about the result, or the error."""
    codec = InferRequestReader(HEADER_CAP, DEPTH_CAP, offloader)
    try:
        for piece in pieces:
            codec.feed(piece)
        codec.feed(b"", last=True)
        while True:
            while codec.step():
                pass
            if codec.future is None:
                break
            assert offloader is not None
            offloader.run_one()
        request = codec.finish()
    except GatewayError as error:
        return error.kind, error.message
    tensors = [part if isinstance(part, int) else b"".join(part) for part in request.tensors]
    return write_binary_header(request), tensors, request.data_size


def write_response(
    pieces: list[bytes], size: int, policies: JsonPolicies, offloader: _RandomOffloader | None
) -> Any:
    """Write a response as JSON; return the text, or the error."""
    codec = json_converter(size, policies, 1 << 24, 1 << 24)
    parts: deque[TextChunk | OffloadedText] = deque()
    text = b""
    try:
        for piece in pieces:
            parts.extend(codec.parts(piece, offloader))
        codec.finish()
        for part in parts:
            while isinstance(part, OffloadedText) and not part.future.done:
                assert offloader is not None
                offloader.run_one()
            text += part.text() if isinstance(part, OffloadedText) else part
    except GatewayError as error:
        return error.kind, error.message
    return text


def check_request(body: bytes, seed: int, window: int) -> None:
    with strategies.windows_of(window):
        expected = convert_request([body], None)
        assert convert_request([body], _RandomOffloader(seed)) == expected
        for accept_rate, failure_rate in ((1, 0), (0.9, 1)):
            offloader = _RandomOffloader(seed, accept_rate, failure_rate)
            pieces = strategies.cut(body, seed + failure_rate)
            assert convert_request(pieces, offloader) == expected


@strategies.LAW
@given(
    st.booleans().flatmap(lambda faulty: strategies.request_bodies(faulty=faulty)), strategies.SEEDS
)
def test_offloading_does_not_change_a_request_or_its_error(body: bytes, seed: int) -> None:
    for window in WINDOWS:
        check_request(body, seed, window)
        check_request(strategies.mutated(body, seed), seed, window)


@strategies.LAW
@given(strategies.responses(), strategies.SEEDS)
def test_offloading_does_not_change_a_response(response: tuple[bytes, int], seed: int) -> None:
    body, size = response
    rng = random.Random(seed)
    policies = JsonPolicies(nonfinite=rng.choice(list(Nonfinite)))
    expected = write_response([body], size, policies, None)
    for failure_rate in (0, 0.3, 1):
        pieces = strategies.cut(body, seed)
        assert write_response(pieces, size, policies, None) == expected
        offloader = _RandomOffloader(seed, failure_rate=failure_rate)
        assert write_response(pieces, size, policies, offloader) == expected


def test_first_error_is_reported_even_if_found_last() -> None:
    numbers = [b"%d" % (number % 100) for number in range(1000)]
    numbers[100], numbers[700] = b"1000", b"true"
    entry = b'{"name":"x","datatype":"UINT8","shape":[1000],"data":[' + b",".join(numbers) + b"]}"
    body = b'{"inputs":[' + entry + b"]}"
    with strategies.windows_of(64):
        for seed in range(50):
            offloader = _RandomOffloader(seed)
            _, message = convert_request([body], offloader)
            assert "element 100" in message
            assert offloader.count


def test_offloaded_results_are_collected_as_soon_as_possible() -> None:
    body = b'{"inputs":[{"name":"x","datatype":"INT32","shape":[9],"data":['
    offloader = _RandomOffloader(0, accept_rate=1, failure_rate=0)
    codec = InferRequestReader(HEADER_CAP, DEPTH_CAP, offloader)
    with strategies.windows_of(64):
        codec.feed(body)
        for _ in range(100):
            codec.feed(b"1234567,1234567,1234567,1234567,1234567,1234567,1234567,1234567,")
            codec.step()
            while codec.future is not None:
                if not codec.future.done:
                    offloader.run_one()
                codec.step()
    assert offloader.count > 90


def test_text_that_could_not_be_offloaded_is_written_here() -> None:
    data = np.array([1, np.nan], np.float32).tobytes()
    body, size = response_body([output("y", "FP32", [2], data)])
    text = write_response(
        [body], size, JsonPolicies(), _RandomOffloader(0, accept_rate=1, failure_rate=0)
    )
    assert b"[1.0,NaN]" in text
