"""The files in config/: the reference shows every setting and its default, the samples load."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gateway.settings.api_keys import ApiKeys
from gateway.settings.load import load
from gateway.settings.routes import Mirror
from gateway.settings.schema import ClientTls, Settings
from gateway.settings.upstreams import HealthCheck
from gateway.settings.values.addresses import TcpAddress
from gateway.settings.values.wording import KeyPath
from gateway.settings.yaml.loader import parse_yaml

CONFIG = Path(__file__).parents[2] / "config"
REFERENCE = CONFIG / "reference.yaml"


# Where the reference file goes on below a field that holds several items.
ITEM: dict[str, KeyPath] = {
    "upstreams": ("triton",),
    "api_keys": ("team-a",),
    "routes": (0,),
    "upstream": (0,),
    "models": ("resnet50",),
    "inputs": (0,),
    "outputs": (0,),
}

# A name right behind the mark, alone or with a value, and what stands below it.
COMMENTED_OUT = re.compile(r"^ *#(?:[a-z_]+:(?: \S+)?$|(?:  )+\S.*)", re.MULTILINE)


def models(field: FieldInfo) -> list[type[BaseModel]]:
    kinds = (field.annotation, *get_args(field.annotation))
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]


def fields(model: type[BaseModel], path: KeyPath = ()) -> Iterator[tuple[KeyPath, FieldInfo]]:
    for name, field in model.model_fields.items():
        here = (*path, name)
        yield here, field
        for nested in models(field):
            yield from fields(nested, (*here, *ITEM.get(name, ())))


def test_the_reference_holds_the_defaults() -> None:
    upstreams = {"triton": {"endpoints": ["http://127.0.0.1:8000"]}}
    shown = load(REFERENCE, {})
    examples_left_out = {
        "upstreams": {"triton": shown.upstreams["triton"]},
        "routes": shown.routes[1:],
    }
    shown = shown.model_copy(update=examples_left_out)
    assert shown == Settings.model_validate({"upstreams": upstreams})


def test_the_reference_shows_the_default_limits_of_a_route() -> None:
    shown = load(REFERENCE, {})
    for name, value in shown.routes[0].limits:
        assert value == getattr(shown.limits, name)


def uncommented_reference() -> str:
    """Return the reference with the settings that it has commented out."""
    return COMMENTED_OUT.sub(lambda found: found[0].replace("#", "", 1), REFERENCE.read_text())


def test_the_settings_that_are_commented_out_are_valid(file: Path) -> None:
    text = uncommented_reference().replace("[http://127.0.0.1:8000]", "[https://localhost:8000]")
    file.write_text(text.replace("auth: []", "auth: [team-a, robots]"))
    settings = load(file, {})
    assert settings.tls is not None
    upstream = settings.upstreams["triton"]
    assert upstream.tls is not None
    assert upstream.health_check == HealthCheck()
    assert (upstream.dns_refresh, upstream.model_discovery) == (10.0, True)
    assert settings.routes[0].auth == tuple(settings.api_keys) == ("team-a", "robots")


def test_the_reference_shows_every_setting() -> None:
    # One group of keys has a file, the other has not: each shows a part.
    of_both = {"robots": "team-a"}
    shown = {
        tuple(of_both.get(str(part), part) for part in path)
        for path in parse_yaml(uncommented_reference(), {}).positions
    }
    paths = [path for path, _ in fields(Settings)]
    assert ("upstreams", "triton", "dialect") in paths
    assert [path for path in paths if path not in shown] == []


def test_the_sidecar_sample_needs_no_environment() -> None:
    settings = load(CONFIG / "sidecar.yaml", {})
    assert settings.listen == (TcpAddress("127.0.0.1", 8080),)
    assert settings.admin.listen == TcpAddress("127.0.0.1", 9080)
    assert settings.upstreams["triton"].endpoints == ("http://127.0.0.1:8000",)


def test_the_sidecar_sample_takes_values_from_the_environment() -> None:
    environ = {
        "LISTEN": "0.0.0.0:80",
        "ADMIN": "0.0.0.0:90",
        "TRITON_URL": "http://[::1]:9000",
        "REQUEST_BYTES": "1048576",
        "DRAIN_TIMEOUT": "2",
        "LOG_LEVEL": "debug",
    }
    settings = load(CONFIG / "sidecar.yaml", environ)
    assert settings.listen == (TcpAddress("0.0.0.0", 80),)
    assert settings.admin.listen == TcpAddress("0.0.0.0", 90)
    assert settings.upstreams["triton"].endpoints == ("http://[::1]:9000",)
    assert settings.limits.max_request_bytes == 1048576
    assert settings.limits.drain_timeout == 2.0
    assert settings.log.level == "debug"


def test_the_tls_sample_takes_values_from_the_environment() -> None:
    environ = {"TLS_KEY": "/k", "TLS_CLIENT_CERTIFICATES": "optional"}
    settings = load(CONFIG / "tls.yaml", environ)
    assert settings.listen == (TcpAddress("0.0.0.0", 8443),)
    assert settings.tls == ClientTls(
        certificate="/etc/tensorgate/tls/tls.crt",
        key="/k",
        client_ca="/etc/tensorgate/tls/ca.crt",
        client_certificates="optional",
    )


def test_the_canary_sample_takes_values_from_the_environment() -> None:
    environ = {"NEXT_URL": "http://next:8000", "MIRROR_PERCENT": "100%"}
    settings = load(CONFIG / "canary.yaml", environ)
    assert settings.upstreams["next"].endpoints == ("http://next:8000",)
    shown = {"upstream": "next", "percent": "100%"}
    assert settings.routes[0].mirror == Mirror.model_validate(shown)
    mirror = load(CONFIG / "canary.yaml", {}).routes[0].mirror
    assert mirror == Mirror.model_validate({**shown, "percent": "10%"})


def test_the_sample_of_api_keys_takes_values_from_the_environment() -> None:
    settings = load(CONFIG / "keys.yaml", {"PEOPLE_KEYS": "/k"})
    assert settings.api_keys["people"] == ApiKeys(file="/k")
    assert settings.api_keys["robots"] == ApiKeys(environment="ROBOT_KEYS", header="X-Api-Key")


@pytest.mark.parametrize("file", sorted(CONFIG.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_sample_loads_without_environment(file: Path) -> None:
    load(file, {})
