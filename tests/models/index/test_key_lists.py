"""Key lists: attention by summaries to a stated error, against float64 over every row."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from models.attention.attend import KVTable
from models.attention.partial_softmax import (
    Attended,
    KVBlock,
    PartialSoftmax,
    attend_blocks,
    merge_partials,
)
from models.index.key_lists import KeyLists

HEADS, D, TARGETS = 2, 16, 24


def made(
    n: int, *, seed: int = 0, loose: float = 0.3, spread: float = 0.0
) -> tuple[KVTable, Tensor]:
    """Keys near some centres, values that follow them, and log weights."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    centres, of = normal(HEADS, 40, D), torch.randint(40, (n,), generator=generator)
    keys = centres[:, of] + loose * normal(HEADS, n, D)
    values = keys @ normal(HEADS, D, D) / 4 + 0.2 * normal(HEADS, n, D)
    return KVTable(keys, values), spread * normal(HEADS, n)


def asked(seed: int = 9, length: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return length * torch.randn(HEADS, TARGETS, D, generator=generator)


def exact(query: Tensor, table: KVTable, log_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Contexts and log-sum-exps of every row, in float64."""
    scores = query.double() @ table.keys.double().mT / math.sqrt(D) + log_weights.double()[:, None]
    return torch.softmax(scores, -1) @ table.values.double(), scores.logsumexp(-1)


def off(found: Attended, wanted: Tensor) -> Tensor:
    away: Tensor = (found.partial.context.double() - wanted).norm(dim=-1)
    relative: Tensor = away / wanted.norm(dim=-1)
    return relative


def nothing() -> PartialSoftmax:
    return PartialSoftmax.empty(HEADS, TARGETS, D)


def lists(table: KVTable, log_weights: Tensor) -> KeyLists:
    return KeyLists(table, torch.arange(table.keys.shape[1]), log_weights)


@pytest.mark.parametrize("length", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("spread", [0.0, 2.0])
@pytest.mark.parametrize("max_error", [0.2, 0.01])
def test_the_stated_error_is_allowed_and_true(
    length: float, spread: float, max_error: float
) -> None:
    """No stated error exceeds the allowed one, and 99 of 100 contexts are as near as stated."""
    table, weights = made(20_000, spread=spread)
    query = asked(length=length)
    found = lists(table, weights).attend(query, nothing(), max_error=max_error)
    context, logsumexp = exact(query, table, weights)
    assert float(found.error.max()) <= max_error
    assert float((off(found, context) <= found.error + 1e-5).float().mean()) >= 0.99
    assert float((found.partial.logsumexp - logsumexp).abs().max()) < 2 * max_error


def test_diffuse_attention_reads_only_rows_that_are_in_no_list() -> None:
    """Queries whose scores hardly differ are answered by summaries, and hold hardly any mass."""
    table, weights = made(20_000)
    found = lists(table, weights).attend(asked(length=0.1), nothing(), max_error=0.01)
    assert (found.scanned == 256).all()
    assert 0 < float(found.mass.max()) < 0.05
    assert float(found.error.min()) > 0


def test_rows_that_lie_apart_are_no_surprise() -> None:
    """One key far from all others, which queries point at, is within the error that is stated."""
    generator = torch.Generator().manual_seed(7)
    keys = 0.5 * torch.randn(HEADS, 8_192, D, generator=generator)
    far = torch.nn.functional.normalize(torch.randn(D, generator=generator), dim=0)
    keys[:, 77] = 6 * far
    values = keys + 1
    values[:, 77] = -1
    query = 4 * far + 0.3 * torch.randn(HEADS, TARGETS, D, generator=generator)
    table, weights = KVTable(keys, values), torch.zeros(HEADS, 8_192)
    found = lists(table, weights).attend(query, nothing(), max_error=0.01)
    away = off(found, exact(query, table, weights)[0])
    assert float(away.max()) <= 0.01
    assert (away <= found.error + 1e-5).all()


def test_weights_that_fall_far_leave_nothing_behind() -> None:
    """After all weights fell by e^-20 the answers are those of the new weights."""
    table, weights = made(8_192)
    own = lists(table, weights)
    own.update(torch.arange(8_192), weights - 20)
    found = own.attend(asked(), nothing(), max_error=0.05)
    context, logsumexp = exact(asked(), table, weights - 20)
    assert float(off(found, context).max()) <= 0.05
    torch.testing.assert_close(found.partial.logsumexp.double(), logsumexp, atol=0.05, rtol=0)


def test_peaked_attention_opens_a_few_lists() -> None:
    """Queries that few lists answer have these attended row by row, and the others by summary."""
    table, weights = made(40_000, loose=0.1)
    query = asked(length=8.0)[:, :1]
    found = lists(table, weights).attend(query, PartialSoftmax.empty(HEADS, 1, D), max_error=0.01)
    context, _ = exact(query, table, weights)
    assert float(found.scanned.min()) > 0
    assert float(off(found, context).max()) <= 0.01
    few = found.scanned < 40_000
    assert few.any()
    assert (found.mass[few] > 0).all()
    assert (found.mass[few] < 1).all()


def test_keys_and_values_that_have_nothing_in_common_are_attended_row_by_row() -> None:
    """Worthless summaries are not used: every row is attended, and the error is none."""
    generator = torch.Generator().manual_seed(1)
    table = KVTable(*(torch.randn(HEADS, 9_000, D, generator=generator) for _ in range(2)))
    weights = torch.zeros(HEADS, 9_000)
    found = lists(table, weights).attend(asked(length=2.0), nothing(), max_error=0.01)
    assert (found.scanned == 9_000).all()
    assert not found.error.any()
    assert float(off(found, exact(asked(length=2.0), table, weights)[0]).max()) < 1e-5


@pytest.mark.parametrize("max_error", [0.05, 1e-9])
def test_near_rows_take_their_share(max_error: float) -> None:
    """Near rows and lists are one softmax: the lists alone, merged with the near rows' own."""
    table, weights = made(12_000)
    some, more = made(50, seed=4)
    query = asked()
    near = attend_blocks(query, [KVBlock(some.keys, some.values, more + 6)])
    found = lists(table, weights).attend(query, near, max_error=max_error)
    context, logsumexp = exact(query, table, weights)
    wanted = merge_partials(near, PartialSoftmax(context.float(), logsumexp.float()))
    assert float(off(found, wanted.context.double()).max()) <= max(max_error, 1e-5)
    if max_error > 0.01:
        share, listed = (near.logsumexp - wanted.logsumexp).exp(), found.scanned < 12_000
        assert listed.any()
        assert (found.mass[listed] >= share[listed] - 0.02).all()


def test_updated_weights_give_the_lists_of_those_weights() -> None:
    """After an update the answers are those of lists that were built with the new weights."""
    table, weights = made(12_000, spread=1.0)
    updated = lists(table, weights)
    updated.attend(asked(), nothing(), max_error=1.0)
    places = torch.arange(0, 12_000, 7)
    new = weights.clone()
    new[:, places] = torch.randn(HEADS, len(places), generator=torch.Generator().manual_seed(2))
    new[0, places[::5]] = -math.inf
    updated.update(places, new[:, places])
    found = updated.attend(asked(), nothing(), max_error=1.0)
    other = lists(table, new).attend(asked(), nothing(), max_error=1.0)
    torch.testing.assert_close(found.partial.context, other.partial.context, atol=0.02, rtol=0.02)
    context, logsumexp = exact(asked(), table, new)
    assert (off(found, context) <= found.error).all()
    torch.testing.assert_close(found.partial.logsumexp.double(), logsumexp, atol=0.05, rtol=0)


def test_some_rows_of_a_table_and_hidden_rows() -> None:
    """Lists over some rows of a table attend to these, and not to rows of weight zero."""
    table, weights = made(15_000)
    rows = torch.arange(1, 15_000, 2)
    own = weights[:, rows]
    own[:, ::3] = -math.inf
    found = KeyLists(table, rows, own).attend(asked(), nothing(), max_error=0.01)
    part = KVTable(*(each[:, rows] for each in table))
    assert float(off(found, exact(asked(), part, own)[0]).max()) <= 0.01


def test_a_head_whose_rows_are_all_hidden_attends_nothing() -> None:
    """A head that sees no row has a zero context and all of nothing's mass."""
    table, weights = made(5_000)
    weights[1] = -math.inf
    for max_error in (0.01, 1e-9):
        found = lists(table, weights).attend(asked(), nothing(), max_error=max_error)
        assert not found.partial.context[1].any()
        assert not found.error[1].any()
        assert float(off(found, exact(asked(), table, weights)[0])[0].max()) <= max(max_error, 1e-5)


@pytest.mark.parametrize("count", [1, 40, 300])
def test_few_or_equal_rows_are_attended_too(count: int) -> None:
    """Any number of rows, all of them alike, gives the one value that there is."""
    table = KVTable(torch.ones(HEADS, count, D), torch.full((HEADS, count, D), 2.0))
    found = lists(table, torch.zeros(HEADS, count)).attend(asked(), nothing(), max_error=0.01)
    torch.testing.assert_close(found.partial.context, torch.full((HEADS, TARGETS, D), 2.0))


def test_many_targets_are_attended_in_parts() -> None:
    """The answer to a target does not depend on how many are asked beside it."""
    table, weights = made(6_000)
    query = asked().repeat(1, 30, 1)
    own = lists(table, weights)
    found = own.attend(query, PartialSoftmax.empty(HEADS, TARGETS * 30, D), max_error=0.3)
    part = own.attend(asked(), nothing(), max_error=0.3)
    torch.testing.assert_close(found.partial.context[:, -TARGETS:], part.partial.context)


def test_bytes_of_each_row_are_bounded() -> None:
    """Lists hold some 16 bytes for each row and head, and the summaries."""
    table, weights = made(60_000)
    own = lists(table, weights)
    own.attend(asked(), nothing(), max_error=1.0)
    assert own.nbytes < 60_000 * (8 + HEADS * 16) + 4_000_000
