"""Probes a server: whether it is ready, and whether its dialect is as declared."""

from __future__ import annotations

import asyncio

from gateway.app.preflight.report import Verdict, excerpt
from gateway.errors import GatewayError
from gateway.protocol.dialect_detection import DetectedDialect
from gateway.protocol.dialects import DIALECTS, Dialect
from gateway.sizes import MAX_PROBE_RESPONSE
from gateway.upstream.control_client import send_control_request
from gateway.upstream.pool.dialect import detect_dialect
from gateway.upstream.transport import UpstreamEndpoint

_READY = "/v2/health/ready"


async def probe_server(
    endpoint: UpstreamEndpoint, declared: str, time_limit: float
) -> tuple[Verdict, tuple[str, ...]]:
    """Probe a server within ``time_limit`` seconds; ``declared`` is its dialect, or auto."""
    messages: list[str] = []
    verdict = Verdict.UNAVAILABLE
    try:
        async with asyncio.timeout(time_limit):
            is_ready, readiness = await _probe_readiness(endpoint)
            verdict = Verdict.NOT_READY
            messages.append(readiness)
            detected = await detect_dialect(endpoint)
    except TimeoutError:
        messages.append(f"no response{' to GET /v2' if messages else ''} within {time_limit:g} s")
        return verdict, tuple(messages)
    except GatewayError as error:
        messages.append(error.message)
        return verdict, tuple(messages)
    differs, dialect = _compare(declared, detected)
    messages.append(dialect)
    if differs:
        return Verdict.MISMATCH, tuple(messages)
    return Verdict.AS_DECLARED if is_ready else verdict, tuple(messages)


async def probe_grpc_address(
    endpoint: UpstreamEndpoint, time_limit: float
) -> tuple[Verdict, tuple[str, ...]]:
    """Probe the gRPC address of a server within ``time_limit`` seconds: whether it is ready.

    Its dialect shows at its HTTP address.
    """
    try:
        async with asyncio.timeout(time_limit):
            is_ready, readiness = await _probe_readiness(endpoint)
    except TimeoutError:
        return Verdict.UNAVAILABLE, (f"no response within {time_limit:g} s",)
    except GatewayError as error:
        return Verdict.UNAVAILABLE, (error.message,)
    return Verdict.AS_DECLARED if is_ready else Verdict.NOT_READY, (readiness,)


async def _probe_readiness(endpoint: UpstreamEndpoint) -> tuple[bool, str]:
    response = await send_control_request(endpoint, "GET", _READY, MAX_PROBE_RESPONSE)
    if response.status == 200:
        return True, "ready"
    asked = "ServerReady" if endpoint.speaks_grpc else f"GET {_READY}"
    quoted = f"{response.status} {excerpt(response.body)}".rstrip()
    return False, f"not ready: {asked} returned {quoted}"


def _compare(declared: str, detected: DetectedDialect) -> tuple[bool, str]:
    """Tell whether a server's dialect is certainly not as declared, and describe it."""
    name = _display_name(detected.dialect)
    if declared == "auto":
        return False, f"dialect {name}: it {detected.reason}"
    if detected.certain and _differs(detected.dialect, DIALECTS[declared]):
        return True, f"dialect {name}, but {declared} is declared: it {detected.reason}"
    if detected.certain and detected.dialect.name in DIALECTS:
        return False, f"dialect {declared}, as declared: it {detected.reason}"
    return (
        False,
        f"dialect {declared} is declared, but the server does not confirm it: it {detected.reason}",
    )


def _differs(detected: Dialect, declared: Dialect) -> bool:
    if detected.binary is not declared.binary:
        return True
    # Without the binary form all dialects are alike. An unknown name may be any of them.
    return detected.binary and detected.name in DIALECTS and detected.name != declared.name


def _display_name(dialect: Dialect) -> str:
    known = DIALECTS.get(dialect.name)
    older = known is not None and known.binary and not dialect.binary
    return f"{dialect.name} without the binary form" if older else dialect.name
