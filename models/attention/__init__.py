"""The attention operator: scorers, masks, exact softmax over key-value rows, and its fast paths.

Queries, keys and values go in as tensors; weights, rows and contexts come out. Every softmax over
rows in `models/` stands in this table, reference first; `tests/models/attention/test_every_softmax`
compares each with one float64 loop.

| softmax | why it exists |
|---|---|
| `attend.attend` | The reference: any scorer, mask, bias and temperature; gives the weights. |
| `attend.context_only` | The same contexts by torch's fused kernel, which stores no weights. |
| `memory_query.MemoryQuery` | `attend` over a `KeyValueMemory`: all rows, or k rows of each head. |
| `index.two_stage.attend_retrieved` | `attend` over the rows that FAISS finds, with their mass. |
| `partial_softmax.attend_blocks` | Gives the log-sum-exp by which parts of a softmax are merged. |
| `flash_kernel.plain_attention` | `attend_blocks` where torch lacks the private fused operator. |
| `clustered.attend_clusters` | Cost nearly independent of the number of rows, to a stated error. |
| `softmax_mass.mass_from_sample` | The share that some rows hold, from a sample of the others. |
| `target_attention.target_attention` | Every item as a target: two products a head, no contexts. |
| `target_attention.target_attention_prefixes` | All prefixes in training: e^(s+b) = e^s · e^b. |
| `target_attention.candidate_query` | One pooled context for all targets: biases alone. |
| `encoder.causal_attention` | Training: the gradient of a bucketed bias, which no kernel gives. |
| `encoder_block.attend_cached` | New events of many histories over cached keys and values. |
| `numpy_step.attend_one` | One new event: torch takes longer to start than numpy to finish. |
| `training.chunked_cross_entropy` | Loss over all items, its gradient formed chunk by chunk. |

Search and similar items call `attend` with scores they have already, and take the log-sum-exp of
the same scores to compare queries; explanations call `attend` with gains as values. A collapsed
history subtracts one item's share from a merged softmax; `training.negatives` samples by a softmax.
"""
