from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from gateway.system import shared_memory as region


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Have regions in a folder of the test's own: other gateways may run on this machine."""
    with TemporaryDirectory(dir=region.FOLDER) as path:
        monkeypatch.setattr(region, "FOLDER", Path(path))
        yield Path(path)
