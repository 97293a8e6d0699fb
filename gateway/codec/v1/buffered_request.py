"""Reads V1 predictions that are fully buffered, within one time slice."""

from __future__ import annotations

from contextlib import closing

from gateway.codec.v1.fast_request import read_buffered_predict
from gateway.codec.v1.request import PredictRequestReader
from gateway.protocol.messages import InferRequest
from gateway.protocol.tensors import ModelMetadata
from gateway.protocol.v1 import V1ResponseLayout


def read_prediction(
    body: bytes,
    model: ModelMetadata,
    header_cap: int,
    depth_cap: int,
    tensor_cap: int,
    request_id: str,
) -> tuple[InferRequest, V1ResponseLayout]:
    """Read a V1 prediction that fits into a time slice; raises GatewayError."""
    read = read_buffered_predict(body, model, depth_cap, request_id)
    if read is not None:
        return read
    with closing(PredictRequestReader(model, header_cap, depth_cap, tensor_cap)) as reader:
        reader.feed(body, last=True)
        while reader.step():
            pass
        return reader.finish(request_id)
