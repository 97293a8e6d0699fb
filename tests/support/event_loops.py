"""Both event loops: the product runs on uvloop, and must not depend on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

from gateway.build import COMPILED


@pytest.hookimpl
def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run each test of the folder whose conftest takes this in, on both loops.

    Compiled, on that of the product: the code is the same, and its tests come on top of all others.
    """
    product = {"uvloop": uvloop.new_event_loop}
    return product if COMPILED else {"asyncio": asyncio.new_event_loop, **product}
