"""Data sets: open them, decode images, augment, and make batches."""
