"""Builds the C module ``_native``, where a build is asked to compile: pyproject.toml, "hooks"."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_PACKAGE = ("gateway", "codec", "native")
"""The package of the module, with its sources."""

_LEAST, _MOST = -300, 288
"""Exponents of the powers of ten: times 64 bits of digits, each gives normal doubles."""

_LEAST_UNIT, _MOST_UNIT = -1074, 971
"""Exponents of the powers of two that doubles are multiples of."""


class BuildHook(BuildHookInterface[Any]):
    """Compiles the module, and puts it beside its sources in the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; raises what the compiler has to say."""
        self._folder = TemporaryDirectory(prefix="tensorgate-build-")
        built = _compiled(Path(self.root, *_PACKAGE), Path(self._folder.name))
        build_data["force_include"][str(built)] = "/".join((*_PACKAGE, built.name))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was made on the way."""
        self._folder.cleanup()


def _compiled(package: Path, folder: Path) -> Path:
    # Not at the top: an install that compiles nothing has no setuptools.
    from setuptools import Distribution, Extension
    from setuptools.command.build_ext import build_ext

    (folder / "powers_of_ten.h").write_text(powers_of_ten())
    module = ".".join((*_PACKAGE, "_native"))
    sources = sorted(map(str, package.glob("*.c")))
    # With -O3, gcc 12 needs a fifth more time for most numbers.
    flags = ["-O2", "-std=c11"]
    extension = Extension(module, sources, include_dirs=[str(folder)], extra_compile_args=flags)
    command = build_ext(Distribution({"ext_modules": [extension]}))
    command.build_lib = command.build_temp = str(folder)
    command.ensure_finalized()
    command.run()
    return Path(command.get_ext_fullpath(module))


def powers_of_ten() -> str:
    """Give a C header with the powers of ten by which text is read, and those to write it."""
    powers = [_first_bits(exponent) for exponent in range(_LEAST, _MOST + 1)]
    units = [_scaled_unit(exponent) for exponent in range(_LEAST_UNIT, _MOST_UNIT + 1)]
    return f"""\
enum {{ LEAST_POWER = {_LEAST}, MOST_POWER = {_MOST} }};
static const uint64_t POWERS_OF_TEN[][2] = {{
{_rows(powers)}
}};
enum {{ LEAST_UNIT = {_LEAST_UNIT} }};
static const uint64_t UNITS[][2] = {{
{_rows(units)}
}};
"""


def _rows(numbers: list[int]) -> str:
    """Give C initializers for numbers of 128 bits, as two words each."""
    return "\n".join(f"    {{{n >> 64:#x}, {n % 2**64:#x}}}," for n in numbers)


def _scaled_unit(exponent: int) -> int:
    """Give 2**exponent, divided by the largest power of ten that is not above it, cut off.

    This is at least 1 and below 10: 4 bits for the integer and 124 for the fraction.
    """
    power = exponent * 78913 >> 18  # floor(log10(2**exponent)), as C computes it
    scaled = (2**124 << max(exponent, 0)) * 10 ** max(-power, 0)
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
    # For development: compile the module beside its sources, in seconds.
    with TemporaryDirectory(prefix="tensorgate-build-") as build_folder:
        package_folder = Path(__file__).parent.joinpath(*_PACKAGE)
        shutil.copy(_compiled(package_folder, Path(build_folder)), package_folder)
