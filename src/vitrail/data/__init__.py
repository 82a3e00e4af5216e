"""Everything about images before the model."""
