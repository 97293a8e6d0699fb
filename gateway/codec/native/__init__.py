"""What is written in C, and runs without the interpreter's lock; None where it is not compiled.

It gives up on what it is not sure of: callers then go the pure way, which words all errors.
``_native.pyi`` has the signatures.
"""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


class _NotCompiled:
    DATATYPES = ()

    def __getattr__(self, name: str) -> None:
        return None


VERSION = 2
"""Counts changes of what the C module offers: an older one may lie beside newer sources."""

try:
    from gateway.codec.native import _native

    if getattr(_native, "VERSION", 0) != VERSION:
        raise ImportError("the C module is of other sources")
except ImportError:
    _native = _NotCompiled()  # type: ignore[assignment]


def _optional(member: T) -> T | None:
    return member


DATATYPE_CODES = {name: code for code, name in enumerate(_native.DATATYPES)}
"""The code of each datatype that the module knows, by name."""

decode_numbers = _optional(_native.decode_numbers)
encode_numbers = _optional(_native.encode_numbers)
scan_numbers = _optional(_native.scan_numbers)
decode_strings = _optional(_native.decode_strings)
decode_elements = _optional(_native.decode_elements)
decode_text = _optional(_native.decode_text)
decode_base64 = _optional(_native.decode_base64)
decode_base64_elements = _optional(_native.decode_base64_elements)
encode_strings = _optional(_native.encode_strings)
encode_base64 = _optional(_native.encode_base64)
encode_text = _optional(_native.encode_text)
scan_strings = _optional(_native.scan_strings)
find_string_end = _optional(_native.find_string_end)
scan_array_values = _optional(_native.scan_array_values)
collect_marks = _optional(_native.collect_marks)
TEXT, BASE64, BASE64_OBJECT = range(3)
"""How ``encode_strings`` writes an element: as text, as base64, or as V1's ``{"b64": ...}``."""

ThreadPool = _optional(_native.ThreadPool)
