"""Converts infer requests and responses for tests, and compares results with the reference."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from gateway.codec.elements.decode import decode_numbers
from gateway.codec.elements.encode import NumberEncoder, OffloadedText, TextChunk
from gateway.codec.json import array_scanner
from gateway.codec.offload_interface import Offloader, OffloadFuture
from gateway.codec.policies import BytesEncoding, JsonPolicies, Nonfinite
from gateway.codec.v2.binary_request import write_binary_header
from gateway.codec.v2.request import InferRequestReader
from gateway.codec.v2.response import ResponseEncoder, json_converter
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.datatypes import Datatype
from gateway.protocol.messages import ALL_BINARY, InferRequest, OutputEncoding
from tests.codec import strategies
from tests.codec.reference import RefusedError, convert_request

HEADER_CAP = BODY_CAP = 1 << 20
DEPTH_CAP = 12
WINDOW = array_scanner.WINDOW
STRING_WINDOW = array_scanner.STRING_WINDOW
X = "input 'x': "


@dataclass(frozen=True)
class Failed:
    kind: ErrorKind
    message: str


def feed_all(codec: InferRequestReader | ResponseEncoder, pieces: list[bytes], work: bool) -> None:
    """Feed a whole message; ``work`` says whether to convert between the pieces."""
    for piece in pieces:
        codec.feed(piece)
        while work and codec.step():
            pass
    codec.feed(b"", last=True)


def normal(text: str | bytes) -> str:
    """Return JSON in a normal form, with integers as a 64-bit library parses them."""
    return json.dumps(_parse(text), sort_keys=True)


def _parse(text: str | bytes) -> Any:
    def to_int(digits: str) -> int | float:
        value = int(digits)
        return value if -(2**63) <= value < 2**64 else float(value)

    return json.loads(text, parse_int=to_int)


# ------------------------------------------------------------------------------- offloading


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
        assert self.done
        self.done = False  # nobody may take it again
        return self._result

    async def wait(self) -> None:
        raise AssertionError("nobody waits here")

    def help(self) -> bool:
        raise AssertionError("nobody helps here")

    def call_when_done(self, callback: Callable[[], None]) -> None:
        raise AssertionError("nobody waits here")


class RandomOffloader(Offloader):
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

    def run_until(self, future: OffloadFuture | None) -> None:
        """Run jobs until one of them is done."""
        while future is not None and not future.done:
            self.run_one()


# ------------------------------------------------------------------------------- requests


@dataclass(frozen=True)
class Accepted:
    header: bytes
    tensors: list[bytes | int]
    encoding: OutputEncoding
    data_size: int
    missing_size: int

    @property
    def fields(self) -> Any:
        return json.loads(self.header)


Outcome = Accepted | Failed


def outcome(
    pieces: list[bytes],
    *,
    work: bool = True,
    header_cap: int = HEADER_CAP,
    depth_cap: int = DEPTH_CAP,
    offloader: RandomOffloader | None = None,
) -> Outcome:
    """Convert a body; `work` says whether to convert between the pieces."""
    codec = InferRequestReader(header_cap, depth_cap, offloader)
    try:
        feed_all(codec, pieces, work)
        while offloader is not None and (codec.step() or codec.future is not None):
            offloader.run_until(codec.future)
        request = codec.finish()
    except GatewayError as error:
        return Failed(error.kind, error.message)
    return accepted(request)


def accepted(request: InferRequest) -> Accepted:
    return Accepted(
        write_binary_header(request),
        [part if isinstance(part, int) else b"".join(part) for part in request.tensors],
        request.head.output_encoding,
        request.data_size,
        request.missing_size,
    )


def converted(body: bytes) -> Accepted:
    found = outcome([body])
    assert isinstance(found, Accepted)
    return found


def agrees(found: Outcome, body: bytes) -> bool:
    """Compare the result of a body with that of the reference."""
    try:
        plain = convert_request(body, DEPTH_CAP)
    except RefusedError:
        return isinstance(found, Failed) and found.kind is ErrorKind.BAD_REQUEST
    if isinstance(found, Failed):
        return found.kind is ErrorKind.BAD_REQUEST and "bytes without a comma" in found.message
    missing = sum(part for part in plain.tensors if isinstance(part, int))
    size = missing + sum(len(part) for part in plain.tensors if isinstance(part, bytes))
    encoding = OutputEncoding(plain.binary_by_default, plain.binary_by_output, plain.as_base64)
    header = json.dumps(plain.header).encode()
    return _normal_header(found.header) == _normal_header(header) and (
        Accepted(b"", found.tensors, found.encoding, found.data_size, found.missing_size)
        == Accepted(b"", plain.tensors, encoding, size, missing)
    )


def _normal_header(header: bytes) -> str:
    """Return a header in a normal form, without what means nothing."""
    fields = _parse(header)
    if fields.get("outputs"):
        fields.get("parameters", {}).pop("binary_data_output", None)
    for key in ("outputs", "parameters"):
        if not fields.get(key):
            fields.pop(key, None)
    for output in fields.get("outputs", []):
        if "shared_memory_region" in output["parameters"]:
            output["parameters"].pop("binary_data", None)
    return json.dumps(fields, sort_keys=True)


def check_law(body: bytes, seed: int, window: int) -> None:
    """Check the result of a body, however it is split, and wherever numbers are converted."""
    with strategies.windows_of(window):
        found = outcome([body])
        assert agrees(found, body), found
        assert outcome([body], work=False) == found
        assert outcome(strategies.cut(body, seed + 1), work=False) == found
        assert outcome(strategies.bytewise(body)) == found
        for accept_rate, failure_rate in ((0, 0), (0.7, 0.1), (1, 0), (0.9, 1)):
            pieces = strategies.cut(body, seed + int(failure_rate))
            offloader = RandomOffloader(seed, accept_rate, failure_rate)
            assert outcome(pieces, offloader=offloader) == found


def request_body(datatype: str, shape: str, data: str, *more: str) -> bytes:
    entry = [f'"name":"x","datatype":"{datatype}","shape":{shape},"data":{data}', *more]
    return ('{"inputs":[{' + ",".join(entry) + "}]}").encode()


def chunks(body: bytes, step: int) -> list[bytes]:
    return [body[i : i + step] for i in range(0, len(body), step)]


def check_large(body: bytes, steps: tuple[int, ...] = (65536, 50_001)) -> Accepted:
    found = converted(body)
    assert agrees(found, body)
    for step in steps:
        assert outcome(chunks(body, step)) == found
    return found


# ------------------------------------------------------------------------------- responses


NAMES = st.sampled_from(["y", "z", 'q"', "é"])
POLICIES = st.builds(
    JsonPolicies,
    st.sampled_from(Nonfinite),
    st.sampled_from(BytesEncoding),
    st.frozensets(NAMES, max_size=2),
)


def as_json(
    pieces: list[bytes],
    header_size: int,
    policies: JsonPolicies | None = None,
    offloader: RandomOffloader | None = None,
) -> bytes | Failed:
    codec = json_converter(header_size, policies or JsonPolicies(), 1 << 24, 1 << 24)
    parts: list[TextChunk | OffloadedText] = []
    text = b""
    try:
        try:
            for piece in pieces:
                parts.extend(codec.parts(piece, offloader))
            codec.finish()
        finally:  # the error of a part stands before that of a later one
            for part in parts:
                if isinstance(part, OffloadedText):
                    assert offloader is not None
                    offloader.run_until(part.future)
                    part = part.text()
                text += part
    except GatewayError as error:
        return Failed(error.kind, error.message)
    return text


@dataclass(frozen=True)
class Converted:
    header: bytes
    tensors: bytes

    @property
    def outputs(self) -> Any:
        return json.loads(self.header)["outputs"]


def convert_response(
    pieces: list[bytes],
    form: OutputEncoding = ALL_BINARY,
    policies: JsonPolicies | None = None,
    *,
    header_size: int | None = None,
    work: bool = True,
    header_cap: int = HEADER_CAP,
    body_cap: int = 1 << 24,
) -> Converted | Failed:
    """Convert a response; `work` says whether to convert between the pieces."""
    codec = ResponseEncoder(header_size, form, policies or JsonPolicies(), header_cap, body_cap)
    try:
        feed_all(codec, pieces, work)
        header, tensors = codec.finish()
    except GatewayError as error:
        return Failed(error.kind, error.message)
    return Converted(header, b"".join(tensors))
