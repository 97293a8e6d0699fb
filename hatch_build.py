"""Builds wheels, compiled where that is possible: see docs/guide/install.md, "Compiled".

pyproject.toml names this file twice. Its hook compiles during hatchling's build of a wheel. Its
functions are the build backend, and are hatchling's but for what they require: an install that
compiles nothing needs no compiler of Python.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling import build as hatchling
from hatchling.build import *  # noqa: F403
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_ROOT = Path(__file__).parent
_PACKAGE = ("gateway", "codec", "native")
"""The package of the C module, with its sources."""

_NOTE = "gateway/not_compiled.txt"
"""Where a wheel says why it is not compiled. pip hides what a build prints."""

_NEWEST = (3, 14)
_MACHINES = ("aarch64", "arm64", "x86_64")
"""What mypy has wheels for. Elsewhere its installation could fail, and the gateway's with it."""

_LEAST, _MOST = -342, 308
"""Exponents of the powers of ten: times 64 bits of digits, lesser ones give 0, others infinity."""

_LEAST_UNIT, _MOST_UNIT = -1074, 971
"""Exponents of the powers of two that doubles are multiples of."""


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """Require what compiles, where a wheel can be compiled: PEP 517."""
    required = hatchling.get_requires_for_build_wheel(config_settings)
    return required if _obstacle() else [*required, *_compile_requires()]


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    """Require what compiles, where an editable install is to be compiled: PEP 660."""
    required = hatchling.get_requires_for_build_editable(config_settings)
    return [*required, *_compile_requires()] if _must_compile() else required


def _compile_requires() -> list[str]:
    """Return the requirements of a build that compiles.

    Of the gateway's own ones, these are all whose types tell in what mypyc writes.
    """
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())
    settings = project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]
    typed = [
        each
        for each in project["project"]["dependencies"]
        if re.match(r"[\w.-]+", each)[0] in settings["typed"]
    ]
    return [*settings["compile-requires"], *typed]


def _must_compile() -> bool:
    return os.environ.get("TENSORGATE_PURE") == "0"


def _must_be_pure() -> bool:
    return os.environ.get("TENSORGATE_PURE", "0") not in ("", "0")


def _obstacle() -> str:
    """Return why nothing is to be compiled here, "" if it can be."""
    if _must_compile():
        return ""
    if _must_be_pure():
        return "TENSORGATE_PURE is set"
    if platform.python_implementation() != "CPython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "it takes CPython, and not a free-threaded one"
    if sys.version_info[:2] > _NEWEST or platform.machine() not in _MACHINES:
        version, machine = platform.python_version(), platform.machine()
        return f"mypy may have no wheel for Python {version} on {machine}"
    return _missing_tool()


def _missing_tool() -> str:
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    try:
        (program, *_) = shlex.split(compiler)
    except ValueError:  # nothing, or a quote that never ends
        program = ""
    if shutil.which(program) is None:
        return "there is no C compiler"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python.h is missing"
    return ""


class BuildHook(BuildHookInterface[Any]):
    """Compiles the fast path and the C module for a wheel, and goes on without if that fails."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add what was compiled to the wheel, or the reason why nothing was.

        With TENSORGATE_PURE=0, a failure ends the build.
        """
        self._folder = TemporaryDirectory(prefix="tensorgate-build-")
        if version == "editable" and not _must_compile():
            return
        obstacle = _obstacle()
        if not obstacle:
            try:
                built = self._compile(Path(self._folder.name))
            except _CompileError as error:
                if _must_compile():
                    raise
                obstacle = str(error)
        if obstacle:
            print(f"tensorgate: not compiled, pure Python: {obstacle}", file=sys.stderr)
            if not _must_be_pure():
                note = Path(self._folder.name, "note")
                note.write_text(f"{obstacle}\n")
                build_data["force_include"][str(note)] = _NOTE
        elif version == "editable":
            for path, name in built.items():
                shutil.copy(path, Path(self.root, name))
        else:
            build_data["force_include"] |= built
            build_data["pure_python"] = False
            build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was made on the way."""
        self._folder.cleanup()

    def _compile(self, folder: Path) -> dict[str, str]:
        """Compile in a folder of its own; return the place in the wheel of each file.

        So two builds of one checkout do not disturb each other, and leave nothing in it. mypy finds
        no settings there either, nor does setuptools find the project.
        """
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(Path(self.root, "gateway"), folder / "gateway", ignore=ignored)
        modules = [
            str(path.relative_to(folder))
            for pattern in self.config["mypyc"]
            for path in folder.glob(pattern)
        ]
        done = subprocess.run(  # noqa: S603  # its own command
            [sys.executable, __file__, *sorted(modules)],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode != 0:
            raise _CompileError(done.stdout)
        built = folder / "built"
        return {str(path): str(path.relative_to(built)) for path in built.rglob("*.so")}


class _CompileError(Exception):
    """The compiler failed; as text, the line of its output that says why."""

    def __init__(self, output: str) -> None:
        super().__init__(output)
        self.output = output

    def __str__(self) -> str:
        if _must_compile():
            return self.output
        lines = self.output.strip().splitlines() or ["it ended without a word"]
        reasons = [line for line in lines if re.search(r"(^|[: ])\w*[Ee]rror: ", line)]
        return f"compiling failed: {(reasons or lines[-1:])[0].strip()}"


def _build(extensions: Sequence[Any], folder: Path) -> None:
    # Not at the top: an install that compiles nothing has no setuptools.
    from setuptools import Distribution
    from setuptools.command.build_ext import build_ext

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()

    class BuildInParallel(build_ext):
        """Compiles the files of one extension at the same time: setuptools does one by one."""

        def build_extensions(self) -> None:
            compile_all = self.compiler.compile

            def compile_each(sources: list[str], **options: Any) -> list[str]:
                with ThreadPoolExecutor(cores) as pool:
                    objects = pool.map(lambda source: compile_all([source], **options), sources)
                    return [each for one in objects for each in one]

            self.compiler.compile = compile_each
            super().build_extensions()

    command = BuildInParallel(Distribution({"ext_modules": extensions}))
    command.build_lib, command.build_temp = str(folder), str(folder.with_name("objects"))
    command.parallel = cores
    command.ensure_finalized()
    command.run()


def _c_module(package: Path, folder: Path) -> Any:
    """Return the C module as an extension; ``folder`` gets a header."""
    from setuptools import Extension

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "powers_of_ten.h").write_text(powers_of_ten())
    # With -O3, gcc 12 needs a fifth more time for most numbers.
    return Extension(
        ".".join((*_PACKAGE, "_native")),
        sorted(map(str, package.glob("*.c"))),
        include_dirs=[str(folder)],
        extra_compile_args=["-O2", "-std=c11"],
    )


def _compile_all(modules: Sequence[str]) -> None:
    """Compile these modules and the C module, of the sources in this folder, into ``built``."""
    from mypyc.build import mypycify

    # Of what is not installed here, no type is used: the C that mypyc writes is the same.
    options = ["--config-file=", "--ignore-missing-imports"]
    extensions = mypycify(
        [*options, *modules], opt_level="2", multi_file=True, target_dir="generated"
    )
    extensions.append(_c_module(Path(*_PACKAGE), Path("generated")))
    _build(extensions, Path("built"))


def _compile_beside_the_sources() -> None:
    """Compile the C module alone, in seconds, for development."""
    package = _ROOT.joinpath(*_PACKAGE)
    with TemporaryDirectory(prefix="tensorgate-build-") as name:
        folder = Path(name)
        _build([_c_module(package, folder)], folder / "built")
        for path in (folder / "built").rglob("*.so"):
            shutil.copy(path, package)


def powers_of_ten() -> str:
    """Give a C header with the powers of ten that read and write floats, and tables of text."""
    powers = [_first_bits(exponent) for exponent in range(_LEAST, _MOST + 1)]
    short = "\n".join(map(_short_number, range(1000)))
    units = [_scaled_unit(exponent) for exponent in range(_LEAST_UNIT, _MOST_UNIT + 1)]
    return f"""\
enum {{ LEAST_POWER = {_LEAST}, MOST_POWER = {_MOST} }};
static const uint64_t POWERS_OF_TEN[][2] = {{
{_rows(powers)}
}};
/* Powers of two, divided by the least power of ten above each. */
enum {{ LEAST_UNIT = {_LEAST_UNIT} }};
static const uint64_t UNITS[][2] = {{
{_rows(units)}
}};
{_layouts()}
/* Numbers below 1000: up to three digits and how many they are, and the same with all three. */
static const uint32_t SHORT_NUMBERS[][2] = {{
{short}
}};
"""


def _rows(numbers: list[int]) -> str:
    """Give C initializers for numbers of 128 bits, as two words each."""
    return "\n".join(f"    {{{n >> 64:#x}, {n % 2**64:#x}}}," for n in numbers)


def _layouts() -> str:
    """Give C tables that tell where the digits of a float stand in its text; see encode_numbers.c.

    There are 8 digits of FP32 and 16 of FP64, the last of them in the lowest byte, and one more.
    Rows go by the digits before the point, then by the zeros that the digits begin with. The text
    has ``longest`` characters, less one per zero that the digits end with, but ``least``.
    """
    tables = []
    for name, digits, least, most, zeros in (("4", 8, -5, 13, 3), ("8", 16, -4, 16, 2)):
        rows = [
            _layout(digits, before, skipped)
            for before in range(least, most + 1)
            for skipped in range(zeros)
        ]
        tables.append(f"static const struct layout LAYOUTS_{name}[] = {{\n{''.join(rows)}}};\n")
    return f"""\
struct layout {{ unsigned char places[32], characters[32], last, longest, least, unused[13]; }};
{"".join(tables)}"""


def _layout(digits: int, before: int, skipped: int) -> str:
    """Give the row of a table; a place is the number of a digit, -1 for a 0, None for the point."""
    lead = list(range(skipped, skipped + before)) or [-1] * (1 - before)
    places = [*lead[:1], None, *lead[1:]] if before <= 0 else [*lead, None]
    places += range(skipped + max(before, 0), 32)
    digits_at = places[:32]
    shuffled = [
        digits - 1 - place if place is not None and 0 <= place < digits else 0x80
        for place in digits_at
    ]
    characters = [ord("." if place is None else "0") for place in digits_at]
    last = digits_at.index(digits)
    others = 2 - before if before <= 0 else 1
    fields = [last, digits + 1 - skipped + others, before + 2 if before > 0 else 0]
    return f"    {{{_braced(shuffled)}, {_braced(characters)}, {str(fields)[1:-1]}, {{0}}}},\n"


def _braced(numbers: list[int]) -> str:
    return f"{{{', '.join(map(str, numbers))}}}"


def _short_number(number: int) -> str:
    digits = b"%d" % number
    words = digits.ljust(3) + bytes((len(digits),)), digits.zfill(3)
    first, second = (int.from_bytes(word, "little") for word in words)
    return f"    {{{first:#x}, {second:#x}}},"


def _scaled_unit(exponent: int) -> int:
    """Give the first 128 bits behind the point of 2**exponent / 10**power, cut off.

    The power of ten is the least one above 2**exponent: this is at least 0.1 and below 1.
    """
    power = (exponent * 78913 >> 18) + 1  # floor(log10(2**exponent)) + 1, as C computes it
    scaled = (2**128 << max(exponent, 0)) * 10 ** max(-power, 0)
    return (scaled >> max(-exponent, 0)) // 10 ** max(power, 0)


def _first_bits(exponent: int) -> int:
    """Give the first 128 bits of 10**exponent: cut off, or, below 1, one more than that.

    They are those of 5**exponent, as the rest are powers of two.
    """
    five = 5 ** abs(exponent)
    size = five.bit_length()
    if exponent < 0:
        return (1 << (127 + size)) // five + 1
    return five << (128 - size) if size <= 128 else five >> (size - 128)


if __name__ == "__main__":
    if sys.argv[1:]:
        _compile_all(sys.argv[1:])
    else:
        _compile_beside_the_sources()
