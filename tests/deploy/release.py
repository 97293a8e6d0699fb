"""Checks a tag against the version of the package: the release workflow runs it.

python -m tests.deploy.release v0.1.0
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)


def package_version() -> str:
    """Return the version in the sources; the package need not be installed."""
    found = _VERSION.search((Path(__file__).parents[2] / "gateway" / "__init__.py").read_text())
    assert found is not None
    return found[1]


def check_tag(tag: str) -> str | None:
    """Return what is wrong with a tag, None if it is that of this version."""
    expected = f"v{package_version()}"
    return None if tag == expected else f"the tag is {tag}, and this version's is {expected}"


if __name__ == "__main__":
    sys.exit(check_tag(sys.argv[1]))
