"""Every softmax over rows that `models.attention` lists, against one float64 loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from models.attention import partial_softmax
from models.attention.attend import AttentionOptions, KVTable, attend, split_heads
from models.attention.partial_softmax import (
    KVBlock,
    attend_blocks,
    mass_from_sample,
    remove_partial,
)
from models.encoder.causal_attention import FUTURE_BUCKET, causal_attention
from models.encoder.event_bias import BUCKETS
from models.encoder.history_encoder import attend_cached, attend_one
from models.index import memory_attention
from models.index.key_lists import KeyLists
from models.index.memory_attention import Memory
from models.recommender.recommender import Recommender, RecommenderConfig
from models.recommender.target_attention import (
    ItemTables,
    target_attention,
    target_attention_prefixes,
)
from models.training.losses import Chunk, chunked_cross_entropy
from tests.support import reference

HEADS, TARGETS, D = 2, 3, 4
_NEVER = -1e9  # a finite bias that no softmax sees, where -inf is not supported


@dataclass(frozen=True)
class Case:
    """Queries over rows; the bias is of heads and rows."""

    query: Tensor  # [H, T, d]
    keys: Tensor  # [H, n, d]
    values: Tensor  # [H, n, d]
    bias: Tensor  # [H, n], -inf hides
    outputs: Tensor  # [H, T, d], for paths that give ⟨context, output⟩ alone
    temperature: float

    @property
    def rows(self) -> int:
        return self.keys.shape[1]

    @property
    def sharpened(self) -> Case:
        """The same softmax at temperature 1: (q·k/√d + b) / τ = (q/τ)·k/√d + b/τ."""
        query, bias = self.query / self.temperature, self.bias / self.temperature
        return replace(self, query=query, bias=bias, temperature=1.0)

    def loop(self) -> tuple[Tensor, Tensor]:
        """Weights [H, T, n] and contexts [H, T, d] of the float64 loop."""
        seen = np.ones((self.query.shape[1], self.rows))
        parts = (x.double().numpy() for x in (self.query, self.keys, self.values, self.bias))
        each = [
            reference.attend(
                query,
                keys,
                values,
                np.broadcast_to(bias, seen.shape),
                seen,
                temperature=self.temperature,
            )
            for query, keys, values, bias in zip(*parts, strict=True)
        ]
        weights, contexts = (torch.from_numpy(np.stack(x)) for x in zip(*each, strict=True))
        return weights, contexts


def case(rows: int, *, hidden: float = 0.0, blind: bool = False, temperature: float = 1.0) -> Case:
    """Draw a case; `hidden` is the share of rows hidden, `blind` hides all of the last head's."""
    generator = torch.Generator().manual_seed(rows)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    bias = normal(HEADS, rows)
    bias[:, 1:][torch.rand(HEADS, max(0, rows - 1), generator=generator) < hidden] = -math.inf
    if blind:
        bias[-1] = -math.inf
    query, outputs = normal(HEADS, TARGETS, D), normal(HEADS, TARGETS, D)
    keys, values = normal(HEADS, rows, D), normal(HEADS, rows, D)
    return Case(query, keys, values, bias, outputs, temperature)


CASES = {
    "empty memory": case(0),
    "one row": case(1),
    "few rows": case(7),
    "temperature": case(7, temperature=0.4),
    "high temperature": case(7, temperature=3.0),
    "hidden rows": case(9, hidden=0.5),
    "a blind head": case(9, blind=True),
    "many rows": case(300, hidden=0.3),
    "many rows, a blind head": case(300, blind=True, temperature=0.7),
}


class Softmax(NamedTuple):
    """A path, its expected result (contexts unless given), and the cases it supports."""

    run: Callable[[Case], Tensor]
    wanted: Callable[[Case], Tensor] = lambda made: made.loop()[1]
    least: int = 0  # rows that it needs
    blind: bool = True  # may a head see nothing
    tolerance: float = 1e-5  # relative to the largest entry


def scores_of(made: Case) -> Tensor:
    """The sum over heads of ⟨context, output⟩, [T]."""
    return (made.loop()[1] * made.outputs.double()).sum((0, 2))


def run_masked(made: Case) -> Tensor:
    bias = made.bias[:, None]
    return attend(
        made.query, made.keys, made.values,
        bias=bias.clamp(min=_NEVER), visible=bias > -math.inf, temperature=made.temperature,
    ).context  # fmt: skip


def run_given_scores(made: Case) -> Tensor:
    scores = made.query @ made.keys.mT / D**0.5
    return attend(
        made.query, made.keys, made.values,
        bias=made.bias[:, None], score=lambda _q, _k: scores, temperature=made.temperature,
    ).context  # fmt: skip


def run_memory(made: Case, options: AttentionOptions) -> Tensor:
    memory = Memory(KVBlock(made.keys, made.values, made.bias))
    options = replace(options, temperature=made.temperature)
    return memory_attention.attend(made.query, memory, options).partial.context


def run_blocks(made: Case) -> Tensor:
    own = made.sharpened
    at = own.rows // 2
    parts = [slice(0, at), slice(at, None)]
    blocks = [KVBlock(own.keys[:, part], own.values[:, part], own.bias[:, part]) for part in parts]
    return attend_blocks(own.query, blocks).context


def run_plain_blocks(made: Case) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partial_softmax, "attention_with_logsumexp", partial_softmax.plain_attention)
        return run_blocks(made)


def run_removed(made: Case) -> Tensor:
    """Over the rows and five more, without these."""
    own, more = made.sharpened, case(5)
    hidden = (own.bias == -math.inf).all(1, keepdim=True)
    block = KVBlock(own.keys, own.values, own.bias)
    extra = KVBlock(more.keys, more.values, more.bias.masked_fill(hidden, -math.inf))
    part = attend_blocks(own.query, [extra])
    return remove_partial(attend_blocks(own.query, [block, extra]), part).context


def run_lists(made: Case, max_error: float) -> Tensor:
    own = made.sharpened
    near = own.rows // 3  # the rest are in lists
    rows = torch.arange(near, own.rows)
    lists = KeyLists(KVTable(own.keys, own.values), rows, own.bias[:, near:])
    block = KVBlock(own.keys[:, :near], own.values[:, :near], own.bias[:, :near])
    partial = attend_blocks(own.query, [block])
    return lists.attend(own.query, partial, max_error=max_error).partial.context


def run_mass(made: Case) -> Tensor:
    scores = made.query @ made.keys.mT / D**0.5 + made.bias[:, None]  # [H, T, n]
    inside, outside = scores[..., :2].transpose(0, 1), scores[..., 2:].transpose(0, 1)
    rest = (outside > -math.inf).sum(2)
    return mass_from_sample(inside, outside, rest, temperature=made.temperature)


def mass_of(made: Case) -> Tensor:
    weights = made.loop()[0]
    share = weights[..., :2].sum(2)
    return torch.where(weights.sum(2) > 0, share, 1.0).transpose(0, 1)


def tables_of(made: Case) -> ItemTables:
    nothing = torch.zeros(TARGETS, 0)
    return ItemTables(
        nothing, made.query, made.query, made.query, made.outputs, torch.zeros(TARGETS)
    )


def run_target_attention(made: Case) -> Tensor:
    own = made.sharpened
    return target_attention(tables_of(own), own.keys[None], own.values[None], own.bias[None])[0]


def run_prefixes(made: Case) -> Tensor:
    own = made.sharpened
    return target_attention_prefixes(
        own.query, own.outputs, own.keys[None], own.values[None], own.bias[None, :, None]
    )[0, 0]


def run_read_out(made: Case) -> Tensor:
    own = made.sharpened
    shape = RecommenderConfig(0, dim=HEADS * D, heads=HEADS, attention_heads=HEADS, blocks=0)
    model = Recommender(shape)
    torch.nn.init.eye_(model.cross_attention.w_o.weight)
    scores = (own.query @ own.keys.mT / D**0.5 + own.bias[:, None]).transpose(0, 1)  # [T, H, n]
    with torch.inference_mode():
        readout = model.read_out(own.values.expand(TARGETS, -1, -1, -1), scores)
    return split_heads(readout[:, None], HEADS)[:, :, 0].transpose(0, 1)


def run_causal(made: Case, *, by_row: bool) -> Tensor:
    own, n = made.sharpened, made.rows
    contexts = []
    for target in range(TARGETS):  # the last query of a window sees all of its rows
        query = own.query[:, None, target : target + 1].expand(-1, -1, n, -1)
        table, row_bias = torch.zeros(HEADS, BUCKETS), None
        if by_row:
            row_bias = own.bias[:, None]
        else:
            table[:, :n] = own.bias.clamp(min=_NEVER)
        bucket = torch.arange(n).expand(1, n, n)
        future = torch.ones(n, n, dtype=torch.bool).triu(1)
        bucket = bucket.masked_fill(future, FUTURE_BUCKET).int().contiguous()
        keys, values = own.keys[:, None], own.values[:, None]
        found = causal_attention(query, keys, values, table, bucket, row_bias)
        contexts.append(found[:, 0, -1])
    return torch.stack(contexts, 1)


def run_cached(made: Case) -> Tensor:
    own = made.sharpened
    return attend_cached(own.query, own.keys, own.values, own.bias[:, None])


def run_numpy(made: Case) -> Tensor:
    own = made.sharpened
    keys, values, bias = own.keys.numpy(), own.values.numpy(), own.bias.numpy()
    each = [
        torch.from_numpy(attend_one(own.query[:, target].numpy(), keys, values, bias))
        for target in range(TARGETS)
    ]
    return torch.stack(each, 1)


def run_entropy(made: Case) -> Tensor:
    """-log weight of row 0, the mean over targets, of each head."""
    own = made.sharpened
    losses = []
    for head in range(HEADS):
        flat = (own.bias[head] == -math.inf).expand(TARGETS, -1).flatten().nonzero().flatten()
        losses.append(
            chunked_cross_entropy(
                own.query[head] / D**0.5, torch.zeros(TARGETS, 0), own.keys[head],
                own.bias[head].clamp(min=_NEVER),
                targets=torch.zeros(TARGETS, dtype=torch.int64), target_weights=torch.ones(TARGETS),
                chunks=[Chunk(0, TARGETS, flat, None)],
            )
        )  # fmt: skip
    return torch.stack(losses)


def losses_of(made: Case) -> Tensor:
    return -made.loop()[0][..., 0].log().mean(1)


EVERY: dict[str, Softmax] = {
    "attend": Softmax(
        lambda m: (
            attend(
                m.query, m.keys, m.values, bias=m.bias[:, None], temperature=m.temperature
            ).context
        )
    ),
    "attend with a mask": Softmax(run_masked),
    "attend with given scores": Softmax(run_given_scores),
    "memory_attention.attend": Softmax(lambda m: run_memory(m, AttentionOptions())),
    "memory_attention.attend, coarse": Softmax(
        lambda m: run_memory(m, AttentionOptions(mode="coarse", k=max(1, m.rows)))
    ),
    "attend_blocks": Softmax(run_blocks),
    "attend_blocks, plain kernel": Softmax(run_plain_blocks, least=1),
    "remove_partial": Softmax(run_removed, least=1),
    "KeyLists.attend": Softmax(lambda m: run_lists(m, 0.01), least=1, tolerance=0.01),
    "KeyLists.attend, exact": Softmax(lambda m: run_lists(m, 1e-9), least=1),
    "mass_from_sample": Softmax(run_mass, mass_of, least=1),
    "target_attention": Softmax(run_target_attention, scores_of),
    "target_attention_prefixes": Softmax(run_prefixes, scores_of, least=1),
    "Recommender.read_out": Softmax(run_read_out),
    "causal_attention": Softmax(lambda m: run_causal(m, by_row=False), least=1, blind=False),
    "causal_attention, biases of rows": Softmax(lambda m: run_causal(m, by_row=True), least=1),
    "attend_cached": Softmax(run_cached, least=1, blind=False),
    "attend_one": Softmax(run_numpy, least=1, blind=False),
    "chunked_cross_entropy": Softmax(run_entropy, losses_of, least=1, blind=False),
}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (path, name)
        for path, softmax in EVERY.items()
        for name, made in CASES.items()
        if made.rows >= softmax.least and (softmax.blind or "blind" not in name)
    ],
)
def test_every_softmax_equals_the_float64_loop(path: str, name: str) -> None:
    softmax, made = EVERY[path], CASES[name]
    wanted = softmax.wanted(made).numpy()
    found = softmax.run(made).double().numpy()
    assert found.shape == wanted.shape
    limit = softmax.tolerance * max(1.0, float(np.abs(wanted).max(initial=0.0)))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=limit)


def test_the_fused_kernel_is_used_where_torch_has_it() -> None:
    assert partial_softmax.attention_with_logsumexp is not partial_softmax.plain_attention


@pytest.mark.parametrize("schema", [None, "", "aten::flash(Tensor query) -> (Tensor output)"])
def test_a_missing_or_changed_operator_falls_back(schema: str | None) -> None:
    operators = SimpleNamespace()
    if schema is not None:
        operator = SimpleNamespace(default=SimpleNamespace(_schema=schema))
        operators._scaled_dot_product_flash_attention_for_cpu = operator
    assert partial_softmax.select_kernel(operators) is partial_softmax.plain_attention


@pytest.mark.parametrize(
    "kernel", [partial_softmax.plain_attention, partial_softmax.attention_with_logsumexp]
)
@pytest.mark.parametrize("per_target", [False, True])
def test_both_kernels_give_contexts_and_logsumexp(
    kernel: partial_softmax.Kernel, per_target: bool
) -> None:
    """In float64 arithmetic: the softmax's mean of values, and the log of its denominator."""
    made = case(37)
    bias = made.bias[:, None]
    if per_target:
        bias = bias + torch.randn(HEADS, TARGETS, 37, generator=torch.Generator().manual_seed(1))
    scores = made.query.double() @ made.keys.double().mT / D**0.5 + bias
    context, logsumexp = kernel(made.query, made.keys, made.values, bias)
    wanted = torch.softmax(scores, -1) @ made.values.double()
    torch.testing.assert_close(context.double(), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logsumexp.double(), scores.logsumexp(-1), atol=1e-5, rtol=1e-5)
