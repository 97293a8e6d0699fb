"""Wording of messages: values as YAML shows them, and names that were probably meant."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from functools import lru_cache

from gateway.errors import shorten
from gateway.sizes import QUOTED_NAME

KeyPath = tuple[str | int, ...]
"""The keys and list positions that lead from the top of a file to a value."""

SettingWarning = tuple[KeyPath, str]
"""A setting that is allowed but unwise, and why."""

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]+")
_CAMEL_CASE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_COMPARED = 60  # characters of a name that are compared with known ones
LIKENESS = 0.66
"""How alike two names are of which one was probably meant, of 1."""
TYPING_ERROR = 0.85
"""How alike they are if one is the other with a letter or two too many, missing or wrong."""
_LISTED_KEYS = 30  # names in a message: no section has more keys

_ELSEWHERE = {
    name: meant
    for meant, names in {
        "load_balancing": ("balance", "lb_policy"),
        "max_request_bytes": ("client_max_body_size",),
        "deny_operations": ("deny",),
        "hash_header": ("hash",),
        "dns_refresh": ("resolve",),
        "retry_budget": ("retries",),
        "sticky_header": ("sticky",),
        "BOOL": ("bool_",),
        "FP16": ("float16", "half"),
        "BF16": ("bfloat16",),
        "FP32": ("float", "float32"),
        "FP64": ("float64", "double"),
        "BYTES": ("string", "str"),
        "least_request": ("least_outstanding", "least_conn"),
        "json": ("mlserver",),
        "openvino": ("ovms",),
        "debug": ("verbose", "trace"),
        "error": ("critical", "fatal"),
        "unlimited": ("infinite",),
        "infer": ("inference",),
        "true": ("yes", "on"),
        "false": ("no", "off"),
    }.items()
    for name in names
}
"""What is meant by names of other programs: numpy, Python's logging, Envoy, HAProxy, nginx."""


def format_path(path: KeyPath) -> str:
    """Return a path as an operator reads it: ``upstreams["a b"].endpoints[0]``."""
    return "".join(_step(part) for part in path).removeprefix(".")


def _step(part: str | int) -> str:
    if isinstance(part, int):
        return f"[{part}]"
    return f".{part}" if _PLAIN_KEY.fullmatch(part) else f'["{part}"]'


def describe(value: object) -> str:
    """Return a value as it would stand in YAML, cut to a length that a message can hold."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case dict():
            return "keys and values"
        case list() | tuple():
            return "a list"
        case _:
            return shorten(repr(value), QUOTED_NAME)


def spaces(count: int) -> str:
    """Return an indentation in words."""
    return "1 space" if count == 1 else f"{count} spaces"


def closest_name(name: object, known: Iterable[str], likeness: float = LIKENESS) -> str | None:
    """Return the known name that was probably meant.

    Case and the sign between words do not count. Names of other programs count as well.
    """
    if not isinstance(name, str):
        return None
    folded = {_folded(each): each for each in known}
    wanted = _folded(name[:_COMPARED])
    elsewhere = _folded(_ELSEWHERE.get(wanted, ""))
    for each in (wanted, elsewhere, *wanted.split("_")):
        if each in folded:
            return folded[each]
    near = get_close_matches(wanted, folded, n=1, cutoff=likeness)
    return folded[near[0]] if near else None


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return the end of a message: the name that was probably meant, or nothing."""
    near = closest_name(name, known)
    if near is None:
        return ""
    return f"; did you mean {near}{', without quotes' if near == name else ''}?"


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message on an unknown name: what was meant, or all known names."""
    every = list(known)
    shown = ", ".join(every[:_LISTED_KEYS]) + (", ..." if len(every) > _LISTED_KEYS else "")
    return did_you_mean(name, every) or f"; known: {shown}"


@lru_cache(maxsize=1024)
def _folded(name: str) -> str:
    return re.sub(r"[\s-]+", "_", _CAMEL_CASE.sub("_", name.strip())).casefold()
