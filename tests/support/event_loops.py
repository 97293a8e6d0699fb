"""Event loops for tests: the product runs on uvloop, and must not depend on it.

A folder's conftest imports one of these hooks as ``pytest_asyncio_loop_factories``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

from gateway.build_info import COMPILED
from tests.support.scale import SCALE

LoopFactories = Mapping[str, Callable[[], asyncio.AbstractEventLoop]]

_PRODUCT: LoopFactories = {"uvloop": uvloop.new_event_loop}


@pytest.hookimpl
def both_loops() -> LoopFactories:
    """Run each test on both loops; compiled code, which is the same on both, on uvloop alone."""
    return _PRODUCT if COMPILED else {"asyncio": asyncio.new_event_loop, **_PRODUCT}


@pytest.hookimpl
def product_loop() -> LoopFactories:
    """Run each test on uvloop, and in a full run (see ``scale``) on both loops.

    For tests of what uses the loop through modules that have tests on both loops.
    """
    return both_loops() if SCALE >= 1 else _PRODUCT
