"""How this gateway was built."""

from __future__ import annotations

from gateway.codec.native import decode_numbers
from gateway.http1 import connection

COMPILED = not connection.__file__.endswith(".py")
"""Whether the fast path was compiled by mypyc: see docs/architecture.md."""

NATIVE = decode_numbers is not None
"""Whether the C module is there."""
