"""Settings of the sections ``admin``, ``api_keys``, ``forwarded`` and ``tracing``."""

import re
from collections.abc import Mapping
from ipaddress import ip_address, ip_network
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    StrictBool,
    model_validator,
)

from gateway.settings.values.addresses import Address, TcpAddress, parse_endpoint
from gateway.settings.values.fields import (
    Check,
    File,
    ListenAddress,
    OneOrMore,
    Percentage,
    Section,
)
from gateway.settings.values.patterns import parse_header_name
from gateway.settings.values.wording import describe, did_you_mean


def _fixed_port(address: Address) -> Address:
    if isinstance(address, TcpAddress) and address.port == 0:
        raise ValueError("expected a port from 1 to 65535, got 0")
    return address


def _host_name(name: str) -> str:
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", name):
        raise ValueError(f"expected a host name in lower case, without a port, got {name!r}")
    return name


class Admin(Section):
    """The address for operators, and what they may do there."""

    listen: Annotated[ListenAddress, AfterValidator(_fixed_port)] | None = None
    """Address for operators, over plain HTTP: HOST:PORT, [IPv6]:PORT or unix:/PATH. Without it,
    there is none."""
    hosts: OneOrMore[Annotated[str, AfterValidator(_host_name)]] = ()
    """Host names by which operators open the page of the admin address, and by which Prometheus
    reads it, beside localhost and IP addresses. Others are refused, as web pages of others could
    use them. Only /live and /ready respond to any name."""
    actions: StrictBool = False
    """Whether operators with an API key can drain and restore endpoints, and change trace settings.
    It needs keys."""
    payloads: StrictBool = False
    """Whether operators with an API key can send inference requests from the page, and see the
    values of their tensors. It needs keys."""
    keys: str | None = None
    """The group of api_keys that actions and payloads ask for."""


def as_admin_section(value: object) -> object:
    """Return the section; an address alone is its short form."""
    return value if isinstance(value, Mapping) else {"listen": value}


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NO_KEYS_HERE = (
    "keys are not written here: name the file, or the environment variable, that holds them"
)
_NAMES_OF_KEYS = ("key", "keys", "token", "tokens", "value", "values", "secret", "bearer")

# These frame a message or are of this hop alone (RFC 9110, section 7.6.1).
_RESERVED_HEADERS = (
    *("connection", "content-encoding", "content-length", "content-type", "expect", "host"),
    *("inference-header-content-length", "keep-alive", "te", "trailer", "transfer-encoding"),
    "upgrade",
)


def _variable_name(value: object) -> str:
    if not isinstance(value, str) or not _VARIABLE.fullmatch(value):
        # The value is not quoted: it may be a key.
        raise ValueError("expected the name of an environment variable")
    return value


def _key_header(value: object) -> str:
    name = parse_header_name(value)
    if name.lower() == "authorization":
        raise ValueError("without header, keys are shown as Authorization: Bearer KEY already")
    if name.lower() in _RESERVED_HEADERS:
        raise ValueError(f"{name} is a reserved header and cannot hold a key")
    return name


class ApiKeys(Section):
    """A group of API keys: the file or variable that holds them, and how clients show them."""

    file: File | None = None
    """File that holds the keys, one on each line."""
    environment: Annotated[str, Check(_variable_name, str)] | None = None
    """Environment variable that holds the keys, with commas or spaces between."""
    header: Annotated[str, Check(_key_header, str)] | None = None
    """Request header that holds a client's key and nothing else. Without it, clients send
    Authorization: Bearer KEY."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_keys(cls, value: object) -> object:
        """Refuse what may be a key, without quoting it."""
        named = value if isinstance(value, Mapping) else {}
        if isinstance(value, str | list | tuple) or any(name in named for name in _NAMES_OF_KEYS):
            raise ValueError(_NO_KEYS_HERE)
        return value

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.file is None) == (self.environment is None):
            raise ValueError("expected either file or environment, which holds the keys")
        return self


_ALL_NETWORKS = ("0.0.0.0/0", "::/0")


def parse_network(value: object) -> str:
    """Return a network, or an address as a network of one. Raises ValueError."""
    wrong = f"expected a network such as 10.0.0.0/8 or an address, got {describe(value)}"
    if not isinstance(value, str):
        raise ValueError(wrong)
    try:
        network = ip_network(value, strict=False)
    except ValueError:
        raise ValueError(wrong) from None
    if network.network_address != ip_address(value.partition("/")[0]):
        raise ValueError(f"{wrong}; did you mean {network}?")
    return str(network)


def _networks_of_word(value: object) -> object:
    """Return the networks of the words none and all; lists stay as they are."""
    match value:
        case "none":
            return ()
        case "all":
            return _ALL_NETWORKS
        case str() if "." in value or ":" in value:
            return value
        case list() | tuple():
            return value
    expected = "none, all or networks such as [10.0.0.0/8, 127.0.0.1]"
    hint = did_you_mean("all" if value == "*" else value, ("none", "all"))
    raise ValueError(f"expected {expected}, got {describe(value)}{hint}")


_Network = Annotated[str, Check(parse_network, str)]


class Forwarded(Section):
    """Which headers tell servers about clients, and which proxies are trusted to have set them."""

    headers: StrictBool = True
    """Whether servers get X-Forwarded-For, X-Forwarded-Proto and X-Forwarded-Host. They get
    Forwarded too, where the client sends it."""
    trusted_proxies: Annotated[
        OneOrMore[_Network],
        BeforeValidator(_networks_of_word, json_schema_input_type=str | list[str]),
    ] = Field(default=(), json_schema_extra={"default": "none"})
    """Proxies whose own values of those headers are kept: none, all, or a list of networks and
    addresses. Peers on Unix sockets are always trusted."""
    via: StrictBool = True
    """Whether servers get a Via header that names the gateway. With false, they get CDN-Loop
    instead. Either shows requests that come back to the gateway."""


_RECEIVER = re.compile(r"(?P<server>(?P<scheme>https?)://[^/?#]*)(?P<path>(?:/[!-~]*)?)", re.I)
_HAS_PORT = re.compile(r".*[^:]:[0-9]+")
_DEFAULT_PORTS = {"http": 80, "https": 443}
# RFC 9110, section 5.6.2: what is a header's name over HTTP and a key of metadata over gRPC.
_HEADER_KEY = re.compile(r"[A-Za-z0-9_.-]+")
_HEADER_TEXT = re.compile(r"[ -~]*")


def parse_receiver(value: object) -> str:
    """Return the URL of a receiver, of http or https; a port is added. Raises ValueError."""
    found = _RECEIVER.fullmatch(value) if isinstance(value, str) else None
    if found is None or "?" in found["path"] or "#" in found["path"]:
        raise ValueError(f"expected a URL such as http://127.0.0.1:4318, got {describe(value)}")
    server = found["server"]
    if not _HAS_PORT.fullmatch(server) and not server.endswith(":"):
        server += f":{_DEFAULT_PORTS[found['scheme'].lower()]}"
    return parse_endpoint(server) + found["path"].rstrip("/")


def _service_name(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"expected a name, got {describe(value)}")
    return value


def _export_headers(value: object) -> Mapping[str, str]:
    if not isinstance(value, Mapping):
        raise ValueError(f"expected names and values of headers, got {describe(value)}")
    for name, text in value.items():
        if not (isinstance(name, str) and _HEADER_KEY.fullmatch(name)):
            raise ValueError(f"expected the name of a header, got {describe(name)}")
        if not (isinstance(text, str) and _HEADER_TEXT.fullmatch(text)):
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
    service_name: Annotated[str, Check(_service_name, str)] = "tensorgate"
    """The attribute service.name of all spans."""
    headers: Annotated[
        Mapping[str, str], PlainValidator(_export_headers, json_schema_input_type=Mapping[str, str])
    ] = {}
    """Headers of each export, such as the key of a service that takes traces."""
    ca: File | None = None
    """PEM file of the certificates of those who issue the receiver's certificate. Without it, the
    system's are taken."""
