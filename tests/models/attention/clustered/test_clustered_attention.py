"""Clustered attention over very many rows against a softmax in float64."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from models.attention.clustered.cluster_tree import MIN_CLUSTER_SIZE, ClusterTree, KVTable
from models.attention.clustered.clustered_attention import attend_clusters
from models.attention.clustered.moment_expansion import ClusteredAttention, attend_by_moments
from models.attention.partial_softmax import KVBlock, PartialSoftmax, attend_blocks, merge_partials

HEADS, D = 2, 8


class World(NamedTuple):
    """Keys, values, log weights and queries."""

    table: KVTable
    log_weights: Tensor
    query: Tensor

    def tree(self) -> ClusterTree:
        """Build a tree whose metric is that of the queries."""
        metric = self.query.mT @ self.query / self.query.shape[1]
        return ClusterTree(self.table, self.log_weights, metric=metric)

    def exact(self) -> Tensor:
        """The contexts [H, T, d] in float64."""
        scores = self.query.double() @ self.table.keys.double().mT / D**0.5
        scores = scores + self.log_weights.double()[:, None]
        context: Tensor = torch.softmax(scores, -1) @ self.table.values.double()
        return context


def world(
    n: int, sharp: float = 1.0, targets: int = 60, seed: int = 0, spread: float = 0.4
) -> World:
    """Keys around a hundred centres, values that go with them, weights that differ."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    of = torch.randint(100, (n,), generator=generator)
    keys = normal(HEADS, 100, D)[:, of] + spread * normal(HEADS, n, D)
    values = normal(HEADS, 100, D)[:, of] + 0.5 * keys + 0.3 * normal(HEADS, n, D)
    return World(KVTable(keys, values), normal(HEADS, n), sharp * normal(HEADS, targets, D))


def errors(found: ClusteredAttention, wanted: Tensor) -> Tensor:
    """Relative errors of contexts, [H, T]."""
    away = (found.partial.context.double() - wanted).norm(dim=-1)
    relative: Tensor = away / wanted.norm(dim=-1)
    return relative


@pytest.mark.parametrize("sharp", [0.3, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("max_error", [0.05, 0.01])
def test_the_allowed_error_is_met(sharp: float, max_error: float) -> None:
    """The relative error of a context is within `max_error` for at least 99 % of targets."""
    made = world(20_000, sharp, targets=200)
    found = attend_clusters(made.tree(), made.query, max_error=max_error)
    assert float((errors(found, made.exact()) <= max_error).float().mean()) >= 0.99
    assert float(found.error.max()) <= max_error


@pytest.mark.parametrize("sharp", [0.3, 1.0, 2.0])
def test_the_reported_error_bounds_the_true_error(sharp: float) -> None:
    """The reported error bounds the true one for 99 % of targets, even without exact clusters."""
    made = world(20_000, sharp, targets=200, seed=1)
    found = attend_clusters(made.tree(), made.query, max_error=math.inf)
    assert float(found.scanned.max()) == 0
    assert float((errors(found, made.exact()) <= found.error).float().mean()) >= 0.99


def test_diffuse_attention_scans_nothing() -> None:
    """Diffuse attention scans no row for most targets and stays within the error of 0.01."""
    made = world(60_000, 0.2)
    found = attend_clusters(made.tree(), made.query)
    assert float(found.scanned.median()) == 0
    assert float(errors(found, made.exact()).max()) <= 0.01


def test_exact_clusters_are_those_that_matter() -> None:
    """Sixteen exact clusters reduce the error of peaked attention by a factor of five."""
    made = world(30_000, 3.0, spread=0.1)
    tree, wanted = made.tree(), made.exact()
    last, head = len(tree.levels) - 1, slice(0, 1)
    scaled, recent = made.query[head] / D**0.5, PartialSoftmax.empty(1, 60, D)
    expanded, refined = (
        attend_by_moments(tree, last, head, scaled, recent, exact_clusters=count)
        for count in (0, 16)
    )
    assert float(refined.scanned.max()) == 16 * tree.levels[-1].size < 30_000 / 8
    before, after = (errors(found, wanted[head]).median() for found in (expanded, refined))
    assert float(after) < float(before) / 5
    share = (refined.exact_logsumexp - refined.partial.logsumexp).exp()
    assert float(share.median()) > 0.2


def test_second_order_is_far_nearer_than_first() -> None:
    """Covariances make the expansion at least five times as accurate as means alone."""
    made = world(20_000, 0.5, spread=1.0)
    tree, wanted = made.tree(), made.exact()
    first = errors(attend_clusters(tree, made.query, max_error=math.inf, order=1), wanted)
    second = errors(attend_clusters(tree, made.query, max_error=math.inf), wanted)
    assert float(second.median()) < float(first.median()) / 5


def test_no_error_attends_every_row() -> None:
    """With `max_error=0` every row is scanned, and the contexts equal the softmax."""
    made = world(5_000)
    found = attend_clusters(made.tree(), made.query, max_error=0)
    assert float(errors(found, made.exact()).max()) < 1e-5
    assert float(found.error.max()) == 0
    assert torch.equal(found.scanned, torch.full_like(found.scanned, 5_000))
    every = attend_blocks(made.query, made.tree().blocks(slice(None)))
    torch.testing.assert_close(every.context, found.partial.context)


def test_logsumexp_is_that_of_every_row() -> None:
    """The log of the denominator is within 0.02 of that over every row."""
    made = world(20_000, 1.0)
    scores = made.query.double() @ made.table.keys.double().mT / D**0.5
    wanted = torch.logsumexp(scores + made.log_weights.double()[:, None], -1)
    found = attend_clusters(made.tree(), made.query)
    assert float((found.partial.logsumexp - wanted).abs().max()) < 0.02


@pytest.mark.parametrize("max_error", [0.01, 0.0])
def test_recent_rows_take_their_share(max_error: float) -> None:
    """A partial softmax over recent rows is merged with the rows of the tree."""
    made = world(20_000, 1.0)
    keys, values = (part[:, :300] for part in made.table)
    keys = keys * 1.5
    bias = torch.full((HEADS, 300), 2.0)
    recent = attend_blocks(made.query, [KVBlock(keys, values, bias)])
    all_of = World(
        KVTable(torch.cat([made.table.keys, keys], 1), torch.cat([made.table.values, values], 1)),
        torch.cat([made.log_weights, bias], 1),
        made.query,
    )
    found = attend_clusters(made.tree(), made.query, recent_partial=recent, max_error=max_error)
    assert float(errors(found, all_of.exact()).quantile(0.99)) <= max(max_error, 1e-5)
    share = (found.exact_logsumexp - found.partial.logsumexp).exp()
    assert 0 < float(share.min()) <= float(share.max()) <= 1.001


def test_updated_weights_give_the_tree_of_those_weights() -> None:
    """After an update of weights a tree has the moments of one built with those weights."""
    made = world(10_000, 0.5)
    tree = made.tree()
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(10_000, generator=generator)[:700]
    other = made.log_weights.clone()
    other[:, rows] = torch.randn(HEADS, 700, generator=generator)
    other[:, rows[:50]] = -torch.inf
    tree.update_log_weights(rows, other[:, rows])
    made = made._replace(log_weights=other)
    anew = made.tree()
    for level, wanted in zip(tree.levels, anew.levels, strict=True):
        for part in ("keys", "values", "spread"):
            one, another = getattr(level.moments, part), getattr(wanted.moments, part)
            torch.testing.assert_close(one, another, atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(level.log_weight, wanted.log_weight, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(level.inflation, wanted.inflation, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(level.shares, wanted.shares, atol=1e-3, rtol=1e-3)
    found = attend_clusters(tree, made.query)
    assert float((errors(found, made.exact()) <= 0.01).float().mean()) >= 0.99
    exact = attend_clusters(tree, made.query, max_error=0)
    assert float(errors(exact, made.exact()).max()) < 1e-5


def test_tree_over_some_rows_of_a_table() -> None:
    """A tree over some rows of a table attends those rows alone."""
    made = world(8_000)
    at = torch.randperm(8_000)[:3_000]
    own = World(KVTable(*(part[:, at] for part in made.table)), made.log_weights[:, at], made.query)
    tree = ClusterTree(made.table, own.log_weights, table_rows=at)
    found = attend_clusters(tree, made.query)
    assert float((errors(found, own.exact()) <= 0.01).float().mean()) >= 0.99


@pytest.mark.parametrize("n", [MIN_CLUSTER_SIZE, MIN_CLUSTER_SIZE + 1, 200, 4_097])
def test_partly_filled_clusters_stay_within_the_error(n: int) -> None:
    """Partly filled clusters keep the error within 0.01."""
    made = world(n, 1.0)
    found = attend_clusters(made.tree(), made.query)
    assert float((errors(found, made.exact()) <= 0.01).float().mean()) >= 0.99


def test_equal_rows_and_hidden_rows() -> None:
    """Equal rows give their common value, and rows of log weight -inf are ignored."""
    table = KVTable(torch.ones(HEADS, 1_000, D), torch.full((HEADS, 1_000, D), 3.0))
    log_weights = torch.zeros(HEADS, 1_000)
    log_weights[:, ::2] = -torch.inf
    found = attend_clusters(ClusterTree(table, log_weights), torch.randn(HEADS, 5, D))
    torch.testing.assert_close(found.partial.context, torch.full((HEADS, 5, D), 3.0))
    assert float(found.error.max()) < 1e-4


def test_fewer_rows_than_a_cluster_has_are_refused() -> None:
    """A tree over fewer rows than the minimum cluster size is refused."""
    made = world(MIN_CLUSTER_SIZE - 1)
    with pytest.raises(ValueError, match="at least 64 rows, got 63"):
        made.tree()


def test_tree_size_per_row_is_bounded() -> None:
    """A tree takes less than 100 bytes per row and head."""
    made = world(20_000)
    size = made.tree().nbytes / 20_000
    assert size < 400 * HEADS / 4


def test_parts_merge_as_one_softmax() -> None:
    """Attention over the halves of a memory, put together, is that over all of it."""
    made = world(500)
    halves = [
        KVBlock(made.table.keys[:, half], made.table.values[:, half], made.log_weights[:, half])
        for half in (slice(0, 130), slice(130, 500))
    ]
    one = merge_partials(
        attend_blocks(made.query, halves[:1]), attend_blocks(made.query, halves[1:])
    )
    for found in (one, attend_blocks(made.query, halves)):
        torch.testing.assert_close(found.context.double(), made.exact(), atol=1e-5, rtol=1e-4)
    nothing = PartialSoftmax.empty(HEADS, 60, D)
    assert torch.equal(merge_partials(nothing, one).context, one.context)
    assert not merge_partials(nothing, nothing).context.any()


@pytest.mark.parametrize("max_error", [0.0, 0.01, math.inf])
def test_a_head_whose_rows_are_all_hidden_attends_nothing(max_error: float) -> None:
    """A head whose rows are all hidden gives zero contexts, or those of the recent rows."""
    made = world(2_000, 1.0)
    made.log_weights[1] = -math.inf
    found = attend_clusters(made.tree(), made.query, max_error=max_error)
    assert not found.partial.context[1].any()
    assert not found.error[1].any()
    assert found.partial.context.isfinite().all()
    keys, values = (part[:, :9] for part in made.table)
    recent = attend_blocks(made.query, [KVBlock(keys, values, torch.zeros(HEADS, 9))])
    both = attend_clusters(made.tree(), made.query, recent_partial=recent, max_error=max_error)
    torch.testing.assert_close(both.partial.context[1], recent.context[1])
