"""The value of Server-Timing: what is known of a call's times."""

import re

import pytest

from gateway.observe.call_record import CallRecord
from gateway.proxy.response_headers import server_timing

# W3C Server Timing, section 3.2, with one parameter only.
_VALUE = re.compile(r"[a-z-]+;dur=\d+\.\d+(, [a-z-]+;dur=\d+\.\d+)*")


def _record(**known: float | str) -> CallRecord:
    record = CallRecord("POST", "/v2/models/m/infer")
    for name, value in known.items():
        setattr(record, name, value)
    return record


@pytest.mark.parametrize(
    ("known", "response_seconds", "value"),
    [
        ({}, None, ""),
        (
            {"prepare_seconds": 0.0012344, "queue_seconds": 0.25, "server_form": "binary"},
            None,
            "queue;dur=250.0, convert-request;dur=1.234",
        ),
        (
            {
                "prepare_seconds": 0.0,
                "queue_seconds": 1e-7,
                "first_byte_seconds": 12.5,
                "server_form": "json",
            },
            0.0008,
            "queue;dur=0.0, convert-request;dur=0.0, server;dur=12500.0, convert-response;dur=0.8",
        ),
        (
            {"prepare_seconds": 0.001, "first_byte_seconds": 0.01},
            0.001,
            "queue;dur=0.0, server;dur=10.0",
        ),
    ],
    ids=["not queued yet", "sent", "converted", "passed untouched"],
)
def test_value_has_the_metrics_that_are_known(
    known: dict[str, float | str], response_seconds: float | None, value: str
) -> None:
    assert server_timing(_record(**known), response_seconds) == value
    assert not value or _VALUE.fullmatch(value)
