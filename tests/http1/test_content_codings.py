"""Content-Encoding and Accept-Encoding."""

from __future__ import annotations

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.errors import ErrorKind, GatewayError
from gateway.http1.content_codings import CODINGS, accepted_coding, content_coding, is_encoded


def _headers(name: str, *values: str) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict([(name, value) for value in values]))


@pytest.mark.parametrize(
    ("values", "coding"),
    [
        ((), None),
        (("",), None),
        (("identity",), None),
        ((" Identity ",), None),
        ((" , identity,",), None),
        (("gzip",), "gzip"),
        (("GZip\t",), "gzip"),
        (("x-gzip",), "gzip"),
        (("X-GZIP",), "gzip"),
        (("deflate",), "deflate"),
        (("", "deflate"), "deflate"),
    ],
)
def test_content_coding_is_read_from_the_headers(
    values: tuple[str, ...], coding: str | None
) -> None:
    headers = _headers("content-encoding", *values)
    assert content_coding(headers) == coding
    assert is_encoded(headers) is (coding is not None)


@pytest.mark.parametrize(
    "values",
    [
        *(("br",), ("x-deflate",), ("gzip;q=1",), ("*",), ("x" * 100,)),
        *(("gzip, gzip",), ("gzip", "gzip"), ("identity", "gzip"), ("deflate, identity",)),
    ],
)
def test_unknown_content_coding_is_refused(values: tuple[str, ...]) -> None:
    headers = _headers("Content-Encoding", *values)
    assert is_encoded(headers)
    with pytest.raises(GatewayError) as caught:
        content_coding(headers)
    assert caught.value.kind is ErrorKind.UNSUPPORTED_ENCODING
    said = ", ".join(values)[:60]
    wanted = "use gzip, deflate, or none"
    assert caught.value.message == f"the request's Content-Encoding is {said!r}; {wanted}"


@pytest.mark.parametrize(
    ("value", "coding"),
    [
        ("", None),
        ("gzip", "gzip"),
        ("x-gzip", "gzip"),
        ("gzip, deflate", "gzip"),
        ("gzip, deflate, br, zstd", "gzip"),
        ("gzip;q=0.5, deflate;q=0.5", "gzip"),
        ("gzip ; q=0.5 ,\tdeflate; Q=0.501", "deflate"),
        ("gzip;q=0", None),
        ("gzip;q=0, *", "deflate"),
        ("*", "gzip"),
        ("*;q=0, deflate;q=0.1", "deflate"),
        ("identity", None),
        ("identity;q=0.5, gzip;q=0.4", None),
        ("identity;q=0.4, gzip;q=0.5", "gzip"),
        ("identity;q=0, gzip;q=0.001", "gzip"),
        ("br;q=1.0, gzip;q=0.8, *;q=0.1", "gzip"),
        ("gzip;q=", None),
        ("gzip;q=1.5", None),
        ("gzip;q=1e0", None),
        ("gzip;level=1", None),
        ("gzipped", None),
    ],
)
def test_accepted_coding_has_the_highest_weight(value: str, coding: str | None) -> None:
    assert accepted_coding(_headers("Accept-Encoding", value), CODINGS) == coding


def test_first_offered_coding_wins_among_equals_of_all_lines() -> None:
    headers = _headers("Accept-Encoding", "br", "gzip;q=0.2", "deflate;q=0.2")
    assert accepted_coding(headers, ("deflate", "gzip")) == "deflate"
    assert accepted_coding(headers, ()) is None
    assert accepted_coding(_headers("Accept", "gzip"), CODINGS) is None
    # Only the first elements of a long list count.
    assert accepted_coding(_headers("Accept-Encoding", "," * 30_000 + "gzip"), CODINGS) is None
