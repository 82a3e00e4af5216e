"""One training loop, and what it stands on: optimiser, schedule, averaging, checkpoints, ranks, records."""
