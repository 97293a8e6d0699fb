"""What a release builds and publishes, as far as that can be checked offline."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway import __version__
from tests.deploy.files import ROOT
from tests.deploy.release import check_tag
from tests.deploy.wheels import supported_versions

BIN = Path(sys.executable).parent
FILE = ROOT / ".github" / "workflows" / "release.yml"
# YAML 1.1 reads the key `on` as true.
WORKFLOW: dict[Any, Any] = yaml.safe_load(FILE.read_text())
JOBS: dict[str, dict[str, Any]] = WORKFLOW["jobs"]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CIBUILDWHEEL = PYPROJECT["tool"]["cibuildwheel"]

# pypa/gh-action-pypi-publish has no release that is older than its advice to name this branch.
BRANCHES = {"pypa/gh-action-pypi-publish@release/v1"}


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BIN / command[0]), *command[1:]], cwd=cwd, capture_output=True, text=True, timeout=60
    )


def validate(file: Path) -> int:
    return run(
        "check-jsonschema", "--builtin-schema", "vendor.github-workflows", str(file)
    ).returncode


def identifiers(platform: str, arch: str, cwd: Path = ROOT) -> list[str]:
    """Return what cibuildwheel would build with the settings of a folder."""
    options = ("--platform", platform, "--archs", arch)
    done = run("cibuildwheel", "--print-build-identifiers", *options, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def steps() -> list[dict[str, Any]]:
    return [step for job in JOBS.values() for step in job["steps"]]


def scripts(job: str) -> str:
    return "\n".join(step.get("run", "") for step in JOBS[job]["steps"])


def test_the_workflow_fits_its_schema() -> None:
    assert validate(FILE) == 0


def test_the_tag_must_be_that_of_the_version() -> None:
    assert check_tag(f"v{__version__}") is None
    for tag in (__version__, f"v{__version__}.1", "v", "main"):
        assert check_tag(tag) == f"the tag is {tag}, and this version's is v{__version__}"
    assert 'python -m tests.deploy.release "$TAG"' in scripts("sdist")


def test_only_the_publishing_job_may_do_more_than_read() -> None:
    assert WORKFLOW["permissions"] == {}
    allowed = {name: job["permissions"] for name, job in JOBS.items()}
    publishing = allowed.pop("publish")
    assert publishing == {"id-token": "write"}
    assert all(each == {"contents": "read"} for each in allowed.values())


def test_publishing_is_trusted_and_signed() -> None:
    """There is no secret to lose: PyPI checks the workflow's identity, in an environment."""
    (publish,) = (step for step in JOBS["publish"]["steps"] if "pypi-publish" in step["uses"])
    assert publish["with"]["attestations"] is True
    assert JOBS["publish"]["environment"]["name"] == "pypi"
    assert "secrets." not in FILE.read_text()


def test_the_publishing_job_runs_no_code_of_the_checkout() -> None:
    uses = [step["uses"].partition("@")[0] for step in JOBS["publish"]["steps"]]
    assert uses == ["actions/download-artifact", "pypa/gh-action-pypi-publish"]


def test_actions_are_pinned_and_checkouts_keep_no_credentials() -> None:
    for step in (step for step in steps() if "uses" in step):
        name = step["uses"]
        assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|[0-9a-f]{40})", name) or name in BRANCHES
        if name.startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


def test_no_script_contains_an_expression() -> None:
    """A tag may be named like a shell command: scripts get it from the environment."""
    assert not [step for step in steps() if "${{" in step.get("run", "")]


def test_all_name_the_same_versions_of_python() -> None:
    versions = supported_versions()
    assert PYPROJECT["project"]["requires-python"] == f">={versions[0]}"
    assert JOBS["test"]["strategy"]["matrix"]["python"] == versions
    tags = [f"cp{each.replace('.', '')}" for each in versions]
    assert CIBUILDWHEEL["build"].split() == [f"{tag}-*" for tag in tags]
    built = identifiers("linux", "x86_64")
    assert built == [f"{tag}-{libc}_x86_64" for libc in ("manylinux", "musllinux") for tag in tags]


@pytest.mark.parametrize(
    ("platform", "arch", "runner"),
    [
        ("linux", "x86_64", "ubuntu-24.04"),
        ("linux", "aarch64", "ubuntu-24.04-arm"),
        ("macos", "x86_64", "macos-15-intel"),
        ("macos", "arm64", "macos-15"),
    ],
)
def test_each_platform_is_built_on_its_own_processor(platform: str, arch: str, runner: str) -> None:
    matrix = JOBS["wheels"]["strategy"]["matrix"]["include"]
    assert {"name": f"{platform}-{arch}", "runner": runner} in matrix
    assert len(matrix) == 4
    libcs = 2 if platform == "linux" else 1
    assert len(identifiers(platform, arch)) == libcs * len(supported_versions())


def test_a_wheel_of_a_release_must_be_compiled() -> None:
    assert CIBUILDWHEEL["environment"] == {"TENSORGATE_PURE": "0"}
    version, form = CIBUILDWHEEL["test-command"]
    assert version == "tensorgate --version"
    assert "form() == 'compiled'" in form


def test_the_workflow_uses_the_cibuildwheel_that_is_tested() -> None:
    (wanted,) = (
        each
        for each in PYPROJECT["project"]["optional-dependencies"]["dev"]
        if each.startswith("cibuildwheel")
    )
    assert f"pip install '{wanted}'" in scripts("wheels")
