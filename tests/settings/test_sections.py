"""Networks of trusted proxies, and the receiver of traces, whose packages must be installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from gateway.settings import cross_checks
from gateway.settings.load import load_with_positions
from gateway.settings.problems import SettingsError
from gateway.settings.sections import Forwarded, parse_receiver
from tests.support.compiled import needs_source


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://127.0.0.1:4318", "http://127.0.0.1:4318"),
        ("http://collector:4318/", "http://collector:4318"),
        ("HTTP://collector:4318", "http://collector:4318"),
        ("https://[::1]:4317", "https://[::1]:4317"),
        ("https://[::1]", "https://[::1]:443"),
        ("https://traces.example/otlp/v1/traces", "https://traces.example:443/otlp/v1/traces"),
        ("http://collector", "http://collector:80"),
    ],
)
def test_receiver_is_a_url(given: str, url: str) -> None:
    assert parse_receiver(given) == url


@needs_source
@pytest.mark.parametrize(
    ("missing", "protocol", "named"),
    [
        ({"opentelemetry.proto", "google.protobuf"}, "http", "opentelemetry.proto"),
        ({"grpc"}, "grpc", "grpc"),
        ({"grpc"}, "http", None),
    ],
)
def test_missing_extra_is_an_error_that_names_it(
    missing: set[str], protocol: str, named: str | None, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "gateway.settings.cross_checks.find_spec",
        lambda name: None if name in missing else find_spec(name),
    )
    text = "upstreams: {triton: {endpoints: ['http://triton:8000']}}\n"
    file.write_text(f"{text}tracing: {{endpoint: 'http://a:1', protocol: {protocol}}}\n")
    if named is None:
        assert load_with_positions(file, {}, with_files=True).settings.tracing is not None
        return
    for at_start in (True, False):
        with pytest.raises(SettingsError) as error:
            load_with_positions(file, {}, with_files=at_start, with_written_files=True)
        what = f"it takes the Python package {named}, which is not installed"
        assert str(error.value) == f"{file}:2: tracing: {what}: pip install 'tensorgate[otel]'"


def test_check_for_the_extra_loads_none_of_it() -> None:
    loaded = set(sys.modules)
    assert not list(cross_checks.missing_packages({"tracing": {"protocol": "grpc"}}))
    assert not {name for name in set(sys.modules) - loaded if name.startswith("grpc.")}
    assert list(cross_checks.missing_packages({})) == []
    assert not cross_checks._is_installed("no_such_package.proto")


@pytest.mark.parametrize(
    ("value", "networks"),
    [
        ("none", ()),
        ("all", ("0.0.0.0/0", "::/0")),
        ("10.0.0.0/8", ("10.0.0.0/8",)),
        ("192.0.2.7", ("192.0.2.7/32",)),
        (["::1", "2001:DB8::/32", "127.0.0.1"], ("::1/128", "2001:db8::/32", "127.0.0.1/32")),
        (["10.0.0.0/255.0.0.0"], ("10.0.0.0/8",)),
    ],
)
def test_trusted_proxies_are_networks(value: object, networks: tuple[str, ...]) -> None:
    assert Forwarded.model_validate({"trusted_proxies": value}).trusted_proxies == networks
    assert Forwarded.model_validate({"trusted_proxies": networks}).trusted_proxies == networks
