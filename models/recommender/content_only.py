"""The untrained model: attention over text embeddings as they are."""

from __future__ import annotations

import torch

from models.encoder.recency_bias import POSITION_BUCKETS
from models.recommender.config import RecommenderConfig
from models.recommender.recommender import Recommender


def content_only_model(dimension: int) -> Recommender:
    """Build the untrained model: one head whose projections are the identity on content.

    Layer-normed unit vectors have length √d, so a score is √d·cos(c, j): sharp enough that the most
    similar events count most. Its values point back at content, so that the attention part is the
    mean cosine of a target with the attended events.

    Args:
        dimension: of the text embeddings.
    """
    config = RecommenderConfig(
        n_items=0, content_dim=dimension, dim=dimension, heads=1, blocks=0, transitions_per_item=0,
        attention_heads=1, tied_values=True,
    )  # fmt: skip
    model = Recommender(config)
    attention, eye = model.cross_attention, torch.eye(dimension)
    with torch.no_grad():
        model.id_embedding.weight.zero_()
        model.content_projection.weight.copy_(eye)
        for projection in (attention.w_q, attention.w_k, attention.w_v):
            if projection is not None:
                projection.weight.copy_(eye)
        attention.w_o.weight.copy_(eye / dimension**0.5)
        model.recency.position.copy_(-torch.linspace(0, 1, POSITION_BUCKETS))
    return model.eval()
