from collections.abc import Callable

import pytest

from gateway.settings.values.addresses import (
    Address,
    TcpAddress,
    UnixAddress,
    has_host_name,
    parse_address,
    parse_endpoint,
    parse_host,
    parse_path,
)

Parse = Callable[[object], object]

ADDRESSES = [
    ("127.0.0.1:8080", TcpAddress("127.0.0.1", 8080)),
    ("0.0.0.0:0", TcpAddress("0.0.0.0", 0)),
    ("my_host.example.:80", TcpAddress("my_host.example.", 80)),
    ("[::1]:8080", TcpAddress("::1", 8080)),
    ("[::]:0", TcpAddress("::", 0)),
    ("unix:/run/tensorgate.sock", UnixAddress("/run/tensorgate.sock")),
]
NOT_ADDRESSES = [
    ("", "expected HOST:PORT, [IPv6]:PORT or unix:/PATH, got ''"),
    ("::1:8080", "expected HOST:PORT, [IPv6]:PORT or unix:/PATH, got '::1:8080'"),
    ("h:-1", "expected HOST:PORT, [IPv6]:PORT or unix:/PATH, got 'h:-1'"),
    ("h:٨", "expected HOST:PORT, [IPv6]:PORT or unix:/PATH, got 'h:٨'"),
    (99999, "expected HOST:PORT, [IPv6]:PORT or unix:/PATH, got 99999"),
    ("300.1.1.1:80", "expected an IPv4 address, got '300.1.1.1'"),
    ("[::x]:80", "expected an IPv6 address, got '::x'"),
    ("[127.0.0.1]:80", "expected an IPv6 address, got '127.0.0.1'"),
    ("-h:80", "expected a host name or an IP address, got '-h'"),
    ("unix:run/s", "expected unix: and the absolute path of a socket, got 'run/s'"),
    ("unix:/run/", "expected unix: and the absolute path of a socket, got '/run/'"),
    ("unix:/" + "é" * 54, "a socket's path may hold 107 bytes, not more"),
]
ENDPOINTS = [
    ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
    ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
    ("HTTP://triton:80", "http://triton:80"),
    ("http://[0:0::1]:8000", "http://[::1]:8000"),
    ("grpc://127.0.0.1:8001/", "grpc://127.0.0.1:8001"),
    ("GRPCS://triton.example:443", "grpcs://triton.example:443"),
    ("unix:/run/triton.sock", "unix:/run/triton.sock"),
]
NOT_ENDPOINTS = [
    (
        "triton:8000",
        "expected a URL such as http://127.0.0.1:8000, got 'triton:8000'; did you mean http://triton:8000?",
    ),
    ("http://h:1\n", "expected a host and a port after http://, got 'h:1\\n'"),
    (
        "grpc://h",
        "expected a host and a port after grpc://, got 'h'; the port is missing, as in grpc://h:8001",
    ),
    ("unix:run/s", "expected unix: and the absolute path of a socket, got 'run/s'"),
    ("UNIX:/s", "expected a URL such as http://127.0.0.1:8000, got 'UNIX:/s'"),
    (
        "http://h:1/v2",
        "expected no path or query after the port, got '/v2'; did you mean http://h:1?",
    ),
    (
        "http://h:1?q",
        "expected no path or query after the port, got '?q'; did you mean http://h:1?",
    ),
    ("http://", "expected a host and a port after http://, got ''"),
    ("http://[::1:80", "expected a host and a port after http://, got '[::1:80'"),
]
HOSTS = [
    ("triton", "triton"),
    ("Triton.example.", "Triton.example."),
    ("127.0.0.1", "127.0.0.1"),
    ("0:0::1", "::1"),
    ("[::1]", "::1"),
]
NOT_HOSTS = [
    ("", "expected a host name or an IP address, got ''"),
    (7, "expected a host name or an IP address, got 7"),
    ("300.1.1.1", "expected an IPv4 address, got '300.1.1.1'"),
    ("h:1", "expected an IPv6 address, got 'h:1'"),
]


@pytest.mark.parametrize(("written", "address"), ADDRESSES)
def test_an_address_reads_back_as_it_was_written(written: str, address: Address) -> None:
    assert parse_address(written) == address
    assert str(address) == written


@pytest.mark.parametrize(
    ("parse", "written", "value"),
    [(parse_endpoint, *row) for row in ENDPOINTS] + [(parse_host, *row) for row in HOSTS],
)
def test_an_endpoint_and_a_host_are_in_one_form(parse: Parse, written: str, value: str) -> None:
    assert parse(written) == value


@pytest.mark.parametrize(
    ("parse", "written", "message"),
    [
        *[(parse_address, *row) for row in NOT_ADDRESSES],
        *[(parse_endpoint, *row) for row in NOT_ENDPOINTS],
        *[(parse_host, *row) for row in NOT_HOSTS],
    ],
)
def test_an_invalid_address_is_an_error(parse: Parse, written: object, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse(written)
    assert str(error.value) == message


@pytest.mark.parametrize("written", ["/", "/v2/health/ready", "/a?b=c&d", "/%20", "/" + "a" * 1023])
def test_a_path_stays_as_it_is(written: str) -> None:
    assert parse_path(written) == written


@pytest.mark.parametrize(
    "written",
    ["", "v2", "http://h/", "/two words", "/a\nb", "/a#b", "/é", "/" + "a" * 1024, 7, None, ["/"]],
)
def test_an_invalid_path_is_an_error(written: object) -> None:
    with pytest.raises(ValueError, match=r"^expected a path such as /v2/health/ready, got "):
        parse_path(written)


@pytest.mark.parametrize(
    ("endpoint", "has_name"),
    [
        ("http://triton:8000", True),
        ("https://4.example:1", True),
        ("http://10.0.0.1:8000", False),
        ("http://[::1]:8000", False),
        ("unix:/triton:8000", False),
        ("what?", False),
    ],
)
def test_has_host_name_is_false_for_ip_addresses_and_sockets(endpoint: str, has_name: bool) -> None:
    assert has_host_name(endpoint) is has_name
