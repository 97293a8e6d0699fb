"""The settings of an upstream: its servers, and how they are spoken to."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PlainValidator, StrictBool

from gateway.settings.addresses import parse_endpoint, parse_host
from gateway.settings.fields import File, Percentage, Section, count
from gateway.settings.limits import Places

_DIALECTS_TO_COME = ("auto", "kserve", "openvino", "json")


def _known_dialect(value: object) -> object:
    if value in _DIALECTS_TO_COME:
        raise ValueError(f"the dialect {value} is not available yet; triton is")
    return value


_Endpoint = Annotated[str, PlainValidator(parse_endpoint, json_schema_input_type=str)]


class UpstreamTls(Section):
    """Say how TLS is spoken to the endpoints that are https."""

    ca: File | None = Field(
        default=None,
        description="The file of the certificates, PEM, that are trusted instead of the system's.",
    )
    certificate: File | None = Field(
        default=None,
        description="The file of the certificate, PEM, that the gateway shows to servers, followed"
        " by those of its issuers.",
    )
    key: File | None = Field(
        default=None,
        description="The file of the certificate's key, PEM, without a password.",
    )
    server_name: Annotated[str, PlainValidator(parse_host, json_schema_input_type=str)] | None = (
        Field(
            default=None,
            description="What the servers' certificates must name; the endpoint's host, if nothing"
            " is said.",
        )
    )
    verify: StrictBool = Field(
        default=True,
        description="Whether the servers' certificates are checked. Without that, anybody on the"
        " way can read and change what is sent.",
    )


class Retries(Section):
    """Bound how many requests are sent again, so that retries do not multiply an outage."""

    share: Percentage = Field(
        default=0.5, description="How many there may be, of the requests to the upstream."
    )
    reserve: Annotated[int, count("0", "1000000")] = Field(
        default=20, description="How many there may be at once when all was well before."
    )


class Upstream(Section):
    """Name a group of servers that answer alike."""

    endpoints: tuple[_Endpoint, ...] = Field(
        min_length=1,
        description="The servers, each as http://host:port, https://host:port or unix:/path.",
    )
    tls: UpstreamTls | None = Field(
        default=None, description="How TLS is spoken to the endpoints that are https."
    )
    dialect: Annotated[Literal["triton"], BeforeValidator(_known_dialect)] = Field(
        default="triton", description="How the servers speak the protocol."
    )
    retries: Retries = Field(
        default=Retries(), description="How many requests to these servers are sent again."
    )
    limits: Places = Field(
        default=Places(), description="How many requests may be at these servers at a time."
    )
