import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.protocol.request_header import HEADER_LENGTH
from gateway.proxy.headers import end_to_end, to_server, with_body


def _headers(*pairs: tuple[str, str]) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict(pairs))


@pytest.mark.parametrize(
    "name",
    [
        "Connection",
        "Expect",
        "Keep-Alive",
        "Proxy-Authenticate",
        "Proxy-Authentication-Info",
        "Proxy-Authorization",
        "Proxy-Connection",
        "TE",
        "Trailer",
        "Transfer-Encoding",
        "Upgrade",
    ],
)
@pytest.mark.parametrize("spelling", [str, str.lower, str.upper])
def test_hop_by_hop_headers_are_dropped(name: str, spelling: type[str]) -> None:
    assert not end_to_end(_headers((spelling(name), "x"), (spelling(name), "y")))


@pytest.mark.parametrize("value", ["X-A,x-b", " x-a , X-B ", "close, x-a,,x-b", ",x-a,x-b,"])
def test_headers_named_by_connection_are_dropped(value: str) -> None:
    headers = _headers(("X-A", "1"), ("Connection", value), ("X-B", "2"), ("X-C", "3"))
    assert list(end_to_end(headers).items()) == [("X-C", "3")]


@pytest.mark.parametrize(
    "name", ["Host", "Content-Length", "Content-Type", "Content-Encoding", HEADER_LENGTH]
)
def test_end_to_end_headers_cannot_be_named_by_connection(name: str) -> None:
    # RFC 9110, section 7.6.1
    for value in (name, f"close, {name.lower()}", f"x-a,{name.upper()} "):
        headers = _headers((name, "1"), ("Connection", value), ("X-A", "2"))
        assert end_to_end(headers)[name] == "1"


def test_connection_cannot_drop_headers_that_the_gateway_adds() -> None:
    headers = _headers(("Connection", "x-request-id, via"), ("Via", "1.1 a"), ("X-Request-Id", "a"))
    added_headers = (("X-Request-Id", "b"), ("Via", "1.1 a, 1.1 b"))
    dropped_headers = frozenset(("x-request-id", "via"))
    assert tuple(to_server(headers, dropped_headers, added_headers).items()) == added_headers


def test_other_headers_keep_their_order_and_repetition() -> None:
    pairs = [("X-Two", "a"), ("Host", "h"), ("x-two", "b"), ("Content-Length", "7")]
    assert list(end_to_end(_headers(*pairs)).items()) == pairs


def test_with_body_sets_and_drops_headers() -> None:
    old = (("Content-Length", "7"), (HEADER_LENGTH, "5"), ("TE", "x"))
    headers = _headers(*old, ("content-type", "a"), ("Content-Type", "b"), ("ETag", "c"))
    changed = {"Content-Type": "d", "ETag": None, HEADER_LENGTH: "3"}
    assert dict(with_body(headers, changed)) == {"Content-Type": "d", HEADER_LENGTH: "3"}
