"""A prepared reload is used or given back."""

from contextlib import AsyncExitStack

from gateway.app.reload.prepared import CloseReplaced, PreparedReload


def _prepared(done: list[str]) -> PreparedReload:
    async def close_replaced() -> None:
        done.append("closed those of before")

    def swap() -> CloseReplaced:
        done.append("swapped")
        return close_replaced

    undo = AsyncExitStack()
    for name in ("first", "second"):
        undo.callback(done.append, f"closed the {name}")
    return PreparedReload("all is new", swap, undo)


async def test_commit_uses_the_parts_before_it_closes_those_of_before() -> None:
    done: list[str] = []
    prepared = _prepared(done)
    close_replaced = prepared.commit()
    assert done == ["swapped"]
    await close_replaced()
    assert done == ["swapped", "closed those of before"]
    assert prepared.changes == "all is new"


async def test_abort_closes_the_parts_in_reverse_order() -> None:
    done: list[str] = []
    await _prepared(done).abort()
    assert done == ["closed the second", "closed the first"]
