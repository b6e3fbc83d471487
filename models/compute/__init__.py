"""Hardware of a training run: device, precision and the data-parallel process group."""
