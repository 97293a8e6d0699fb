from __future__ import annotations

from itertools import product

import orjson
import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.codec.v2.tensor_check import NoTensorsError, TensorCheck, last_byte, tensor_check
from gateway.errors import ErrorKind, GatewayError
from gateway.protocol.operations import OperationKind
from gateway.protocol.request_header import HEADER_LENGTH


def _typed(content_type: str | None, **others: str) -> CIMultiDictProxy[str]:
    fields = others if content_type is None else {"Content-Type": content_type, **others}
    return CIMultiDictProxy(CIMultiDict(fields))


INFER, PREDICT, GENERATE = OperationKind.INFER, OperationKind.PREDICT, OperationKind.GENERATE


@pytest.mark.parametrize("kind", [INFER, PREDICT, GENERATE])
def test_page_or_status_without_tensors_is_refused(kind: OperationKind) -> None:
    pages = ("text/html", " Text/HTML;charset=utf-8", "application/xhtml+xml", "text/xml")
    for content_type in (*pages, "application/xml"):
        for status in (200, 201, 206):
            with pytest.raises(NoTensorsError) as caught:
                tensor_check(status, _typed(content_type), kind)
            assert caught.value.kind is ErrorKind.BAD_RESPONSE
            assert repr(content_type) in caught.value.message
        for status in (302, 304, 400, 500):
            assert tensor_check(status, _typed(content_type), kind) is None
    for status in (204, 205):
        with pytest.raises(NoTensorsError, match=f"of status {status} holds no tensors"):
            tensor_check(status, _typed("application/json"), kind)


@pytest.mark.parametrize(
    ("kind", "headers"),
    [
        (INFER, _typed("text/html", **{HEADER_LENGTH: "2", "Content-Encoding": "gzip"})),
        (INFER, _typed("application/json", **{"Content-Encoding": "gzip"})),
        (PREDICT, _typed("text/event-stream")),
        (PREDICT, _typed("application/octet-stream")),
        (PREDICT, _typed("image/svg+xml")),
        # Its head goes to the client at once, and a decoupled model may generate nothing.
        (GENERATE, _typed("text/event-stream")),
    ],
)
def test_body_is_not_looked_into_where_the_head_is_enough(
    kind: OperationKind, headers: CIMultiDictProxy[str]
) -> None:
    assert tensor_check(200, headers, kind) is None


@pytest.mark.parametrize(
    ("kind", "body", "is_right"),
    [
        (INFER, b'{"outputs":[]}', True),
        (INFER, b'{"' + b"x" * 2000 + b'":1,"outputs":[]}', True),
        (INFER, b'{"\\u006futputs":[]}', True),
        (INFER, b"{}", False),
        (INFER, b"", False),
        (INFER, b"<html>", False),
        (INFER, b"ok", False),
        (PREDICT, b"[7]", True),
        (PREDICT, b"", False),
        (PREDICT, b"<think>4</think> 2", True),
        (PREDICT, b"<HTML lang=en>", False),
        (GENERATE, b'<?xml version="1.0"?>', False),
        (GENERATE, b"", False),
        (GENERATE, b" \r\n", False),
    ],
)
def test_body_tells_whether_it_holds_tensors(
    kind: OperationKind, body: bytes, is_right: bool
) -> None:
    wholes: tuple[bytes | memoryview, ...] = (body, memoryview(body))
    for content_type, whole in product(("application/json", "text/plain", None), wholes):
        check = _text_check(content_type, kind)
        if is_right:
            end = check.check_start(whole[:1], None)
            end.check(len(whole), last_byte(whole))
            check.check_whole(whole)
        else:
            with pytest.raises(NoTensorsError):
                check.check_whole(whole)


def _text_check(content_type: str | None, kind: OperationKind) -> TensorCheck:
    check = tensor_check(200, _typed(content_type), kind)
    assert check is not None
    return check


@pytest.mark.parametrize("end", [b"", b"}", b"}]", b"}], ", b"}]}x"])
@pytest.mark.parametrize("padding", [b"", b"1," * 40_000], ids=["small", "large"])
def test_json_without_its_end_is_refused(end: bytes, padding: bytes) -> None:
    """A server that sends no length, and dies within its response, seems to have ended it."""
    check = _text_check("application/json", INFER)
    start = b'{"outputs":[{"name":"o","datatype":"FP32","shape":[3],"data":[' + padding
    check.check_whole(start + b"1]}]}" + b" \r\n" * 1000)
    body = start + b"1.0,2" + end
    if end == b"}":
        check.check_whole(body)  # to tell it from an end takes reading the whole
        return
    with pytest.raises(GatewayError, match="JSON that breaks off"):
        check.check_whole(body)
    with pytest.raises(GatewayError, match="JSON that breaks off"):
        check.check_start(body[:100], len(body)).check(len(body), last_byte(body))


@pytest.mark.parametrize(
    ("content_type", "body", "is_right"),
    [
        ("application/json", b'{"predictions":[1', False),
        ("application/vnd.v1+json", b'{"a":[1]', False),
        ("application/json", b"[1,2", False),
        ("application/json", b'"text"', True),
        ("application/json", b"{" + b" " * 100_000, False),
        ("application/json", b"{" + b" " * 100_000 + b"} ", True),
        (None, b"{hello", True),
    ],
)
def test_other_json_without_its_end_is_refused(
    content_type: str | None, body: bytes, is_right: bool
) -> None:
    for kind in (PREDICT, GENERATE):
        check = _text_check(content_type, kind)
        if is_right:
            check.check_whole(body)
        else:
            with pytest.raises(GatewayError, match="JSON that breaks off"):
                check.check_whole(body)


def _output(**changed: object) -> dict[str, object]:
    parameters = {"binary_data_size": 12}
    return {"name": "o", "datatype": "FP32", "shape": [3], "parameters": parameters, **changed}


def _binary(header: bytes, size: int | None = None) -> TensorCheck:
    length = str(len(header) if size is None else size)
    headers = _typed("application/octet-stream", **{HEADER_LENGTH: length})
    check = tensor_check(200, headers, INFER)
    assert check is not None
    return check


_RAW = bytes(range(12))
_IN_JSON = {"name": "j", "datatype": "INT8", "shape": [1], "data": [1]}


@pytest.mark.parametrize(
    ("document", "data"),
    [
        ({"outputs": [_output()]}, _RAW),
        ({"id": "1", "outputs": [_output(), _output(name="p")]}, _RAW * 2),
        ({"outputs": [_output(), _IN_JSON]}, _RAW),
        ({"outputs": [_output(datatype="FP8")]}, _RAW),
        ({"outputs": [_output(shape=[0], parameters=None)]}, b""),
        ({"outputs": []}, b""),
    ],
)
def test_binary_response_passes(document: dict[str, object], data: bytes) -> None:
    header = orjson.dumps(document)
    check, body = _binary(header), header + data
    for whole in (body, memoryview(body), body):
        check.check_whole(whole)
    for size in (None, len(body)):
        check.check_start(header, size).check(len(body), b"")


@pytest.mark.parametrize(
    ("document", "data", "words"),
    [
        ({"outputs": [_output()]}, b"", "ends before"),
        ({"outputs": [_output()]}, _RAW + b"x", "more bytes"),
        ({"outputs": [_output(datatype="FP8")]}, _RAW[1:], "ends before"),
        ({"outputs": [_output(shape=[4])]}, _RAW, "takes 16 bytes"),
        ({"model_name": "m"}, b"", "has no outputs"),
        ({"outputs": {}}, b"", "outputs"),
        ({"outputs": [1]}, b"", "lacks|outputs"),
    ],
)
def test_binary_response_with_other_tensors_than_its_json_says_is_refused(
    document: dict[str, object], data: bytes, words: str
) -> None:
    header = orjson.dumps(document)
    check, body = _binary(header), header + data
    for _ in range(2):
        with pytest.raises(GatewayError, match=words) as caught:
            check.check_whole(body)
        assert caught.value.kind is ErrorKind.BAD_RESPONSE
        with pytest.raises(GatewayError, match=words):
            check.check_start(header, None).check(len(body), b"")


def test_binary_response_that_differs_from_the_last_is_checked() -> None:
    first = orjson.dumps({"id": "a", "outputs": [_output()]})
    check = _binary(first)
    check.check_whole(first + _RAW)
    check.check_whole(first.replace(b'"a"', b'"b"') + _RAW)
    with pytest.raises(GatewayError):
        check.check_whole(first.replace(b'"a"', b'"a,') + _RAW)  # its id does not end
    with pytest.raises(GatewayError):
        check.check_whole(first.replace(b":12", b":13") + _RAW)
    with pytest.raises(GatewayError):
        check.check_whole(first + _RAW[1:])


@pytest.mark.parametrize("more", [1, 10**18])
def test_json_that_is_larger_than_its_response_is_refused(more: int) -> None:
    header = orjson.dumps({"outputs": [_output(parameters=None, data=[1, 2, 3])]})
    body = header + _RAW
    check = _binary(header, len(body) + more)
    for size in (None, len(body)):
        with pytest.raises(GatewayError, match=f": {len(body) + more}, but {len(body)} bytes"):
            check.check_start(body, size).check(len(body), b"")
    with pytest.raises(GatewayError, match=f"but {len(body)} bytes"):
        check.check_whole(body)


@pytest.mark.parametrize("more", [-20, -1, 1, 12])
def test_json_that_ends_elsewhere_than_its_length_says_is_refused(more: int) -> None:
    header = orjson.dumps({"outputs": [_output()]})
    with pytest.raises(GatewayError, match="JSON"):
        _binary(header, len(header) + more).check_whole(header + _RAW)


def test_large_json_of_a_binary_response_is_not_parsed() -> None:
    header = b"{" + b"x" * 20_000
    check = _binary(header)
    check.check_whole(header + _RAW)
    with pytest.raises(GatewayError, match="20001, but 20000 bytes"):
        check.check_whole(header[:-1])


@pytest.mark.parametrize("body", [b"", b"<html>" + b" " * 200])
def test_page_with_the_header_of_a_binary_response_is_refused(body: bytes) -> None:
    with pytest.raises(NoTensorsError, match=r"empty body|<html>"):
        _binary(b"x" * 100).check_whole(body)


@pytest.mark.parametrize("values", [["0"], ["-1"], ["x"], [""], ["1", "1"]])
def test_invalid_size_of_the_json_is_refused(values: list[str]) -> None:
    headers = CIMultiDictProxy(CIMultiDict((HEADER_LENGTH, value) for value in values))
    with pytest.raises(GatewayError, match=HEADER_LENGTH) as caught:
        tensor_check(200, headers, INFER)
    assert caught.value.kind is ErrorKind.BAD_RESPONSE
    assert tensor_check(404, headers, INFER) is None


def test_error_quotes_text_but_no_bytes() -> None:
    error = NoTensorsError(200, "text/html")
    assert "begins with 'a b'" in error.quoting(b" a\n\tb ").message
    assert "an empty body" in error.quoting(b"").message
    assert error.quoting(b"\x1f\x8b\x08\0").message == error.message
    assert len(NoTensorsError(200, "t" * 5000, b"w" * 5000).message) < 500
