"""Skips tests that cannot run with a compiled gateway."""

from __future__ import annotations

import pytest

from gateway.build_info import COMPILED

_REASON = "replaces or extends what cannot be where it is compiled"

needs_source = pytest.mark.skipif(COMPILED, reason=_REASON)


def skip_if_compiled() -> None:
    """Skip the test of the calling fixture: see ``needs_source``."""
    if COMPILED:
        pytest.skip(_REASON)
