"""Descriptions of changed settings."""

from pathlib import Path
from typing import Any

import pytest

from gateway.app.loaded_resources import load_resources
from gateway.app.reload.diff import (
    describe_changes,
    keep_startup_settings,
    settings_needing_restart,
)
from gateway.settings.schema import Settings
from tests.support.certificates import ca_file


def _settings(upstreams: dict[str, Any] | None = None, **more: object) -> Settings:
    every = {"a": {"endpoints": ["http://a:1"]}, "b": {"endpoints": ["http://b:1"]}}
    return Settings.model_validate(
        {"upstreams": upstreams or every, "routes": [{"upstream": "b"}], **more}
    )


B, C = {"endpoints": ["http://b:1"]}, {"endpoints": ["http://c:1"]}
B2 = {"endpoints": ["http://b:2"]}


@pytest.mark.parametrize(
    ("now", "described"),
    [
        (_settings(), "no setting that applies now has changed"),
        (_settings({"b": B}), "upstreams -a"),
        (_settings({"c": C, "b": B2}), "upstreams +c -a ~b"),
        (_settings(log={"access": False}), "log changed"),
        (
            _settings(
                {"b": B}, routes=[{"upstream": "b", "deny_operations": ["trace"]}], watch=False
            ),
            "upstreams -a, watch, routes changed",
        ),
        (_settings(limits={"request_timeout": 7}), "limits changed"),
        (_settings(limits={"connect_timeout": 7}), "upstreams ~a ~b, limits changed"),
        (_settings(limits={"metadata_ttl": 7}), "upstreams ~a ~b, limits changed"),
        (_settings(limits={"metadata_cache_size": 7}), "upstreams ~a ~b, limits changed"),
        (_settings(limits={"idle_timeout": 7}), "upstreams ~a ~b, limits changed"),
        (_settings(listen="127.0.0.1:9"), "listen changed"),
    ],
)
def test_changes_are_described(now: Settings, described: str) -> None:
    before = load_resources(_settings())
    assert describe_changes(load_resources(now, before), before) == described


def test_long_list_of_upstreams_is_shortened() -> None:
    many = {f"u{i}": C for i in range(100)}
    before = load_resources(_settings())
    described = describe_changes(load_resources(_settings({"b": B, **many}), before), before)
    assert described.startswith("upstreams +u0 +u1 ")
    assert described.endswith("+u19 and 81 more")


def test_changed_certificate_file_changes_the_upstream(tmp_path: Path) -> None:
    ca = ca_file(tmp_path)
    settings = _settings({"b": {"endpoints": ["https://b:1"], "tls": {"ca": ca}}})
    before = load_resources(settings)
    assert (
        describe_changes(load_resources(settings, before), before)
        == "no setting that applies now has changed"
    )
    with open(ca, "a") as file:
        file.write("\n")
    assert describe_changes(load_resources(settings, before), before) == "upstreams ~b"


def test_worker_count_needs_a_restart() -> None:
    before, now = _settings(workers=2), _settings(workers="auto", watch=False)
    assert keep_startup_settings(now, before) == _settings(workers=2, watch=False)
    assert settings_needing_restart(now, before) == ["workers"]
    assert settings_needing_restart(before, before) == []
