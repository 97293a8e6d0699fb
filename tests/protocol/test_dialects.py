from __future__ import annotations

import pytest

from gateway.protocol.dialects import DIALECTS, TRITON, TraceForm


@pytest.mark.parametrize(
    ("model", "version", "path"),
    [
        (None, None, "/v2/trace/setting"),
        ("m", None, "/v2/models/m/trace/setting"),
        ("m", "3", "/v2/models/m/trace/setting"),
    ],
)
def test_triton_keeps_trace_settings_per_model(
    model: str | None, version: str | None, path: str
) -> None:
    assert TRITON.trace is not None
    assert TRITON.trace.path(model, version) == path


def test_the_specification_has_trace_settings_per_version() -> None:
    form = TraceForm("/trace", per_version=True)
    assert form.path(None, None) == "/v2/trace"
    assert form.path("m", None) == "/v2/models/m/trace"
    assert form.path("m", "3") == "/v2/models/m/versions/3/trace"


def test_dialects_are_found_by_name() -> None:
    assert DIALECTS["triton"] is TRITON
    assert all(name == dialect.name for name, dialect in DIALECTS.items())
