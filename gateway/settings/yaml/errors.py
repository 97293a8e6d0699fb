"""PyYAML's errors → what an operator has to change, and in which line."""

import re
from collections.abc import Sequence
from typing import Any

import yaml

from gateway.settings.problems import INDENTATION, UnreadableError
from gateway.settings.values.wording import spaces

_SEARCHED = 500  # characters of a line that are looked at
_ABOVE = 1000  # lines above an error that are looked at

# PyYAML's words for what mostly is an error in indentation.
_MAY_BE_INDENTATION = re.compile(
    r"mapping values are not|expected <block end>|expected '-'|could not find expected ':'"
    r"|sequence entries are not|character '\\[tx]"
)
# PyYAML's words → an operator's, and whether the error is better shown where its construct begins.
_REWORDED = (
    ("mapping values are not", "a : where none is expected; check indentation and quotes", False),
    ("expected <block end>", "does not fit what is above; check indentation and quotes", False),
    ("could not find expected ':'", "a : is missing behind the key that begins here", True),
    ("cannot start any|alphabetic or num", "text that begins with {sign} needs quotes", True),
    ("expected ',' or", "the bracket is not closed, or lacks a comma", True),
    ("unexpected end of stream", "the quotes are not closed", True),
    ("another document", "a second document begins; a settings file holds one", False),
)
# What operators forget to quote, as it stands in the line that YAML then cannot read.
_UNQUOTED = (
    (r"[\[{,][^\"']*\$\{", "${...} inside [ ] or { } needs quotes"),
    (r"\[[0-9A-Fa-f]*:[0-9A-Fa-f:]*\]", "an address in [ ] needs quotes"),
)
_KEY = r"(?P<key>[A-Za-z_][\w.-]*)"
_NO_SPACE = re.compile(_KEY + r":(?!//)[^\s].*")
_EQUALS = re.compile(_KEY + r"\s*=.*")


def translate(text: str, error: yaml.MarkedYAMLError) -> UnreadableError:
    """Return an error of PyYAML's in an operator's words."""
    lines = [line[:_SEARCHED] for line in text.splitlines()]
    marks = [mark for mark in (error.problem_mark, error.context_mark) if mark is not None]
    # At the end of the text there is nothing to see.
    mark = next((mark for mark in marks if mark.line < len(lines)), marks[0] if marks else None)
    problem = error.problem or "cannot be read"
    line = lines[mark.line] if mark and mark.line < len(lines) else ""
    for pattern, message in _UNQUOTED:
        if re.search(pattern, line):
            return error_at(mark, message)
    if mark and line and _MAY_BE_INDENTATION.search(problem):
        found = _amiss(lines, mark.line, error)
        if found is not None:
            return found
    for pattern, message, at_start in _REWORDED:
        if re.search(pattern, problem):
            shown = (at_start and error.context_mark) or mark
            return error_at(shown, message.format(sign=_sign(lines, shown)))
    return error_at(mark, f"not valid YAML: {problem}")


def error_at(mark: Any, message: str, kind: str = "") -> UnreadableError:
    """Return an error at a mark of PyYAML, if there is one."""
    if mark is None:
        return UnreadableError(message)
    return UnreadableError(message, mark.line + 1, mark.column + 1, kind)


def _sign(lines: Sequence[str], mark: Any) -> str:
    line = lines[mark.line] if mark and mark.line < len(lines) else ""
    sign = line[mark.column] if mark and mark.column < len(line) else ""
    return sign if sign.isprintable() and sign.strip() else "this sign"


def _amiss(
    lines: Sequence[str], number: int, error: yaml.MarkedYAMLError
) -> UnreadableError | None:
    """Return what is wrong with the indentation of a line, or with a colon in one above."""
    line = lines[number]
    lead = line[: len(line) - len(line.lstrip())]
    odd = lead.strip(" ")[:1]
    if odd:
        sign = "a tab" if odd == "\t" else f"U+{ord(odd):04X}"
        message = f"indented with {sign}; YAML indents with spaces only"
        return UnreadableError(message, number + 1, 1, INDENTATION)
    colon = _colon_amiss(lines, error)
    if colon is not None:
        return UnreadableError(colon[1], colon[0] + 1)
    found = _misindented(lines[:number], line)
    return UnreadableError(found, number + 1, len(lead) + 1, INDENTATION) if found else None


def _misindented(above: Sequence[str], line: str) -> str | None:
    """Tell what is wrong with the indentation of a line, if anything is."""
    own, levels = len(line) - len(line.lstrip()), _levels(above[-_ABOVE:])
    if not levels or line.startswith("-", own):
        known = [level for level, is_item in levels if is_item or level == own]
        return _unlike(own, known[-1:], "items of one list") if known else None
    if (own, True) in levels and (own, False) not in levels:
        below = next(level for level, is_item in levels if level > own)
        return (
            f"indented by {spaces(own)}, as the - of the item above;"
            f" what belongs to the item is indented by {below}"
        )
    return _unlike(own, [level for level, _ in levels], "keys of one section")


def _unlike(own: int, levels: Sequence[int], what: str) -> str | None:
    """Tell that an indentation is none of those that may be here, unless it is one."""
    if own in levels:
        return None
    same = f"{what} have the same indentation"
    return f"indented by {spaces(own)}, what is above by {levels[-1]}; {same}"


def _levels(lines: Sequence[str]) -> list[tuple[int, bool]]:
    """Return the indentations that are open behind some lines, and which are those of a -."""
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


def _colon_amiss(lines: Sequence[str], error: yaml.MarkedYAMLError) -> tuple[int, str] | None:
    """Tell which line lacks a colon, or the space behind it, and how."""
    problem = error.problem or ""
    start = error.context_mark if "expected ':'" in problem else None
    mark = start or error.problem_mark
    if mark is None or not re.search("mapping values|expected ':'", problem):
        return None
    numbers = [mark.line] if start else range(mark.line - 1, -1, -1)
    for number in numbers:
        text = lines[number].strip()
        if text and not text.startswith("#"):
            found = _amiss_in(text)
            return (number, found) if found else None
    return None


def _amiss_in(text: str) -> str | None:
    # No value is repeated: it may be a key that nobody should see.
    if found := _NO_SPACE.fullmatch(text):
        return f"a space is missing behind {found['key']}:"
    if found := _EQUALS.fullmatch(text):
        return f"{found['key']} is followed by =, where YAML has a colon and a space"
    if ":" not in text and re.match(_KEY, text):
        return "a : is missing in this line"
    return None
