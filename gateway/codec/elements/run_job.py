"""Runs the conversion jobs that codecs offload."""

from __future__ import annotations

from gateway.codec.elements.decode import TensorDecoder
from gateway.codec.elements.encode import NumberEncoder
from gateway.codec.elements.fast_decode import fast_decode_numbers
from gateway.codec.offload_interface import ConversionJob
from gateway.errors import GatewayError
from gateway.protocol.datatypes import Family


def run_job(job: ConversionJob, data: bytes | memoryview) -> bytes | memoryview | None:
    """Run a job; return None if the data is invalid."""
    if job.to_json:
        try:
            encoder = NumberEncoder("", job.datatype, job.nonfinite)
            return encoder.encode(data, continued=job.continued)
        except GatewayError:
            return None
    plain = fast_decode_numbers(data, job.datatype)
    if plain is not None or job.datatype.family is not Family.FLOAT:
        return plain
    converted = TensorDecoder("", job.datatype).decode_unusual_floats(bytes(data))
    return None if converted is None else converted[1]
