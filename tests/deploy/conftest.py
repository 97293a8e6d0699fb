from pathlib import Path

import pytest

from tests.deploy.files import DEPLOY
from tests.deploy.manifest import Manifest


@pytest.fixture(params=sorted((DEPLOY / "kubernetes").glob("*.yaml")), ids=lambda file: file.stem)
def file(request: pytest.FixtureRequest) -> Path:
    """Each of the files."""
    found: Path = request.param
    return found


@pytest.fixture
def manifest(file: Path) -> Manifest:
    """Each of the files, read."""
    return Manifest(file)
