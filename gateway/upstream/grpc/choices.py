"""Chooses how an upstream uses gRPC, by its settings and its dialect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gateway.protocol.dialects import Dialect

GrpcCancellation = Literal["auto", "forward", "drain"]
"""The setting ``grpc_cancellation`` of an upstream."""

_NAMES = {True: "grpc", False: "http", None: None}


@dataclass(frozen=True, slots=True)
class InferenceProtocol:
    """Chooses the protocol in which inference of HTTP clients goes to the servers of an upstream.

    It has the addresses that endpoints have, and the setting ``inference_protocol``.
    Endpoints with both addresses get inference over the faster protocol, which the dialect tells,
    unless the setting names one.
    """

    has_http: bool = True
    has_grpc: bool = False
    setting: Literal["auto", "http", "grpc"] = "auto"

    @property
    def is_choice(self) -> bool:
        """Tell whether endpoints have both addresses."""
        return self.has_http and self.has_grpc

    def is_grpc(self, dialect: Dialect | None) -> bool | None:
        """Tell whether inference goes over gRPC; None if the dialect decides and is unknown."""
        if not self.is_choice:
            return self.has_grpc
        if self.setting != "auto":
            return self.setting == "grpc"
        return None if dialect is None else dialect.faster_over_grpc

    def name(self, dialect: Dialect | None) -> str | None:
        """Return http or grpc; None if that is not known yet."""
        return _NAMES[self.is_grpc(dialect)]

    def reason(self, dialect: Dialect | None) -> str:
        """Say why it is that protocol, or why it is not known."""
        if not self.is_choice:
            return f"the endpoints have no {'gRPC' if self.has_http else 'HTTP'} address"
        if self.setting != "auto":
            return "configured"
        if dialect is None:
            return "the dialect is not known"
        if dialect.faster_over_grpc:
            return f"dialect {dialect.name} is faster over gRPC"
        if dialect.binary:
            return f"dialect {dialect.name} takes binary tensors over HTTP"
        return f"dialect {dialect.name} is not known to be faster over gRPC"

    def describe(self, dialect: Dialect) -> str:
        """Describe the choice for the log; empty if there is none."""
        if not self.is_choice:
            return ""
        protocol = "gRPC" if self.is_grpc(dialect) else "HTTP"
        return f"inference over {protocol}: {self.reason(dialect)}"


def drains_cancelled(setting: GrpcCancellation, dialect: Dialect | None) -> bool:
    """Tell whether cancelled gRPC calls are read to their end, so that no server learns of it.

    Triton 2.39 to 2.58 releases the state of a call twice if a cancellation meets its response, and
    dies: issues 7368 and 8034 of triton-inference-server/server. Unknown servers may do the same.
    """
    if setting != "auto":
        return setting == "drain"
    return dialect is None or not dialect.grpc.survives_cancellation
