"""Measures how strong the tests are: changes single places of the gateway, and runs its tests.

``make mutants ARGS="--seed 35 --count 300"`` draws the places, the same for a seed, and runs the
test files that execute them. The first run records which files these are: see ``file_coverage``.
``--again RESULT`` tries the mutants of an earlier result, as far as the gateway still has them.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import py_compile
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from multiprocessing import Pool
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from tests.support.checks.file_coverage import FileCoverage, environment, record

ROOT = Path(__file__).parents[2]
_MAX_SILENCE = 120
"""Seconds after which a test hangs; those of the gateway wait for at most half as long."""
_MAX_MEMORY = 4 << 30
_NOT_COPIED = shutil.ignore_patterns(".git", ".venv", ".cache", ".*_cache", "__pycache__")

_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add,
}  # fmt: skip
_SKIPPED_FIELDS = {"annotation", "returns", "decorator_list"}
# What has no behaviour of its own. The positions inside an f-string are wrong before Python 3.12.
_SKIPPED = re.compile(
    r"(if TYPE_CHECKING|if __name__ ==|__all__\b|assert |assert_never|raise NotImpl|_?log(ging)?\.)"
)


@dataclass(frozen=True)
class Mutant:
    """A changed place of the gateway; ``start`` and ``end`` are offsets in the file's bytes."""

    file: str
    line: int
    column: int
    last_line: int
    operator: str
    before: str
    after: str
    source: str
    start: int
    end: int

    @classmethod
    def read(cls, result: dict[str, Any]) -> Mutant:
        """Return the mutant of a result."""
        return cls(**{each.name: result[each.name] for each in fields(cls)})

    def apply(self, text: bytes) -> bytes:
        """Return the text of the file with the change."""
        return text[: self.start] + self.after.encode() + text[self.end :]

    def distance(self, other: Mutant) -> tuple[int, int]:
        """Return how many lines and columns of a file are between two mutants."""
        return abs(self.line - other.line), abs(self.column - other.column)

    @property
    def key(self) -> tuple[str, ...]:
        """Return what stays the same while other lines of the file change."""
        return self.file, self.operator, self.before, self.after, self.source


def _nodes(node: ast.AST, function: str = "") -> Iterator[tuple[ast.AST, str]]:
    """Yield each node that may be changed, with the name of its function."""
    if isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.stmt) and _SKIPPED.match(ast.unparse(node))
    ):
        return
    yield node, function
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        function = node.name
    for name, value in ast.iter_fields(node):
        if name not in _SKIPPED_FIELDS:
            for child in value if isinstance(value, list) else (value,):
                if isinstance(child, ast.AST):
                    yield from _nodes(child, function)


def _changed(node: Any, **changed: Any) -> str:
    return ast.unparse(type(node)(**{**dict(ast.iter_fields(node)), **changed}))


def _changes(node: Any, function: str) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield changes: the operator, the first and the last node that it replaces, the new text."""
    if isinstance(node, ast.ExceptHandler):
        if ast.unparse(node.body[0]) != "raise":
            yield "handler", node.body[0], node.body[-1], "raise"
    elif isinstance(node, ast.stmt):
        for operator, after in _changed_statement(node, function):
            yield operator, node, node, after
    else:
        for operator, after in _changed_expression(node):
            yield operator, node, node, after
    # A comparison is negated by its own operator.
    if isinstance(node, (ast.If, ast.While, ast.IfExp)) and not isinstance(
        node.test, (ast.Compare, ast.Constant)
    ):
        yield "condition", node.test, node.test, f"not ({ast.unparse(node.test)})"


def _changed_expression(node: Any) -> Iterator[tuple[str, str]]:
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in _SWAPPED:
            yield "comparison", _changed(node, ops=[_SWAPPED[type(operator)]()])
        case ast.BoolOp(op=operator):
            yield "and/or", _changed(node, op=_SWAPPED[type(operator)]())
        case ast.BinOp(op=ast.Add() | ast.Sub()):
            yield "+/-", _changed(node, op=_SWAPPED[type(node.op)]())
        case ast.Constant(value=bool(value)):
            yield "boolean", str(not value)
        case ast.Constant(value=int(value)):
            yield "integer", str(value + 1)


def _changed_statement(node: Any, function: str) -> Iterator[tuple[str, str]]:
    match node:
        case ast.Return(value=ast.expr()) if ast.unparse(node) != "return None":
            yield "return", "return None"
        case ast.Break():
            yield "loop", "continue"
        case ast.Continue():
            yield "loop", "break"
        case ast.Expr(value=ast.Await(value=ast.Call())):
            yield "await", "pass"
        case ast.Expr(value=ast.Call()):
            yield "call", "pass"
        case ast.AugAssign(op=ast.Add() | ast.Sub()):
            yield "+/-", _changed(node, op=_SWAPPED[type(node.op)]())
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    # Without an assignment of __init__, almost any use fails.
    is_part = isinstance(target, (ast.Attribute, ast.Subscript)) and function != "__init__"
    if is_part and isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        yield "assignment", "pass"


def mutants_of(file: Path) -> tuple[list[Mutant], int]:
    """Return all mutants of a file, and its number of lines with statements."""
    text = file.read_bytes()
    lines = text.splitlines(keepends=True)
    starts = [sum(map(len, lines[:index])) for index in range(len(lines))]
    tree, found = ast.parse(text), list[Mutant]()
    for node, function in _nodes(tree):
        for operator, first, last, after in _changes(node, function):
            start = starts[first.lineno - 1] + first.col_offset
            end = starts[last.end_lineno - 1] + last.end_col_offset
            place = first.lineno, first.col_offset + 1, last.end_lineno
            before, source = text[start:end].decode(), lines[first.lineno - 1].decode().strip()
            name = str(file.relative_to(ROOT))
            found.append(Mutant(name, *place, operator, before, after, source, start, end))
    return found, len({node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt)})


def draw(seed: int, count: int) -> list[Mutant]:
    """Draw mutants by chance: of each file in proportion to its lines."""
    chance, chosen = random.Random(seed), list[Mutant]()
    found = {file: mutants_of(file) for file in sorted(ROOT.glob("gateway/**/*.py"))}
    while len(chosen) < count:
        left = {file: size for file, (mutants, size) in found.items() if mutants}
        file = chance.choices(list(left), list(left.values()))[0]
        mutants = found[file][0]
        chosen.append(mutants.pop(chance.randrange(len(mutants))))
    return chosen


def same_again(result: Path) -> list[Mutant]:
    """Return the mutants of an earlier result that still exist, wherever their lines are now."""
    wanted = [Mutant.read(json.loads(line)) for line in result.read_text().splitlines()]
    found: dict[tuple[str, ...], list[Mutant]] = {}
    for file in {ROOT / each.file for each in wanted}:
        for mutant in mutants_of(file)[0] if file.exists() else ():
            found.setdefault(mutant.key, []).append(mutant)
    left = [each for each in wanted if each.key in found]
    print(f"{len(wanted) - len(left)} of {len(wanted)} mutants are gone")
    return [min(found[each.key], key=each.distance) for each in left]


_copy: Path
_coverage: FileCoverage
_budget: float
_end: float


def _start(folder: str, coverage: FileCoverage, budget: float, end: float) -> None:
    """Give this process its copy of the checkout, with all bytecode."""
    global _copy, _coverage, _budget, _end
    _copy, _coverage = copy_checkout(Path(folder) / str(os.getpid())), coverage
    _budget, _end = budget, end
    _pytest(["--collect-only"], 600, {})
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def copy_checkout(to: Path) -> Path:
    """Copy what the tests need, without their servers."""
    return Path(shutil.copytree(ROOT, to, ignore=_NOT_COPIED))


def _try(mutant: Mutant) -> dict[str, Any] | None:
    """Run the tests of a mutant: those of its own package, then others, the quickest first."""
    if time.monotonic() > _end:
        return None
    path, parent = _copy / mutant.file, Path(mutant.file).parent
    mirror = Path("tests", *parent.parts[1:])
    covering = _coverage.tests_of(mutant.file, range(mutant.line, mutant.last_line + 1))
    stem = f"{mirror}/test_{path.stem}"
    named = [str(each.relative_to(_copy)) for each in sorted(_copy.glob(f"{stem}.py"))]
    own = [each for each in covering if str(Path(each).parent) == str(mirror) and each not in named]
    others = [each for each in covering if each not in named and each not in own]
    text = path.read_bytes()
    started, by = _processor_time(), None
    try:
        _write(path, mutant.apply(text))
        for files in (named + own, others):
            left = _budget - (_processor_time() - started)
            if files and by is None and left > 0:
                by = _run_files(files, left)
    finally:
        _write(path, text)
    is_own = by is not None and by.split("::")[0] in named + own
    result = {"killed_by": by, "own": is_own, "covering": len(covering)}
    return asdict(mutant) | result | {"seconds": round(_processor_time() - started, 1)}


def _run_files(files: list[str], seconds: float) -> str | None:
    """Run as many of the files as fit the seconds; return the first test that fails."""
    fitting, expected = list[str](), 0.0
    while len(fitting) < len(files) and expected < seconds:
        fitting.append(files[len(fitting)])
        expected += _coverage.seconds.get(fitting[-1], 1)
    while fitting:
        by = _pytest(fitting, 10 * seconds, {"PYTHONDONTWRITEBYTECODE": "1"})
        # A test may fail by chance, or because of those before it: then it passes alone.
        if by is None or _pytest([by], 10 * seconds, {"PYTHONDONTWRITEBYTECODE": "1"}) is not None:
            return by
        fitting = fitting[fitting.index(by.partition("::")[0]) + 1 :]
    return None


def _processor_time() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _write(file: Path, text: bytes) -> None:
    """Write a source with its bytecode, whose age would not tell the one from the other."""
    file.write_bytes(text)
    py_compile.compile(str(file), doraise=True)


def _pytest(arguments: list[str], limit: float, more: dict[str, str]) -> str | None:
    """Run tests in the copy, for ``limit`` seconds; return the first that fails or hangs."""
    failing = [f"--deselect={each}" for each in _coverage.failing]
    command = [sys.executable, "-m", "pytest", "-x", "-v", "--tb=no", "-p", "no:cacheprovider"]
    process = subprocess.Popen(
        [*command, *failing, *arguments],
        cwd=_copy,
        env=environment(_copy) | more,
        stdout=(output := (_copy / "output.txt").open("w+")),
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (_MAX_MEMORY, _MAX_MEMORY)),
    )
    hangs = not _wait(process, output, limit)
    ended = process.poll()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if ended in (0, 5) or (ended is None and not hangs):
        return None
    output.seek(0)
    printed = output.read()
    failed = re.search(r"^(?:FAILED|ERROR) (tests/.*?)(?: - |$)", printed, re.MULTILINE)
    begun = re.findall(r"^(tests/\S+?\.py::\S+)", printed, re.MULTILINE)
    return failed[1] if failed else begun[-1] if begun else "collection of the tests"


def _wait(process: subprocess.Popen[bytes], output: IO[str], limit: float) -> bool:
    """Wait for the end of tests, or of the time; return False if one of them hangs."""
    end, size, since = time.monotonic() + limit, 0, time.monotonic()
    while process.poll() is None and (now := time.monotonic()) < end:
        if size != (size := os.fstat(output.fileno()).st_size):
            since = now
        if now - since > _MAX_SILENCE:
            return False
        time.sleep(0.1)
    return True


def main() -> None:
    """Try mutants, and print how many the tests have killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=35)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--again", type=Path, help="a result whose mutants to try again")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--budget", type=float, default=90, help="seconds of processor time each")
    parser.add_argument("--minutes", type=float, default=600, help="begin no mutant after them")
    folder = ROOT / ".cache/mutants"
    parser.add_argument("--result", type=Path, default=folder / "result.jsonl")
    parser.add_argument("--coverage", type=Path, default=folder / "coverage.json", help="of tests")
    options = parser.parse_args()
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.minutes * 60
    with TemporaryDirectory(prefix="tensorgate-mutants-") as copies:
        if not options.coverage.exists():
            record(copy_checkout(Path(copies) / "coverage"), options.processes, options.coverage)
        coverage = FileCoverage.read(options.coverage)
        mutants = same_again(options.again) if options.again else draw(options.seed, options.count)
        results = list[dict[str, Any]]()
        with (
            options.result.open("w") as file,
            Pool(options.processes, _start, (copies, coverage, options.budget, end)) as pool,
        ):
            for result in filter(None, pool.imap_unordered(_try, mutants)):
                results.append(result)
                print(json.dumps(result), file=file, flush=True)
    _report(results)


def _report(results: list[dict[str, Any]]) -> None:
    killed = [each for each in results if each["killed_by"]]
    survivors = [each for each in results if not each["killed_by"]]
    for each in survivors:
        print("{file}:{line}:{column} {operator}, {covering} test files".format(**each))
        print("  {source}\n  -> {after}".format(**each))
    print("survivors:", dict(Counter(each["operator"] for each in survivors)))
    own = sum(each["own"] for each in killed)
    print(f"killed {len(killed)} of {len(results)}, {own} by the tests of their own package")


if __name__ == "__main__":
    main()
