"""Fuzzing settings files: the result is settings, or errors with file and line."""

from __future__ import annotations

import random
import re
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gateway.settings.load import MAX_FILE_BYTES, load_with_positions
from gateway.settings.problems import SettingsError
from tests.fuzz.broken_bytes import rounds

CONFIG = Path(__file__).parents[2] / "config"
_COMMENTED_OUT = re.compile(r"^ *#(?:[a-z_]+:(?: \S+)?$|(?:  )+\S.*)", re.MULTILINE)


def _with_all() -> str:
    """Return the reference with what it only shows put in."""
    text = (CONFIG / "reference.yaml").read_text()
    text = _COMMENTED_OUT.sub(lambda found: found[0].replace("#", "", 1), text)
    text = text.replace("[http://127.0.0.1:8000]", "[https://localhost:8000]")
    return text.replace("auth: []", "auth: [team-a, robots]")


SAMPLES = [
    *((CONFIG / name).read_text() for name in sorted(path.name for path in CONFIG.glob("*.yaml"))),
    _with_all(),
    "upstreams: {a: &a {endpoints: [http://a:1]}, b: {<<: *a}}\nroutes: [{upstream: b}]\n",
    '{"upstreams": {"a": {"endpoints": "http://a:1"}}, "watch": "${A:-false}"}',
]
WITNESS = "written-by-a-tag"
"""A file that a tag would write, if tags were obeyed."""

_KEY = re.compile(r"(?m)^([ \t]*(?:- )?)([A-Za-z_-]+)(?=:)")
_VALUE = re.compile(r"(?m)(?<=: )[^\n#]+$")
_VALUES = [
    *("", "null", "~", "true", "yes", "0", "-1", "1.5", "1e999", ".inf", ".nan", "0x1F", "9" * 400),
    *("text", "'quoted'", '"quoted"', "'open", '"open', "[]", "{}", "[1, 2", "{a: 1", "[[[[]]]]"),
    *("5 minutes", "64 MB", "64mb", "1h30m", "50", "150%", "8080", "127.0.0.1:99999", "unix:x"),
    *("http://a:1, http://b:2", "grpc://a:1", "-a", "- a", "a: b", "a:b", "a = b", "*", "@x", "`x"),
    *("${SET}", "${NONE}", "${NONE:-7}", '"${NUMBER}"', "'${NONE:-true}'", "${", "$${", "${a b}"),
    *("${ODD}", "${EMPTY}", "2024-01-01", "12:30", "re:(", "[z-a]", "|", ">\n x", "? a", "!!set"),
]
_PIECES: list[str] = [
    *"\t\u00a0\ufeff\x00\x1b\x85\u2028\ud800\U0001f600\r\n#|'\"[}",
    *("---\n", "...\n", "%YAML 1.1\n", "%TAG ! x\n", "&a ", "*a", "<<: *a\n", "? ", "- ", ": "),
    *("!!python/none ", "!!binary ", "!x ", "!<tag:yaml.org,2002:int> ", ">-"),
    f"!!python/object/apply:os.system ['touch {WITNESS}'] ",
    f"!!python/object/new:subprocess.Popen [['touch', '{WITNESS}']] ",
    *("${SET}", "${", "}", "\\", '"\\UFFFFFFFF"', '"\\ud800"'),
]


def broken(chance: random.Random) -> bytes:
    """Return a settings file that is wrong in some ways."""
    text = chance.choice(SAMPLES)
    for _ in range(chance.randint(1, 4)):
        text = chance.choice(_MUTATIONS)(text, chance)
    content = text.encode("utf-8", "surrogatepass")
    return _without_text(content, chance) if chance.random() < 0.1 else content


def _misspelt(text: str, chance: random.Random) -> str:
    def change(found: re.Match[str]) -> str:
        key, at = found[2], chance.randrange(len(found[2]))
        shorter, longer = key[:at] + key[at + 1 :], key[:at] + "x" + key[at:]
        changed = chance.choice([shorter, longer, key.upper(), key.title(), f"-{key}"])
        return found[1] + (changed or "x")

    return _at_one(_KEY, text, chance, change)


def _other_key(text: str, chance: random.Random) -> str:
    keys = [found[2] for found in _KEY.finditer(text)]
    return _at_one(_KEY, text, chance, lambda found: found[1] + chance.choice(keys))


def _other_value(text: str, chance: random.Random) -> str:
    return _at_one(_VALUE, text, chance, lambda _: chance.choice(_VALUES))


def _lines_changed(text: str, chance: random.Random) -> str:
    lines = text.splitlines(keepends=True) or [""]
    at, other = chance.randrange(len(lines)), chance.randrange(len(lines))
    match chance.randrange(5):
        case 0:
            lines[at] = chance.choice([" ", "  ", "   ", "\t", " \t", "\u00a0"]) + lines[at]
        case 1:
            lines[at] = lines[at].removeprefix(" " * chance.randint(1, 4))
        case 2:
            del lines[at]
        case 3:
            lines.insert(at, lines[other])
        case _:
            lines[at], lines[other] = lines[other], lines[at]
    return "".join(lines)


def _with_a_piece(text: str, chance: random.Random) -> str:
    at = chance.randrange(len(text) + 1)
    return text[:at] + chance.choice(_PIECES) + text[at:]


def _cut(text: str, chance: random.Random) -> str:
    return text[: chance.randrange(len(text) + 1)]


def _deep(text: str, chance: random.Random) -> str:
    depth = chance.choice([3, 31, 32, 33, 1000, 20_000])
    deep = chance.choice(
        ["[" * depth, "{a: " * depth, "[" * depth + "]" * depth, "- " * depth, "? " * depth]
    )
    return _at_one(_VALUE, text, chance, lambda _: deep)


def _laughing(text: str, chance: random.Random) -> str:
    """Make aliases of aliases, as lists or merged, and put them in the place of a value."""
    width, depth = chance.randint(2, 12), chance.randint(2, 30)
    merged = chance.random() < 0.3
    lines = ["x0: &x0 {k: v}" if merged else "x0: &x0 [a, b]"]
    for i in range(1, depth):
        several = ", ".join([f"*x{i - 1}"] * width)
        lines.append(f"x{i}: &x{i} " + (f"{{<<: [{several}]}}" if merged else f"[{several}]"))
    bomb = "\n".join(lines) + "\n"
    return bomb + _at_one(_VALUE, text, chance, lambda _: f"*x{depth - 1}")


_REPEATED = ["a ", "#\n", "- a\n", "a: ", "&a ", "${A}", "1,", "'${N:-1}',", *"a \n'\\[é"]


def _huge(text: str, chance: random.Random) -> str:
    size = chance.choice([9_000, 11_000, 300_000, 2**20])
    part = chance.choice(_REPEATED)
    return _at_one(_VALUE, text, chance, lambda _: part * (size // len(part)))


def _without_text(content: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(content) + 1)
    return content[:at] + chance.choice([b"\xff", b"\xe9", b"\x00", b"\xc0\x80"]) + content[at:]


def _at_one(
    pattern: re.Pattern[str],
    text: str,
    chance: random.Random,
    change: Callable[[re.Match[str]], str],
) -> str:
    """Change one of the places that a pattern finds."""
    places = list(pattern.finditer(text))
    if not places:
        return text
    found = chance.choice(places)
    return text[: found.start()] + change(found) + text[found.end() :]


_MUTATIONS = [
    *([_misspelt, _other_key, _other_value, _lines_changed, _with_a_piece] * 4),
    *(_cut, _deep, _laughing, _huge),
]


ENVIRON = {"SET": "64", "NUMBER": "7", "EMPTY": "", "ODD": "\udc80\n"}
MAX_CPU_SECONDS = 60
"""Seconds of CPU that a file may take: hundreds of times what the slowest here takes."""
MAX_GROWTH_KIB = 512 * 1024
"""KiB of memory that all files together may add to the process."""
WITHOUT_LINE = ("", "upstreams", "routes")
"""Where something is missing as a whole, no line can be told."""


class TooLongError(BaseException):
    """A file took too long; nothing but the test may catch it."""


@contextmanager
def bounded() -> Iterator[None]:
    """Stop what takes more CPU than a file may."""

    def stop(number: int, frame: object) -> None:
        raise TooLongError(f"more than {MAX_CPU_SECONDS} s of CPU")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def check_file(file: Path, content: bytes, with_files: bool = False) -> bool:
    """Check what comes of a file; return whether it gave settings."""
    file.write_bytes(content)
    try:
        with bounded():
            load_with_positions(file, ENVIRON, with_files=with_files)
        return True
    except SettingsError as error:
        found = error.problems
    assert found
    text = content.decode(errors="replace")
    last = len(text.splitlines()) + 1
    for problem in found:
        if problem.line is None:
            is_as_a_whole = problem.setting in WITHOUT_LINE
            assert is_as_a_whole, problem
        else:
            assert 1 <= problem.line <= last, problem
        said = problem.describe(file)
        assert said.startswith(str(file))
        assert said.isprintable()
        assert "nput should" not in said  # pydantic's own words
    return False


def test_broken_files_give_settings_or_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "gateway.yaml"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = {check_file(file, broken(each), each.random() < 0.5) for each in rounds(5)}
    assert found == {True, False}  # it is of use only where some pass and some do not
    assert not (tmp_path / WITNESS).exists()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_GROWTH_KIB


def test_the_samples_are_right(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    assert [check_file(file, sample.encode()) for sample in SAMPLES] == [True] * len(SAMPLES)


U = "upstreams: {u: {endpoints: http://u:1}}\n"
HOSTILE = {
    "billion laughs": "a0: &a0 [x]\n"
    + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 60)),
    "merged laughs": "a0: &a0 {x: 1}\n"
    + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 60)),
    "an alias inside itself": "upstreams: &a {u: *a}\n",
    "a tag that runs a program": f"a: !!python/object/apply:os.system ['touch {WITNESS}']\n",
    "too large": U + "#" * MAX_FILE_BYTES,
    "as large as may be": U + "#" * (MAX_FILE_BYTES - len(U)),
    "lists in lists": U + "listen: " + "[" * 500_000,
    "keys that are lists": U + "? " * 500_000,
    "unknown keys in a section": U + "limits:\n" + "".join(f"  log{i}: 1\n" for i in range(4_900)),
    "misplaced sections": "upstreams:\n" + "  log: {}\n  limits: {}\n" * 2_000,
    "the same key": U + "watch: true\n" * 4_900,
    "references": U + "listen: [" + "'${N:-1}', " * 9_000 + "]",
    "a long key": U + "a" * 1_000_000 + ": 1\n",
    "quotes that do not end": U + "watch: '" + "a\n" * 500_000,
    "dashes that do not fit": U + ("- " * 200 + "\n") * 2_000 + " b: c\n",
    "many commas": U + "listen: " + "a," * 500_000,
    "NUL": U + "watch: \0\n",
    "UTF-16": U.encode("utf-16").decode("latin-1"),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_files_are_refused_quickly(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    is_right = text == HOSTILE["as large as may be"]
    assert check_file(tmp_path / "gateway.yaml", text.encode("latin-1")) is is_right
    assert not (tmp_path / WITNESS).exists()
