"""Export models to other runtimes, and compare each export with its model before it counts."""
