"""Decides whether servers learn that a client has cancelled a gRPC call, or that it waits no more.

Triton 2.39 to 2.58 releases the state of a call twice if a cancellation meets its response, and
dies: issues 7368 and 8034 of triton-inference-server/server.
"""

from __future__ import annotations

from typing import Literal

from gateway.protocol.dialects import Dialect

GrpcCancellation = Literal["auto", "forward", "drain"]
"""The setting ``grpc_cancellation`` of an upstream."""


def drains_cancelled(setting: GrpcCancellation, dialect: Dialect | None) -> bool:
    """Tell whether cancelled calls are read to their end; unknown servers may need it."""
    if setting != "auto":
        return setting == "drain"
    return dialect is None or not dialect.grpc.survives_cancellation
