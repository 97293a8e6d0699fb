"""Converts infer responses for tests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from gateway.codec.policies import BytesEncoding, JsonPolicies, Nonfinite
from gateway.codec.v2.response import ResponseEncoder, json_converter
from gateway.errors import GatewayError
from gateway.protocol.messages import OutputEncoding
from tests.codec.v2.infer_requests import Failed, feed_all

HEADER_CAP = BODY_CAP = 1 << 20


def as_json(
    pieces: list[bytes], header_size: int, policies: JsonPolicies | None = None
) -> bytes | Failed:
    codec = json_converter(header_size, policies or JsonPolicies(), 1 << 24, 1 << 24)
    try:
        text = b"".join(codec.text(piece) for piece in pieces)
        codec.finish()
    except GatewayError as error:
        return Failed(error.kind, error.message)
    return text


def as_mixed(
    pieces: list[bytes],
    header_size: int,
    form: OutputEncoding,
    policies: JsonPolicies | None = None,
    body_cap: int = BODY_CAP,
) -> tuple[bytes, bytes] | Failed:
    codec = ResponseEncoder(header_size, form, policies or JsonPolicies(), HEADER_CAP, body_cap)
    try:
        for piece in pieces:
            codec.feed(piece)
        header, tensors = codec.finish()
    except GatewayError as error:
        return Failed(error.kind, error.message)
    return header, b"".join(tensors)


def rewritten(text: str | bytes) -> str:
    """Return JSON in a normal form, with integers as a 64-bit library parses them."""

    def to_int(digits: str) -> int | float:
        value = int(digits)
        return value if -(2**63) <= value < 2**64 else float(value)

    return json.dumps(json.loads(text, parse_int=to_int), sort_keys=True)


NAMES = st.sampled_from(["y", "z", 'q"', "é"])


POLICIES = st.builds(
    JsonPolicies,
    st.sampled_from(Nonfinite),
    st.sampled_from(BytesEncoding),
    st.frozensets(NAMES, max_size=2),
)


ALL = OutputEncoding(True, {})


@dataclass(frozen=True)
class Converted:
    header: bytes
    tensors: bytes

    @property
    def outputs(self) -> Any:
        return json.loads(self.header)["outputs"]


def convert_response(
    pieces: list[bytes],
    form: OutputEncoding = ALL,
    *,
    work: bool = True,
    header_cap: int = 1 << 20,
    body_cap: int = 1 << 24,
) -> Converted | Failed:
    """Convert a response; `work` says whether to convert between the pieces."""
    codec = ResponseEncoder(None, form, JsonPolicies(), header_cap, body_cap)
    try:
        feed_all(codec, pieces, work)
        header, tensors = codec.finish()
    except GatewayError as error:
        return Failed(error.kind, error.message)
    return Converted(header, b"".join(tensors))
