"""What is wrong with a settings file, and where."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

INDENTATION = "indentation"
"""The kind of a problem from which others may follow: it comes first."""

MISSING_FILE = "named file"
"""The kind of a problem that is not in the settings, but in a file that they name."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Name one fault of a settings file.

    ``setting`` reads like ``routes[0].upstream`` and is empty for the file as a whole. Line
    and column count from 1; they are None where no line is at fault, as for a missing file.
    """

    setting: str
    line: int | None
    column: int | None
    message: str
    kind: str = ""

    def describe(self, file: Path) -> str:
        """Return ``FILE:LINE: path: message``, without the parts that are not known."""
        place = f"{file}" if self.line is None else f"{file}:{self.line}"
        return ": ".join(part for part in (place, self.setting, self.message) if part)


class SettingsError(Exception):
    """Tell all that is wrong with a settings file: indentation, then the rest, in its order."""

    def __init__(self, file: Path, problems: Iterable[Problem]) -> None:
        self.file = file
        self.problems = tuple(sorted(problems, key=_place))
        super().__init__(file, self.problems)

    @property
    def is_about_files(self) -> bool:
        """Tell whether the settings are right, and the files that they name are not."""
        return all(problem.kind == MISSING_FILE for problem in self.problems)

    def __str__(self) -> str:
        return "\n".join(problem.describe(self.file) for problem in self.problems)


class UnreadableError(Exception):
    """Stop at the one problem that keeps the rest of the file from being read."""

    def __init__(
        self, message: str, line: int | None = None, column: int | None = None, kind: str = ""
    ) -> None:
        self.problem = Problem("", line, column, message, kind)
        super().__init__(message)


def _place(problem: Problem) -> tuple[bool, int, int]:
    return (problem.kind != INDENTATION, problem.line or 0, problem.column or 0)
