"""Writes infer responses, and errors of servers, for V1 clients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from multidict import CIMultiDictProxy

from gateway.codec.response_form import ResponseForm
from gateway.codec.v1.fast_response import write_buffered_prediction
from gateway.codec.v1.response import predict_converter
from gateway.codec.v2.buffered_response import ConvertedResponse, ResponsePlan, convert_body
from gateway.codec.v2.response import ResponseConverter
from gateway.errors import bad_response
from gateway.protocol.response_header import is_success, response_header_length
from gateway.protocol.v1 import V1ResponseLayout, error_document


class PredictionForm(ResponseForm):
    """Writes predictions in the ``layout`` that the request asks for."""

    def __init__(self, layout: V1ResponseLayout) -> None:
        self.layout: Final = layout

    def convert(
        self,
        status: int,
        reason: str,
        headers: CIMultiDictProxy[str],
        body: bytes,
        plan: ResponsePlan,
    ) -> ConvertedResponse:
        """Convert a server's complete response, or its error; see ResponseForm."""
        cap = plan.header_cap
        if not is_success(status):
            return ConvertedResponse(error_document(body[:cap], reason))
        converted = convert_body(body, plan)
        if converted is None:
            header_size = response_header_length(headers, cap)
        else:
            body, header_size = converted.body, converted.header_size
        if header_size is None:  # all outputs are empty
            header_size = len(body)
            if header_size > cap:
                raise bad_response(
                    f"the server's response has more than {cap} bytes of JSON "
                    "(limits.max_inference_header_bytes) and no binary tensors behind it"
                )
        written = write_buffered_prediction(body, header_size, self.layout)
        if written is None:
            converter = self.converter(header_size, plan)
            text = b"".join((converter.text(body), *converter.finish()))
            written = text, converter.element_count
        return ConvertedResponse(written[0], elements=written[1])

    def converter(self, header_size: int, plan: ResponsePlan) -> ResponseConverter[Iterator[bytes]]:
        """Return what converts a response while it arrives; see ResponseForm."""
        return predict_converter(header_size, self.layout, *plan.policies_and_caps)
