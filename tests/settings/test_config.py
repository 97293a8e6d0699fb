"""The files in config/: the reference shows every setting and its default, the samples load."""

import re
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gateway.settings.load import load
from gateway.settings.schema import Settings
from gateway.settings.upstreams import HealthCheck
from gateway.settings.values.addresses import TcpAddress
from gateway.settings.values.wording import KeyPath
from gateway.settings.yaml_document import parse_yaml

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


@pytest.mark.parametrize(
    ("sample", "environ", "setting", "value"),
    [
        ("sidecar", {}, "listen", (TcpAddress("127.0.0.1", 8080),)),
        ("sidecar", {"LISTEN": "0.0.0.0:80"}, "listen", (TcpAddress("0.0.0.0", 80),)),
        ("sidecar", {"ADMIN": "0.0.0.0:90"}, "admin.listen", TcpAddress("0.0.0.0", 90)),
        ("sidecar", {"REQUEST_BYTES": "1048576"}, "limits.max_request_bytes", 2**20),
        ("sidecar", {"DRAIN_TIMEOUT": "2"}, "limits.drain_timeout", 2.0),
        ("sidecar", {"LOG_LEVEL": "debug"}, "log.level", "debug"),
        ("tls", {}, "listen", (TcpAddress("0.0.0.0", 8443),)),
        ("tls", {"TLS_KEY": "/k"}, "tls.key", "/k"),
        ("tls", {"TLS_CLIENT_CERTIFICATES": "optional"}, "tls.client_certificates", "optional"),
    ],
)
def test_samples_take_values_from_the_environment(
    sample: str, environ: dict[str, str], setting: str, value: object
) -> None:
    assert attrgetter(setting)(load(CONFIG / f"{sample}.yaml", environ)) == value


@pytest.mark.parametrize("file", sorted(CONFIG.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_sample_loads_without_environment(file: Path) -> None:
    load(file, {})
