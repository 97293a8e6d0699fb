"""The response half of a client form other than V2's, such as V1's predictions.

The request half is a reader in ``codec/`` and a handler in ``proxy/calls/``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from multidict import CIMultiDictProxy

from gateway.codec.v2.buffered_response import ConvertedResponse, ResponsePlan

if TYPE_CHECKING:
    from gateway.codec.v2.response import ResponseConverter


class ResponseForm(ABC):
    """Writes the responses to a request as JSON of another form; it gets them in binary form."""

    @abstractmethod
    def convert(
        self,
        status: int,
        reason: str,
        headers: CIMultiDictProxy[str],
        body: bytes,
        plan: ResponsePlan,
    ) -> ConvertedResponse:
        """Convert a server's complete response, or its error.

        ``plan`` makes the binary form of what a server sends in another one. Raises GatewayError:
        502 for an invalid response, 406 for one that the form or a policy cannot express.
        """

    @abstractmethod
    def converter(self, header_size: int, plan: ResponsePlan) -> ResponseConverter:
        """Return what converts a response while it arrives: in binary form, after its header."""
