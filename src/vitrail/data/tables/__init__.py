"""Tables about images: their rows, whatever file they stand in, and the task that their columns tell."""
