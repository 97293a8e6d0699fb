from __future__ import annotations

import asyncio
import mmap
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.system.shared_memory import (
    Owner,
    Region,
    Slice,
    dead_owners,
    is_dead,
    owner_of,
    remove_mark,
    remove_region_files,
)
from tests.support.doubles.shared_memory_folder import folder as folder

PAGE = mmap.PAGESIZE
TOKEN = "0123456789abcdef"
SERVER = "http://127.0.0.1:8000"


@contextmanager
def region_of(pages: int) -> Iterator[Region]:
    region = Region(f"tensorgate-{TOKEN}-1", pages * PAGE)
    try:
        yield region
    finally:
        region.unlink()


def taken(region: Region, size: int) -> Slice:
    part = region.take(size)
    assert part is not None
    return part


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# --------------------------------------------------------------------------------- slices


SIZES = st.one_of(
    st.integers(1, 4 * PAGE),
    st.builds(lambda pages, more: pages * PAGE + more, st.integers(1, 8), st.sampled_from((0, 1))),
)
OPERATIONS = st.lists(st.one_of(SIZES, st.integers(0, 9).map(lambda i: -i)), max_size=40)
"""Sizes to take, and negated indices of slices to give back."""


def fill(part: Slice, number: int) -> None:
    part.view[:] = bytes((number,)) * part.size


def is_whole(part: Slice, number: int) -> bool:
    return bytes(part.view) == bytes((number,)) * part.size


@given(OPERATIONS)
def test_slices_never_share_a_byte_and_are_free_again_after_their_release(
    operations: list[int],
) -> None:
    with region_of(8) as region:
        held: dict[int, Slice] = {}
        for number, operation in enumerate(operations):
            if operation > 0:
                part = region.take(operation)
                if part is None:
                    continue
                assert (part.size, len(part.view)) == (operation, operation)
                assert part.offset % PAGE == 0
                assert part.offset + part.size <= region.size
                held[number] = part
                fill(part, number)
            elif held:
                held.pop(sorted(held)[operation % len(held)]).release()
            assert all(is_whole(part, i) for i, part in held.items())
            assert region.used == sum(-(-part.size // PAGE) * PAGE for part in held.values())
        for part in held.values():
            part.release()
        assert region.used == 0
        assert region.take(region.size) is not None


@pytest.mark.parametrize("size", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE])
def test_slice_takes_whole_pages(size: int) -> None:
    with region_of(4) as region:
        parts = []
        while (part := region.take(size)) is not None:
            parts.append(part)
        assert len(parts) == (4 if size <= PAGE else 2)
        assert region.used == region.size


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2), (1, 2, 0)])
def test_neighbours_that_are_free_become_one(order: tuple[int, ...]) -> None:
    with region_of(3) as region:
        parts = [part for part in map(region.take, [PAGE] * 3) if part is not None]
        assert region.take(1) is None
        for i in order:
            parts[i].release()
        assert region.take(3 * PAGE) is not None


def test_first_free_bytes_that_suffice_are_taken() -> None:
    with region_of(4) as region:
        first, second, third = (region.take(PAGE) for _ in range(3))
        assert first is not None
        assert second is not None
        assert third is not None
        second.release()
        larger, small = region.take(PAGE + 1), region.take(PAGE)
        assert larger is None
        assert small is not None
        assert small.offset == PAGE


def test_slice_larger_than_the_region_is_not_given() -> None:
    with region_of(2) as region:
        assert region.take(2 * PAGE + 1) is None
        assert region.used == 0


def test_slice_without_bytes_is_not_given() -> None:
    with region_of(2) as region:
        assert region.take(0) is None
        assert region.used == 0


def test_slice_is_free_once_nobody_holds_it() -> None:
    with region_of(1) as region:
        part = region.take(1)
        assert part is not None
        part.hold()
        part.release()
        assert region.take(1) is None
        part.release()
        assert region.take(1) is not None


def test_lost_slice_is_never_free() -> None:
    with region_of(4) as region:
        part = region.take(PAGE + 1)
        assert part is not None
        part.hold()
        part.lose()
        part.lose()
        assert (region.used, region.quarantined, region.lost) == (2 * PAGE, 0, 2 * PAGE)
        part.end_call()
        assert (region.used, region.quarantined, region.lost) == (2 * PAGE, 2 * PAGE, 2 * PAGE)


def test_region_tells_when_all_slices_are_free_or_lost() -> None:
    with region_of(4) as region:
        first, second = region.take(1), region.take(1)
        assert first is not None
        assert second is not None
        idle: list[bool] = []
        region.on_idle = lambda: idle.append(region.is_idle)
        first.release()
        assert not region.is_idle
        assert not idle
        second.lose()
        assert idle == [True]


def test_closed_region_is_unmapped(folder: Path) -> None:
    region = Region(f"tensorgate-{TOKEN}-1", PAGE)
    part = region.take(1)
    assert part is not None
    part.release()
    del part
    assert region.close()
    assert region.memory.closed


def test_region_stays_mapped_while_somebody_has_a_view(folder: Path) -> None:
    region = Region(f"tensorgate-{TOKEN}-1", PAGE)
    part = region.take(1)
    assert part is not None
    view = part.view[:1]
    part.release()
    del part
    assert not region.close()
    view[:] = b"x"
    del view
    assert region.close()


# --------------------------------------------------------------------------------- the file


def test_file_is_open_to_all_until_it_is_unlinked(folder: Path) -> None:
    umask = os.umask(0o077)
    try:
        region = Region(f"tensorgate-{TOKEN}-1", 2 * PAGE)
    finally:
        os.umask(umask)
    assert region.key == f"/{region.name}"
    found = (folder / region.name).stat()
    assert stat.S_IMODE(found.st_mode) == 0o666
    assert found.st_size == 2 * PAGE
    assert found.st_blocks * 512 >= 2 * PAGE  # no page is missing later
    region.unlink()
    assert not names(folder)
    region.unlink()  # it is gone already


def test_memory_is_shared_with_who_mapped_it_by_its_name(folder: Path) -> None:
    region = Region(f"tensorgate-{TOKEN}-1", 2 * PAGE)
    descriptor = os.open(folder / region.name, os.O_RDWR)
    region.unlink()
    with mmap.mmap(descriptor, 2 * PAGE) as server:
        os.close(descriptor)
        first, part = region.take(1), region.take(5)
        assert first is not None
        assert part is not None
        part.view[:] = b"input"
        assert server[part.offset : part.offset + 5] == b"input"
        server[part.offset : part.offset + 5] = b"other"
        assert bytes(part.view) == b"other"


def test_memory_that_does_not_exist_is_refused_and_leaves_no_file(folder: Path) -> None:
    with pytest.raises(OSError, match="Cannot allocate"):
        Region(f"tensorgate-{TOKEN}-1", 2**60)
    assert not names(folder)


def test_file_of_another_region_is_not_touched(folder: Path) -> None:
    with region_of(1) as region:
        with pytest.raises(FileExistsError):
            Region(region.name, PAGE)
        assert names(folder) == {region.name}


def test_file_goes_with_a_region_that_nobody_got(folder: Path) -> None:
    region = Region(f"tensorgate-{TOKEN}-1", PAGE)
    assert names(folder) == {region.name}
    del region
    assert not names(folder)


# ------------------------------------------------------------------------------- its size

MIB = 2**20
START = 4


def held_pages(folder: Path) -> int:
    """Return the MiB that exist of the region's file."""
    (file,) = folder.iterdir()
    return file.stat().st_blocks * 512 // MIB


@contextmanager
def sparse_region() -> Iterator[Region]:
    """Make a region of 64 MiB that may grow."""
    with region_of(64 * MIB // PAGE) as region:
        region.on_full = lambda: None
        yield region


def test_region_begins_with_little_memory(folder: Path) -> None:
    with sparse_region() as region:
        assert (region.size, region.allocated) == (64 * MIB, START * MIB)
        assert (folder / region.name).stat().st_size == 64 * MIB
        assert held_pages(folder) == START


@pytest.mark.parametrize(
    ("held", "asked", "allocated"),
    [
        ([], [5], 8),
        ([], [8], 8),
        ([], [9], 16),
        ([], [5, 40, 6], 48),
        ([], [64], 64),
        ([4], [1], 8),
        ([1], [8], 16),
        ([1], [63], 64),
        ([1], [64], START),  # it would find no gap either
        ([], [65], START),
    ],
)
async def test_region_grows_by_what_was_asked_for_or_doubles(
    folder: Path, held: Sequence[int], asked: Sequence[int], allocated: int
) -> None:
    with sparse_region() as region:
        parts = [taken(region, size * MIB) for size in held]
        assert [region.take(size * MIB) for size in asked] == [None] * len(asked)
        await region.grow()
        assert (region.allocated, held_pages(folder)) == (allocated * MIB, allocated)
        free = taken(region, (allocated - sum(held)) * MIB) if allocated > sum(held) else None
        for part in (*parts, *([] if free is None else [free])):
            part.release()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("peak", "allocated"), [(0, 16), (4, 16), (8, 16), (9, 32), (16, 32), (31, 32)]
)
async def test_region_of_which_a_quarter_was_used_at_most_gives_half_back(
    folder: Path, peak: int, allocated: int, when: str
) -> None:
    with sparse_region() as region:
        await grown_to(region, 32)
        await region.shrink()  # it looks at what was used since then
        part = region.take(peak * MIB)
        if part is not None and when == "before":
            part.release()
        await region.shrink()
        assert (region.allocated, held_pages(folder)) == (allocated * MIB, allocated)
        if part is not None and when == "after":
            part.release()


async def grown_to(region: Region, size: int) -> None:
    """Have so many MiB allocated, of which none are used."""
    assert region.take(size * MIB) is None
    await region.grow()
    assert region.allocated == size * MIB
    taken(region, size * MIB).release()


async def test_memory_that_a_call_made_it_allocate_waits_for_the_next_such_call() -> None:
    with sparse_region() as region:
        assert region.take(32 * MIB) is None
        await region.grow()
        await region.shrink()
        taken(region, 32 * MIB).release()


async def test_region_that_stops_growing_allocates_nothing_for_calls_that_found_no_room() -> None:
    with sparse_region() as region:
        assert region.take(32 * MIB) is None
        region.stop_growing()
        await region.grow()
        assert region.allocated == START * MIB
        assert region.take(32 * MIB) is None


async def test_region_that_is_unmapped_while_it_fails_to_grow_counts_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_unmapped, counted = threading.Event(), [0]

    def fail(*_: object) -> None:
        is_unmapped.wait(5)
        raise OSError("no room")

    monkeypatch.setattr(Region, "_change_file", fail)
    region = await Region.make("tensorgate-x", 64 * MIB, counted.append)
    region.on_full = lambda: None
    assert region.take(8 * MIB) is None
    growing = asyncio.create_task(region.grow())
    await asyncio.sleep(0)
    assert sum(counted) == 8 * MIB
    assert await region.unmap()
    is_unmapped.set()
    with pytest.raises(OSError, match="no room"):
        await growing
    assert sum(counted) == 0


async def test_region_that_is_not_used_gives_back_all_but_its_start(folder: Path) -> None:
    with sparse_region() as region:
        await grown_to(region, 64)
        for allocated in (64, 32, 16, 8, START, START):
            await region.shrink()
            assert (region.allocated, held_pages(folder)) == (allocated * MIB, allocated)


@pytest.mark.parametrize("how", ["used", "quarantined", "lost"])
async def test_memory_below_a_slice_is_not_given_back(folder: Path, how: str) -> None:
    with sparse_region() as region:
        await grown_to(region, 32)
        below, part = taken(region, 9 * MIB), taken(region, 1)
        below.release()
        fill(part, 7)
        if how != "used":
            part.hold()
            part.end_call()
        if how == "lost":
            part.lose()
        for _ in range(4):
            await region.shrink()
        assert region.allocated == 32 * MIB
        assert is_whole(part, 7)


@given(st.lists(st.integers(1, 16 * MIB), min_size=1, max_size=8), st.integers(0, 6))
async def test_steady_load_has_what_it_needs_and_it_is_not_given_back(
    sizes: list[int], turns: int
) -> None:
    with sparse_region() as region:
        for _ in range(6):
            while not holds_all(region, sizes):
                await region.grow()
        before = region.allocated
        for _ in range(turns):
            await region.shrink()
            assert holds_all(region, sizes)
        assert turns < 2 or region.allocated == before


def holds_all(region: Region, sizes: Sequence[int]) -> bool:
    """Take slices of all sizes, as far as they fit together, and give them back."""
    fit, total = [], 0
    for size in sizes:
        total += -(-size // PAGE) * PAGE
        fit += [size] * (total <= region.size)
    parts = [region.take(size) for size in fit]
    for part in parts:
        if part is not None:
            part.release()
    return None not in parts


STEPS = st.lists(
    st.one_of(
        st.integers(1, 12 * MIB),
        st.integers(0, 9).map(lambda i: -i),
        st.sampled_from(("grow", "shrink", "lose")),
    ),
    max_size=40,
)
"""Sizes to take, negated indices of slices to give back, and what else befalls a region."""


@given(STEPS)
async def test_slices_of_a_region_that_grows_and_shrinks_keep_their_bytes(
    steps: list[int | str],
) -> None:
    with sparse_region() as region:
        held: dict[int, Slice] = {}
        lost: list[Slice] = []
        for number, step in enumerate(steps):
            if step == "grow":
                await region.grow()
            elif step == "shrink":
                await region.shrink()
            elif step == "lose" and held:
                held[min(held)].lose()
                lost.append(held.pop(min(held)))
            elif isinstance(step, int) and step > 0:
                if (part := region.take(step)) is not None:
                    held[number] = part
                    part.view[:1] = part.view[-1:] = bytes((number,))
            elif isinstance(step, int) and held:
                held.pop(sorted(held)[step % len(held)]).release()
            for i, part in held.items():
                assert part.offset + part.size <= region.allocated
                assert part.view[0] == part.view[-1] == i
            blocks = os.fstat(region._descriptor).st_blocks * 512
            assert blocks == region.allocated <= region.size
        assert region.used == sum(-(-part.size // PAGE) * PAGE for part in (*held.values(), *lost))


async def test_memory_that_comes_again_after_it_was_given_back_is_the_servers_too(
    folder: Path,
) -> None:
    with sparse_region() as region:
        descriptor = os.open(folder / region.name, os.O_RDWR)
        with mmap.mmap(descriptor, region.size) as server:
            os.close(descriptor)
            for number in (1, 2, 3):
                assert region.take(60 * MIB) is None
                await region.grow()
                part = taken(region, 60 * MIB)
                assert part.view[-1] == 0  # nothing is left of the call before
                fill(part, number)
                assert server[part.size - 1] == number
                part.release()
                del part
                for _ in range(6):
                    await region.shrink()
                assert held_pages(folder) == START


async def test_closed_region_does_not_grow(folder: Path) -> None:
    with sparse_region() as region:
        assert region.take(8 * MIB) is None
        growing = asyncio.create_task(region.grow())
        assert region.close()
        await growing
        assert held_pages(folder) == START


SMALL = """
import asyncio, os, sys
from pathlib import Path
from gateway.system import shared_memory as region
region.FOLDER = Path(sys.argv[1])
MIB = 2**20

async def grow(made, size):
    made.on_full = lambda: None
    assert made.take(size * MIB) is None
    try:
        await made.grow()
    except OSError as error:
        return f"{error}: {made.allocated // MIB} MiB, {made.possible // MIB} possible"
    return f"{made.allocated // MIB} MiB, {made.possible // MIB} possible"

made = region.Region("tensorgate-0123456789abcdef-1", 60 * MIB)
print(asyncio.run(grow(made, 40)))
other = Path(sys.argv[1], "other")
with other.open("wb") as file:
    os.posix_fallocate(file.fileno(), 0, 12 * MIB)
try:
    region.Region("tensorgate-0123456789abcdef-2", 4096)
except OSError as error:
    print(error)
other.unlink()
print(asyncio.run(grow(made, 24)))
print(made.take(16 * MIB) is not None, sorted(os.listdir(region.FOLDER)))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small folder")
def test_half_of_a_small_folder_stays_free(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=48m tmpfs {tmp_path} && exec "
    command = ("unshare", "--mount", "sh", "-c", mount + '"$@"', "sh", sys.executable, "-c", SMALL)
    run = subprocess.run((*command, str(tmp_path)), capture_output=True, text=True, check=True)
    refusal = f"half of {tmp_path}, which has 48 MiB, has to stay free"
    assert run.stdout.splitlines() == [
        f"{refusal}: 16 MiB, 16 possible",
        refusal,
        f"{refusal}: 16 MiB, 16 possible",
        "True ['tensorgate-0123456789abcdef-1']",
    ]


# --------------------------------------------------------------------------------- owners


@pytest.mark.parametrize(
    ("name", "token"),
    [
        (f"tensorgate-{TOKEN}-1", TOKEN),
        (f"tensorgate-{TOKEN}-12", TOKEN),
        (f"tensorgate-{TOKEN}", None),
        (f"tensorgate-{TOKEN}-", None),
        (f"tensorgate-{TOKEN}-1a", None),
        (f"tensorgate-{TOKEN}.owner", None),
        (f"tensorgate-{TOKEN[1:]}-1", None),
        (f"tensorgate-{TOKEN.upper()}-1", None),
        (f"x-tensorgate-{TOKEN}-1", None),
        (f"tensorgate-{TOKEN}-1\n", None),
        ("", None),
    ],
)
def test_owner_is_in_the_name_of_a_region(name: str, token: str | None) -> None:
    assert owner_of(name) == token


CHILD = """
import sys
from pathlib import Path
from gateway.system import shared_memory as region
region.FOLDER = Path(sys.argv[1])
owner = region.Owner("http://127.0.0.1:8000")
made = region.Region(f"tensorgate-{owner.token}-1", 4096)
print(owner.token, flush=True)
sys.stdin.read()
"""


@contextmanager
def other_process(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a process that has a mark and a region that still has a name."""
    command = (sys.executable, "-c", CHILD, str(folder))
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def files_of(token: str) -> set[str]:
    return {f"tensorgate-{token}-1", f"tensorgate-{token}.owner"}


def test_owner_lives_until_it_is_closed(folder: Path) -> None:
    owner, other = Owner(SERVER), Owner(SERVER)
    assert owner.token != other.token
    assert not is_dead(owner.token)
    assert not is_dead(owner.token)  # asking has not ended it
    owner.close(keeps_regions=True)
    assert is_dead(owner.token)
    assert not is_dead(other.token)
    other.close()
    assert names(folder) == {f"tensorgate-{owner.token}.owner"}


def test_owner_without_regions_leaves_no_mark(folder: Path) -> None:
    Owner(SERVER).close()
    assert not names(folder)


def test_owner_without_a_mark_is_not_known_to_be_dead() -> None:
    assert not is_dead(TOKEN)


def test_owner_whose_mark_cannot_be_opened_is_not_taken_for_dead(folder: Path) -> None:
    mark = folder / f"tensorgate-{TOKEN}.owner"
    mark.symlink_to(mark)
    with pytest.raises(OSError, match="symbolic links"):
        is_dead(TOKEN)


def test_mark_can_be_read_by_all_users(folder: Path) -> None:
    umask = os.umask(0o077)
    try:
        owner = Owner(SERVER)
    finally:
        os.umask(umask)
    mark = folder / f"tensorgate-{owner.token}.owner"
    assert stat.S_IMODE(mark.stat().st_mode) & 0o444 == 0o444
    owner.close()


def remove_all() -> None:
    """Remove all that may be removed if no server has a region any more."""
    for token in [*dead_owners(), TOKEN]:
        remove_mark(token)
    remove_region_files()


def test_files_of_a_living_owner_stay(folder: Path) -> None:
    with other_process(folder) as (_, token):
        assert not is_dead(token)
        assert not dead_owners()
        remove_mark(token)
        remove_all()
        assert names(folder) == files_of(token)


def test_files_of_a_killed_owner_go(folder: Path) -> None:
    with other_process(folder) as (process, token):
        process.kill()
        process.wait()
        assert names(folder) == files_of(token)
        assert is_dead(token)
        assert dead_owners() == {token: SERVER}
        remove_region_files()
        assert names(folder) == {f"tensorgate-{token}.owner"}
        remove_mark(token)
        assert not names(folder)


def test_server_of_a_mark_from_another_network_is_not_known(folder: Path) -> None:
    owner = Owner(SERVER)
    owner.close(keeps_regions=True)
    mark = folder / f"tensorgate-{owner.token}.owner"
    assert dead_owners() == {owner.token: SERVER}
    mark.write_text(f"{SERVER} net:[1]")
    assert dead_owners() == {owner.token: ""}


@pytest.mark.parametrize("content", [b"", b" ", b"\xff", b"\xff " * 10_000])
def test_mark_with_any_content_is_read(folder: Path, content: bytes) -> None:
    (folder / f"tensorgate-{TOKEN}.owner").write_bytes(content)
    assert dead_owners() == {TOKEN: ""}


def test_mark_that_is_no_file_harms_nothing(folder: Path) -> None:
    os.mkfifo(folder / f"tensorgate-{TOKEN}.owner")
    other = "f" * 16
    (folder / f"tensorgate-{other}.owner").mkdir()
    owner = Owner(SERVER)
    owner.close(keeps_regions=True)
    assert dead_owners()[owner.token] == SERVER
    remove_all()
    assert f"tensorgate-{owner.token}.owner" not in names(folder)


def test_region_whose_owner_has_ended_as_it_should_goes(folder: Path) -> None:
    with region_of(1) as region:
        remove_region_files()
        assert not (folder / region.name).exists()


def test_slice_is_in_quarantine_once_only_the_server_may_use_it() -> None:
    with region_of(4) as region:
        part, other = region.take(PAGE + 1), region.take(1)
        assert part is not None
        assert other is not None
        part.hold()
        other.end_call()
        assert (region.used, region.quarantined) == (2 * PAGE, 0)
        part.end_call()
        assert (region.used, region.quarantined) == (2 * PAGE, 2 * PAGE)
        part.release()
        assert (region.used, region.quarantined) == (0, 0)


def test_files_of_others_stay(folder: Path) -> None:
    others = {
        "tensorgate",
        "tensorgate-",
        f"tensorgate-{TOKEN}",
        f"tensorgate-{TOKEN}-1.old",
        f"tensorgate-{TOKEN}-1-2",
        f"x-tensorgate-{TOKEN}-1",
        f"tensorgate_{TOKEN}-1",
        "tensorgate-notes.owner",
        f"tensorgate-{TOKEN}.owner.old",
        f"other-{TOKEN}.owner",
    }
    for name in others:
        (folder / name).touch()
    remove_all()
    assert names(folder) == others
