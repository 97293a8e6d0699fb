from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from gateway.settings import cross_checks
from gateway.settings.load import load_with_positions
from gateway.settings.problems import SettingsError
from gateway.settings.sections import Forwarded, parse_receiver
from tests.settings.loading import ONE_UPSTREAM, problems
from tests.support.compiled import needs_source


def test_cross_checks_take_a_single_item_as_a_list(file: Path) -> None:
    file.write_text(
        "upstreams: {u: {endpoints: http://10.0.0.1:1, tls: {ca: c}, dns_refresh: 1s}}\n"
        "routes: [{upstream: u, auth: none}]\n"
        "listen: 127.0.0.1:9\n"
        "admin: 127.0.0.1:9\n"
    )
    assert [(each.setting, each.message) for each in problems(file)] == [
        ("upstreams.u.tls", "no endpoint needs it: none is https or grpcs"),
        ("upstreams.u.dns_refresh", "no endpoint has a host name that could be looked up"),
        ("routes[0].auth", "no group of API keys is named 'none'; there are none"),
        ("admin.listen", "needs an address of its own: clients connect there (listen)"),
    ]


def test_a_route_behind_one_without_a_match_is_never_reached(file: Path) -> None:
    for match in ("{}", "{model: null}", "{headers: {}}", "{version: ~, operations: null}"):
        file.write_text(
            f"{ONE_UPSTREAM}routes: [{{match: {match}, upstream: triton}}, {{upstream: triton}}]"
        )
        (problem,) = problems(file)
        assert problem.setting == "routes[1]"
        assert problem.message == "never reached: routes[0] takes every request"


NAMED = """\
tls:
  certificate: {0}/tls.crt
  key: {0}/tls.key
  client_ca: {0}
workers: {1}
api_keys:
  a: {{file: no-keys}}
  b: {{environment: KEYS_OF_B}}
  c: {{environment: KEYS_OF_C}}
upstreams:
  u:
    endpoints: https://u:1
    tls:
      ca: {0}/ca.crt
      certificate: {0}/there
      key: {0}/u.key
routes: [{{upstream: u, auth: [a, b, c]}}]
"""


@pytest.mark.parametrize("workers", ["1", "many"])
def test_missing_files_are_reported_together(file: Path, workers: str) -> None:
    folder = file.parent
    (folder / "there").write_text("")
    file.write_text(NAMED.format(folder, workers))
    with pytest.raises(SettingsError) as error:
        load_with_positions(file, {"KEYS_OF_B": "k"}, with_files=True)
    gone = "cannot be read: No such file or directory"
    expected = [
        f"2: tls.certificate: {folder}/tls.crt {gone}",
        f"3: tls.key: {folder}/tls.key {gone}",
        f"4: tls.client_ca: {folder} cannot be read: Is a directory",
        f"7: api_keys.a.file: no-keys {gone} (in {Path.cwd()})",
        "9: api_keys.c.environment: KEYS_OF_C is not set in the environment",
        f"14: upstreams.u.tls.ca: {folder}/ca.crt {gone}",
        f"16: upstreams.u.tls.key: {folder}/u.key {gone}",
    ]
    if workers == "many":
        expected.insert(3, "5: workers: expected 1 to 256, or auto, got 'many'")
    assert str(error.value) == "\n".join(f"{file}:{line}" for line in expected)
    assert error.value.is_about_files is (workers == "1")


def test_a_pipe_of_keys_is_not_opened(file: Path) -> None:
    pipe = file.parent / "keys"
    os.mkfifo(pipe)
    route = "routes: [{upstream: triton, auth: a}]"
    file.write_text(f"{ONE_UPSTREAM}api_keys: {{a: {{file: {pipe}}}}}\n{route}\n")
    load_with_positions(file, {}, with_files=True)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("there", None),
        ("new", None),
        ("", "Is a directory"),
        ("none/log", "there is no folder {}/none"),
    ],
)
def test_access_log_that_cannot_be_written_is_reported(
    file: Path, name: str, reason: str | None
) -> None:
    (file.parent / "there").write_text("")
    file.write_text(f"{ONE_UPSTREAM}log: {{access: {{path: {file.parent}/{name}}}}}\n")
    if reason is None:
        load_with_positions(file, {}, with_files=True)
        return
    with pytest.raises(SettingsError, match=f"cannot be written: {reason.format(file.parent)}$"):
        load_with_positions(file, {}, with_files=True)


# ---------------------------------------------------------------------------------- single sections


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
