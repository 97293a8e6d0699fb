"""Writes infer responses, and errors of servers, for V1 clients.

Buffered binary responses of numbers take a few calls. Unusual and invalid ones are left to
PredictResponseWriter; for all others both give the same result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from multidict import CIMultiDictProxy

from gateway.codec.elements.encode import fast_encode_numbers
from gateway.codec.response_form import ResponseForm
from gateway.codec.v1.nested_writer import MAX_NESTED_RANK
from gateway.codec.v1.response import predict_converter
from gateway.codec.v2.buffered_response import ConvertedResponse, ResponsePlan, convert_body
from gateway.codec.v2.response_reader import read_header_fast
from gateway.errors import bad_response
from gateway.protocol.response_header import is_success, response_header_length
from gateway.protocol.v1 import V1ResponseLayout, error_document

if TYPE_CHECKING:
    from gateway.codec.v2.response import ResponseConverter


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
        header_size = plan.stated_size
        if converted is None:
            if header_size is None:
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
        written = write_prediction_fast(body, header_size, self.layout)
        if written is None:
            converter = self.converter(header_size, plan)
            text = b"".join((converter.text(body), *converter.finish()))
            written = text, converter.element_count
        return ConvertedResponse(written[0], elements=written[1])

    def converter(self, header_size: int, plan: ResponsePlan) -> ResponseConverter:
        """Return what converts a response while it arrives; see ResponseForm."""
        return predict_converter(header_size, self.layout, *plan.policies_and_caps)


def write_prediction_fast(
    body: bytes, header_size: int, layout: V1ResponseLayout
) -> tuple[bytes, int] | None:
    """Write a response with one output, of numbers; return it with the number of its elements.

    Returns None if PredictResponseWriter is needed.
    """
    response = read_header_fast(body, header_size)
    if response is None or len(response.head.outputs) != 1:
        return None
    (output,) = response.head.outputs
    datatype, size = output.datatype, output.binary_size
    if not size or datatype.size is None or header_size + size != len(body):
        return None
    shape = (1, *output.shape) if layout.single else output.shape
    if not 0 < len(shape) <= MAX_NESTED_RANK:
        return None
    text = fast_encode_numbers(memoryview(body)[header_size:], datatype, shape)
    if text is None:
        return None
    key = layout.form.response_key.encode()
    return b"".join((b'{"', key, b'":[', text, b"]}")), size // datatype.size
