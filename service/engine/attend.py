"""The bare operator over rows of a request, the memory of a user, or the catalogue."""

from __future__ import annotations

import math
from typing import cast

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
    split_heads,
)
from models.attention.partial_softmax import KVBlock
from models.catalogue.snapshot import Snapshot
from models.compute.checkpoint import checkpoint
from models.history.user_memory import UserMemory
from models.index.memory_attention import Memory, as_mask, retrieve
from service.domain.errors import Invalid
from service.domain.records import check_finite
from service.engine.explanation import name_rows
from service.engine.pipeline import Request
from service.questions.answers import AttendedOut
from service.questions.asked import attention_options
from service.questions.attend import INDEXED, AttendIn, MemoryIn, ScorerName

Vector = NDArray[np.float32]

_SCORERS: dict[ScorerName, Scorer] = {
    "scaled_dot": scaled_dot,
    "cosine": cosine,
    "additive": additive,
}


async def attend_memory(request: Request[AttendIn]) -> AttendedOut:
    """Apply the bare operator. Raises `Invalid` where dimensions do not fit, and `NotFound`."""
    question, parts = request.question, request.parts
    await request.open_snapshot()
    target: int | Vector
    query, memory = question.query, question.memory
    if query.item_id is not None:
        target = request.item_row(query.item_id)
    elif query.text is not None:
        target = parts.embeddings.query(query.text)
    elif query.vector is not None:
        target = query.vector
    else:
        raise Invalid("/query", "one of vector, item_id and text must be given")
    if memory.is_inline:
        vector = content_of(request.snapshot, target) if isinstance(target, int) else target
        return await request.compute(lambda: attend_vectors(question, memory, vector))
    if memory.user_id is None:
        answer = await request.compute(lambda: attend_catalogue(question, request.snapshot, target))
        return answer | {"degraded": parts.live.degraded}
    options = attention_options(question.retrieval, parts.settings)
    await request.open(memory.user_id, options=options, visible=question.visible)

    def attend() -> tuple[AttendedOut, list[int]]:
        user = request.every_row()
        answer = attend_user(question, request.snapshot, user, target)
        return answer, [int(user.source[row]) for row in answer["rows"]]

    answer, sources = await request.compute(attend)
    with request.stages("explain"):
        named = await name_rows(parts.store, request.snapshot, request.events, sources)
    request.degraded = named.is_degraded
    answer["ids"] = [*named.ids]
    answer["events"] = named.events
    answer["degraded"] = request.is_degraded()
    return answer


def attend_vectors(question: AttendIn, memory: MemoryIn, target: Vector) -> AttendedOut:
    """Attend over rows that the client sent, by a query vector [d]. Raises `Invalid`."""
    heads, keys, values = question.heads or 1, memory.keys, memory.values
    if keys is None or values is None:
        raise Invalid("/memory", "must have keys and values")
    if not len(keys):  # of no row the width is not known: it fits
        keys = np.zeros((0, len(target) if question.query.vector is not None else 0), np.float32)
        values = keys[:, :0]
    if target.shape[0] != keys.shape[1]:
        raise Invalid(
            "/query" if question.query.vector is None else "/query/vector",
            f"the query has dimension {target.shape[0]}, the keys have {keys.shape[1]}: "
            "they must agree",
        )
    for name, width in (("keys", keys.shape[1]), ("values", values.shape[1])):
        if width % heads:
            raise Invalid("/heads", f"must divide the dimension of the {name}, {width}")
    bias = None if memory.bias is None else torch.from_numpy(memory.bias)
    if memory.visible is not None:
        bias = torch.zeros(len(keys)) if bias is None else bias
        bias = bias.masked_fill(~torch.tensor(memory.visible, dtype=torch.bool), -math.inf)
    rows = _block(keys, values, heads, bias)
    answer = _attend(question, _split(target[None], heads), rows)
    # Members that such rows do not have come last.
    present = {name: value for name, value in answer.items() if value is not None}
    return cast("AttendedOut", present | {"ids": None, "model_version": None, "events": None})


def attend_user(
    question: AttendIn, snapshot: Snapshot, user: UserMemory, target: Vector | int
) -> AttendedOut:
    """Attend over a user's memory through the model's projections.

    The target is an item row, or a vector of the content space. The user's part is in its query and
    recency in the bias of each row, unless the query leaves out the state: then only the target
    decides. Raises `Invalid`.
    """
    block, heads = user.block, user.keys.shape[1]
    if question.heads not in {None, heads}:
        raise Invalid("/heads", f"a user's memory has the model's own heads, {heads}")
    if isinstance(target, int):
        vector = snapshot.tables.queries[:, target : target + 1]  # (H, 1, d)
        if question.exclude_self:
            block = block._replace(bias=block.bias.masked_fill(user.rows == target, -math.inf))
    else:
        _check_content(snapshot, target)
        vector = snapshot.projected(target).queries
    if question.state:
        vector = vector + user.query[:, None]
    else:
        recency = snapshot.model.recency(user.distance, user.age)
        block = block._replace(bias=block.bias - recency)
    return _attend(question, vector, block, snapshot.version)


def attend_catalogue(question: AttendIn, snapshot: Snapshot, target: Vector | int) -> AttendedOut:
    """Attend over the field keys of all listed items; each key's value is its item's vector.

    The target is an item row, or a vector of the content space. Raises `Invalid`.
    """
    catalogue = snapshot.catalogue
    seen = catalogue.keys.mask(catalogue.visible)
    if isinstance(target, int):
        vector = content_of(snapshot, target)
        if question.exclude_self:
            seen = seen & (catalogue.keys.owners != target)
    else:
        _check_content(snapshot, target)
        vector = target
    heads = question.heads or 1
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
    answer = _attend(question, _split(vector[None], heads), memory, snapshot.version)
    answer["ids"] = [catalogue.vocabulary.id(int(owners[row])) for row in answer["rows"]]
    return answer


def _attend(
    question: AttendIn, vector: Tensor, memory: KVBlock, version: str | None = None
) -> AttendedOut:
    """Attend by a vector [H, 1, d] over the rows that FAISS names, or over every row.

    For one query every row takes less time than lists of them take to build: `auto` is exact.
    """
    count, score = memory.keys.shape[1], _SCORERS[question.scorer]
    bias, visible = memory.bias[:, None], None
    is_coarse = question.retrieval.mode == "coarse" and count > 0
    with torch.inference_mode():
        if is_coarse:
            options = AttentionOptions(
                mode="coarse", k=question.retrieval.k, probes=question.retrieval.probes
            )
            rows = _named(question, vector, memory, options)
            visible = as_mask(rows, count)
        found = attend(
            vector,
            memory.keys,
            memory.values,
            bias=bias,
            visible=visible,
            score=score,
            temperature=question.temperature,
            hard=question.hard,
        )
        mass, scanned = torch.ones(len(bias)), float(count)
        if visible is not None:
            scores = (
                logits(vector, memory.keys, bias=bias, score=score)[:, 0] / question.temperature
            )
            seen = scores.masked_fill(~visible[:, 0], -math.inf)
            total, scanned = torch.logsumexp(scores, 1), float(visible.sum(2).float().mean())
            mass = (torch.logsumexp(seen, 1) - total).exp().nan_to_num(nan=1.0)
            if question.hard:
                mass = (seen.amax(1) >= scores.amax(1)).float()
        weights = found.weights[:, 0]  # (H, n)
        mean = weights.mean(0)
        order = torch.argsort(mean, descending=True, stable=True)
        top = order[mean[order] > 0][: question.limit]
    # Heads lie side by side in one context, as in multi-head attention before W_O.
    context = found.context.flatten().tolist()
    check_finite("the context", context)
    return {
        "rows": top.tolist(),
        "ids": None,
        "weights": weights[:, top].tolist(),
        "context": context,
        "mass": mass.tolist(),
        "retrieval": "coarse" if is_coarse else "exact",
        "model_version": version,
        "degraded": False,
        "rows_scanned": round(scanned),
        "memory_rows": count,
        "events": None,
    }


def _named(
    question: AttendIn, vector: Tensor, memory: KVBlock, options: AttentionOptions
) -> Tensor:
    """Name the rows [H, 1, k] of largest score, which FAISS orders by the inner product."""
    if question.scorer not in INDEXED:  # has no inner product: every row is scored
        score = _SCORERS[question.scorer]
        scores = logits(vector, memory.keys, bias=memory.bias[:, None], score=score)
        best = scores.topk(min(options.rows_kept, scores.shape[2]), 2)
        return best.indices.masked_fill(best.values == -math.inf, -1)
    if question.scorer == "cosine":
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
