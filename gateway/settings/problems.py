"""Problems of a settings file, with their positions."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

INDENTATION = "indentation"
"""Kind of a problem that may cause others: these come first."""

UNKNOWN_KEY = "unknown key"
"""Kind of a problem that may be why another key is missing: these come next."""

MISSING_FILE = "named file"
"""Kind of a problem in a file that the settings name, not in the settings."""


class Problem(NamedTuple):
    """One problem of a settings file.

    ``setting`` reads like ``routes[0].upstream`` and is empty for the file as a whole. Line
    and column count from 1; they are None for a problem of no line, such as a missing file.
    """

    setting: str
    line: int | None
    column: int | None
    message: str
    kind: str = ""

    def describe(self, file: Path) -> str:
        """Return ``FILE:LINE: setting: message``, without the parts that are not known."""
        place = f"{file}" if self.line is None else f"{file}:{self.line}"
        return ": ".join(part for part in (place, self.setting, self.message) if part)


class SettingsError(Exception):
    """All problems of a settings file: indentation, unknown keys, then the rest.

    Each kind is in the file's order.
    """

    def __init__(self, file: Path, problems: Iterable[Problem]) -> None:
        self.file = file
        self.problems = tuple(sorted(problems, key=_sort_key))
        super().__init__(file, self.problems)

    @property
    def is_about_files(self) -> bool:
        """Tell whether the settings are valid, and only files that they name are missing."""
        return all(problem.kind == MISSING_FILE for problem in self.problems)

    def __str__(self) -> str:
        return "\n".join(problem.describe(self.file) for problem in self.problems)


class UnreadableError(Exception):
    """The one problem that keeps the rest of the file from being read."""

    def __init__(
        self, message: str, line: int | None = None, column: int | None = None, kind: str = ""
    ) -> None:
        self.problem = Problem("", line, column, message, kind)
        super().__init__(message)


def _sort_key(problem: Problem) -> tuple[bool, bool, int, int]:
    is_later = (problem.kind != INDENTATION, problem.kind not in (INDENTATION, UNKNOWN_KEY))
    return (*is_later, problem.line or 0, problem.column or 0)
