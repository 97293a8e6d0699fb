"""How this gateway was built."""

from __future__ import annotations

from importlib.machinery import SOURCE_SUFFIXES
from importlib.util import find_spec
from pathlib import Path

from gateway.codec.native import DATATYPE_CODES


def _is_compiled(module: str) -> bool:
    spec = find_spec(module)
    return spec is not None and not str(spec.origin).endswith(tuple(SOURCE_SUFFIXES))


# Not imported: that takes all that a connection needs.
COMPILED = _is_compiled("gateway.http1.connection")
"""Whether the fast path was compiled by mypyc: see docs/architecture.md."""

NATIVE = bool(DATATYPE_CODES)
"""Whether the C module is there."""


def describe_build() -> str:
    """Say which form of the gateway runs, and if it is not compiled, why as far as is known."""
    if COMPILED:
        return "compiled" if NATIVE else "compiled, without the C module"
    form = "pure Python with the C module" if NATIVE else "pure Python"
    try:
        reason = Path(__file__).with_name("not_compiled.txt").read_text().strip()
    except OSError:  # a checkout, or an editable install
        return form
    return f"{form}: {reason}"
