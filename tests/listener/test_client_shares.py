"""Clients share what is bounded: whoever holds most gives way."""

import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.listener.client_shares import ClientShares, client_of
from gateway.listener.open_connections import OpenConnections


def test_client_with_most_gives_way_to_another() -> None:
    shares = ClientShares[str](3)
    for item, client in (("first", "B"), ("second", "A"), ("third", "A")):
        assert shares.add(item, client) == []
    assert shares.add("fourth", "C") == ["second"]
    assert set(shares) == {"first", "third", "fourth"}


def test_idle_item_gives_way_before_one_in_use() -> None:
    shares = ClientShares[str](3)
    for item in ("first", "second", "third"):
        shares.add(item, "A")
    shares.set_in_use("first", True)
    assert shares.add("fourth", "A") == ["second"]
    shares.set_in_use("first", False)  # it is the youngest now
    assert [shares.add(each, "A") for each in ("a", "b", "c")] == [["third"], ["fourth"], ["first"]]


def test_many_small_items_give_way_to_a_large_one() -> None:
    shares = ClientShares[int](100)
    for number in range(10):
        shares.add(number, "A", 10)
    assert shares.add(10, "B", 35) == [0, 1, 2, 3]
    assert shares.add(11, "B", 1000) == [4, 5, 6, 10, 7, 8, 9]
    assert list(shares) == [11]


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "discard", "use", "idle"]), st.integers(0, 30)),
        max_size=200,
    )
)
def test_total_is_bounded_and_nothing_stays(steps: list[tuple[str, int]]) -> None:
    limit, shares, sizes = 40, ClientShares[int](40), {}
    for number, (step, chosen) in enumerate(steps):
        if step == "add":
            sizes[number] = chosen
            for gone in shares.add(number, str(chosen % 4), chosen):
                del sizes[gone]
        elif step == "discard":
            shares.discard(chosen)
            sizes.pop(chosen, None)
        else:
            shares.set_in_use(chosen, step == "use")
        assert set(shares) == set(sizes)
        assert sum(sizes.values()) <= limit
    for item in sizes:
        shares.discard(item)
    assert not len(shares)
    assert shares.add(-1, "A", limit) == []


@pytest.mark.parametrize(
    ("peername", "client"),
    [
        (("10.0.0.1", 1), "10.0.0.1"),
        (("::ffff:10.0.0.1", 1, 0, 0), "10.0.0.1"),
        (("2001:db8:1:2:3:4:5:6", 1, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 1, 0, 2), "fe80::/64"),
        ("", ""),
        (None, ""),
    ],
)
def test_client_is_an_address_or_a_network(peername: object, client: str) -> None:
    assert client_of(peername) == client


def test_admitted_connection_counts_until_it_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client with an eighth of all descriptors gets no more where they are crowded."""
    limit, connections = 800, OpenConnections()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    for descriptor in range(103):
        assert connections.admit(descriptor, "A")
    connections.forget(0)
    connections.forget(1)
    assert not connections.admit(limit - 1, "A")
    connections.forget(2)
    assert connections.admit(limit - 1, "A")
