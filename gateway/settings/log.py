"""Settings of the log, and of the access log in it."""

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, StrictBool
from pydantic_core import PydanticKnownError

from gateway.settings.values.fields import Check, File, Percentage, Section, time
from gateway.settings.values.wording import describe

LOG_FIELDS = (
    "time",
    "client",
    "method",
    "target",
    "operation",
    "route",
    "model",
    "version",
    "upstream",
    "endpoint",
    "attempts",
    "status",
    "grpc_status",
    "answered_by",
    "error_kind",
    "reason",
    "client_form",
    "server_form",
    "request_bytes",
    "response_bytes",
    "sent_bytes",
    "received_bytes",
    "duration_ms",
    "server_ms",
    "first_byte_ms",
    "request_id",
    "trace_id",
)
"""The fields of a line of JSON; a template may name them."""

_BRACES = re.compile(r"\{([^{}]*)\}|[{}]")


def _line_format(value: object) -> str:
    """Return text, json, or a template. Raises ValueError for an unknown field."""
    if value in ("text", "json"):
        return str(value)
    if not isinstance(value, str) or "{" not in value:
        example = "'{status} {duration_ms} {upstream}'"
        raise ValueError(
            f"expected text, json or a template such as {example}, got {describe(value)}"
        )
    if "\n" in value:
        raise ValueError("a template has one line")
    for found in _BRACES.finditer(value):
        if found[1] is None:
            raise ValueError(f"a brace without its counterpart in {describe(value)}")
        if found[1] not in LOG_FIELDS:
            raise ValueError(
                f"unknown field {{{found[1]}}} in the template; known: {', '.join(LOG_FIELDS)}"
            )
    return value


class AccessLog(Section):
    """How calls are logged."""

    format: Annotated[str, Check(_line_format, str)] = "text"
    """What a line looks like: text, json, or a template with fields in braces, such as '{time}
    {status} {model} {duration_ms}'."""
    path: File | None = None
    """File to which the lines are appended. SIGHUP opens it anew, and so does the gateway if it was
    renamed or removed. Without it, they go to stderr."""
    sample: Percentage = Field(default=100.0, json_schema_extra={"default": "100%"})
    """Percentage of the successful calls that are logged. Failing calls always are."""
    slow: Annotated[float, time("1ms", "24h")] | None = None
    """Calls that take at least so long are always logged."""


def _as_section(value: object) -> object:
    """Return the defaults for true, and None for false."""
    if isinstance(value, bool):
        return AccessLog() if value else None
    if not isinstance(value, Mapping):
        raise PydanticKnownError("bool_type")
    return value


class Log(Section):
    """What the gateway logs."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that is logged."""
    access: Annotated[
        AccessLog | None,
        BeforeValidator(_as_section, json_schema_input_type=StrictBool | AccessLog),
    ] = Field(default=AccessLog.model_construct(), json_schema_extra={"default": True})
    """Whether each call is logged in one line: true, false, or how."""
