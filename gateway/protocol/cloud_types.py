"""Content types of SageMaker and Vertex AI, which carry the length of the JSON header.

Both clouds forward bodies and content types but not all headers. So Triton's endpoints for them
take the header length as a parameter of the type: ``sagemaker_server.cc``,
``vertex_ai_server.cc``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gateway.errors import bad_request

HEADER_SIZE_PARAMETER = "json-header-size"


@dataclass(frozen=True, slots=True)
class Cloud:
    """A cloud's content type for bodies with binary tensors, in lower case.

    ``length_in_response_type`` tells whether clients read the header length of a response from its
    type, too; otherwise they read Inference-Header-Content-Length.
    """

    content_type: str
    length_in_response_type: bool


SAGEMAKER = Cloud("application/vnd.sagemaker-triton.binary+json", length_in_response_type=True)
# Triton's endpoint responds with octet-stream and Inference-Header-Content-Length.
VERTEX_AI = Cloud("application/vnd.vertex-ai-triton.binary+json", length_in_response_type=False)

_CLOUDS = (SAGEMAKER, VERTEX_AI)

# RFC 9110, sections 5.6.2, 5.6.4, 5.6.6 and 8.3.1.
_WORD = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_PARAMETER = re.compile(rf'[ \t]*;[ \t]*(?:({_WORD})=({_WORD}|"(?:[^"\\]|\\.)*"))?')
_ESCAPED = re.compile(r"\\(.)")
_SIZE = re.compile(r"[0-9]{1,19}")


@dataclass(frozen=True, slots=True)
class CloudType:
    """A cloud's content type; ``header_size`` is in bytes, None if the whole body is JSON."""

    cloud: Cloud
    header_size: int | None


def is_cloud_type(content_type: str) -> bool:
    """Tell whether a content type contains a cloud's type, even if it is malformed."""
    return _find_cloud(content_type) is not None


def parse_cloud_type(content_type: str) -> CloudType | None:
    """Parse a content type; None if it is not a cloud's.

    Raises GatewayError (400) for a malformed type or size.
    """
    cloud = _find_cloud(content_type)
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
        parameter = _PARAMETER.match(content_type, position)
        if parameter is None:
            raise bad_request(
                f"the Content-Type has a parameter that cannot be read, near "
                f"{content_type[position : position + 60]!r}"
            )
        position = parameter.end()
        if parameter[1] is not None and parameter[1].lower() == HEADER_SIZE_PARAMETER:
            if size is not None:
                raise bad_request(f"the Content-Type has more than one {HEADER_SIZE_PARAMETER}")
            size = _parse_size(parameter[2])
    return CloudType(cloud, size)


def resolve_header_size(
    cloud_type: CloudType, stated: int | None, body_size: int | None
) -> int | None:
    """Return the header size of a request; None if the whole body is JSON.

    ``stated`` is that of Inference-Header-Content-Length, ``body_size`` that of the body, None if
    unknown. Raises GatewayError (400) if they do not fit the content type.
    """
    size = cloud_type.header_size
    if size is None:
        size = stated
    elif stated is not None and size != stated:
        raise bad_request(
            f"Inference-Header-Content-Length is {stated}, but {HEADER_SIZE_PARAMETER} of the "
            f"Content-Type {size}"
        )
    if size is not None and body_size is not None and size > body_size:
        raise bad_request(
            f"{HEADER_SIZE_PARAMETER} of the Content-Type is {size}, the body has {body_size} bytes"
        )
    return size


def format_cloud_type(cloud: Cloud, header_size: str) -> str:
    """Format the content type of a body whose JSON header has ``header_size`` bytes."""
    return f"{cloud.content_type};{HEADER_SIZE_PARAMETER}={header_size}"


def _find_cloud(content_type: str) -> Cloud | None:
    lowered = content_type.lower()
    return next((cloud for cloud in _CLOUDS if cloud.content_type in lowered), None)


def _parse_size(value: str) -> int:
    if value.startswith('"'):
        value = _ESCAPED.sub(r"\1", value[1:-1])
    if not _SIZE.fullmatch(value):
        raise bad_request(
            f"{HEADER_SIZE_PARAMETER} of the Content-Type must be a number of bytes, "
            f"got {value[:60]!r}"
        )
    return int(value)
