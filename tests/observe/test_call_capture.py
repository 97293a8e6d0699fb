"""What is kept of a captured call, and that it is always JSON."""

import base64

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.observe.call_capture import CallCapture, CapturedMessage

SIZE = "Inference-Header-Content-Length"
TEXTS = st.text(st.characters(), max_size=20)  # with halves of surrogate pairs


def _message(*pieces: bytes, headers: tuple[tuple[str, str], ...] = ()) -> CapturedMessage:
    message = CapturedMessage("POST /x HTTP/1.1", headers, 64 * 1024)
    for piece in pieces:
        message.add(piece)
    return message


@given(st.lists(st.integers(0, 40_000), max_size=8))
def test_begin_of_a_body_is_kept_with_its_size(sizes: list[int]) -> None:
    pieces = [bytes([index]) * size for index, size in enumerate(sizes)]
    described = _message(*map(memoryview, pieces)).describe()  # type: ignore[arg-type]
    assert described["size"] == sum(sizes)
    assert base64.b64decode(described["body"]) == b"".join(pieces)[: 64 * 1024]


def test_body_that_is_sent_again_is_kept_once() -> None:
    message = _message(b"abc")
    message.restart()
    message.add(b"abcd")
    assert message.describe()["size"] == 4
    assert base64.b64decode(message.describe()["body"]) == b"abcd"


@pytest.mark.parametrize(
    ("value", "size"),
    [
        *[("0", 0), ("5", 5), ("10", 10), ("11", None), ("", None), ("-1", None)],
        *[("²", None), ("٣", None), ("9" * 20, None), ("9" * 5000, None), ("5, 5", None)],
    ],
)
def test_size_of_the_json_is_told_if_there_is_as_much(value: str, size: int | None) -> None:
    assert _message(bytes(10), headers=((SIZE.upper(), value),)).describe()["json_size"] == size


def test_body_without_that_header_has_no_json_before_tensors() -> None:
    assert _message(b"{}").describe()["json_size"] is None


def test_first_attempts_are_kept() -> None:
    capture = CallCapture()
    for index in range(20):
        attempt = capture.begin("u", f"http://{index}", _message())
        attempt.error = f"no {index}"  # those that are not kept can be used as well
    described = capture.describe()
    assert [each["endpoint"] for each in described] == [f"http://{index}" for index in range(8)]
    assert described[7] == {
        "upstream": "u",
        "endpoint": "http://7",
        "request": _message().describe(),
        "response": None,
        "error": "no 7",
    }


@given(TEXTS, TEXTS, TEXTS)
def test_whatever_was_sent_is_described_as_json(one: str, other: str, third: str) -> None:
    capture = CallCapture()
    attempt = capture.begin("u", "http://s", CapturedMessage(one, [(other, third), (SIZE, one)], 9))
    attempt.error = third
    attempt.response = CapturedMessage(other, [], 9)
    attempt.response.trailers = [(third, one)]
    (described,) = orjson.loads(orjson.dumps(capture.describe()))
    clean = [each.encode(errors="replace").decode() for each in (one, other, third)]
    assert described["request"]["start"] == clean[0]
    assert described["request"]["headers"][0] == clean[1:]
    assert described["response"]["trailers"] == [[clean[2], clean[0]]]
    assert described["error"] == (clean[2] or None)
