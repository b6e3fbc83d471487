"""The attention operator: scorers, masks, exact softmax over key-value rows, and its fast paths.

Queries, keys and values go in as tensors; weights, rows and contexts come out. The table lists
every implementation of softmax attention by its path under `models/`, reference first;
`tests/models/attention/test_every_softmax.py` compares each with one float64 loop.

| softmax | why it exists |
|---|---|
| `attention.attend.attend` | The reference: any scorer, mask, bias, temperature; gives weights. |
| `index.memory_attention.attend` | Any memory: every row, the rows that FAISS names, or lists. |
| `attention.partial_softmax.attend_blocks` | The fast path: fused, mergeable, without weights. |
| `attention.partial_softmax.plain_attention` | `attend_blocks` without torch's private operator. |
| `index.key_lists.KeyLists.attend` | FAISS's lists by their summaries, to a stated error. |
| `attention.partial_softmax.mass_from_sample` | The mass of some rows, by a sample of the rest. |
| `recommender.target_attention.target_attention` | All items as targets, a head at a time. |
| `recommender.target_attention.target_attention_prefixes` | All prefixes: e^(s+b) = e^s · e^b. |
| `recommender.recommender.Recommender.read_out` | Scores that are the same for every target. |
| `encoder.causal_attention.causal_attention` | Training: the gradient of a bucketed bias. |
| `encoder.history_encoder.attend_cached` | New events of many histories over cached rows. |
| `encoder.history_encoder.attend_one` | One new event, in less time than torch takes to start. |
| `training.losses.chunked_cross_entropy` | Loss over all items, its gradient by chunks. |

Search and similar items call `attend` with scores they have already, and take the log-sum-exp of
the same scores to compare queries; a similar item's shares by space are a softmax over its few
keys. Explanations call `attend` with gains as values, and differentiate it by the encoder's events.
`attention.partial_softmax.remove_partial` takes rows out of a merged softmax; `training.losses`
samples by a softmax, and compares the target attention's scores of sampled items by
torch's own cross-entropy.
"""
