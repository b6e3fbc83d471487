"""Derivatives of scores by gates on the events that the encoder has read."""

from __future__ import annotations

import torch
from torch import Tensor

from models.attention.attend import AttentionOptions, attend, exclude_self
from models.attention.kv_memory import gather_rows
from models.attention.partial_softmax import PartialSoftmax, remove_partial
from models.catalogue.snapshot import Snapshot
from models.compute.checkpoint import checkpoint
from models.history.user_attention import at_request, is_known, known_rows, retrieve_user
from models.history.user_memory import UserMemory, target_queries
from models.index.memory_attention import as_mask, attend_near
from models.ranking.scoring import target_counts


def encoder_slopes(
    snapshot: Snapshot,
    user: UserMemory,
    targets: Tensor,
    options: AttentionOptions,
    *,
    partial: PartialSoftmax | None = None,
) -> Tensor:
    """Differentiate scores by gates on the encoder's events, [L, n].

    Row j of the attention itself is not gated: without it the score is known in closed form.

    Args:
        snapshot: the model and the catalogue.
        user: from `build_memory`, with an encoded history of n events.
        targets: item rows, int64 [L].
        options: as in `score`; the temperature counts.
        partial: of a history of very many items, the targets' attention as `score` returned it,
            [H, L].

    Raises:
        ValueError: for a memory without an encoded history, or very many items without `partial`.
    """
    encoded, model = user.encoded, snapshot.model
    if encoded is None or model.encoder is None or model.state_attention is None:
        raise ValueError("user: has no encoded history")
    older = None
    with at_request(user):
        block, own = known_rows(user), user.rows
        if user.collapsed is not None and block.bias.shape[1] > len(own):
            own = torch.cat([own, torch.from_numpy(user.collapsed.items.items)])
        seen = exclude_self(targets, own) if options.exclude_self else None
        retrieved = retrieve_user(snapshot, user, targets, options)
        if retrieved is not None:
            seen = as_mask(retrieved, len(own))
        if not is_known(user):
            if partial is None:
                raise ValueError("partial: must be given for a history of very many items")
            # To first order this is one row, whose context and mass do not depend on the query.
            query = target_queries(snapshot, user, targets)
            near = attend_near(query, block._replace(visible=seen), options)
            older = remove_partial(partial, near)
    attention = model.state_attention
    counts = target_counts(snapshot, user, targets, again=not options.exclude_self)
    # What requests compute cannot be differentiated through; copies can.
    with torch.inference_mode(mode=False), torch.enable_grad():
        gates = torch.ones(len(encoded.cache), requires_grad=True)
        times = encoded.cache.timestamps.clone()
        states = model.encoder.forward_gated(encoded.events.clone(), times, gates)
        change = states - states.detach()  # 0: only its derivative counts
        read = user.encoded_rows.clone()
        keys, values = (
            part.clone().index_add(1, read, projected.transpose(0, 1))
            for part, projected in (
                (block.keys, attention.keys(change)),
                (block.values, attention.values(change)),
            )
        )  # (H, m, d)
        query = attention.queries(change[-1]) - attention.queries(change[-1].detach())
        queries = target_queries(snapshot, user, targets).clone() + query[:, None]
        bias = block.bias.clone()[:, None].expand(-1, len(targets), -1)  # (H, L, m)
        if seen is not None:
            bias = bias.masked_fill(~seen.clone(), -torch.inf)
        if older is not None:  # one more row, with a score and a value of each target's own
            nothing = keys.new_zeros(len(keys), 1, keys.shape[2])
            keys, values = torch.cat([keys, nothing], 1), torch.cat([values, nothing], 1)
            bias = torch.cat([bias, older.logsumexp[..., None].clone()], 2)
        found = attend(queries, keys, values, bias=bias, temperature=options.temperature)
        context = found.context
        if older is not None:
            context = context + found.weights[..., -1:] * older.context.clone()
        totals = (context * gather_rows(snapshot.tables.outputs, targets).clone()).sum((0, 2))
        user_state = user.user_state.clone() + change[-1]
        totals = totals + model.transition_scores(user_state, counts.clone())
        slopes = list[Tensor]()
        for total in totals:
            checkpoint()
            slopes += torch.autograd.grad(total, gates, retain_graph=True)
    return torch.stack(slopes)
