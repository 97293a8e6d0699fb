"""Decides by its head what becomes of a server's infer response."""

from __future__ import annotations

from dataclasses import replace

from multidict import CIMultiDictProxy

from gateway.codec.policies import JsonPolicies
from gateway.codec.v2.buffered_response import ResponsePlan
from gateway.codec.v2.tensor_check import tensor_check
from gateway.http1.content_codings import is_encoded
from gateway.protocol.messages import OutputEncoding
from gateway.protocol.operations import OperationKind
from gateway.protocol.response_header import choose_response_action
from gateway.proxy.destination import Destination


def plan_response(
    status: int, headers: CIMultiDictProxy[str], encoding: OutputEncoding, destination: Destination
) -> ResponsePlan:
    """Decide what becomes of a response.

    Raises GatewayError (502) as ``choose_response_action`` and ``tensor_check``.
    """
    check = tensor_check(status, headers, OperationKind.INFER)
    policies, limits = policies_for(encoding, destination), destination.limits
    action, header_size = choose_response_action(
        status,
        headers,
        destination.upstream.dialect,
        encoding,
        policies.any_base64,
        limits.max_inference_header_bytes,
    )
    caps = limits.max_inference_header_bytes, limits.max_buffered_body_bytes
    return ResponsePlan(
        action, header_size, encoding, policies, *caps, check, is_coded=is_encoded(headers)
    )


def policies_for(encoding: OutputEncoding, destination: Destination) -> JsonPolicies:
    """Return the destination's policies, with the outputs that a request wants as base64."""
    policies = destination.policies
    return replace(policies, as_base64=encoding.as_base64) if encoding.as_base64 else policies
