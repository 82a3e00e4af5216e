"""Training objectives: modules whose forward takes a batch and returns a loss and the sums it measured."""
