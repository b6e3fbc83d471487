"""Progress file of recommendations for all users: continued, cut off, discarded, locked."""

from __future__ import annotations

import errno
import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pytest

from service.domain.errors import Conflict, Invalid, StoreFull
from service.engine.list_progress import ListBatch, ListRun, UserList, open_progress
from service.engine.lists import ListShard
from service.stores.event_identity import user_key

RUN = ListRun({"model": "one", "shard": "1/1"}, at=7, begun=8, catalogue_version=9)
THIRD = 1 / 3
BATCHES = [
    ListBatch([UserList("a", ["x", "y\n"], [THIRD, -2e-30]), UserList("b", [], [])], []),
    ListBatch([UserList("ç", ["z"], [0.1])], [0.25, 1.0]),
    ListBatch([UserList("名", ["\u2028"], [3.0])], []),
]
LATER = replace(RUN, at=70, begun=80, catalogue_version=90)


def fill(path: Path, count: int = len(BATCHES)) -> list[int]:
    """Append so many batches; return the size of the file after the first line and each batch."""
    with open_progress(path, RUN) as progress:
        sizes = [path.stat().st_size]
        for batch in BATCHES[:count]:
            progress.append(batch)
            sizes.append(path.stat().st_size)
    return sizes


def test_a_run_continues_with_what_the_last_one_has_written(tmp_path: Path) -> None:
    """A run of the same identity finds all lists, exactly, and the time of the one before."""
    fill(tmp_path / "p", 2)
    with open_progress(tmp_path / "p", LATER) as progress:
        assert (progress.users, progress.last, progress.recalls) == (3, "ç", [0.25, 1.0])
        assert (progress.run, progress.differences) == (RUN, ())
        progress.append(BATCHES[2])
        assert list(progress.batches()) == BATCHES
        assert (progress.users, progress.last) == (4, "名")
        progress.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_was_cut_anywhere_is_continued_after_its_last_whole_line(
    tmp_path: Path,
) -> None:
    """Whatever a kill leaves of the file, whole lines are kept and the rest is written again."""
    path = tmp_path / "p"
    sizes = fill(path)
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        whole = sum(size <= length for size in sizes) - 1  # batches; -1 without a first line
        with open_progress(path, LATER) as progress:
            assert progress.users == sum(len(batch.lists) for batch in BATCHES[: max(whole, 0)])
            assert progress.run == (RUN if whole >= 0 else LATER)
            for batch in BATCHES[max(whole, 0) :]:
                progress.append(batch)
            assert list(progress.batches()) == BATCHES
        assert whole < 0 or path.read_bytes() == data


def test_a_damaged_line_and_all_after_it_are_not_believed(tmp_path: Path) -> None:
    """Of a file with one changed byte only the lines before that byte are continued."""
    path = tmp_path / "p"
    sizes = fill(path)
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        whole = sum(size <= at for size in sizes) - 1
        with open_progress(path, LATER) as progress:
            assert list(progress.batches()) == BATCHES[: max(whole, 0)]


@pytest.mark.parametrize(
    ("identity", "differences"),
    [
        ({"model": "two", "shard": "1/1"}, ("model",)),
        ({"model": "two", "shard": "1/2"}, ("model", "shard")),
        ({"model": "one"}, ("shard",)),
        ({"model": "one", "shard": "1/1", "store": "x"}, ("store",)),
    ],
)
def test_a_run_of_another_identity_discards_the_file(
    tmp_path: Path, identity: dict[str, str], differences: tuple[str, ...]
) -> None:
    """A run that depends on anything else begins anew, and knows by what it differs."""
    fill(tmp_path / "p")
    other = replace(LATER, identity=identity)
    with open_progress(tmp_path / "p", other) as progress:
        assert (progress.users, progress.last, progress.recalls) == (0, None, [])
        assert (progress.run, progress.differences) == (other, differences)
        assert list(progress.batches()) == []
    with open_progress(tmp_path / "p", replace(other, at=0)) as progress:
        assert progress.run == other


def test_restart_discards_the_file(tmp_path: Path) -> None:
    """With `restart` a run begins anew, although it could continue."""
    fill(tmp_path / "p")
    with open_progress(tmp_path / "p", LATER, restart=True) as progress:
        assert (progress.users, progress.run, progress.differences) == (0, LATER, ())


def test_two_runs_exclude_each_other(tmp_path: Path) -> None:
    """While one run has the file open another is refused, and neither loses a line."""
    path = tmp_path / "p"
    with open_progress(path, RUN) as progress:
        progress.append(BATCHES[0])
        with pytest.raises(Conflict, match=str(path)), open_progress(path, RUN, restart=True):
            pytest.fail("two runs have the file open")
        assert list(progress.batches()) == BATCHES[:1]


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a full disk cuts off is reported, and the next run goes on after the last whole line."""
    path = tmp_path / "p"
    fill(path, 2)
    write = os.write

    def write_half(descriptor: int, data: memoryview) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "no space left")
        return write(descriptor, data[: len(data) // 2])

    with open_progress(path, LATER) as progress, monkeypatch.context() as full:
        full.setattr(os, "write", write_half)
        with pytest.raises(StoreFull, match=str(path)):
            progress.append(BATCHES[2])
    with open_progress(path, LATER) as progress:
        assert (progress.users, progress.last) == (3, "ç")
        progress.append(BATCHES[2])
        assert list(progress.batches()) == BATCHES


def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    """The lists of users cannot be read by other users of the machine."""
    fill(tmp_path / "p")
    assert (tmp_path / "p").stat().st_mode & 0o777 == 0o600


# ------------------------------------------------------------------ shards


@pytest.mark.parametrize(
    ("user_id", "key"),  # by b2sum -l 64, and all bits but the first
    [
        ("", 0x64A6A0577479B2B4),
        ("u1", 0x12994D683F4E6AD5),
        ("名", 0x69F40412298B18E5),
    ],
)
def test_user_keys_never_change(user_id: str, key: int) -> None:
    """A user's key is 63 bits of the BLAKE2b digest of the id, whatever the machine."""
    assert user_key(user_id) == key


def test_each_user_is_in_one_shard() -> None:
    """Shards are disjoint, leave nobody out, and are about equally large."""
    users = [f"user {n}" for n in range(4_000)]
    shards = [{user for user in users if ListShard(k, 4).has(user)} for k in (1, 2, 3, 4)]
    assert sorted(user for shard in shards for user in shard) == sorted(users)
    assert all(900 < len(shard) < 1_100 for shard in shards)
    for user in users:
        digest = hashlib.blake2b(user.encode(), digest_size=8).digest()
        assert user in shards[int.from_bytes(digest, "big") % 2**63 % 4]
    assert all(ListShard().has(user) for user in users)


def test_shards_are_written_as_they_are_read() -> None:
    """NUMBER/COUNT is parsed, with the number from 1 to the count."""
    assert [str(ListShard.parse(text)) for text in ("1/1", "2/4", "4/4")] == ["1/1", "2/4", "4/4"]
    for text in (
        "5/4",
        "0/4",
        "x",
        "",
        "2",
        "2/0",
        "-1/4",
        "1/4/2",
        " 1/4",
        "1.0/4",
        "²/4",
        "1/1_0",
    ):
        with pytest.raises(Invalid, match="NUMBER/COUNT"):
            ListShard.parse(text)
