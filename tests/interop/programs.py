"""Finds the programs that these tests run; a test whose program is missing is skipped."""

from __future__ import annotations

import shutil

import pytest

PACKAGES = {
    "curl": "curl",
    "h2load": "nghttp2-client",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "wrk": "wrk",
}
"""The Debian packages that have the programs."""


def program(name: str) -> str:
    """Give the path of a program, or skip the test."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (apt install {PACKAGES[name]})")
    return found
