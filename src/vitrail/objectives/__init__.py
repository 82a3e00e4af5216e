"""What a model is trained for. An objective is a module whose forward takes a batch and gives a loss and sums."""
