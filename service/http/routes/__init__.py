"""Routes translate between HTTP and the engine, and do nothing else."""
