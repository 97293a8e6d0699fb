"""Sends requests in any encoding, and checks that the response has the same tensor."""

import numpy as np

from tests.integration.support.client import Client, Response
from tests.integration.support.infer_messages import FLOATS, Output, Request, Tensor


def send(client: Client, request: Request, content_type: str | None = None) -> Response:
    """Send a request as it is, with a Content-Type only where one is given."""
    body, headers = request.encoded()
    if content_type is not None:
        headers["Content-Type"] = content_type
    if not request.pieces:
        return client.infer(request.model, body, headers)
    starts = range(0, len(body), request.pieces)
    chunks = [body[start : start + request.pieces] for start in starts]
    return client.infer(request.model, iter(chunks), headers)


def check_echo(outputs: tuple[Output, ...], sent: Tensor) -> None:
    """Check that an identity model's answer is what was sent, bit by bit but for NaN's own bits."""
    (output,) = outputs
    assert (output.datatype, output.shape) == (sent.datatype, sent.shape)
    if sent.datatype in FLOATS and not (sent.binary and output.binary):
        # Every datatype fits into FP64, and numpy cannot compare BF16 without a warning.
        with np.errstate(invalid="ignore"):  # raised by the cast of a signalling NaN
            values, wanted = (each.astype(np.float64) for each in (output.elements, sent.elements))
        np.testing.assert_array_equal(values, wanted)
        is_number = ~np.isnan(wanted)
        np.testing.assert_array_equal(np.signbit(values)[is_number], np.signbit(wanted)[is_number])
    else:
        assert output.data == sent.encoded()
