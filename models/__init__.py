"""Computation: attention, encoders, indexes, training and evaluation.

Arrays, tensors and bytes go in and come out. Nothing here opens a socket, reads the environment or
knows of HTTP; `service` stores, serves and orchestrates.
"""
