"""The training loop: losses, packing, optimiser, checkpoints, publishing."""
