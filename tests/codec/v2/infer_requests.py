"""Converts infer requests for tests, and compares results with the reference."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

from gateway.codec.json import array_scanner
from gateway.codec.v2.binary_request import write_binary_header
from gateway.codec.v2.request import InferRequestReader
from gateway.codec.v2.response import ResponseEncoder
from gateway.errors import ErrorKind, GatewayError
from tests.codec import strategies
from tests.codec.reference import PlainRequest, RefusedError, convert_request

HEADER_CAP = 1 << 20
DEPTH_CAP = 12
WINDOW = array_scanner.WINDOW
STRING_WINDOW = array_scanner.STRING_WINDOW


@dataclass(frozen=True)
class Accepted:
    header: bytes
    tensors: list[bytes | int]
    binary_by_default: bool
    binary_by_output: dict[str, bool]
    data_size: int
    missing_size: int
    as_base64: frozenset[str] = frozenset()

    @property
    def fields(self) -> Any:
        return json.loads(self.header)


@dataclass(frozen=True)
class Failed:
    kind: ErrorKind
    message: str


Outcome = Accepted | Failed


def feed_all(codec: InferRequestReader | ResponseEncoder, pieces: list[bytes], work: bool) -> None:
    """Feed a whole message; ``work`` says whether to convert between the pieces."""
    for piece in pieces:
        codec.feed(piece)
        while work and codec.step():
            pass
    codec.feed(b"", last=True)


def outcome(
    pieces: list[bytes],
    *,
    work: bool = True,
    header_cap: int = HEADER_CAP,
    depth_cap: int = DEPTH_CAP,
) -> Outcome:
    """Convert a body; `work` says whether to convert between the pieces."""
    codec = InferRequestReader(header_cap, depth_cap)
    try:
        feed_all(codec, pieces, work)
        request = codec.finish()
    except GatewayError as error:
        return Failed(error.kind, error.message)
    return Accepted(
        write_binary_header(request),
        [part if isinstance(part, int) else b"".join(part) for part in request.tensors],
        request.head.output_encoding.binary_by_default,
        dict(request.head.output_encoding.binary_by_output),
        request.data_size,
        request.missing_size,
        request.head.output_encoding.as_base64,
    )


def converted(body: bytes) -> Accepted:
    found = outcome([body])
    assert isinstance(found, Accepted)
    return found


def plain_outcome(body: bytes) -> PlainRequest | None:
    try:
        return convert_request(body, DEPTH_CAP)
    except RefusedError:
        return None


def agrees(found: Outcome, plain: PlainRequest | None) -> bool:
    if isinstance(found, Failed):
        without_comma = "bytes without a comma" in found.message
        return found.kind is ErrorKind.BAD_REQUEST and (plain is None or without_comma)
    return plain is not None and (
        normal(found.header) == normal(json.dumps(plain.header).encode())
        and found.tensors == plain.tensors
        and found.binary_by_default == plain.binary_by_default
        and found.binary_by_output == plain.binary_by_output
        and found.as_base64 == plain.as_base64
        and found.data_size == sum(map(size, plain.tensors))
        and found.missing_size == sum(part for part in plain.tensors if isinstance(part, int))
    )


def size(part: bytes | int) -> int:
    return part if isinstance(part, int) else len(part)


def normal(header: bytes) -> str:
    """Return a header in a normal form.

    Integers are as a 64-bit library parses them, and what means nothing is left out.
    """

    def to_int(digits: str) -> int | float:
        value = int(digits)
        return value if -(2**63) <= value < 2**64 else float(value)

    fields = json.loads(header, parse_int=to_int)
    if fields.get("outputs"):
        fields.get("parameters", {}).pop("binary_data_output", None)
    for key in ("outputs", "parameters"):
        if not fields.get(key):
            fields.pop(key, None)
    for output in fields.get("outputs", []):
        if "shared_memory_region" in output["parameters"]:
            output["parameters"].pop("binary_data", None)  # means nothing there
    return json.dumps(fields, sort_keys=True)


def check_law(body: bytes, seed: int, window: int) -> None:
    with strategies.windows_of(window):
        found = outcome([body])
        assert agrees(found, plain_outcome(body)), found
        assert outcome([body], work=False) == found
        assert outcome(strategies.cut(body, seed)) == found
        assert outcome(strategies.cut(body, seed + 1), work=False) == found
        assert outcome(strategies.bytewise(body)) == found


def request_body(datatype: str, shape: str, data: str, *more: str) -> bytes:
    entry = [f'"name":"x","datatype":"{datatype}","shape":{shape},"data":{data}', *more]
    return ('{"inputs":[{' + ",".join(entry) + "}]}").encode()


def pack(code: str, *values: float) -> bytes:
    return struct.pack(f"<{len(values)}{code}", *values)


X = "input 'x': "


def chunks(body: bytes, step: int) -> list[bytes]:
    return [body[i : i + step] for i in range(0, len(body), step)]


def check_large(body: bytes, steps: tuple[int, ...] = (65536, 50_001)) -> Accepted:
    found = converted(body)
    assert agrees(found, plain_outcome(body))
    for step in steps:
        assert outcome(chunks(body, step)) == found
    return found
