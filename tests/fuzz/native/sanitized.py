"""Builds the C module with AddressSanitizer and UndefinedBehaviorSanitizer; runs Python with it."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "gateway" / "codec" / "native"

_SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

_OBJECTS: dict[str, Path] = {}
"""What was compiled, by its text: a changed module shares most with the others."""


class NoSanitizerError(Exception):
    """This machine lacks a compiler, Python's headers or the sanitizers; the text says which."""


def build(folder: Path, *options: str, right: str = "", wrong: str = "") -> Path:
    """Compile the C module, with one part of its sources changed; raises NoSanitizerError."""
    compiler = _compiler()
    header = runpy.run_path(str(ROOT / "hatch_build.py"))["powers_of_ten"]()
    (folder / "powers_of_ten.h").write_text(header)
    sources = {path.name: path.read_text() for path in SOURCES.glob("*.[ch]")}
    assert not right or sum(text.count(right) for text in sources.values()) == 1
    if right:
        sources = {name: text.replace(right, wrong) for name, text in sources.items()}
    for name, text in sources.items():
        (folder / name).write_text(text)
    headers = [text for name, text in sources.items() if name.endswith(".h")]
    module = folder / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    include = ["-I", str(folder), "-I", sysconfig.get_path("include")]
    flags = ["-std=c11", "-O1", "-g", "-fno-omit-frame-pointer", *_SANITIZERS, *options]
    objects = []
    for name, text in sources.items():
        if not name.endswith(".c"):
            continue
        key = "\0".join((*options, *headers, text))
        if key not in _OBJECTS:
            compiled = folder / f"{name}.o"
            _compile([compiler, *flags, "-fPIC", *include, "-c", str(folder / name)], compiled)
            _OBJECTS[key] = compiled
        objects.append(str(_OBJECTS[key]))
    _compile([compiler, *flags, "-shared", *objects], module)
    return module


def _compile(command: list[str], target: Path) -> None:
    done = _run([*command, "-o", str(target)])
    if done.returncode:
        raise AssertionError(f"{SOURCES} does not compile with the sanitizers:\n{done.stderr}")


def run(program: Path, *arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a Python program in which what is built can be loaded; raises NoSanitizerError.

    A sanitizer that finds something ends it, and says what on standard error.
    """
    environment = os.environ | {
        "LD_PRELOAD": _runtime(),
        # Python's own allocator would hide where a block ends.
        "PYTHONMALLOC": "malloc",
        # Python itself leaves much behind when it ends.
        "ASAN_OPTIONS": "detect_leaks=0:exitcode=99:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": str(ROOT),
    }
    return _run([sys.executable, str(program), *arguments], environment, timeout)


def fuzz(
    program: Path, module: Path, budget: float, seed: str = ""
) -> tuple[subprocess.CompletedProcess[str], str]:
    """Fuzz a module for ``budget`` seconds; return the outcome, and what to tell of a failure."""
    last, seed = module.with_name("last"), seed or os.urandom(8).hex()
    done = run(program, str(module), str(budget), seed, str(last), timeout=budget + 120)
    data = last.read_bytes() if last.exists() else None
    return done, f"seed {seed}, last input: {data!r}\n{done.stderr}"


def check_generated(program: Path, module: Path, budget: float, least_share: float) -> None:
    """Check that nothing is found in ``budget`` seconds, and that each count has its share."""
    done, failure = fuzz(program, module, budget)
    assert done.returncode == 0, failure
    counts = json.loads(done.stdout)
    assert min(counts.values()) > least_share * sum(counts.values()) > 0, counts


def check_defect_is_found(
    program: Path, folder: Path, right: str, wrong: str, expected: str
) -> None:
    """Check that the program ends as expected where a part of the sources was changed."""
    done, output = fuzz(program, build(folder, right=right, wrong=wrong), 60, "planted")
    assert done.returncode != 0
    assert expected in output


def check_machine(folder: Path) -> None:
    """Raise NoSanitizerError unless a program can be built and run with the sanitizers."""
    source = folder / "nothing.c"
    source.write_text("int nothing(void) { return 0; }\n")
    module = folder / "nothing.so"
    done = _run([_compiler(), *_SANITIZERS, "-shared", "-fPIC", str(source), "-o", str(module)])
    if done.returncode:
        raise NoSanitizerError(f"the C compiler has no sanitizers: {done.stderr.strip()}")
    program = folder / "nothing.py"
    program.write_text(f"import ctypes\nprint(ctypes.CDLL({str(module)!r}).nothing())\n")
    done = run(program, timeout=60)
    if done.stdout != "0\n":
        raise NoSanitizerError(f"Python does not run with AddressSanitizer: {done.stderr.strip()}")


def _compiler() -> str:
    compiler = shutil.which("cc")
    if compiler is None:
        raise NoSanitizerError("there is no C compiler (cc)")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise NoSanitizerError("Python.h is missing")
    return compiler


def _runtime() -> str:
    """Find AddressSanitizer's library, which must be loaded before all others."""
    library = _run([_compiler(), "-print-file-name=libasan.so"]).stdout.strip()
    if not Path(library).is_absolute():  # the bare name, where there is none
        raise NoSanitizerError("the C compiler has no libasan.so")
    return library


def _run(
    command: list[str], environment: dict[str, str] | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
