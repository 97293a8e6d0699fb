from typing import Any

import pytest

from gateway.demo.server.errors import RequestError
from gateway.demo.server.trace import TraceSettings


def test_model_without_settings_uses_the_global_ones() -> None:
    settings = TraceSettings()
    settings.update("add", {"trace_count": "5"})
    settings.update("", {"trace_rate": "50", "trace_count": "9"})
    assert (settings.get("add")["trace_rate"], settings.get("add")["trace_count"]) == ("50", "5")
    assert settings.get("half")["trace_count"] == "9"


def test_null_clears_a_setting() -> None:
    settings = TraceSettings()
    settings.update("add", {"trace_rate": "7", "trace_level": ["TENSORS", "TIMESTAMPS"]})
    changed = settings.update("add", {"trace_rate": None})
    assert changed["trace_rate"] == settings.get("")["trace_rate"]
    assert changed["trace_level"] == ["TIMESTAMPS", "TENSORS"]


def test_empty_and_unknown_settings_change_nothing() -> None:
    settings = TraceSettings()
    before = settings.update("add", {"trace_rate": "7"})
    assert settings.update("add", {}) == before
    assert settings.update("add", {"colour": "red"}) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"trace_rate": 7},
        {"trace_rate": "x"},
        {"trace_rate": "-1"},
        {"trace_rate": "9" * 5000},
        {"trace_count": "-2"},
        {"log_frequency": "1.5"},
        {"trace_level": "OFF"},
        {"trace_level": ["OFF", "TENSORS"]},
        {"trace_level": ["LOUD"]},
        {"trace_level": [3]},
        {"trace_level": []},
    ],
)
def test_one_wrong_setting_rejects_all_changes(changes: dict[str, Any]) -> None:
    settings = TraceSettings()
    before = settings.get("add")
    with pytest.raises(RequestError) as rejected:
        settings.update("add", {"log_frequency": "3", **changes})
    assert rejected.value.status == 400
    assert settings.get("add") == before


def test_trace_file_cannot_be_changed() -> None:
    with pytest.raises(RequestError, match="trace file location") as rejected:
        TraceSettings().update("", {"trace_file": "/tmp/x"})
    assert rejected.value.status == 501
