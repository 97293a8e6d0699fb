"""Settings and commands that the documentation shows can be used as they stand."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.settings.load import load
from gateway.settings.values.units import parse_size
from tests.docs.markdown import PAGES, ROOT, Block, blocks, name

_OF_OTHERS = {"apiVersion", "spec", "containers", "lifecycle", "scrape_configs", "volumes"}
"""Keys at the top of what is for Kubernetes or Prometheus."""

SAMPLES = [
    pytest.param(block, id=f"{name(page)}:{block.line}")
    for page in PAGES
    for block in blocks(page)
    if block.language == "yaml"
]


@pytest.mark.parametrize("block", SAMPLES)
def test_every_sample_of_settings_can_be_used(block: Block, tmp_path: Path) -> None:
    """One that shows no upstreams gets those that its routes name."""
    document: Any = yaml.safe_load(block.text)
    if not _OF_OTHERS.isdisjoint(document):
        return
    text = block.text
    if "upstreams" not in document:
        names = _upstreams_of(document.get("routes", [])) or {"triton"}
        servers = [f"  {each}: {{endpoints: [http://127.0.0.1:8000]}}" for each in sorted(names)]
        text = "\n".join([text, "upstreams:", *servers])
    file = tmp_path / "gateway.yaml"
    file.write_text(text)
    environment = dict.fromkeys(re.findall(r"\$\{(\w+)\}", text), "http://127.0.0.1:8000")
    load(file, environment)


def _upstreams_of(routes: list[dict[str, Any]]) -> set[str]:
    found: set[str] = set()
    for route in routes:
        upstream = route["upstream"]
        found |= {upstream} if isinstance(upstream, str) else {each["name"] for each in upstream}
        if "mirror" in route:
            found.add(route["mirror"]["upstream"])
    return found


def test_limit_in_the_readme_takes_eight_images_in_json() -> None:
    """Of float32 as Python writes them: with all the digits of a double, and an exponent."""
    (sample,) = [
        each.text for each in blocks(ROOT / "README.md") if "max_request_bytes" in each.text
    ]
    route = yaml.safe_load(sample)["routes"][0]
    element = len(json.dumps([-1.1920928955078125e-07, 1])) - len("[1]")
    assert 8 * 3 * 224 * 224 * element < parse_size(route["limits"]["max_request_bytes"])


PAGE = ROOT / "docs" / "guide" / "upgrade.md"
UNIT = ROOT / "deploy" / "tensorgate.service"


def _programs(unit: Path) -> set[str]:
    lines = unit.read_text().splitlines()
    return {line.split("=")[1].split()[0] for line in lines if line.startswith("ExecStart")}


def test_unit_starts_the_new_version_and_then_the_old_one(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    shutil.copy(UNIT, unit)
    lines = [line for block in blocks(PAGE) for line in block.text.splitlines()]
    to_new, to_old = [shlex.split(line) for line in lines if line.startswith("sed ")]
    before = _programs(unit)
    subprocess.run([*to_new[:-1], str(unit)], check=True)
    assert _programs(unit) == {"/opt/tensorgate-0.2.0/bin/tensorgate"}
    subprocess.run([*to_old[:-1], str(unit)], check=True)
    assert _programs(unit) == before == {"/opt/tensorgate/bin/tensorgate"}
