"""Same bytes, same errors, same record: on every path, however request and response are split."""

from __future__ import annotations

import contextlib
import json
import logging
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.observe.call_record import CallRecord
from tests.end_to_end.paths.generated_calls import THEMES, GeneratedCall, generated_calls
from tests.end_to_end.paths.sent_calls import (
    LONG_HEAD,
    SPLIT_WAYS,
    WHOLE,
    Message,
    Outcome,
    SentCalls,
    Way,
)
from tests.support.checks.call_records import call_records as call_records
from tests.support.inference_messages import HEADER_LENGTH
from tests.support.scale import scaled

pytestmark = pytest.mark.usefixtures("one_identity")

_BUFFERED = 64 * 1024
"""Bytes of a body that the gateway waits for, and passes on as a whole."""


def _may_stream(call: GeneratedCall, way: Way, outcome: Outcome) -> bool:
    """Tell whether a response may be passed on in the pieces in which it arrives, or is written."""
    responses = [response.data for response in call.responses]
    if way.is_impatient or any(len(data) > _BUFFERED for data in (*responses, outcome.body or b"")):
        return True
    # Only inference calls wait for chunks: events must not be delayed.
    return way.is_cut and any(b"\r\ncontent-length:" not in data.lower() for data in responses)


def _without_framing(outcome: Outcome, *, may_compress: bool) -> Outcome:
    """Drop what depends on the pieces in which a response is passed on.

    Without a size it is chunked. If it is compressed, each piece is flushed, and a small body is
    compressed only if its size is not known.
    """
    dropped = {"content-length", "transfer-encoding"}
    body, size = outcome.body, outcome.response_bytes
    if may_compress:
        dropped |= {"content-encoding", "etag"}
        size = 0
        with contextlib.suppress(zlib.error):  # not compressed, or not by the gateway
            body = zlib.decompress(body or b"", wbits=47)
    headers = tuple(line for line in outcome.headers if line[0] not in dropped)
    return replace(outcome, headers=headers, body=body, response_bytes=size)


def _has_equal_error(outcome: Outcome, other: Outcome) -> bool:
    """Tell whether outcomes of a broken response differ only as pieces of it arrive.

    An error that is found after the response has started truncates it. Of two errors, the one that
    is found first counts.
    """
    if outcome.received != other.received or not outcome.error[0]:
        return False
    breaks_off = "before the end of its response" in outcome.error[0] + other.error[0]
    is_equal = outcome.error == other.error or (
        breaks_off and outcome.error[1] == other.error[1] == "BAD_RESPONSE"
    )
    return is_equal and (other.body is None or breaks_off)


def _without_request_length(outcome: Outcome) -> Outcome:
    """Drop what says the size of a request: a server may get a chunked one, too.

    Order and spaces mean nothing in JSON: a request without tensors may keep the client's.
    """
    framing = {"content-length", "transfer-encoding", HEADER_LENGTH.lower()}

    def without(messages: tuple[Message, ...]) -> tuple[Message, ...]:
        return tuple(
            (first, tuple(line for line in headers if line[0] not in framing), _in_order(body))
            for first, headers, body in messages
        )

    received, mirrored = without(outcome.received), without(outcome.mirrored)
    return replace(outcome, received=received, mirrored=mirrored)


def _in_order(body: bytes) -> bytes:
    """Return JSON with its members in order, and other bytes as they are."""
    try:
        return json.dumps(json.loads(body), sort_keys=True).encode()
    except ValueError:
        return body


def _is_equal_refusal(outcome: Outcome, other: Outcome) -> bool:
    """Tell whether both were refused for the same kind of error.

    A wrong size is told by other words if the size of the body is not known.
    """
    is_refused = outcome.status in (400, 413) and outcome.error[1] == other.error[1] != ""
    return is_refused and outcome.status == other.status and not outcome.received


def _may_be_repeated(call: GeneratedCall) -> bool:
    """Tell whether only the chunked request can be sent again, as raw binary is buffered then."""
    return len(call.request) > _BUFFERED and "retry_on" in call.route


def differences(call: GeneratedCall, way: Way, outcome: Outcome, other: Outcome) -> Iterator[str]:
    """Yield what differs from the outcome of the whole call, each as a text for people.

    What may differ is here alone; docs/architecture.md says why ("A short wait for small
    bodies").
    """
    if _may_stream(call, way, outcome):
        if _has_equal_error(outcome, other):
            return
        may_compress = "compression" in call.route
        outcome = _without_framing(outcome, may_compress=may_compress)
        other = _without_framing(other, may_compress=may_compress)
    if way.is_chunked:
        if _is_equal_refusal(outcome, other) or _may_be_repeated(call):
            return
        outcome, other = _without_request_length(outcome), _without_request_length(other)
    for each in fields(Outcome):
        one, two = getattr(outcome, each.name), getattr(other, each.name)
        if one != two:
            yield f"{way.name}, {each.name}:\n      {one!r:.3000}\n   != {two!r:.3000}"


_LAW = settings(max_examples=scaled(30), suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("theme", THEMES)
@_LAW
@given(data=st.data(), split=st.sampled_from(SPLIT_WAYS))
async def test_call_has_the_same_outcome_on_every_path(
    data: st.DataObject,
    split: Way,
    theme: str,
    call_records: list[CallRecord],
    fast_path_requests: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    call = data.draw(generated_calls(theme))
    caplog.clear()
    async with SentCalls(call, call_records, fast_path_requests) as calls:
        whole = await calls.send(WHOLE)
        others = [(way, await calls.send(way)) for way in (LONG_HEAD, split)]
    found = [text for way, other in others for text in differences(call, way, whole, other)]
    found += [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]
    assert not found, "\n".join(found)


@pytest.fixture
def paths() -> Iterator[Counter[bool]]:
    """Counts the calls that took the fast path, and those that did not."""
    counted: Counter[bool] = Counter()
    yield counted
    assert counted[True] > counted.total() / 2


@_LAW
@given(call=generated_calls("plain"))
async def test_most_whole_calls_take_the_fast_path(
    call: GeneratedCall,
    call_records: list[CallRecord],
    fast_path_requests: list[str],
    paths: Counter[bool],
) -> None:
    """Else the law would compare the streaming path with itself."""
    async with SentCalls(call, call_records, fast_path_requests) as calls:
        await calls.send(WHOLE)
        paths[calls.took_fast_path] += 1
