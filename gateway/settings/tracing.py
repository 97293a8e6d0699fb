"""Settings of the section ``tracing``: which calls are traced, and where their spans go."""

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, PlainValidator

from gateway.settings.values.addresses import parse_endpoint
from gateway.settings.values.fields import Check, File, Percentage, Section
from gateway.settings.values.wording import describe

_URL = re.compile(r"(?P<server>(?P<scheme>https?)://[^/?#]*)(?P<path>(?:/[!-~]*)?)", re.I)
_HAS_PORT = re.compile(r".*[^:]:[0-9]+")
_DEFAULT_PORTS = {"http": 80, "https": 443}
# RFC 9110, section 5.6.2: what is a header's name over HTTP and a key of metadata over gRPC.
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_VALUE = re.compile(r"[ -~]*")


def parse_receiver(value: object) -> str:
    """Return the URL of a receiver, of http or https; a port is added. Raises ValueError."""
    found = _URL.fullmatch(value) if isinstance(value, str) else None
    if found is None or "?" in found["path"] or "#" in found["path"]:
        raise ValueError(f"expected a URL such as http://127.0.0.1:4318, got {describe(value)}")
    server = found["server"]
    if not _HAS_PORT.fullmatch(server) and not server.endswith(":"):
        server += f":{_DEFAULT_PORTS[found['scheme'].lower()]}"
    return parse_endpoint(server) + found["path"].rstrip("/")


def _name(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"expected a name, got {describe(value)}")
    return value


def _headers(value: object) -> Mapping[str, str]:
    if not isinstance(value, Mapping):
        raise ValueError(f"expected names and values of headers, got {describe(value)}")
    for name, text in value.items():
        if not (isinstance(name, str) and _NAME.fullmatch(name)):
            raise ValueError(f"expected the name of a header, got {describe(name)}")
        if not (isinstance(text, str) and _VALUE.fullmatch(text)):
            raise ValueError(f"expected text in ASCII as the value of {name}")
    return dict(value)


class Tracing(Section):
    """Which calls are traced, and where their spans go."""

    endpoint: Annotated[str, Check(parse_receiver, str)]
    """URL of the receiver of spans, such as http://127.0.0.1:4318. Over HTTP, /v1/traces is added
    to a URL without a path."""
    protocol: Literal["http", "grpc"] = "http"
    """Protocol of the receiver: OTLP over HTTP, mostly on port 4318, or over gRPC, mostly on port
    4317."""
    sample: Percentage = Field(default=100.0, json_schema_extra={"default": "100%"})
    """Percentage of the calls without a traceparent of their own that are traced. The others are
    traced as their traceparent says."""
    service_name: Annotated[str, Check(_name, str)] = "tensorgate"
    """The attribute service.name of all spans."""
    headers: Annotated[
        Mapping[str, str], PlainValidator(_headers, json_schema_input_type=Mapping[str, str])
    ] = {}
    """Headers of each export, such as the key of a service that takes traces."""
    ca: File | None = None
    """PEM file of the certificates of those who issue the receiver's certificate. Without it, the
    system's are taken."""
