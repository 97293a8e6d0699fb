"""Finds the programs that these tests run; a test whose program is missing is skipped."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from benchmarks.harness.client import NotInstalledError
from benchmarks.harness.processes import Server

PACKAGES = {
    "aarch64-linux-gnu-gcc": "gcc-aarch64-linux-gnu libc6-dev-arm64-cross",
    "cc": "gcc",
    "curl": "curl",
    "h2load": "nghttp2-client",
    "musl-gcc": "musl-tools",
    "nghttp": "nghttp2-client",
    "node": "nodejs",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "qemu-aarch64": "qemu-user",
    "wrk": "wrk",
}
"""The Debian packages that have the programs."""


def program(name: str) -> str:
    """Give the path of a program, or skip the test."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (apt install {PACKAGES[name]})")
    return found


def installed_folder(name: str) -> Path:
    """Give a folder of .cache that install_programs.sh has made, or skip the test."""
    folder = _CACHE / name
    if not folder.exists():
        pytest.skip(f"there is no {folder} (tests/interop/install_programs.sh)")
    return folder


_CACHE = Path(__file__).parents[2] / ".cache"
_GO_FOLDER = _CACHE / "go"


def go_program(package: str) -> str:
    """Install a program by Go's tool, once; skip the test if that is not possible.

    ``package`` has its version after an @. Return the path of the program.
    """
    name, version = package.rpartition("/")[2].split("@")
    folder = _GO_FOLDER / f"{name}-{re.sub('[^A-Za-z0-9.]', '-', version)}"
    if not (folder / name).exists():
        go = shutil.which("go")
        if go is None:
            pytest.skip(f"{name} is not installed, and there is no Go toolchain to install it")
        folder.mkdir(parents=True, exist_ok=True)
        environ = {**os.environ, "GOBIN": str(folder.resolve())}
        done = subprocess.run(
            [go, "install", package], env=environ, capture_output=True, text=True, timeout=300
        )
        if done.returncode:
            pytest.skip(f"go install {package}: {done.stderr.strip()[-300:]}")
    return str(folder / name)


def built_go_program(source: Path) -> str:
    """Build a program of one file that needs no module, or skip the test; return its path."""
    go = shutil.which("go")
    if go is None:
        pytest.skip(f"there is no Go toolchain to build {source.name}")
    built = _GO_FOLDER / f"{source.parent.name}-{source.stem}"
    command = [go, "build", "-o", str(built.resolve()), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    return str(built.resolve())


Proxy = Callable[[int], AbstractContextManager[Server]]


@contextmanager
def before(proxy: Proxy, url: str) -> Iterator[str]:
    """Run a proxy before what listens at a URL; give the proxy's own."""
    port = urlsplit(url).port
    assert port is not None
    try:
        # Without cores of their own: to set them takes a fork, which breaks grpcio in this process.
        with proxy(port) as running:
            yield f"http://127.0.0.1:{running.ports[0]}"
    except NotInstalledError as error:
        pytest.skip(str(error))
