"""The documentation can be built as a site, without a warning."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """MkDocs takes dead links, and pages that the navigation lacks, for errors."""
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "settings.html").exists()
