"""Says why an array under the key ``data`` is not the data of a tensor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import orjson

from gateway.codec.json.structure_scan import mask_strings
from gateway.errors import GatewayError
from gateway.protocol.error_vocabulary import ErrorVocabulary
from gateway.protocol.json_errors import (
    ExtractedArray,
    invalid_json_error,
    original_offset,
    parse_json,
    quote_around,
)
from gateway.protocol.request_header import check_entries, check_object

_OPENINGS, _CLOSINGS = b"[{", b"]}"


def misplaced_array(
    message: ErrorVocabulary, header: bytes, key_at: int, cuts: Sequence[ExtractedArray]
) -> GatewayError:
    """Make the error of an array that is the value of the last key of a header, at ``key_at``.

    ``cuts`` are the arrays before it. Names what is wrong before the key, if anything is.
    """
    try:
        fields = parse_json(header + b"1" + _closings(header))
    except orjson.JSONDecodeError as error:
        return invalid_json_error(message, header, error, cuts)
    try:
        if message.tensors in check_object(fields, message):
            check_entries(fields, message)
    except GatewayError as error:
        return error
    return message.malformed(
        f'there is an array "data" outside the tensors of {message.tensors}, '
        f"at byte {original_offset(key_at, cuts)}, near: {quote_around(header, key_at, cuts)}"
    )


def _closings(text: bytes) -> bytes:
    """Give the brackets that a text lacks which ends outside of any string."""
    codes, inside = mask_strings(text)
    is_open: list[int] = []
    for code in codes[(inside == 0) & np.isin(codes, list(_OPENINGS + _CLOSINGS))].tolist():
        if code in _OPENINGS:
            is_open.append(code)
        elif is_open:
            is_open.pop()
    return bytes(_CLOSINGS[_OPENINGS.index(code)] for code in reversed(is_open))
