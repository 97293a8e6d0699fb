"""Checks that the gateway leaves no reference cycles to the garbage collector."""

from __future__ import annotations

import gc
import sys
import types
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gateway

_SOURCES = str(Path(gateway.__file__).parent)


@contextmanager
def no_garbage(left_by: str) -> Iterator[None]:
    """Check that reference counts free all objects of the gateway that die inside.

    ``left_by`` says whose objects they are. So what a call held is free as soon as it is over, and
    not when the collector runs.
    """
    gc.collect()
    gc.disable()
    try:
        yield
        before = _living()
        gc.collect()
        found = before - _living()
    finally:
        gc.enable()
    assert not found, f"{left_by}: {found}"


@contextmanager
def no_suspended_generators() -> Iterator[None]:
    """Check that each async generator of the gateway that dies inside has run to its end.

    For one that has not the event loop starts a task, which closes it.
    """
    found: list[str] = []
    hooks = sys.get_asyncgen_hooks()

    def note(generator: AsyncGenerator[Any, Any]) -> None:
        if name := name_of_gateway(generator):
            found.append(name)
        assert hooks.finalizer is not None
        hooks.finalizer(generator)

    sys.set_asyncgen_hooks(finalizer=note)
    try:
        yield
    finally:
        sys.set_asyncgen_hooks(*hooks)
    assert not found


def _living() -> Counter[str]:
    """Count the objects of the gateway's.

    The collector does not name all that it frees: a suspended generator is closed before, and
    nothing of its cycle is left then.
    """
    return Counter(name for name in map(name_of_gateway, gc.get_objects()) if name)


def name_of_gateway(thing: object) -> str:
    """Name an object of the gateway's, or one that may hold much; nothing for others."""
    kind = type(thing)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if str(kind.__module__).startswith("gateway.") or isinstance(thing, memoryview):
        return name
    code = _code(thing)
    if code is not None and code.co_filename.startswith(_SOURCES):
        return f"{name} of {code.co_qualname}"
    return ""


def _code(thing: object) -> types.CodeType | None:
    match thing:
        case types.FrameType():
            return thing.f_code
        case types.TracebackType():
            return thing.tb_frame.f_code
        case types.CoroutineType():
            return thing.cr_code
        case types.GeneratorType():
            return thing.gi_code
        case types.AsyncGeneratorType():
            return thing.ag_code
        case _:
            return None
