"""Check and salvage of damaged SQLite stores."""

import asyncio
import random
from pathlib import Path
from typing import Any

import apsw
import numpy as np
import pytest

from service.domain.errors import Corrupt, Invalid
from service.domain.records import Event, Item, User
from service.stores.sqlite.check import check_store, salvage
from service.stores.sqlite.database_file import checksum_vfs
from service.stores.sqlite.store import SQLiteStore

USERS = 400
PAGE = 4096


@pytest.fixture
def filled(path: Path) -> Path:
    """A closed store of many users, with profiles, vectors and long documents."""

    async def fill() -> None:
        store = SQLiteStore(path)
        for first in range(0, USERS, 20):
            await store.append(
                [
                    Event(f"u{user}", f"i{n}", f"{user}-{n}", timestamp=1 + n)
                    for user in range(first, first + 20)
                    for n in range(20)
                ]
            )
        for user in range(0, USERS, 40):
            await store.put_user(User(f"u{user}", {"n": user}))
            key = np.full(256, user, np.float32)
            await store.append([Event(f"u{user}", "i1", f"{user}-key", key=key, value=key)])
        await store.put_items([Item(f"i{n}", "x" * (n * 400)) for n in range(20)])
        await store.forget("u7")
        await store.close()

    asyncio.run(fill())
    return path


def pages_of(path: Path, table: str, kind: str) -> list[int]:
    """Return the numbers of the pages of a table, in the order of its rows."""
    connection = apsw.Connection(str(path), vfs=checksum_vfs())
    find = "SELECT pageno FROM dbstat WHERE name = ? AND pagetype = ? ORDER BY path"
    rows: list[Any] = connection.execute(find, (table, kind)).fetchall()
    connection.close()
    return [page for (page,) in rows]


def damage(path: Path, page: int, rng: random.Random) -> None:
    """Turn one bit of a page."""
    with path.open("r+b") as file:
        at = PAGE * (page - 1) + rng.randrange(PAGE)
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))


def histories(path: Path) -> dict[str, list[tuple[str, int]]]:
    """Return the event ids and times of each user."""

    async def read() -> dict[str, list[tuple[str, int]]]:
        store = SQLiteStore(path)
        found: dict[str, list[tuple[str, int]]] = {}
        for event in store.scan_events():
            found.setdefault(event.user_id, []).append((event.event_id or "", event.timestamp or 0))
        assert await store.counts() == {
            "events": sum(map(len, found.values())),
            "users": len(list(store.scan_user_ids())),
            "items": len(list(store.scan_items())),
        }
        await store.append([Event("u1", "i", "after")])
        assert (await store.history("u1")).item_ids[-1] == "i"
        await store.close()
        return found

    return asyncio.run(read())


def test_any_flipped_bit_is_found(filled: Path, tmp_path: Path) -> None:
    """A check finds any one bit that was flipped anywhere in the file."""
    assert [f.level for f in check_store(filled)] == ["ok"] * 4
    content, copy, rng = filled.read_bytes(), tmp_path / "copy.db", random.Random(20)
    for at in [*range(100), *(rng.randrange(len(content)) for _ in range(60))]:
        copy.write_bytes(
            content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
        )
        problems = [f.sentence for f in check_store(copy) if f.level == "problem"]
        assert any("copy.db" in sentence for sentence in problems), at


def test_wrong_counts_and_dangling_rows_are_found(filled: Path) -> None:
    connection = apsw.Connection(str(filled), vfs=checksum_vfs())
    connection.execute("UPDATE state SET events = events + 1")
    connection.execute("DELETE FROM items WHERE item_id = 'i3'")
    connection.close()
    problems = [f.sentence for f in check_store(filled) if f.level == "problem"]
    assert len(problems) == 2
    problems = [f.sentence for f in check_store(filled, full=True) if f.level == "problem"]
    assert any("399 events of items without a name" in sentence for sentence in problems)


def test_one_damaged_page_loses_its_rows_alone(filled: Path, tmp_path: Path) -> None:
    whole, rng = histories(filled), random.Random(30)
    leaves = pages_of(filled, "events", "leaf")
    for page in (leaves[0], leaves[len(leaves) // 2], leaves[-1]):
        copy, target = tmp_path / f"{page}.db", tmp_path / f"salvaged-{page}.db"
        copy.write_bytes(filled.read_bytes())
        damage(copy, page, rng)
        before = copy.read_bytes()
        done = salvage(copy, target)
        assert copy.read_bytes() == before
        left = histories(target)
        lost = [
            (user, event)
            for user, events in whole.items()
            for event in events
            if event not in left.get(user, []) and event[0] != "after"
        ]
        assert 20 < len(lost) < PAGE / 20  # rows of one page
        assert all(event in whole[user] for user, events in left.items() for event in events
                   if event[0] != "after")  # fmt: skip
        (gap,) = done.gaps
        assert gap.table == "events"
        number = {user: n for n, user in enumerate(whole)}
        affected = sorted({number[user] for user, _ in lost})
        ends = [number[user] for user in gap.users]
        assert affected == list(range(affected[0], affected[-1] + 1))
        assert gap.after is None or 0 <= affected[0] - ends[0] <= 1
        assert gap.before is None or 0 <= ends[-1] - affected[-1] <= 1
        assert gap.after or gap.before
        assert all(f.level == "ok" for f in check_store(target, full=True))


@pytest.mark.parametrize("table", ["users", "items", "vectors", "types", "state", "forgotten"])
def test_other_tables_are_salvaged_too(filled: Path, tmp_path: Path, table: str) -> None:
    """With any page of any table damaged, what does not depend on it is salvaged, and valid."""
    rng, target = random.Random(31), tmp_path / "salvaged.db"
    damage(filled, pages_of(filled, table, "leaf")[0], rng)
    done = salvage(filled, target)
    assert {gap.table for gap in done.gaps} == {table} - {"state"}
    assert [f for f in check_store(target, full=True) if f.level == "problem"] == []
    if table not in ("users", "items", "types"):
        assert done.rows["events"] == (USERS - 1) * 20 + USERS // 40
    histories(target)


def test_damaged_interior_and_overflow_pages(filled: Path, tmp_path: Path) -> None:
    """A damaged page between root and leaves, or of a long document, loses what it leads to."""
    rng = random.Random(32)
    damage(filled, pages_of(filled, "items", "overflow")[0], rng)
    done = salvage(filled, tmp_path / "one.db")
    assert 0 < done.rows["items"] < 20
    damage(filled, pages_of(filled, "events", "internal")[0], rng)
    done = salvage(filled, tmp_path / "two.db")
    assert {gap.table for gap in done.gaps} >= {"events", "items"}
    assert [f for f in check_store(tmp_path / "two.db", full=True) if f.level == "problem"] == []


def test_salvage_refuses_what_it_cannot_do(filled: Path, tmp_path: Path) -> None:
    """An existing target, a missing source and a lost first page are errors that name the file."""
    with pytest.raises(Invalid, match="exists already"):
        salvage(filled, filled)
    with pytest.raises(Invalid, match="there is no store"):
        salvage(tmp_path / "none.db", tmp_path / "new.db")
    content = filled.read_bytes()
    filled.write_bytes(bytes(PAGE) + content[PAGE:])
    with pytest.raises(Corrupt, match=r"heed\.db"):
        salvage(filled, tmp_path / "new.db")
    assert not (tmp_path / "new.db").exists()


def test_an_intact_store_takes_writes_again_after_a_check(path: Path) -> None:
    async def write() -> bool:
        store = SQLiteStore(path)
        try:
            await store.append([Event("u", "i")])
        except Corrupt:
            return False
        finally:
            await store.close()
        return True

    assert asyncio.run(write())
    content = path.read_bytes()
    store = SQLiteStore(path)
    store._explain(apsw.CorruptError("as a read of a damaged page"))
    asyncio.run(store.close())
    assert not asyncio.run(write())
    assert path.read_bytes() == content
    assert "note" in {finding.level for finding in check_store(path)}
    assert asyncio.run(write())
