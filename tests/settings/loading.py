"""Helpers of tests that load settings files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gateway.settings.load import load
from gateway.settings.problems import Problem, SettingsError
from gateway.settings.routes import Route

ONE_UPSTREAM = "upstreams: {triton: {endpoints: ['http://triton:8000']}}\n"


def problems(file: Path, **environ: str) -> tuple[Problem, ...]:
    """Return the problems of an invalid file."""
    with pytest.raises(SettingsError) as error:
        load(file, environ)
    assert error.value.file == file
    return error.value.problems


def route_to(upstream: str, **more: Any) -> Route:
    """Return a route to an upstream."""
    return Route.model_validate({"upstream": upstream, **more})


FOLDER = Path(__file__).parent / "invalid"


@dataclass(frozen=True, slots=True)
class InvalidFile:
    """A settings file, and all that is wrong with it."""

    text: str
    errors: str


def read_invalid_files() -> dict[str, InvalidFile]:
    """Read the invalid settings files in ``invalid/``, each with the errors that it gives.

    A case begins with ``=== NAME``. The file's text follows, then its errors, each behind ``=> ``.
    """
    files = sorted(FOLDER.glob("*.cases"))
    cases = [case for file in files for case in _cases(file.read_bytes().decode())]
    assert len(dict(cases)) == len(cases), "a name stands for two cases"
    return dict(cases)


def _cases(text: str) -> list[tuple[str, InvalidFile]]:
    cases = []
    for part in text.removeprefix("=== ").split("\n=== "):
        name, _, rest = part.partition("\n")
        lines = rest.split("\n")
        first = next(i for i, line in enumerate(lines) if line.startswith("=> "))
        errors = [line.removeprefix("=> ") for line in lines[first:] if line]
        file = "".join(f"{line}\n" for line in lines[:first])
        cases.append((name, InvalidFile(file, "\n".join(errors))))
    return cases
