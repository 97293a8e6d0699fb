from pathlib import Path

import pytest

from tests.deploy.files import FILES, Manifest


@pytest.fixture(params=FILES, ids=lambda file: file.stem)
def file(request: pytest.FixtureRequest) -> Path:
    """Each of the files that deploy a gateway."""
    found: Path = request.param
    return found


@pytest.fixture
def manifest(file: Path) -> Manifest:
    """Each of the files, read."""
    return Manifest(file)
