from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from gateway.codec.json import text_reader
from gateway.codec.v1 import nested_reader as v1_values
from gateway.codec.v1 import request as v1_request
from gateway.errors import GatewayError
from tests.codec import strategies
from tests.codec.reference import RefusedError
from tests.codec.reference_v1 import Declared, PlainPredict, convert_predict
from tests.codec.strategies_v1 import predict_requests
from tests.codec.v1.predict_requests import WINDOW, as_plain, convert


@contextmanager
def windows_of(size: int) -> Iterator[None]:
    """Scan text in windows of so many bytes."""
    with ExitStack() as stack:
        stack.enter_context(strategies.windows_of(size))
        for module in (text_reader, v1_values):
            stack.enter_context(mock.patch.object(module, "WINDOW", size))
        stack.enter_context(mock.patch.object(v1_request, "_ROWS_WINDOW", size))
        yield


def outcome(pieces: list[bytes], declared: Declared) -> PlainPredict | str:
    """Return a converted request, or the text of its error."""
    try:
        return as_plain(convert(pieces, declared), declared)
    except GatewayError as error:
        return error.message


# ----------------------------------------------------------------------- independence of splits


WINDOWS = (96, WINDOW)


@given(predict_requests(), strategies.SEEDS)
@strategies.LAW
def test_request_equals_the_reference_however_split(
    made: tuple[bytes, Declared], seed: int
) -> None:
    for window in WINDOWS:
        check_request(*made, seed, window)


def check_request(body: bytes, declared: Declared, seed: int, window: int) -> None:
    expected = convert_predict(body, declared)
    for pieces in ([body], strategies.bytewise(body), strategies.cut(body, seed)):
        with windows_of(window):
            found = outcome(pieces, declared)
        if window < WINDOW and isinstance(found, str):
            # Too long for the window: a name, a value, the text before a comma, or an array of
            # strings before its first object.
            assert "bytes" in found or "is an object" in found
        else:
            assert found == expected


@given(predict_requests(faulty=True), strategies.SEEDS, st.booleans())
@strategies.LAW
def test_refusals_equal_the_reference_however_split(
    made: tuple[bytes, Declared], seed: int, mutate: bool
) -> None:
    for window in WINDOWS:
        check_refusal(*made, seed, mutate, window)


def check_refusal(body: bytes, declared: Declared, seed: int, mutate: bool, window: int) -> None:
    if mutate:
        body = strategies.mutated(body, seed)
    with windows_of(window):
        found = outcome([body], declared)
        for pieces in (strategies.bytewise(body), strategies.cut(body, seed)):
            assert outcome(pieces, declared) == found
    if mutate:
        return
    try:
        expected = convert_predict(body, declared)
    except RefusedError:
        expected = None
    if expected is None or (window < WINDOW and "bytes" in str(found)):
        assert isinstance(found, str)
    else:
        assert found == expected
