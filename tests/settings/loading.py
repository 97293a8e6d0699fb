"""Helpers of tests that load settings files."""

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
