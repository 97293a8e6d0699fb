"""Trace settings: global ones, and those of models, which override them."""

import re
from collections.abc import Callable
from typing import Any, Final

from gateway.demo.server import documents
from gateway.demo.server.errors import RequestError

Settings = dict[str, str | list[str]]

_DEFAULTS: Final[Settings] = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "triton",
}
_LEVELS: Final = ("TIMESTAMPS", "TENSORS")
_MINIMUM: Final = {"trace_rate": 0, "trace_count": -1, "log_frequency": 0}
_MAXIMUM: Final = 2**31 - 1


class TraceSettings:
    """The trace settings; the model name "" stands for the global ones."""

    def __init__(self) -> None:
        self._overrides: dict[str, Settings] = {}

    def get(self, model: str) -> Settings:
        """Return all settings in effect for a model."""
        return {**_DEFAULTS, **self._overrides.get("", {}), **self._overrides.get(model, {})}

    def update(self, model: str, changes: dict[str, Any]) -> Settings:
        """Apply changes, and return all settings; null clears one, unknown names are ignored.

        Raises RequestError for a value out of range, and for `trace_file`.
        """
        if "trace_file" in changes:
            raise RequestError(
                "trace file location can not be updated through network protocol", 501
            )
        checked = {
            name: None if changes[name] is None else check(name, changes[name])
            for name, check in _CHECKS.items()
            if name in changes
        }
        merged = {**self._overrides.get(model, {}), **checked}
        self._overrides[model] = {
            name: value for name, value in merged.items() if value is not None
        }
        return self.get(model)


def _levels(name: str, value: object) -> str | list[str]:
    levels = documents.check_type(value, list, f"'{name}'")
    if levels == ["OFF"]:
        return ["OFF"]
    if not levels or not all(level in _LEVELS for level in levels):
        raise RequestError(f"Unable to parse '{name}': expected ['OFF'] or some of {_LEVELS}")
    return [level for level in _LEVELS if level in levels]


def _number(name: str, value: object) -> str | list[str]:
    text = documents.check_type(value, str, f"'{name}'")
    if not re.fullmatch(r"-?[0-9]{1,10}", text):
        raise RequestError(f"Unable to parse '{name}', got: {text}")
    if not _MINIMUM[name] <= int(text) <= _MAXIMUM:
        raise RequestError(
            f"Unable to parse '{name}', value is out of range "
            f"[ {_MINIMUM[name]}, {_MAXIMUM} ], got: {text}"
        )
    return str(int(text))


_CHECKS: Final[dict[str, Callable[[str, object], str | list[str]]]] = {
    "trace_level": _levels,
    **dict.fromkeys(_MINIMUM, _number),
}
