"""A server asked whether it is ready, and what it is."""

from __future__ import annotations

import asyncio

from gateway.app.preflight.report import Verdict, excerpt
from gateway.errors import GatewayError
from gateway.protocol.dialect_detection import DetectedDialect as Recognised
from gateway.protocol.dialects import DIALECTS, Dialect
from gateway.sizes import MAX_PROBE_RESPONSE
from gateway.upstream.control_client import send_control_request
from gateway.upstream.pool.dialect import detect_dialect
from gateway.upstream.transport import UpstreamEndpoint

_READY = "/v2/health/ready"


async def probe_server(
    endpoint: UpstreamEndpoint, declared: str, time: float
) -> tuple[Verdict, tuple[str, ...]]:
    """Ask a server, which has ``time`` seconds for all; ``declared`` is its dialect, or auto."""
    told: list[str] = []
    verdict = Verdict.UNAVAILABLE
    try:
        async with asyncio.timeout(time):
            answer = await send_control_request(endpoint, "GET", _READY, MAX_PROBE_RESPONSE)
            verdict = Verdict.NOT_READY
            is_ready = answer.status == 200
            said = f"{answer.status} {excerpt(answer.body)}".rstrip()
            told.append("ready" if is_ready else f"not ready: it answered GET {_READY} with {said}")
            found = await detect_dialect(endpoint)
    except TimeoutError:
        told.append(f"no answer{' to GET /v2' if told else ''} within {time:g} s")
        return verdict, tuple(told)
    except GatewayError as error:
        told.append(error.message)
        return verdict, tuple(told)
    differs, dialect = _compared(declared, found)
    told.append(dialect)
    if differs:
        return Verdict.MISMATCH, tuple(told)
    return Verdict.AS_DECLARED if is_ready else verdict, tuple(told)


def _compared(declared: str, found: Recognised) -> tuple[bool, str]:
    """Tell whether a server's dialect is surely another than declared, and in words what it is."""
    is_named = _named(found.dialect)
    if declared == "auto":
        return False, f"dialect {is_named}: it {found.reason}"
    if found.certain and _is_another(found.dialect, DIALECTS[declared]):
        return True, f"dialect {is_named}, but {declared} is declared: it {found.reason}"
    if found.certain and found.dialect.name in DIALECTS:
        return False, f"dialect {declared}, as declared: it {found.reason}"
    return False, f"dialect {declared} is declared, which it does not show: it {found.reason}"


def _is_another(found: Dialect, declared: Dialect) -> bool:
    if found.binary is not declared.binary:
        return True
    # Without the binary form they are all alike; one whose name is not known may be any other.
    return found.binary and found.name in DIALECTS and found.name != declared.name


def _named(dialect: Dialect) -> str:
    known = DIALECTS.get(dialect.name)
    older = known is not None and known.binary and not dialect.binary
    return f"{dialect.name} without the binary form" if older else dialect.name
