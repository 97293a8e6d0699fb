"""How this gateway was built."""

from __future__ import annotations

from gateway.http1 import connection

COMPILED = not connection.__file__.endswith(".py")
"""Whether what each small request passes through was compiled: see docs/architecture.md."""
