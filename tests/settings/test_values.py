"""Single values: addresses, patterns, sizes and durations, and names that were probably meant."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from gateway.routing.matcher import Pattern
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
from gateway.settings.values.patterns import parse_pattern, pattern_warning
from gateway.settings.values.units import (
    Bounded,
    format_percent,
    parse_count,
    parse_duration,
    parse_percent,
    parse_size,
)
from gateway.settings.values.wording import closest_name, did_you_mean, suggest

Parse = Callable[[object], Any]

# --------------------------------------------------------------------------------- addresses


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


# ---------------------------------------------------------------------------------- patterns


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("m", "m"),
        ("*", "m"),
        ("m[]x]", "m]"),
        ("m[!]]", "mx"),
        ("m[!a-z]", "m7"),
        ("m]", "m]"),
        ("m[a-c]-[0-9]", "mb-7"),
        ("re:", ""),
        ("re:m[]x]+", "m]x"),
    ],
)
def test_a_valid_pattern_can_be_compiled(pattern: str, name: str) -> None:
    assert Pattern.of(parse_pattern(pattern)).matches(name)


@pytest.mark.parametrize(
    "pattern",
    ["^bert", "bert$", "resnet.*", "v.+", r"llama-\d+b", "(llama|bert)-7b", "[a-c]+", "^"],
)
def test_regular_expression_without_its_prefix_is_warned_of(pattern: str) -> None:
    assert parse_pattern(pattern) == pattern
    looks = f"'{pattern}' looks like a regular expression, but it is a glob, "
    written = f"where only * ? and [ ] have a meaning; an expression is written 're:{pattern}'"
    assert pattern_warning(pattern) == looks + written


@pytest.mark.parametrize(
    "pattern",
    ["resnet*", "[a-c]*", "resnet.v1", "com.acme[.]*", "a?b", "cost-$5", "re:^a.*$", "text/*"],
)
def test_glob_or_name_is_not_warned_of(pattern: str) -> None:
    assert pattern_warning(parse_pattern(pattern)) == ""


# ------------------------------------------------------------------------------------- units


VALID: dict[Parse, dict[object, float]] = {
    parse_count: {64: 64, "64": 64},
    parse_size: {
        0: 0,
        4096: 4096,
        "7B": 7,
        "64 MiB": 64 * 1024**2,
        "4GiB": 4 * 1024**3,
        "5kB": 5_000,
        "10MB": 10_000_000,
    },
    parse_duration: {
        5: 5.0,
        0.25: 0.25,
        "1.5": 1.5,
        "500ms": 0.5,
        "5 s": 5.0,
        "2m": 120.0,
        "1.5h": 5400.0,
    },
    parse_percent: {
        "0%": 0.0,
        "7 %": 7.0,
        "100%": 100.0,
        0: 0.0,
        1: 1.0,
        12.5: 12.5,
        "50": 50.0,
        "0.5%": 0.5,
    },
}
"""What is written, and what it means."""
INVALID: dict[Parse, tuple[str, list[object]]] = {
    parse_count: (
        "a whole number",
        ["", "ten", "1.0", "-1", "1 000", "٣", "9" * 5000, 1.0, True, None, []],
    ),
    parse_size: (
        "a size such as 64MiB",
        [
            *("", " ", "lots", "MiB", "-1MiB", "1.5MiB", "64mib", "64M", "64MiB ", "1_000", "٣"),
            *("1\n", "9" * 19, "9" * 5000, True, None, 1.0, [1], {"a": 1}),
        ],
    ),
    parse_duration: (
        "a duration such as 30s",
        [
            *("", "soon", "s", "-1s", "1h30m", "5S", "1d", "12:30", ".inf", "nan", "1e3", ".5"),
            *("5.", "٣s", "9" * 5000, True, None, [], {}),
        ],
    ),
    parse_percent: (
        "a percentage such as 50%",
        [
            *("", "%", "half", "-1%", ".5%", "1e1%", "٣%", "0.5", 0.5, 0.999, -1, True, None, []),
            math.nan,
        ],
    ),
}


@pytest.mark.parametrize("parse", VALID)
def test_values_are_read_as_operators_write_them(parse: Parse) -> None:
    for written, value in VALID[parse].items():
        parsed = parse(written)
        assert (parsed, type(parsed)) == (value, type(value))
        if parse is parse_percent:
            assert parse_percent(format_percent(parsed)) == parsed


@pytest.mark.parametrize("parse", INVALID)
def test_an_invalid_value_is_an_error_with_an_example(parse: Parse) -> None:
    expected, values = INVALID[parse]
    for written in values:
        with pytest.raises(ValueError, match=f"^expected {expected}, got "):
            parse(written)


def test_bounds_are_inclusive_and_named_in_the_error() -> None:
    within = Bounded(parse_duration, "1ms", "1h")
    assert [within("1ms"), within(3600)] == [0.001, 3600.0]
    for written in (0, -5, "2h", math.nan, math.inf):
        with pytest.raises(ValueError, match=r"^expected 1ms to 1h, got "):
            within(written)


# ----------------------------------------------------------------------------------- wording


KNOWN = ("triton", "idle_timeout", "least_request", "round_robin", "FP32", "BYTES", "warning")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("Triton", "triton"),
        ("Triton Inference Server", "triton"),
        ("tritn", "triton"),
        ("idleTimeout", "idle_timeout"),
        ("idel_timeout", "idle_timeout"),
        ("LEAST_CONN", "least_request"),
        ("float32", "FP32"),
        ("warn", "warning"),
    ],
)
def test_the_closest_known_name_is_found(name: str, meant: str) -> None:
    assert closest_name(name, KNOWN) == meant


@pytest.mark.parametrize("name", ["", "x", "time", "vllm", "-", 7, None, True, "a" * 100_000])
def test_an_unlike_name_has_no_closest_name(name: object) -> None:
    assert closest_name(name, KNOWN) is None
    assert did_you_mean(name, KNOWN) == ""


def test_suggest_lists_all_names_if_none_is_close() -> None:
    assert suggest("tritn", KNOWN[:2]) == "; did you mean triton?"
    assert suggest("vllm", KNOWN[:2]) == "; known: triton, idle_timeout"


def test_a_known_name_in_quotes_is_proposed_without_them() -> None:
    assert did_you_mean("503", ["502", "503"]) == "; did you mean 503, without quotes?"
