"""The bare operator over any memory: a client's vectors, a user's history, the catalogue."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.attention.attend import (
    AttentionOptions,
    Scorer,
    additive,
    attend,
    cosine,
    logits,
    normalize,
    scaled_dot,
)
from models.attention.kv_memory import split_heads
from models.attention.partial_softmax import KVBlock
from models.catalogue.snapshot import Snapshot
from models.compute.checkpoint import checkpoint
from models.history.user_memory import UserMemory
from models.index.memory_attention import Memory, as_mask, retrieve
from service.domain.errors import Invalid
from service.domain.queries import AttendQuery, AttendResult, ScorerName, VectorMemory

Vector = NDArray[np.float32]

_SCORERS: dict[ScorerName, Scorer] = {
    "scaled_dot": scaled_dot,
    "cosine": cosine,
    "additive": additive,
}


def attend_vectors(query: AttendQuery, memory: VectorMemory, target: Vector) -> AttendResult:
    """Attend over rows that the client sent, by a query vector [d].

    Raises:
        Invalid: where dimensions do not fit.
    """
    heads = query.heads or 1
    if target.shape[0] != memory.keys.shape[1]:
        raise Invalid(
            "/query" if query.vector is None else "/query/vector",
            f"the query has dimension {target.shape[0]}, the keys have {memory.keys.shape[1]}: "
            "they must agree",
        )
    for name, width in (("keys", memory.keys.shape[1]), ("values", memory.values.shape[1])):
        if width % heads:
            raise Invalid("/heads", f"must divide the dimension of the {name}, {width}")
    bias = None if memory.bias is None else torch.from_numpy(memory.bias)
    if memory.visible is not None:
        bias = torch.zeros(len(memory.keys)) if bias is None else bias
        bias = bias.masked_fill(~torch.from_numpy(memory.visible), -math.inf)
    rows = _block(memory.keys, memory.values, heads, bias)
    return _attend(query, _split(target[None], heads), rows)


def attend_user(
    query: AttendQuery,
    snapshot: Snapshot,
    user: UserMemory,
    target: Vector | int,
) -> AttendResult:
    """Attend over a user's memory through the model's projections.

    The target is an item row, or a vector of the content space. The user's part is in its query and
    recency in the bias of each row, unless the query leaves out the state: then the target alone
    decides.

    Raises:
        Invalid: when another number of heads than the model's is requested, or a vector is not of
            the content space.
    """
    block, heads = user.block, user.memory.heads
    if query.heads not in {None, heads}:
        raise Invalid("/heads", f"a user's memory has the model's own heads, {heads}")
    if isinstance(target, int):
        vector = snapshot.tables.queries[:, target : target + 1]  # (H, 1, d)
        if query.exclude_self:
            block = block._replace(bias=block.bias.masked_fill(user.rows == target, -math.inf))
    else:
        _check_content(snapshot, target)
        vector = snapshot.projected(target).queries
    if query.state:
        vector = vector + user.query[:, None]
    else:
        recency = snapshot.model.recency(user.distance, user.age)
        block = block._replace(bias=block.bias - recency)
    return _attend(query, vector, block, snapshot.version)


def attend_catalogue(query: AttendQuery, snapshot: Snapshot, target: Vector | int) -> AttendResult:
    """Attend over the field keys of all listed items; each key's value is its item's vector.

    The target is an item row, or a vector of the content space.

    Raises:
        Invalid: where dimensions do not fit.
    """
    catalogue = snapshot.catalogue
    seen = catalogue.keys.mask(catalogue.visible)
    if isinstance(target, int):
        vector = content_of(snapshot, target)
        if query.exclude_self:
            seen = seen & (catalogue.keys.owners != target)
    else:
        _check_content(snapshot, target)
        vector = target
    heads = query.heads or 1
    if catalogue.dimension % heads:
        raise Invalid("/heads", f"must divide the keys' dimension, {catalogue.dimension}")
    places = np.flatnonzero(seen)
    owners = catalogue.keys.owners[places]
    vectors = catalogue.keys.vectors
    if len(places) < len(vectors):
        vectors = vectors[places]
    checkpoint()
    memory = _block(vectors, catalogue.content[owners], heads)
    checkpoint()
    found = _attend(query, _split(vector[None], heads), memory, snapshot.version)
    ids = tuple(catalogue.vocabulary.id(int(owners[row])) for row in found.rows)
    return replace(found, ids=ids)


def _attend(
    query: AttendQuery,
    vector: Tensor,
    memory: KVBlock,
    version: str | None = None,
) -> AttendResult:
    """Attend by a vector [H, 1, d] over the rows that FAISS names, or over every row.

    For one query every row takes less time than lists of them take to build: `auto` is exact.
    """
    count, score = memory.keys.shape[1], _SCORERS[query.scorer]
    bias, visible = memory.bias[:, None], None
    is_coarse = query.retrieval.mode == "coarse" and count > 0
    with torch.inference_mode():
        if is_coarse:
            options = AttentionOptions(
                mode="coarse", k=query.retrieval.k, probes=query.retrieval.probes
            )
            rows = _named(query, vector, memory, options)
            visible = as_mask(rows, count)
        found = attend(
            vector,
            memory.keys,
            memory.values,
            bias=bias,
            visible=visible,
            score=score,
            temperature=query.temperature,
            hard=query.hard,
        )
        mass, scanned = torch.ones(len(bias)), float(count)
        if visible is not None:
            scores = logits(vector, memory.keys, bias=bias, score=score)[:, 0] / query.temperature
            seen = scores.masked_fill(~visible[:, 0], -math.inf)
            total, scanned = torch.logsumexp(scores, 1), float(visible.sum(2).float().mean())
            mass = (torch.logsumexp(seen, 1) - total).exp().nan_to_num(nan=1.0)
            if query.hard:
                mass = (seen.amax(1) >= scores.amax(1)).float()
        weights = found.weights[:, 0]  # (H, n)
        mean = weights.mean(0)
        order = torch.argsort(mean, descending=True, stable=True)
        top = order[mean[order] > 0][: query.limit]
    return AttendResult(
        tuple(top.tolist()),
        None,
        tuple(tuple(row) for row in weights[:, top].tolist()),
        # Heads lie side by side in one context, as in multi-head attention before W_O.
        tuple(found.context.flatten().tolist()),
        tuple(mass.tolist()),
        "coarse" if is_coarse else "exact",
        version,
        rows_scanned=round(scanned),
        memory_rows=count,
    )


def _named(
    query: AttendQuery, vector: Tensor, memory: KVBlock, options: AttentionOptions
) -> Tensor:
    """Name the rows [H, 1, k] of largest score, which FAISS orders by the inner product."""
    if query.scorer == "additive":  # has no inner product: every row is scored
        scores = logits(vector, memory.keys, bias=memory.bias[:, None], score=additive)
        best = scores.topk(min(options.rows_kept, scores.shape[2]), 2)
        return best.indices.masked_fill(best.values == -math.inf, -1)
    if query.scorer == "cosine":
        # The index adds √d times the bias, as for q·k/√d + b.
        vector = normalize(vector) * vector.shape[2] ** 0.5
        memory = memory._replace(keys=normalize(memory.keys))
    return retrieve(vector, Memory(memory), options)


def _block(keys: Vector, values: Vector, heads: int, bias: Tensor | None = None) -> KVBlock:
    bias = torch.zeros(len(keys)) if bias is None else bias
    return KVBlock(_split(keys, heads), _split(values, heads), bias.expand(heads, -1))


def _split(vectors: Vector, heads: int) -> Tensor:
    """[n, H·d] -> [H, n, d]."""
    return split_heads(torch.from_numpy(np.ascontiguousarray(vectors)), heads)


def content_of(snapshot: Snapshot, row: int) -> Vector:
    """Return the embedding of an item. Raises `Invalid` for one without."""
    if not snapshot.catalogue.has_content[row]:
        name = snapshot.catalogue.vocabulary.id(row)
        raise Invalid("/query/item_id", f"item {name!r} has neither a text nor an embedding")
    vector: Vector = snapshot.catalogue.content[row]
    return vector


def _check_content(snapshot: Snapshot, vector: Vector) -> None:
    dimension = snapshot.catalogue.dimension
    if vector.shape[0] != dimension:
        raise Invalid(
            "/query/vector", f"has {vector.shape[0]} dimensions; this memory's queries {dimension}"
        )
