"""Derivatives of scores by gates on the events that the encoder has read."""

from __future__ import annotations

import torch
from torch import Tensor

from models.attention.attend import attend
from models.attention.partial_softmax import PartialSoftmax, remove_partial
from models.catalogue.snapshot import Snapshot
from models.history.attention_options import AttentionOptions
from models.history.long_history import attend_recent
from models.history.user_memory import UserMemory, target_queries
from models.ranking.scoring import target_counts
from models.recommender.target_attention import gather_rows


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
        partial: of a long history, the targets' attention as `score` returned it, [H, L].

    Raises:
        ValueError: for a memory without an encoded history, or a long history without `partial`.
    """
    encoded, model = user.encoded, snapshot.model
    if encoded is None or model.encoder is None or model.state_attention is None:
        raise ValueError("user: has no encoded history")
    older = None
    if user.collapsed is not None:
        if partial is None:
            raise ValueError("partial: must be given for a long history")
        # To first order this is one row, whose context and mass do not depend on the query.
        newer = attend_recent(snapshot, user, targets, options)
        older = remove_partial(partial, newer)
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
            part.clone().index_add(0, read, projected).transpose(0, 1)
            for part, projected in (
                (user.memory.keys, attention.keys(change)),
                (user.memory.values, attention.values(change)),
            )
        )  # (H, m, d)
        query = attention.queries(change[-1]) - attention.queries(change[-1].detach())
        queries = target_queries(snapshot, user, targets).clone() + query[:, None]
        bias = user.bias.clone()[:, None].expand(-1, len(targets), -1)  # (H, L, m)
        if options.exclude_self:
            bias = bias.masked_fill(user.rows == targets[:, None], -torch.inf)
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
        slopes = [torch.autograd.grad(total, gates, retain_graph=True)[0] for total in totals]
    return torch.stack(slopes)
