"""How this gateway was built."""

from __future__ import annotations

from pathlib import Path

from gateway.codec.native import decode_numbers
from gateway.http1 import connection

COMPILED = not connection.__file__.endswith(".py")
"""Whether the fast path was compiled by mypyc: see docs/architecture.md."""

NATIVE = decode_numbers is not None
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
