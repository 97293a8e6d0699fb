"""The content types in which the clients of clouds say how long the header is.

Clouds pass bodies and their types on, but not all headers: so Triton's endpoints for them take the
header length as a parameter of the type (``sagemaker_server.cc`` and ``vertex_ai_server.cc``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gateway.errors import bad_request

HEADER_SIZE_PARAMETER = "json-header-size"


@dataclass(frozen=True, slots=True)
class Cloud:
    """A cloud's content type for bodies with binary tensors, in lower case.

    ``length_in_response_type`` tells whether its clients read the header length of an answer from
    its type
    too; else they read it from the header of the protocol.
    """

    content_type: str
    length_in_response_type: bool


SAGEMAKER = Cloud("application/vnd.sagemaker-triton.binary+json", length_in_response_type=True)
# Triton's endpoint answers octet-stream, with Inference-Header-Content-Length.
VERTEX_AI = Cloud("application/vnd.vertex-ai-triton.binary+json", length_in_response_type=False)

_CLOUDS = (SAGEMAKER, VERTEX_AI)

# RFC 9110, sections 5.6.2, 5.6.4, 5.6.6 and 8.3.1.
_WORD = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_PARAMETER = re.compile(rf'[ \t]*;[ \t]*(?:({_WORD})=({_WORD}|"(?:[^"\\]|\\.)*"))?')
_ESCAPED = re.compile(r"\\(.)")
_SIZE = re.compile(r"[0-9]{1,19}")


@dataclass(frozen=True, slots=True)
class CloudType:
    """A cloud's content type; ``header_size`` is in bytes, None where all of the body is JSON."""

    cloud: Cloud
    header_size: int | None


def is_cloud_type(content_type: str) -> bool:
    """Tell whether a content type is meant for a cloud, well-formed or not."""
    return _named_in(content_type) is not None


def parse_cloud_type(content_type: str) -> CloudType | None:
    """Read a content type, None where it is not a cloud's.

    Raises GatewayError (400) for one that begins otherwise or has a size that is no number.
    """
    cloud = _named_in(content_type)
    if cloud is None:
        return None
    content_type = content_type.strip(" \t")
    size = None
    position = len(cloud.content_type)
    if content_type[:position].lower() != cloud.content_type:
        raise bad_request(
            f"the Content-Type must begin with {cloud.content_type}, got {content_type[:120]!r}"
        )
    while position < len(content_type):
        found = _PARAMETER.match(content_type, position)
        if found is None:
            raise bad_request(
                f"the Content-Type has a parameter that cannot be read, near "
                f"{content_type[position : position + 60]!r}"
            )
        position = found.end()
        if found[1] is not None and found[1].lower() == HEADER_SIZE_PARAMETER:
            if size is not None:
                raise bad_request(f"the Content-Type has more than one {HEADER_SIZE_PARAMETER}")
            size = _size(found[2])
    return CloudType(cloud, size)


def format_cloud_type(cloud: Cloud, header_size: str) -> str:
    """Give the content type of a body with so many bytes of JSON, in digits, before its tensors."""
    return f"{cloud.content_type};{HEADER_SIZE_PARAMETER}={header_size}"


def _named_in(content_type: str) -> Cloud | None:
    lowered = content_type.lower()
    return next((cloud for cloud in _CLOUDS if cloud.content_type in lowered), None)


def _size(value: str) -> int:
    if value.startswith('"'):
        value = _ESCAPED.sub(r"\1", value[1:-1])
    if not _SIZE.fullmatch(value):
        raise bad_request(
            f"{HEADER_SIZE_PARAMETER} of the Content-Type must be a number of bytes, "
            f"got {value[:60]!r}"
        )
    return int(value)
