"""The tests of the C modules pass where each access out of bounds ends the process."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def machine(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skip these tests if nothing can be built with sanitizers."""
    try:
        check_machine(tmp_path_factory.mktemp("machine"))
    except NoSanitizerError as error:
        pytest.skip(f"the C module is not fuzzed: {error}")


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of what was compiled, which all processes of a test run share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "objects"
    folder.mkdir(exist_ok=True)
    return folder


ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "gateway" / "codec" / "native"
HEADS = ROOT / "gateway" / "http1" / "native"

_INCLUDE = re.compile(r'^ *# *include "(.+)"', re.MULTILINE)

_SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

# Only as much for the debugger as names the lines of a report.
_FLAGS = ["-std=c11", "-O1", "-g1", "-fno-omit-frame-pointer", *_SANITIZERS]


class NoSanitizerError(Exception):
    """This machine lacks a compiler, Python's headers or the sanitizers; the text says which."""


def build(
    folder: Path, objects: Path, right: str = "", wrong: str = "", package: Path = SOURCES
) -> Path:
    """Compile a C module, with one part of its sources changed; raises NoSanitizerError.

    What was compiled is kept in ``objects``, by its source and headers: a changed module shares
    most with the others.
    """
    sources = {path.name: path.read_text() for path in package.glob("*.[ch]")}
    assert not right or sum(text.count(right) for text in sources.values()) == 1
    if right:
        sources = {name: text.replace(right, wrong) for name, text in sources.items()}
    for name, text in {**sources, "powers_of_ten.h": _powers_of_ten()}.items():
        (folder / name).write_text(text)
    name = "_native" if package == SOURCES else "_heads"
    module = folder / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    command = [_compiler(), *_FLAGS, "-fPIC"]
    include = ["-I", str(folder), "-I", sysconfig.get_path("include")]
    built = []
    for source in sorted(folder.glob("*.c")):
        key = hashlib.sha256(_with_headers(source.name, sources).encode()).hexdigest()
        target = objects / f"{key}.o"
        with _lock(objects / f"{key}.lock"):
            if not target.exists():
                compiled = source.with_suffix(".o")
                _compile([*command, *include, "-c", str(source)], compiled)
                compiled.rename(target)
        built.append(str(target))
    _compile([*command, "-shared", *built], module)
    return module


def _with_headers(name: str, sources: dict[str, str]) -> str:
    """Return the texts of a source and of all headers of ours that it includes."""
    names = [name]
    for each in names:  # grows on the way
        names += [
            header
            for header in _INCLUDE.findall(sources[each])
            if header in sources and header not in names
        ]
    return "".join(sources[each] for each in names)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Let one process of a test run compile while the others wait for what it compiles."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@cache
def _powers_of_ten() -> str:
    script = runpy.run_path(str(ROOT / "build_tools" / "float_tables.py"))
    header: str = script["powers_of_ten"]()
    return header


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


def run_tests(module: Path, tests: str) -> subprocess.CompletedProcess[str]:
    """Run tests of the C module with the one that was built."""
    return run(Path(__file__).with_name("run_tests.py"), str(module), tests, timeout=500)


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


TESTS = "tests/codec/native"
READER, WRITER, STRINGS = (
    f"{TESTS}/{name}.py" for name in ("test_decode_numbers", "test_encode_numbers", "test_strings")
)
KNOWS_PROCESSOR = "#ifdef __x86_64__\n#include"
FOR_ANY_PROCESSOR = f"#undef __x86_64__\n#undef __aarch64__\n{KNOWS_PROCESSOR}"


@pytest.mark.parametrize(
    ("tests", "right", "wrong"),
    [
        (TESTS, "", ""),
        (READER, KNOWS_PROCESSOR, FOR_ANY_PROCESSOR),
        (WRITER, KNOWS_PROCESSOR, FOR_ANY_PROCESSOR),
        (
            READER,
            'return __builtin_cpu_supports("avx2")',
            'return 0 && __builtin_cpu_supports("avx2")',
        ),
    ],
    ids=["all", "reader for any processor", "writer for any processor", "reader without AVX2"],
)
def test_c_module_stays_within_bounds(
    tests: str, right: str, wrong: str, tmp_path: Path, objects: Path
) -> None:
    done = run_tests(build(tmp_path, objects, right, wrong), tests)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout


@pytest.mark.parametrize(
    ("tests", "right", "wrong", "expected"),
    [
        (
            READER,
            "return at - begin > LOOK_BACK && end - at >= LOOK_AHEAD;",
            "return at - begin > LOOK_BACK;",
            "READ of size",
        ),
        (READER, "up &= mantissa >> 1;", "up = 1;", "c_reader_rounds"),
        (WRITER, "[FP64] = 26", "[FP64] = 16", "ERROR: AddressSanitizer"),
        (
            STRINGS,
            "if (bounds->limit - *to < end - at + MAX_ESCAPE) {",
            "if (bounds->limit - *to < 0) {",
            "AddressSanitizer: heap-buffer-overflow",
        ),
        (STRINGS, "return word & 0x1E ? 2 : 0;", "return 2;", "invalid_characters"),
    ],
    ids=["read beyond", "tie rounded up", "number beyond", "escapes beyond", "overlong form"],
)
def test_planted_defect_is_found(
    tests: str, right: str, wrong: str, expected: str, tmp_path: Path, objects: Path
) -> None:
    done = run_tests(build(tmp_path, objects, right, wrong), tests)
    assert done.returncode != 0
    assert expected in done.stdout + done.stderr


def test_c_module_of_heads_stays_within_bounds(tmp_path: Path, objects: Path) -> None:
    done = run_tests(build(tmp_path, objects, package=HEADS), "tests/http1/test_repeated_heads.py")
    assert done.returncode == 0, done.stdout + done.stderr
