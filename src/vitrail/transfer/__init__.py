"""The suites that train: the paper's transfer tasks and VTAB."""
