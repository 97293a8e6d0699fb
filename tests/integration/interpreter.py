"""Ask a Python interpreter what an installation must know of it."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

# Triton's backend embeds Python, so it needs the shared library; where sysconfig's LIBDIR
# does not hold it, the loader may know another place ("" below).
_QUESTIONS = """
import ctypes, json, os, sys, sysconfig
name = "libpython%d.%d.so.1.0" % sys.version_info[:2]
folder = None
for place in (sysconfig.get_config_var("LIBDIR"), os.path.join(sys.base_prefix, "lib"), ""):
    try:
        ctypes.CDLL(os.path.join(place or "", name))
    except OSError:
        continue
    folder = place or ""
    break
print(json.dumps({
    "version": "%d.%d" % sys.version_info[:2],
    "site_packages": sysconfig.get_path("purelib"),
    "library_folder": folder,
}))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python interpreter.

    version is like "3.11". library_folder holds libpython; it is empty if the system's loader
    finds it by itself, and None if there is no shared libpython.
    """

    path: Path
    version: str
    site_packages: Path
    library_folder: str | None


def probe(path: Path) -> Interpreter | None:
    """Ask the interpreter at path; answer None if it cannot be run."""
    try:
        run = subprocess.run([path, "-I", "-c", _QUESTIONS], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    said = json.loads(run.stdout)
    return Interpreter(path, said["version"], Path(said["site_packages"]), said["library_folder"])
