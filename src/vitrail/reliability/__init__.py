"""When a model's answer can be relied on: sets of labels that hold the right one, and images like no known ones."""
