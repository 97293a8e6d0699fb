"""Does what the codecs lend out, wherever that is."""

from __future__ import annotations

from gateway.codec.elements.decode import TensorDecoder
from gateway.codec.elements.encode import NumberEncoder
from gateway.codec.elements.fast_decode import fast_decode_numbers
from gateway.codec.offload import ConversionJob
from gateway.codec.policies import Nonfinite
from gateway.errors import GatewayError
from gateway.protocol.datatypes import Family


def run_job(work: ConversionJob, data: bytes | memoryview) -> bytes | memoryview | None:
    """Do the work; None where there is something to be said about the data."""
    if work.to_json:
        try:
            return NumberEncoder("", work.datatype, Nonfinite.ERROR).encode_all(data)
        except GatewayError:
            return None
    plain = fast_decode_numbers(data, work.datatype)
    if plain is not None or work.datatype.family is not Family.FLOAT:
        return plain
    converted = TensorDecoder("", work.datatype).decode_unusual_floats(bytes(data))
    return None if converted is None else converted[1]
