"""Device, precision, data-parallel processes and progress of long computations."""
