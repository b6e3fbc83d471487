"""The device, the precision and the group of processes that tensors are computed with.

Settings of a run go in; devices, data types and collective operations come out.
"""
