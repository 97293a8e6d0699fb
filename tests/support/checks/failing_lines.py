"""Lets single lines of a gateway fail, which runs in this process and from the sources."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import gateway

SOURCES = str(Path(gateway.__file__).parent)

Line = tuple[CodeType, int]


class LineError(Exception):
    """What a line raises."""


def code_of(*functions: object) -> set[object]:
    """Return the code of functions and properties; compiled ones have none."""
    found = (getattr(each, "fget", each) for each in functions)
    return {getattr(function, "__code__", None) for function in found}


def name_of(line: Line) -> str:
    """Name a line for the note of a failed test."""
    code, number = line
    return f"{code.co_filename}:{number} ({code.co_qualname})"


class FailingLines:
    """Watches the lines of the code that ``is_watched``; one of them fails, once.

    It fails when it runs for the ``nth`` time. With ``after``, that counts from the first call of
    that function on.
    """

    def __init__(
        self,
        is_watched: Callable[[CodeType], bool],
        failing: Line | None = None,
        after: object = None,
        nth: int = 1,
    ) -> None:
        self.seen: dict[Line, int] = {}
        """The lines that have run, and how often."""
        self._is_watched = is_watched
        self._failing = failing
        self._nth = nth
        self._after = getattr(after, "__code__", None)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the lines that run inside."""
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(None)

    def _trace(self, at: FrameType, event: str, argument: object) -> Any:
        code = at.f_code
        if code is self._after:
            self._after = None
        if self._after is not None or not self._is_watched(code):
            return None
        if event == "line":
            line = code, at.f_lineno
            self.seen[line] = self.seen.get(line, 0) + 1
            if line == self._failing and self.seen[line] == self._nth:
                raise LineError
        return self._trace
