"""Policies for values that JSON cannot express: NaN, infinities, and bytes that are not text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Final


class Nonfinite(Enum):
    """How NaN and the infinities are written in JSON."""

    ERROR = "error"
    NULL = "null"
    LITERAL = "literal"
    """Bare tokens NaN, Infinity and -Infinity, as Triton writes them."""
    STRING = "string"


NONFINITE_CODES: Final = {each: code for code, each in enumerate(Nonfinite)}
"""The codes that the C module knows: encode_numbers.h."""


class BytesEncoding(Enum):
    """How elements of BYTES tensors are written in JSON."""

    UTF8 = "utf8"
    BASE64 = "base64"


@dataclass(frozen=True, slots=True)
class JsonPolicies:
    """The policies of a route; a request may ask for further outputs ``as_base64``."""

    nonfinite: Nonfinite = Nonfinite.LITERAL
    bytes_encoding: BytesEncoding = BytesEncoding.UTF8
    as_base64: frozenset[str] = frozenset()

    @property
    def any_base64(self) -> bool:
        """Tell whether BYTES of any output are written as base64."""
        return self.bytes_encoding is BytesEncoding.BASE64 or bool(self.as_base64)

    def of_output(self, output: str) -> JsonPolicies:
        """Return the policies with the encoding of BYTES that an output has."""
        if not self.wants_base64(output):
            return self
        return replace(self, bytes_encoding=BytesEncoding.BASE64)

    def wants_base64(self, output: str) -> bool:
        """Tell whether BYTES of an output are written as base64."""
        return self.bytes_encoding is BytesEncoding.BASE64 or output in self.as_base64


DEFAULT_POLICIES: Final = JsonPolicies()
