"""Turn pydantic's errors into messages for operators, with what was probably meant."""

import re
from collections.abc import Mapping

from pydantic_core import ErrorDetails

from gateway.settings.schema import section_keys, sections_with_key
from gateway.settings.values.wording import (
    LIKENESS,
    TYPING_ERROR,
    KeyPath,
    closest_name,
    describe,
    did_you_mean,
    format_path,
    suggest,
)

_LITERAL = re.compile(r"'([^']*)'|\b([0-9]+)\b")
_SHELL_VARIABLE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")
_KEY_AND_VALUE = re.compile(r"([A-Za-z_][\w-]*)( *= *|:)(?!//)\S.*")
_TIMEOUT = re.compile(r".*time[_-]?outs?", re.IGNORECASE)
TIMEOUTS = {
    "limits.request_timeout": "a whole call, also in routes[].limits",
    "limits.idle_timeout": "a call without a byte, also in routes[].limits",
    "limits.connect_timeout": "connecting to a server",
    "limits.request_header_timeout": "the head of a request",
    "limits.keep_alive_timeout": "a client between two requests",
    "limits.drain_timeout": "a shutdown",
    "concurrency.queue_timeout": "waiting for a slot, also of an upstream",
    "upstreams.NAME.idle_timeout": "an unused connection to a server",
    "upstreams.NAME.health_check.timeout": "a health check",
}
"""All timeouts, with what each is for: by name alone they are mistaken for each other."""
_EXAMPLES = {"upstreams": "triton: {endpoints: [http://127.0.0.1:8000]}"}


def error_message(details: ErrorDetails) -> str:
    """Return the message for an error of pydantic."""
    got, context, path = details["input"], details.get("ctx", {}), details["loc"]
    match details["type"]:
        case "value_error":
            return str(context["error"]) + (_reference_hint(got) or _dash_hint(got))
        case "missing":
            return "required, but missing" + _misplaced_hint(path[:-1])
        case "extra_forbidden":
            return _unknown_key(path)
        case "too_short":
            return "expected at least one, got none"
        case "literal_error":
            expected = context["expected"].replace("'", "")
            known = [word or number for word, number in _LITERAL.findall(context["expected"])]
            hint = _reference_hint(got) or did_you_mean(got, known)
        case "bool_type":
            expected, hint = "true or false", _reference_hint(got) or _boolean_hint(got)
        case "string_type":
            expected, hint = "text", _quotes_hint(got)
        case "tuple_type":
            expected, hint = "a list", _dash_hint(got)
        case "model_type" | "dict_type" | "mapping_type":
            expected, hint = "keys and values", _misplaced_hint(path) or _section_hint(path, got)
        case _:
            return details["msg"]
    return f"expected {expected}, got {describe(got)}{hint}"


def _unknown_key(path: KeyPath) -> str:
    known, name = section_keys(path[:-1]) or (), str(path[-1])
    if name.startswith("-"):
        return "unknown key; the - of a list needs a space behind it"
    homes = " and of ".join([each or "the top level" for each in sections_with_key(name)][:2])
    is_timeout = _TIMEOUT.fullmatch(name) is not None
    if closest_name(name, known, TYPING_ERROR if is_timeout else LIKENESS) is None:
        if is_timeout and (not homes or name == "timeout"):
            timeouts = ", ".join(f"{path} ({what})" for path, what in TIMEOUTS.items())
            return f"unknown key; the timeouts are {timeouts}"
        if homes:
            return f"unknown key; it is a key of {homes}"
    return f"unknown key{suggest(name, known)}" + (f" {name} is a key of {homes}" if homes else "")


def _boolean_hint(got: object) -> str:
    word = str(got) if isinstance(got, int) else got
    return did_you_mean({"1": "true", "0": "false"}.get(str(word), word), ("true", "false"))


def _quotes_hint(got: object) -> str:
    return "; in quotes it is text" if isinstance(got, bool | int | float) else ""


def _dash_hint(got: object) -> str:
    keys = got if isinstance(got, Mapping) else ()
    if any(str(key).startswith("-") for key in keys):
        return "; the - of a list needs a space behind it"
    return ""


def _misplaced_hint(path: KeyPath) -> str:
    """Tell that an entry with a name of the operator's choice was meant as a setting."""
    if section_keys(path[:-1]) == () and "" in sections_with_key(str(path[-1])):
        return f"; {path[-1]} is a setting of the top level, which is not indented"
    return ""


def _section_hint(path: KeyPath, got: object) -> str:
    found = _KEY_AND_VALUE.fullmatch(got) if isinstance(got, str) else None
    if found is not None:
        return f"; a key is followed by a colon and a space: {found[1]}: ..."
    if isinstance(got, str) and "://" in got and path[:1] == ("upstreams",) and len(path) == 2:
        return f"; did you mean {{endpoints: {describe(got)}}}?"
    example = _EXAMPLES.get(format_path(path))
    return f"; for example {example}" if example else ""


def _reference_hint(got: object) -> str:
    found = _SHELL_VARIABLE.fullmatch(got) if isinstance(got, str) else None
    return f"; a value from the environment is written ${{{found[1]}}}" if found else ""
