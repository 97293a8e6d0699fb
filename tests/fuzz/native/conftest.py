from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.fuzz.native import sanitized


@pytest.fixture(scope="session", autouse=True)
def machine(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip these tests if nothing can be built with sanitizers."""
    try:
        sanitized.check_machine(tmp_path_factory.mktemp("machine"))
    except sanitized.NoSanitizerError as error:
        pytest.skip(f"the C module is not fuzzed: {error}")


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of what was compiled, which all processes of a test run share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "objects"
    folder.mkdir(exist_ok=True)
    return folder
