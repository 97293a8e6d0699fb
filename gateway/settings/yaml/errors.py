"""Turn PyYAML's errors into messages that say what to change, and in which line."""

import re
from collections.abc import Sequence
from typing import Any

import yaml

from gateway.settings.problems import INDENTATION, UnreadableError
from gateway.settings.values.wording import spaces

_SEARCHED = 500  # characters of a line that are looked at
_ABOVE = 1000  # lines above an error that are looked at

# PyYAML's words for errors that mostly are of indentation.
_MAY_BE_INDENTATION = re.compile(
    r"mapping values are not|expected <block end>|expected '-'|could not find expected ':'"
    r"|sequence entries are not|character '\\[tx]"
)
# PyYAML's words → our message, and whether it points to the beginning of the construct.
_REWORDED = (
    ("mapping values are not", "a : where none is expected; check indentation and quotes", False),
    ("expected <block end>", "does not fit what is above; check indentation and quotes", False),
    ("could not find expected ':'", "a : is missing behind the key that begins here", True),
    ("cannot start any|alphabetic or num", "text that begins with {sign} needs quotes", True),
    ("expected ',' or", "the bracket is not closed, or lacks a comma", True),
    ("unexpected end of stream", "the quotes are not closed", True),
    ("another document", "a second document begins; a settings file holds one", False),
)
# What operators forget to quote.
_UNQUOTED = (
    (r"[\[{,][^\"']*\$\{", "${...} inside [ ] or { } needs quotes"),
    (r"\[[0-9A-Fa-f]*:[0-9A-Fa-f:]*\]", "an address in [ ] needs quotes"),
)
_KEY = r"(?P<key>[A-Za-z_][\w.-]*)"
_NO_SPACE = re.compile(_KEY + r":(?!//)[^\s].*")
_EQUALS = re.compile(_KEY + r"\s*=.*")


def translate(text: str, error: yaml.MarkedYAMLError) -> UnreadableError:
    """Return the message and position for an error of PyYAML."""
    lines = [line[:_SEARCHED] for line in text.splitlines()]
    marks = [mark for mark in (error.problem_mark, error.context_mark) if mark is not None]
    # There is no line at the end of the text.
    mark = next((mark for mark in marks if mark.line < len(lines)), marks[0] if marks else None)
    problem = error.problem or "cannot be read"
    line = lines[mark.line] if mark and mark.line < len(lines) else ""
    for pattern, message in _UNQUOTED:
        if re.search(pattern, line):
            return error_at(mark, message)
    if mark and line and _MAY_BE_INDENTATION.search(problem):
        found = _line_error(lines, mark.line, error)
        if found is not None:
            return found
    for pattern, message, at_start in _REWORDED:
        if re.search(pattern, problem):
            shown = (at_start and error.context_mark) or mark
            return error_at(shown, message.format(sign=_sign_at(lines, shown)))
    return error_at(mark, f"not valid YAML: {problem}")


def error_at(mark: Any, message: str, kind: str = "") -> UnreadableError:
    """Return an error at a mark of PyYAML, if there is one."""
    if mark is None:
        return UnreadableError(message)
    return UnreadableError(message, mark.line + 1, mark.column + 1, kind)


def _sign_at(lines: Sequence[str], mark: Any) -> str:
    line = lines[mark.line] if mark and mark.line < len(lines) else ""
    sign = line[mark.column] if mark and mark.column < len(line) else ""
    return sign if sign.isprintable() and sign.strip() else "this sign"


def _line_error(
    lines: Sequence[str], number: int, error: yaml.MarkedYAMLError
) -> UnreadableError | None:
    """Return the error in the indentation of a line, or in a colon above it."""
    line = lines[number]
    lead = line[: len(line) - len(line.lstrip())]
    odd = lead.strip(" ")[:1]
    if odd:
        sign = "a tab" if odd == "\t" else f"U+{ord(odd):04X}"
        message = f"indented with {sign}; YAML indents with spaces only"
        return UnreadableError(message, number + 1, 1, INDENTATION)
    colon = _colon_error(lines, error)
    if colon is not None:
        return UnreadableError(colon[1], colon[0] + 1)
    found = _indentation_error(lines[:number], line)
    return UnreadableError(found, number + 1, len(lead) + 1, INDENTATION) if found else None


def _indentation_error(above: Sequence[str], line: str) -> str | None:
    """Return the message for wrong indentation of a line, if it is wrong."""
    own, levels = len(line) - len(line.lstrip()), _levels(above[-_ABOVE:])
    if not levels or line.startswith("-", own):
        known = [level for level, is_item in levels if is_item or level == own]
        return _unless_one_of(own, known[-1:], "items of one list") if known else None
    if (own, True) in levels and (own, False) not in levels:
        below = next(level for level, is_item in levels if level > own)
        return (
            f"indented by {spaces(own)}, as the - of the item above;"
            f" what belongs to the item is indented by {below}"
        )
    return _unless_one_of(own, [level for level, _ in levels], "keys of one section")


def _unless_one_of(own: int, levels: Sequence[int], what: str) -> str | None:
    """Return the message for an indentation that is none of the open levels."""
    if own in levels:
        return None
    same = f"{what} have the same indentation"
    return f"indented by {spaces(own)}, but the lines above by {levels[-1]}; {same}"


def _levels(lines: Sequence[str]) -> list[tuple[int, bool]]:
    """Return the indentations that are open after some lines, and whether each is that of a -."""
    levels: list[tuple[int, bool]] = []
    for line in lines:
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        indent = len(line) - len(line.lstrip(" "))
        levels = [level for level in levels if level[0] < indent]
        while text.startswith("- "):
            levels.append((indent, True))
            inner = text[2:].lstrip()
            indent, text = indent + len(text) - len(inner), inner
        levels.append((indent, text == "-"))
    return levels


def _colon_error(lines: Sequence[str], error: yaml.MarkedYAMLError) -> tuple[int, str] | None:
    """Return the line that lacks a colon or the space behind it, and the message."""
    problem = error.problem or ""
    start = error.context_mark if "expected ':'" in problem else None
    mark = start or error.problem_mark
    if mark is None or not re.search("mapping values|expected ':'", problem):
        return None
    numbers = [mark.line] if start else range(mark.line - 1, -1, -1)
    for number in numbers:
        text = lines[number].strip()
        if text and not text.startswith("#"):
            found = _colon_message(text)
            return (number, found) if found else None
    return None


def _colon_message(text: str) -> str | None:
    # No value is quoted: it may be an API key.
    if found := _NO_SPACE.fullmatch(text):
        return f"a space is missing behind {found['key']}:"
    if found := _EQUALS.fullmatch(text):
        return f"{found['key']} is followed by =, where YAML has a colon and a space"
    if ":" not in text and re.match(_KEY, text):
        return "a : is missing in this line"
    return None
