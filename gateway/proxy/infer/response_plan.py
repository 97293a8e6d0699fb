"""Decides by the head of a server's infer response what becomes of its body."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import NamedTuple

from multidict import CIMultiDictProxy

from gateway.codec.policies import JsonPolicies
from gateway.errors import bad_response
from gateway.protocol.messages import OutputEncoding
from gateway.proxy.headers import HEADER_LENGTH
from gateway.proxy.interfaces import Destination


class ResponseAction(Enum):
    """What becomes of the body of a response."""

    UNTOUCHED = "untouched"
    """It passes untouched."""
    FILL = "fill"
    """It is JSON, in which outputs without elements may lack the data that the client wants."""
    WRITE_JSON = "write JSON"
    """Its outputs are binary, and become JSON while they arrive."""
    ENCODE = "encode"
    """Each output is converted to the requested encoding, for which it is buffered."""
    ENCODE_UNLESS_FITTING = "encode unless fitting"
    """The same, unless its JSON says that all outputs have the requested encoding already."""


class ResponsePlan(NamedTuple):
    """What becomes of all responses with the same head to requests of one encoding.

    ``header_size`` is the size of the JSON before binary tensors, None for JSON alone. The caps are
    in bytes, of JSON around data and of data.
    """

    action: ResponseAction
    header_size: int | None
    encoding: OutputEncoding
    policies: JsonPolicies
    header_cap: int
    body_cap: int

    @property
    def policies_and_caps(self) -> tuple[JsonPolicies, int, int]:
        """Return what converters take."""
        return self.policies, self.header_cap, self.body_cap


def plan_response(
    status: int, headers: CIMultiDictProxy[str], encoding: OutputEncoding, destination: Destination
) -> ResponsePlan:
    """Decide what becomes of a response; ``encoding`` is the one that the client wants.

    Raises GatewayError (502) for an invalid size of the JSON, or one above the cap.
    """
    limits, policies = destination.limits, _policies(encoding, destination)
    action, header_size = _choose_action(status, headers, encoding, policies, destination)
    header_cap, body_cap = limits.max_inference_header_bytes, limits.max_buffered_body_bytes
    return ResponsePlan(action, header_size, encoding, policies, header_cap, body_cap)


def _choose_action(
    status: int,
    headers: CIMultiDictProxy[str],
    encoding: OutputEncoding,
    policies: JsonPolicies,
    destination: Destination,
) -> tuple[ResponseAction, int | None]:
    """Return the action, and the size of the JSON before tensors if the action needs it."""
    dialect = destination.upstream.dialect
    if status != 200:
        return ResponseAction.UNTOUCHED, None
    if not reads_response(encoding, destination):
        # The gateway cannot inspect a compressed response.
        is_opaque = HEADER_LENGTH in headers or "Content-Encoding" in headers
        is_passed = is_opaque or not dialect.binary
        return (ResponseAction.UNTOUCHED if is_passed else ResponseAction.FILL), None
    if not dialect.binary:
        return ResponseAction.ENCODE, None
    cap = destination.limits.max_inference_header_bytes
    # If the server may have put data into the JSON, that counts as buffered, not as a header.
    size = parse_header_size(headers, cap if dialect.honors_output_encoding else None)
    is_small = size is None or size <= cap
    is_text_fine = size is not None or not policies.any_base64
    if dialect.honors_output_encoding or (encoding.all_json and is_small and is_text_fine):
        if size is None:
            return ResponseAction.FILL, None
        return (ResponseAction.WRITE_JSON if encoding.all_json else ResponseAction.ENCODE), size
    may_fit = size is not None and is_small
    return (ResponseAction.ENCODE_UNLESS_FITTING if may_fit else ResponseAction.ENCODE), size


def reads_response(encoding: OutputEncoding, destination: Destination) -> bool:
    """Tell whether the gateway must read responses of status 200 to send them as requested."""
    dialect = destination.upstream.dialect
    if dialect.binary:
        return not (encoding.all_binary and dialect.honors_output_encoding)
    return not encoding.all_json or _policies(encoding, destination).any_base64


def parse_header_size(headers: CIMultiDictProxy[str], cap: int | None) -> int | None:
    """Return the size of the JSON before a response's tensors; None without tensors.

    Raises GatewayError (502) for an invalid size, and above the cap if there is one.
    """
    # Servers differ in Content-Type: only this header identifies a binary response.
    values = headers.getall(HEADER_LENGTH, [])
    if not values:
        return None
    value = ", ".join(values)  # two values are no number
    if not (value.isascii() and value.isdigit() and len(value) < 20):
        raise bad_response(f"the server's response has {HEADER_LENGTH}: {value[:40]!r}")
    if cap is not None and int(value) > cap:
        raise bad_response(
            f"the server's response has {value} bytes of JSON before the tensors; "
            f"at most {cap} are taken (limits.max_inference_header_bytes)"
        )
    return int(value)


def _policies(encoding: OutputEncoding, destination: Destination) -> JsonPolicies:
    """Return the destination's policies, with the outputs that the request wants as base64."""
    policies = destination.policies
    if not encoding.as_base64:
        return policies
    return replace(policies, as_base64=encoding.as_base64)
