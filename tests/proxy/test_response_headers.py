"""Headers that routes change in their responses, and the value of Server-Timing."""

import re

import pytest
from multidict import CIMultiDict

from gateway.observe.call_record import CallRecord
from gateway.proxy.headers import ResponseHeaderPolicy, server_timing


@pytest.mark.parametrize(
    ("said", "vary"),
    [
        ([], "Accept-Encoding"),
        ([""], "Accept-Encoding"),
        (["Origin"], "Origin, Accept-Encoding"),
        (["Origin", "Accept"], "Origin, Accept, Accept-Encoding"),
        (["Origin, accept-encoding"], "Origin, accept-encoding"),
        (["*"], "*"),
    ],
)
def test_vary_names_accept_encoding(said: list[str], vary: str) -> None:
    headers = CIMultiDict([("X-A", "1"), *(("Vary", value) for value in said)])
    policy = ResponseHeaderPolicy(adds_vary=True)
    assert policy.apply_to_lines(tuple(headers.items())) == (("X-A", "1"), ("Vary", vary))
    policy.apply(headers)
    assert list(headers.items()) == [("X-A", "1"), ("Vary", vary)]


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
