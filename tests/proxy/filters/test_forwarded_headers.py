"""Headers that the gateway adds for servers, and calls that are traced."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from ipaddress import ip_network

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from gateway.http1.forwarded import Peer
from gateway.http1.head import HeadParser, RequestHead, encode_head, parse_lines
from gateway.observe.call_trace import CallTrace
from gateway.proxy.filters.forwarded_headers import NOTED_HEADERS, ForwardedHeaders, ForwardedPolicy
from gateway.proxy.filters.trace_sampling import TraceSampler

CLIENT = Peer("192.0.2.7")
ON_UNIX = Peer(is_unix=True)
GONE = Peer()
"""A client that disconnected before its address was read."""

WAY = ForwardedPolicy(headers=True, trusted=(), via=False, request_id=False)
BELIEVING = ForwardedPolicy(
    headers=True,
    trusted=(ip_network("192.0.2.0/24"), ip_network("2001:db8::/32")),
    via=False,
    request_id=False,
)
VIA = ForwardedPolicy(headers=False, trusted=(), via=True, request_id=False)
IDS = ForwardedPolicy(headers=False, trusted=(), via=False, request_id=True)
ALL = ForwardedPolicy(headers=True, trusted=(), via=True, request_id=True)


def _headers(*pairs: tuple[str, str]) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict(pairs))


_PARSER = HeadParser(("host", "via", "cdn-loop"), NOTED_HEADERS)


def _head(*pairs: tuple[str, str], version: str = "1.1") -> RequestHead:
    """Parse a head with these headers; a Host is added where HTTP demands one."""
    if version == "1.1" and not any(name == "Host" for name, _ in pairs):
        pairs = (("Host", "h"), *pairs)
    return _PARSER.parse_request(encode_head(f"GET / HTTP/{version}", pairs))


def _lines(
    forwarding: ForwardedPolicy, peer: Peer, *pairs: tuple[str, str], version: str = "1.1"
) -> list[tuple[str, str]]:
    headers, lines, _ = ForwardedHeaders(forwarding, peer).make(_head(*pairs, version=version))
    assert parse_lines(lines) == headers
    return list(headers)


# -------------------------------------------------------------------------------------- X-Forwarded


HOST = ("Host", "h")
CLAIMS = (
    ("X-Forwarded-For", "203.0.113.1"),
    ("x-forwarded-for", "203.0.113.2, 203.0.113.3"),
    ("X-Forwarded-Proto", "https"),
    ("X-Forwarded-Host", "public.example"),
    HOST,
)
BLANK = (("X-Forwarded-For", ""), ("X-Forwarded-Proto", ""), HOST)
CLAIMED = "203.0.113.1, 203.0.113.2, 203.0.113.3"
OVER_TLS = Peer("2001:db8::7", is_tls=True)

FORWARDED: dict[
    str, tuple[ForwardedPolicy, Peer, tuple[tuple[str, str], ...], tuple[str, str, str]]
] = {
    "a client": (WAY, CLIENT, (HOST,), ("192.0.2.7", "http", "h")),
    "over IPv6 and TLS": (WAY, OVER_TLS, (HOST,), ("2001:db8::7", "https", "h")),
    "on a Unix socket": (BELIEVING, ON_UNIX, (HOST,), ("", "http", "h")),
    "gone": (BELIEVING, GONE, CLAIMS, ("", "http", "h")),
    "without host": (WAY, CLIENT, (("Host", ""),), ("192.0.2.7", "http", "")),
    "untrusted": (WAY, CLIENT, CLAIMS, ("192.0.2.7", "http", "h")),
    "of another network": (BELIEVING, Peer("192.0.3.7"), CLAIMS, ("192.0.3.7", "http", "h")),
    "of another IPv6 network": (
        BELIEVING,
        Peer("2001:db9::1"),
        CLAIMS,
        ("2001:db9::1", "http", "h"),
    ),
    "trusted": (BELIEVING, CLIENT, CLAIMS, (f"{CLAIMED}, 192.0.2.7", "https", "public.example")),
    "trusted over TLS": (BELIEVING, OVER_TLS, BLANK, ("2001:db8::7", "https", "h")),
    "trusted on a Unix socket": (WAY, ON_UNIX, CLAIMS, (CLAIMED, "https", "public.example")),
}
"""Policies, peers and their headers; and X-Forwarded-For, -Proto and -Host for servers."""


@pytest.mark.parametrize(("forwarding", "peer", "sent", "made"), FORWARDED.values(), ids=FORWARDED)
def test_x_forwarded_headers_describe_the_client_and_extend_what_trusted_ones_say(
    forwarding: ForwardedPolicy,
    peer: Peer,
    sent: tuple[tuple[str, str], ...],
    made: tuple[str, str, str],
) -> None:
    names = ("X-Forwarded-For", "X-Forwarded-Proto", "X-Forwarded-Host")
    expected = [(name, value) for name, value in zip(names, made, strict=True) if value]
    assert _lines(forwarding, peer, *sent) == expected


# ---------------------------------------------------------------------------------------- Forwarded


def test_forwarded_is_extended_only_where_the_client_sends_it() -> None:
    claims = (("Forwarded", "for=a"), ("Host", "h"), ("forwarded", 'for="[::1]";by=b, for=c'))
    own = "for=192.0.2.7;host=h;proto=http"
    assert dict(_lines(WAY, CLIENT, *claims))["Forwarded"] == own
    assert dict(_lines(BELIEVING, CLIENT, *claims))["Forwarded"] == (
        f'for=a, for="[::1]";by=b, for=c, {own}'
    )
    assert "Forwarded" not in dict(_lines(BELIEVING, CLIENT, ("Host", "h")))


# ---------------------------------------------------------------------------------------------- Via


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_via_names_the_gateway(version: str) -> None:
    own = f"{version} tensorgate"
    assert _lines(VIA, CLIENT, version=version) == [("Via", own)]
    # Extended for untrusted clients too: no server acts on Via.
    passed = (("Via", "1.1 a, 2 b"), ("X", "1"), ("VIA", "1.1 c"))
    assert _lines(VIA, CLIENT, *passed, version=version) == [("Via", f"1.1 a, 2 b, 1.1 c, {own}")]


# ---------------------------------------------------------------------------------------------- ids


def _id(*given: str) -> str:
    head = _head(*(("X-Request-Id", each) for each in given))
    headers, lines, request_id = ForwardedHeaders(IDS, CLIENT).make(head)
    assert headers == (("X-Request-Id", request_id),)
    assert lines == f"X-Request-Id: {request_id}\r\n".encode()
    return request_id


@pytest.mark.parametrize("given", ["0", "x" * 128, "!\"#'()*:;=?[]{}~"])
def test_request_id_of_the_client_is_used(given: str) -> None:
    assert _id(given) == given


@pytest.mark.parametrize(
    "given", [(), ("",), ("x" * 129,), ("a b",), ("a\tb",), ("caf\xe9",), ("a", "a"), ("a", "b")]
)
def test_request_id_is_generated(given: tuple[str, ...]) -> None:
    assert re.fullmatch("[0-9a-f]{32}", _id(*given))


def test_forked_processes_generate_different_ids() -> None:
    head = _head(("Host", "h"))
    forwarded_headers = ForwardedHeaders(IDS, CLIENT)
    forwarded_headers.make(head)
    ids = set()
    for _ in range(4):
        reader, writer = os.pipe()
        if not (child := os.fork()):
            os.write(writer, forwarded_headers.make(head)[2].encode())
            os._exit(0)
        os.waitpid(child, 0)
        ids.add(os.read(reader, 64))
        os.close(reader)
        os.close(writer)
    ids.add(forwarded_headers.make(head)[2].encode())
    assert len(ids) == 5


# -------------------------------------------------------------------------------------------- loops


@pytest.mark.parametrize(
    ("via", "lines"),
    [
        (True, [("Via", "1.1 a, 1.1 tensorgate-abc")]),
        (False, [("CDN-Loop", "b; c=d, tensorgate-abc")]),
    ],
)
def test_gateway_recognizes_a_request_that_it_sent(via: bool, lines: list[tuple[str, str]]) -> None:
    own = ForwardedPolicy(headers=False, trusted=(), via=via, request_id=False, identity="abc")
    other = replace(own, identity="def")
    told = _lines(own, CLIENT, ("Via", "1.1 a"), ("CDN-Loop", "b; c=d"))
    assert told == lines
    for sent in (told, _lines(other, CLIENT, *told), own.own_request_headers):
        assert own.is_loop(_headers(*sent))
    for sent in ((), (("Via", "1.1 tensorgate"),), other.own_request_headers):
        assert not own.is_loop(_headers(*sent))
    assert own.replaced_headers == {lines[0][0].lower()}


# -------------------------------------------------------------------------------------- all headers


def test_alternating_heads_get_their_own_headers() -> None:
    forwarded_headers = ForwardedHeaders(ALL, CLIENT)
    one = _head(("Host", "one"), ("X-Request-Id", "1"))
    two = _head(("Host", "two"), ("Via", "1.1 proxy"))
    for _ in range(3):
        headers, encoded, request_id = forwarded_headers.make(one)
        assert headers == (
            ("X-Forwarded-For", "192.0.2.7"),
            ("X-Forwarded-Proto", "http"),
            ("X-Forwarded-Host", "one"),
            ("Via", "1.1 tensorgate"),
            ("X-Request-Id", "1"),
        )
        assert parse_lines(encoded) == headers
        assert request_id == "1"
        lines = dict(forwarded_headers.make(two)[0])
        assert lines["X-Forwarded-Host"] == "two"
        assert lines["Via"] == "1.1 proxy, 1.1 tensorgate"
        assert lines["X-Request-Id"] != "1"


def test_other_keyed_headers_do_not_hide_a_new_host() -> None:
    parser = HeadParser(("host", "via", "cdn-loop", "accept"), NOTED_HEADERS)
    forwarded_headers = ForwardedHeaders(ALL, CLIENT)
    for host, accept, version in (
        ("one", "a", "1.1"),
        ("one", "b", "1.1"),
        ("two", "b", "1.1"),
        ("two", "c", "1.0"),
    ):
        pairs = (("Host", host), ("Accept", accept))
        head = parser.parse_request(encode_head(f"GET / HTTP/{version}", pairs))
        headers, encoded, _ = forwarded_headers.make(head)
        assert dict(headers)["X-Forwarded-Host"] == host
        assert dict(headers)["Via"] == f"{version} tensorgate"
        assert parse_lines(encoded) == headers


@pytest.mark.parametrize("forwarding", [WAY, BELIEVING, VIA, IDS, ALL])
def test_replaced_headers_cover_all_generated_headers(forwarding: ForwardedPolicy) -> None:
    claims = (*CLAIMS, ("Forwarded", "for=a"), ("Via", "1.1 a"), ("X-Request-Id", "a"))
    made = {name.lower() for name, _ in _lines(forwarding, CLIENT, *claims)}
    assert made == forwarding.replaced_headers


TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = (f"traceparent: 00-{TRACE}-{SPAN}-{flags}" for flags in ("01", "00"))
STATE = "tracestate: a=1"


def _traced_head(*lines: str) -> RequestHead:
    data = "\r\n".join(("POST /v2 HTTP/1.1", "Host: gw:8080", *lines, "", ""))
    return HeadParser((), NOTED_HEADERS).parse_request(data.encode("latin-1"))


def _never() -> float:
    raise AssertionError("the caller has decided")


def _sample(
    *lines: str, ratio: float = 0.5, random: Callable[[], float] = _never
) -> CallTrace | None:
    sampler = TraceSampler(ratio, lambda _: None, random)
    return sampler.sample(_traced_head(*lines), Peer("10.0.0.1", is_tls=True), "2")


def test_sampled_caller_is_continued() -> None:
    trace = _sample(SAMPLED, STATE, ratio=0.0)
    assert trace is not None
    assert (trace.trace_id, trace.parent_id, trace.state) == (TRACE, SPAN, "a=1")
    assert (trace.scheme, trace.host, trace.http_version) == ("https", "gw:8080", "2")


def test_caller_that_is_not_sampled_is_not_traced() -> None:
    assert _sample(UNSAMPLED, STATE, ratio=1.0) is None


@pytest.mark.parametrize(
    "lines",
    [
        (),
        (STATE,),
        ("traceparent: 00-nonsense", STATE),
        (SAMPLED, SAMPLED, STATE),
        (SAMPLED.upper().replace("TRACEPARENT", "traceparent"), STATE),
    ],
)
def test_call_without_a_valid_parent_begins_a_trace_by_the_ratio(lines: tuple[str, ...]) -> None:
    assert _sample(*lines, random=lambda: 0.5) is None
    assert _sample(*lines, ratio=0.0, random=lambda: 0.0) is None
    trace = _sample(*lines, random=lambda: 0.49)
    assert trace is not None
    assert trace.trace_id not in ("", TRACE, "0" * 32)
    assert len(trace.trace_id) == 32
    assert (trace.parent_id, trace.state) == ("", "")
    assert _sample(*lines, ratio=1.0, random=lambda: 0.999999) is not None


def test_invalid_tracestate_does_not_end_a_trace() -> None:
    trace = _sample(SAMPLED, STATE, "tracestate: =")
    assert trace is not None
    assert (trace.parent_id, trace.state) == (SPAN, "")
