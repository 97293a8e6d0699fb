"""What is written in C of the parsing of heads; without a compiler, ``plain``.

``_heads.pyi`` has the signatures.
"""

from __future__ import annotations

VERSION = 1
"""Counts changes of what the C module offers: an older one may lie beside newer sources."""

try:
    from gateway.http1.native import _heads

    if getattr(_heads, "VERSION", 0) != VERSION:
        raise ImportError("the C module is of other sources")
except ImportError:
    from gateway.http1.native import plain as _heads  # type: ignore[no-redef]

cut_head = _heads.cut_head
split_head = _heads.split_head
