"""Training: `run_training` trains a model from a `RunConfig`, and resumes from the newest checkpoint."""
