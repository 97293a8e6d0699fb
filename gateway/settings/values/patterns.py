"""Parse names and patterns of routes: models, versions, values of headers."""

import re
from collections.abc import Mapping

from gateway.errors import shorten
from gateway.settings.values.wording import describe
from gateway.sizes import QUOTED_NAME

_EXPRESSION = "re:"
# RFC 9110, section 5.6.2: a token.
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
# RFC 3986, section 3.3: what may stand in one part of a path.
_PATH_PART = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=:@%-]+")
# What stands in the brackets of a glob; a ] right behind [ or [! is one of its characters.
_BRACKETS = re.compile(r"\[!?+(?P<within>\]?+[^\]]*)\]")
# What is seldom meant in a glob, and common in an expression: ^a, a$, .*, .+, \d, ]+, (a|b).
_OF_EXPRESSIONS = re.compile(r"\A\^|\$\Z|\.[*+]|\\.|\]\+|\([^()]*\|[^()]*\)", re.DOTALL)


def parse_pattern(value: object) -> str:
    """Return a name, a glob or ``re:EXPRESSION``; a number is a name, too. Raises ValueError."""
    text = _text(value)
    if not text:
        expected = "a name, a pattern such as resnet* or re:EXPRESSION"
        raise ValueError(f"expected {expected}, got {_describe_no_name(value)}")
    if text.startswith(_EXPRESSION):
        _check_expression(text.removeprefix(_EXPRESSION))
    else:
        _check_glob(text)
    return text


def pattern_warning(text: str) -> str:
    """Return why a valid pattern may not mean what was meant; empty if nothing is odd.

    Whoever forgets ``re:`` gets a glob, which mostly matches nothing.
    """
    if text.startswith(_EXPRESSION) or not _OF_EXPRESSIONS.search(text):
        return ""
    return (
        f"{_quote(text)} looks like a regular expression, but it is a glob, where only * ? and [ ]"
        f" have a meaning; an expression is written {_quote(_EXPRESSION + text)}"
    )


def parse_path_part(value: object) -> str:
    """Return a model's name or version; a number is one, too. Raises ValueError."""
    text = _text(value)
    if not _PATH_PART.fullmatch(text):
        raise ValueError(f"expected a name as it stands in a path, got {_describe_no_name(value)}")
    return text


def parse_header_name(value: object) -> str:
    """Return the name of an HTTP header. Raises ValueError."""
    if not isinstance(value, str) or not _HEADER_NAME.fullmatch(value):
        raise ValueError(f"expected the name of an HTTP header, got {describe(value)}")
    return value


def with_header_names(value: object) -> object:
    """Return a mapping as it is. Raises ValueError for a key that names no HTTP header."""
    for name in value if isinstance(value, Mapping) else ():
        parse_header_name(name)
    return value


def _text(value: object) -> str:
    """Return text, or the digits of a whole number; empty text for anything else."""
    match value:
        case str():
            return value
        case int() if not isinstance(value, bool):
            return str(value)
    return ""


def _describe_no_name(value: object) -> str:
    """Describe a value that is no name, and how quotes make it one."""
    hint = "; in quotes it is text" if isinstance(value, bool | float) else ""
    return describe(value) + hint


def _quote(text: str) -> str:
    # As it stands in the file: repr would double each backslash.
    return f"'{shorten(text, QUOTED_NAME)}'"


def _check_expression(text: str) -> None:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{describe(text)} is not a regular expression: {error}") from None


def _check_glob(text: str) -> None:
    start = text.find("[")
    while start >= 0:
        brackets = _BRACKETS.match(text, start)
        if brackets is None:
            raise ValueError(f"the [ in {describe(text)} is not closed")
        for found in re.finditer(r"(.)-(.)", brackets["within"]):
            first, last = found.groups()
            if first > last:
                raise ValueError(f"the range {first}-{last} in {describe(text)} holds nothing")
        start = text.find("[", brackets.end())
