"""Device, precision, data-parallel processes and progress of long computations.

A device's name and a number of processes go in; a device, collective operations and calls of a
progress callback come out. Knows no event and no model.
"""
