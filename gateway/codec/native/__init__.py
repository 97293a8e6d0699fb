"""What is written in C, and runs without the interpreter's lock; without a compiler, ``plain``.

Both give up on what they are not sure of: callers then go another way, which words all errors.
``_native.pyi`` has the signatures.
"""

from __future__ import annotations

VERSION = 4
"""Counts changes of what the C module offers: an older one may lie beside newer sources."""

try:
    from gateway.codec.native import _native

    if getattr(_native, "VERSION", 0) != VERSION:
        raise ImportError("the C module is of other sources")
except ImportError:
    from gateway.codec.native import plain as _native  # type: ignore[no-redef]

DATATYPE_CODES = {name: code for code, name in enumerate(_native.DATATYPES)}
"""The code of each datatype that the module knows, by name: of none, if it is not compiled."""

decode_numbers = _native.decode_numbers
encode_numbers = _native.encode_numbers
scan_numbers = _native.scan_numbers
split_document = _native.split_document
split_prediction = _native.split_prediction
decode_strings = _native.decode_strings
decode_elements = _native.decode_elements
decode_text = _native.decode_text
decode_base64 = _native.decode_base64
decode_base64_elements = _native.decode_base64_elements
encode_strings = _native.encode_strings
encode_base64 = _native.encode_base64
encode_text = _native.encode_text
scan_strings = _native.scan_strings
find_string_end = _native.find_string_end
scan_array_values = _native.scan_array_values
collect_marks = _native.collect_marks
TEXT, BASE64, BASE64_OBJECT = range(3)
"""How ``encode_strings`` writes an element: as text, as base64, or as V1's ``{"b64": ...}``."""

ThreadPool: type[_native.ThreadPool] | None = _native.ThreadPool
"""Threads that convert; None if they are not compiled."""
