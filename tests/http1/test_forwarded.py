"""The Forwarded header: RFC 7239, sections 4 and 6."""

import pytest

from gateway.http1.forwarded import Peer, forwarded_element


@pytest.mark.parametrize(
    ("peer", "host", "element"),
    [
        (Peer("192.0.2.7"), "h", "for=192.0.2.7;host=h;proto=http"),
        (Peer("192.0.2.7"), "h:80", 'for=192.0.2.7;host="h:80";proto=http'),
        (Peer("192.0.2.7"), "", "for=192.0.2.7;proto=http"),
        (Peer("192.0.2.7"), 'a"b\\c', r'for=192.0.2.7;host="a\"b\\c";proto=http'),
        (Peer("2001:db8::1", is_tls=True), "h", 'for="[2001:db8::1]";host=h;proto=https'),
        (Peer(is_unix=True), "h", "for=unknown;host=h;proto=http"),
        (Peer(), "h", "for=unknown;host=h;proto=http"),
    ],
)
def test_forwarded_element_follows_rfc_7239(peer: Peer, host: str, element: str) -> None:
    # RFC 7239, sections 4 and 6
    assert forwarded_element(peer, host) == element
