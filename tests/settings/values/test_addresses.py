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
ENDPOINTS = [
    ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
    ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
    ("HTTP://triton:80", "http://triton:80"),
    ("http://[0:0::1]:8000", "http://[::1]:8000"),
    ("grpc://127.0.0.1:8001/", "grpc://127.0.0.1:8001"),
    ("GRPCS://triton.example:443", "grpcs://triton.example:443"),
    ("unix:/run/triton.sock", "unix:/run/triton.sock"),
]
HOSTS = [
    ("triton", "triton"),
    ("Triton.example.", "Triton.example."),
    ("127.0.0.1", "127.0.0.1"),
    ("0:0::1", "::1"),
    ("[::1]", "::1"),
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


@pytest.mark.parametrize("written", ["/", "/v2/health/ready", "/a?b=c&d", "/%20", "/" + "a" * 1023])
def test_a_path_stays_as_it_is(written: str) -> None:
    assert parse_path(written) == written


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
