"""Limits what a message may have beside the data of tensors."""

from __future__ import annotations

from typing import Final

from gateway.errors import GatewayError
from gateway.protocol.error_vocabulary import ErrorVocabulary

_PER_HEADER_BYTE: Final = 32
"""Memory of parsed parameters and names, for each byte of them in a message."""
_TENSOR_MEMORY: Final = 700
"""Memory of a tensor without name and parameters: most of it is that of two dictionaries."""


class HeaderBudget:
    """Counts the bytes beside data: parsed, they take many times the memory, and time for each.

    Unknown fields and empty ones count too, wherever they are.
    """

    def __init__(self, cap: int, words: ErrorVocabulary) -> None:
        self.used = 0
        self._cap: Final = cap
        self._words: Final = words

    def spend(self, size: int) -> None:
        """Count bytes, before they are parsed; raises GatewayError (413, 502) above the cap."""
        self.used += size
        if self.used > self._cap:
            raise GatewayError(
                self._words.too_large,
                f"{self._words.name} has more than {self._cap} bytes beside the data of tensors "
                "(limits.max_inference_header_bytes)",
            )

    def memory(self, tensors: int) -> int:
        """Estimate the bytes of memory of what was parsed."""
        return _PER_HEADER_BYTE * self.used + _TENSOR_MEMORY * tensors
