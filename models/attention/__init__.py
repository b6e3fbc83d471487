"""The attention operator: scorers, softmax over key-value rows, exact and clustered kernels.

Queries, keys and values go in as tensors; weights, rows and contexts come out.
"""
