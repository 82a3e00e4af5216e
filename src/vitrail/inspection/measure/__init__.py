"""The numbers behind the paper's figures, measured inside a model."""
