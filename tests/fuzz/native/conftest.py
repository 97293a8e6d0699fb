from __future__ import annotations

import pytest

from tests.fuzz.native import sanitized


@pytest.fixture(scope="session", autouse=True)
def machine(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip these tests if nothing can be built with sanitizers."""
    try:
        sanitized.check_machine(tmp_path_factory.mktemp("machine"))
    except sanitized.NoSanitizerError as error:
        pytest.skip(f"the C module is not fuzzed: {error}")
