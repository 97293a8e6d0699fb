"""The commands that move a systemd unit to another version, and back."""

import shlex
import shutil
import subprocess
from pathlib import Path

from tests.docs.markdown import ROOT, blocks

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
