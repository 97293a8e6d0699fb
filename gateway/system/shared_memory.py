"""A region of system shared memory: its file, its owner, and the slices that calls hold.

A server maps the file by its name, which is unlinked as soon as it has: then a process that is
killed leaves no file. The memory lives until both sides have unmapped it.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import re
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Self

PREFIX: Final = "tensorgate-"
"""How the names of the gateway's regions begin; clients may not name such ones."""

FOLDER: Final = Path("/dev/shm")  # noqa: S108  (where shm_open(3) has its files)
_NAME: Final = re.compile(rf"{PREFIX}([0-9a-f]{{16}})-[0-9]+")
_MARK: Final = ".owner"
_MARK_NAME: Final = re.compile(rf"{PREFIX}([0-9a-f]{{16}})\{_MARK}")
_TOKEN_BYTES: Final = 8
_PAGE: Final = 4096
_START: Final = 4 * 2**20
"""Bytes that a region begins with: some calls of an image each. A region that no large call uses
costs no more, and it grows before the next few calls."""
_STEP: Final = 16 * 2**20
"""Bytes that are allocated at most at a time: in some 5 ms, for which a close may have to wait."""
_OPEN_TO_ALL: Final = 0o666
"""The server may run as another user. The file has a name only until the server has mapped it."""


class Owner:
    """The mark that the owner of some regions lives: a file that it keeps locked.

    A process that ends, however it does, holds its locks no more; its id would say nothing in the
    namespace of another container.
    """

    def __init__(self, server: str) -> None:
        """Raise OSError if there is no folder for shared memory, or no place in it.

        ``server`` is the one that may have regions of this owner when it is dead.
        """
        self.token: Final = secrets.token_hex(_TOKEN_BYTES)
        self._path: Final = _lock_path(self.token)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
        self._descriptor = os.open(self._path, flags, 0o644)
        try:
            os.fchmod(self._descriptor, 0o644)  # whatever the umask: other users ask, too
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(self._descriptor, os.fsencode(f"{server} {_network()}"))
            os.stat(self._path)  # another process may have removed it before it was locked
        except OSError:
            self.close()
            raise

    def close(self, *, keeps_regions: bool = False) -> None:
        """End it; with ``keeps_regions``, another process finds that they are nobody's."""
        try:
            if not keeps_regions:
                self._path.unlink(missing_ok=True)
        finally:
            os.close(self._descriptor)


def owner_of(name: str) -> str | None:
    """Return the token in the name of a region; None if it is no region of a gateway."""
    match = _NAME.fullmatch(name)
    return None if match is None else match[1]


def is_dead(token: str) -> bool:
    """Tell whether the mark of an owner is there, and nobody holds it.

    Without a mark nothing is known: the server may share another folder with that owner. Raises
    OSError if the mark cannot be opened.
    """
    with _open_dead(token) as descriptor:
        return descriptor is not None


def dead_owners() -> dict[str, str]:
    """Return the tokens of all owners whose marks nobody holds, and the servers of each.

    A server is empty where its address may lead elsewhere from here: in another network.
    """
    found = {}
    for path in FOLDER.glob(f"{PREFIX}*{_MARK}"):
        match = _MARK_NAME.fullmatch(path.name)
        with suppress(OSError):  # another user's, or gone
            if match is not None and (text := _read_mark(match[1])) is not None:
                server, _, network = text.rpartition(" ")
                found[match[1]] = server if network == _network() else ""
    return found


def remove_mark(token: str) -> None:
    """Remove the mark of a dead owner, of whose regions no server has any."""
    # Locked, as an owner may have made it just now and be about to lock it: see its check.
    with suppress(OSError), _open_dead(token) as descriptor:
        if descriptor is not None:
            _lock_path(token).unlink(missing_ok=True)


def remove_region_files() -> None:
    """Remove the files of regions whose owners are dead, or have ended as they should."""
    for path in FOLDER.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or gone
            token = owner_of(path.name)
            if token is not None and (is_dead(token) or not _lock_path(token).exists()):
                path.unlink(missing_ok=True)


@contextmanager
def _open_dead(token: str) -> Iterator[int | None]:
    """Open the mark of a dead owner, and lock it; None without one, or if the owner lives."""
    # The folder is open to all: the file may be anything.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(_lock_path(token), flags)
    except FileNotFoundError:
        yield None
        return
    try:
        yield descriptor if _try_lock(descriptor) else None
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_mark(token: str) -> str | None:
    with _open_dead(token) as descriptor:
        return None if descriptor is None else os.fsdecode(os.read(descriptor, _PAGE))


def _network() -> str:
    """Name the network namespace: an address leads to the same server only within it."""
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""


def _lock_path(token: str) -> Path:
    return FOLDER / f"{PREFIX}{token}{_MARK}"


class Slice:
    """A part of a region. Whoever uses it holds it; it is free once nobody does.

    The call that took it holds it from the start.
    """

    __slots__ = ("_holders", "_is_lost", "_region", "is_quarantined", "offset", "size", "view")

    def __init__(self, region: Region, offset: int, size: int) -> None:
        self._region = region
        self.offset: Final = offset
        self.size: Final = size
        """The bytes that were asked for."""
        self.view: Final = memoryview(region.memory)[offset : offset + size]
        self._holders = 1
        self._is_lost = False
        self.is_quarantined = False
        """Its call has ended, and the server may still use it."""

    @property
    def region(self) -> str:
        """The name of its region."""
        return self._region.name

    def hold(self) -> None:
        """Keep it from being free until ``release``."""
        self._holders += 1

    def release(self) -> None:
        """Hold it no more."""
        self._holders -= 1
        if not self._holders:
            self._region.give_back(self)

    def lose(self) -> None:
        """Hold it for ever: the server will never say that it is done with it."""
        if not self._is_lost:
            self._is_lost = True
            self._region.lose(self)

    def end_call(self) -> None:
        """Release it for the call that took it; if the server still holds it, in quarantine."""
        self.release()
        if self._holders:
            self._region.quarantine(self)


class Region:
    """Memory that a server maps, too; slices of it are taken and given back.

    Only the first ``allocated`` bytes of it exist, and slices lie there: a page that is missing
    would end the process that touches it. ``grow`` and ``shrink`` move that border; they may not
    run at the same time.

    Slices are the first free bytes that suffice, in whole pages, and neighbours that are free
    become one. A search takes as long as there are gaps, which are no more than calls in progress:
    to keep sizes of powers of two apart would waste up to half of the memory.
    """

    @classmethod
    async def make(cls, name: str, size: int, count: Callable[[int], None]) -> Self:
        """Make one in a thread.

        ``count`` is called with the bytes that are about to be allocated, or, negated, were given
        back. It raises OSError if they may not be. Raises OSError then, and if /dev/shm has no
        room, and RuntimeError without a thread.
        """
        start = min(size, _START)
        count(start)
        try:
            region = await asyncio.to_thread(cls, name, size)
        except BaseException:
            count(-start)
            raise
        region._on_count, region._counted = count, start
        return region

    def __init__(self, name: str, size: int) -> None:
        """Make the file, map it and allocate its start; that takes some ms, in a thread.

        Raises OSError if /dev/shm has no room.
        """
        self.name: Final = name
        self._path: Final = FOLDER / name
        self.size: Final = size
        self.possible = size
        """The bytes that it can have; less than its size if there was no room for more."""
        self.allocated = min(size, _START)
        descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(descriptor, _OPEN_TO_ALL)
            os.ftruncate(descriptor, size)
            _allocate(descriptor, 0, self.allocated)
            # Not populated: CPython 3.11 would hold its lock for a second, and the pages are there.
            self.memory: Final = mmap.mmap(descriptor, size)
        except BaseException:
            self.unlink()
            os.close(descriptor)
            raise
        # A start that is cancelled drops a region before anybody has its name.
        weakref.finalize(self, self._path.unlink, missing_ok=True)
        self._descriptor: Final = descriptor
        self._close_file: Final = weakref.finalize(self, os.close, descriptor)
        self._file_lock: Final = threading.Lock()
        """Held while a thread uses the descriptor, so that it is not closed meanwhile."""
        self.used = 0
        """Bytes of the slices that somebody holds."""
        self.quarantined = 0
        """Those of them that only the server may still use."""
        self.lost = 0
        """Those of them that are held for ever."""
        self._counted = 0
        """Bytes that ``make`` has told of, and that are not given back."""
        self._on_count: Callable[[int], None] = lambda _: None
        self.on_idle: Callable[[], None] | None = None
        """Called when the last slice is free or lost."""
        self.on_full: Callable[[], None] | None = None
        """Called when ``take`` finds no gap, and ``grow`` can make one."""
        self._gaps = [(0, self.allocated)]
        """Where free bytes begin, and how many there are, in order."""
        self._wanted = 0
        """How much must be allocated for slices that found no gap."""
        self._peak = 0
        """The highest end of a slice since ``shrink`` has looked at it."""

    @property
    def key(self) -> str:
        """The name by which shm_open(3) finds it."""
        return f"/{self.name}"

    @property
    def is_idle(self) -> bool:
        """Tell whether all slices are free or lost."""
        return self.used == self.lost

    def unlink(self) -> None:
        """Remove its name, so that nobody else can map it."""
        self._path.unlink(missing_ok=True)

    def close(self) -> bool:
        """Unmap it, to be called in a thread: 256 MiB take some 40 ms, without Python's lock.

        No slice may be taken any more. Where somebody still has the view of one, return False: an
        error may keep it until the next garbage collection.
        """
        with self._file_lock:
            try:
                self.memory.close()
            except BufferError:
                return False
            self._close_file()
        return True

    async def unmap(self) -> bool:
        """Close it in a thread, as that would hold the event loop; see ``close``."""
        try:
            is_closed = await asyncio.to_thread(self.close)
        except RuntimeError:  # there is no thread for it
            is_closed = self.close()
        if is_closed:
            self._count(-self._counted)
        return is_closed

    def _count(self, size: int) -> None:
        size = max(size, -self._counted)  # it may be unmapped while it fails to grow
        self._on_count(size)
        self._counted += size

    async def grow(self) -> None:
        """Allocate as much again, or what slices that found no gap need, in steps.

        Raises OSError if it may not have more, or /dev/shm has no room, and RuntimeError without a
        thread; what was allocated until then stays.
        """
        try:
            while self._wanted > self.allocated:
                step = min(self.allocated, _STEP, self.size - self.allocated)
                await self._extend(step)
                self._add_gap(self.allocated, step)
                self.allocated += step
            self.possible = self.size
            self._peak = max(self._peak, self._wanted)  # for the next call of this size
        except OSError:
            self.possible = self.allocated
            raise
        finally:
            self._wanted = 0

    async def _extend(self, size: int) -> None:
        self._count(size)
        try:
            await asyncio.to_thread(self._change_file, _allocate, self.allocated, size)
        except BaseException:
            self._count(-size)
            raise

    def stop_growing(self) -> None:
        """Allocate no more: no slice will be taken."""
        self.on_full = None
        self._wanted = 0

    async def shrink(self) -> None:
        """Give back half of the memory if slices since the last call took a quarter at most.

        So a load that is steady, or halves and doubles, never makes it grow again. Raises OSError,
        and RuntimeError without a thread.
        """
        peak, self._peak = self._peak, self._used_end
        end = max(_in_pages(self.allocated // 2), _START)
        if 4 * peak > self.allocated or end >= self.allocated:
            return
        start, _ = self._gaps.pop()  # it reaches to the end, from below the quarter
        self._gaps.append((start, end - start))
        self._count(end - self.allocated)
        self.allocated = end
        await asyncio.to_thread(self._change_file, _cut, end, self.size)

    def _change_file(self, change: Callable[[int, int, int], None], *where: int) -> None:
        with self._file_lock:
            if self._close_file.alive:
                change(self._descriptor, *where)

    @property
    def _used_end(self) -> int:
        """Where the last slice ends."""
        start, length = self._gaps[-1] if self._gaps else (0, 0)
        return start if start + length == self.allocated else self.allocated

    def take(self, size: int) -> Slice | None:
        """Return a slice, held once; None if no gap has so many bytes, or for none."""
        if not size:
            return None
        needed = _in_pages(size)
        for i, (start, length) in enumerate(self._gaps):
            if length >= needed:
                self._gaps[i : i + 1] = [(start + needed, length - needed)] * (length > needed)
                self.used += needed
                self._peak = max(self._peak, start + needed)
                return Slice(self, start, size)
        end = self._used_end + needed
        if end <= self.size and self.on_full is not None:
            self._wanted = max(self._wanted, end)
            self.on_full()
        return None

    def quarantine(self, part: Slice) -> None:
        """Count a slice as one that only the server may still use, until it is free."""
        part.is_quarantined = True
        self.quarantined += _in_pages(part.size)

    def lose(self, part: Slice) -> None:
        """Count a slice as one that is held for ever."""
        self.lost += _in_pages(part.size)
        self._tell_if_idle()

    def give_back(self, part: Slice) -> None:
        """Free a slice that nobody holds."""
        size = _in_pages(part.size)
        self.used -= size
        if part.is_quarantined:
            self.quarantined -= size
        self._add_gap(part.offset, size)
        self._tell_if_idle()

    def _add_gap(self, start: int, size: int) -> None:
        gaps, end = self._gaps, start + size
        i = next((i for i, gap in enumerate(gaps) if gap[0] > start), len(gaps))
        if i < len(gaps) and gaps[i][0] == end:
            end += gaps.pop(i)[1]
        if i and sum(gaps[i - 1]) == start:
            i -= 1
            start = gaps.pop(i)[0]
        gaps.insert(i, (start, end - start))

    def _tell_if_idle(self) -> None:
        if self.on_idle is not None and self.is_idle:
            self.on_idle()


def _in_pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _allocate(descriptor: int, start: int, size: int) -> None:
    """Allocate bytes of a file; some 0.3 ms for each MiB, without Python's lock.

    Raises OSError if less than half of /dev/shm would stay free: the server needs some, too.
    """
    _check_room(size)
    os.posix_fallocate(descriptor, start, size)
    try:
        _check_room(0)  # others may have allocated at the same time
    except OSError:
        _cut(descriptor, start, os.fstat(descriptor).st_size)
        raise


def _check_room(size: int) -> None:
    found = os.statvfs(FOLDER)
    if found.f_bavail * found.f_frsize - size < found.f_blocks * found.f_frsize // 2:
        total = found.f_blocks * found.f_frsize // 2**20
        raise OSError(f"half of {FOLDER}, which has {total} MiB, has to stay free")


def _cut(descriptor: int, end: int, size: int) -> None:
    """Give back what a file has above ``end``: cut off there, it gets its size again, of no pages.

    Nobody may touch that memory meanwhile. MADV_REMOVE does the same, but holds Python's lock.
    """
    os.ftruncate(descriptor, end)
    os.ftruncate(descriptor, size)
