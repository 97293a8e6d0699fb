"""Where the admin address is."""

import pytest

from gateway.top.address import AdminAddress, parse_admin_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9080", AdminAddress("127.0.0.1:9080", "127.0.0.1", 9080)),
        ("[::1]:9080", AdminAddress("[::1]:9080", "::1", 9080)),
        ("host:1", AdminAddress("host:1", "host", 1)),
        ("unix:/run/a.sock", AdminAddress("unix:/run/a.sock", socket="/run/a.sock")),
        ("http://host:9080", AdminAddress("http://host:9080", "host", 9080)),
        ("http://host:9080/#calls", AdminAddress("http://host:9080", "host", 9080)),
        ("http://host/a/b/", AdminAddress("http://host/a/b", "host", 80, prefix="/a/b")),
        ("https://host", AdminAddress("https://host", "host", 443, tls=True)),
        ("http://[::1]/x", AdminAddress("http://[::1]/x", "::1", 80, prefix="/x")),
    ],
)
def test_addresses_are_parsed(text: str, address: AdminAddress) -> None:
    assert parse_admin_address(text) == address


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("host", "expected HOST:PORT"),
        ("9080", "expected HOST:PORT"),
        ("", "expected HOST:PORT"),
        ("host:0", "expected a port from 1 to 65535"),
        ("host:99999", "expected a port up to 65535"),
        ("http://user:pass@host", "a user name or password"),
        ("http://host/?x=1", "expected no query"),
        ("http://host/\x1b", "expected a path of ASCII characters"),
        ("http://host/a b", "expected a path of ASCII characters"),
        ("http://", "a host is missing"),
        ("http://unix:/x", "expected"),
        ("ftp://host:1", "expected HOST:PORT"),
        ("unix:relative", "expected unix: and the absolute path"),
    ],
)
def test_other_texts_are_refused_with_a_reason(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        parse_admin_address(text)
