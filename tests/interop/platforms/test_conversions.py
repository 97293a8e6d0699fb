"""The C module converts elsewhere as it does here: with musl, on aarch64, there with sanitizers.

All of it is compiled. ``convert.c`` runs its conversions, which need no Python.
"""

from __future__ import annotations

import json
import math
import random
import struct
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.codec.strategies import mutated
from tests.interop.platforms.cross_compile import compile_all, run, write_sources
from tests.interop.programs import installed_folder, program

DECODE_NUMBERS, ENCODE_NUMBERS, DECODE_ELEMENTS, ENCODE_STRINGS = range(4)
DATATYPES, STRING_FORMS = 13, 3
WORDS = ["", "plain", "café 日本 \U0001f600", '"\\\n\x1f', "x" * 5000, {"b64": "AAEC/w=="}]


def _texts(rng: random.Random) -> Iterator[bytes]:
    """Give arrays of numbers and of strings, and broken ones."""
    for seed in range(15):
        bits = rng.randbytes(8 * rng.randrange(1, 50))
        integers = [rng.getrandbits(rng.randrange(1, 65)) for _ in range(40)]
        floats = [each for (each,) in struct.iter_unpack("<d", bits) if math.isfinite(each)]
        digits = [float(f"{each:.{rng.randrange(9)}e}") for each in floats]
        for values in (integers, floats, digits, rng.choices(WORDS, k=20), [True, False] * 9):
            text = json.dumps(values).encode()
            yield text
            yield mutated(text, seed)


def _requests() -> Iterator[bytes]:
    def request(kind: int, option: int, data: bytes) -> bytes:
        return struct.pack("<3I", kind, option, len(data)) + data

    rng = random.Random(1)
    for text in _texts(rng):
        yield request(DECODE_ELEMENTS, 0, text)
        for datatype in range(DATATYPES):
            yield request(DECODE_NUMBERS, datatype, text)
    for datatype in range(DATATYPES):
        yield request(ENCODE_NUMBERS, datatype, rng.randbytes(80_000))
    elements = [*(rng.randbytes(rng.randrange(40)) for _ in range(50)), *[b"plain"] * 50]
    for form in range(STRING_FORMS):
        for count in range(100):
            data = b"".join(struct.pack("<I", len(each)) + each for each in elements[-count:])
            yield request(ENCODE_STRINGS, form, data)


def _built(folder: Path, compiler: str, headers: Path, *options: str) -> str:
    """Compile the whole C module; link a program of the sources that do not need Python."""
    folder.mkdir()
    sources = write_sources(folder)
    objects = compile_all(compiler, sources, *options, f"-I{headers}", f"-I{headers.parent}")
    conversions = [
        built
        for source, built in zip(sources, objects, strict=True)
        if '#include "python.h"' not in source.read_text()
    ]
    main = str(Path(__file__).with_name("convert.c"))
    built = str(folder / "convert")
    run(compiler, "-std=c11", f"-I{folder}", main, *conversions, *options, "-o", built)
    return built


def _python_headers() -> Path:
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").exists():
        pytest.skip("Python.h is missing")
    return headers


def _with_musl(folder: Path) -> list[str]:
    return [_built(folder, program("musl-gcc"), _python_headers(), "-static")]


def _with_musl_on_aarch64(folder: Path) -> list[str]:
    root = installed_folder("aarch64")
    specs = folder.with_suffix(".specs")
    installed = (root / "usr" / "lib" / "aarch64-linux-musl" / "musl-gcc.specs").read_text()
    specs.write_text(installed.replace("/usr/", f"{root}/usr/"))
    return _on_aarch64(folder, "-static", "-no-pie", f"-specs={specs}")


def _with_sanitizers_on_aarch64(folder: Path) -> list[str]:
    sanitizers = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    return _on_aarch64(folder, *sanitizers, "-static-libasan", "-static-libubsan")


def _on_aarch64(folder: Path, *options: str) -> list[str]:
    root = installed_folder("aarch64")
    (headers,) = (root / "usr" / "include").glob("python3.*")
    compiler = program("aarch64-linux-gnu-gcc")
    return [
        *(program("qemu-aarch64"), "-L", str(root)),
        _built(folder, compiler, headers, *options),
    ]


@pytest.mark.parametrize(
    "build",
    [_with_musl, _with_musl_on_aarch64, _with_sanitizers_on_aarch64],
    ids=lambda f: f.__name__,
)
def test_c_module_converts_elsewhere_as_here(
    build: Callable[[Path], list[str]], tmp_path: Path
) -> None:
    command = build(tmp_path / "elsewhere")
    here = _built(tmp_path / "here", program("cc"), _python_headers(), "-pthread", "-O0")
    data = b"".join(_requests())
    expected = run(here, data=data)
    assert len(expected) > 3_000_000
    assert run(*command, data=data) == expected
