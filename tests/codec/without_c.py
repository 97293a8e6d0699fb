"""Has the codec convert as a gateway does that is not compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gateway.codec import native
from gateway.codec.native import plain

FUNCTIONS = (
    *("decode_strings", "decode_elements", "decode_text", "decode_base64"),
    *("decode_base64_elements", "encode_strings", "encode_base64", "encode_text"),
    *(
        "split_document",
        "split_prediction",
        "scan_numbers",
        "scan_strings",
        "find_string_end",
        "scan_array_values",
        "collect_marks",
    ),
)


@contextmanager
def without_c() -> Iterator[None]:
    """Replace the C module; encoders of numbers must be made within."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(native, "DATATYPE_CODES", {})
        for name in FUNCTIONS:
            patched.setattr(native, name, getattr(plain, name))
        yield
