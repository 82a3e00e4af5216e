"""Measure how fast models are on this machine, and whether the data path keeps up with training.

Comparisons with other libraries are a script: benchmarks/against_peers.py.
"""

from vitrail.benchmark.benchmark import SpeedOptions, measure_speed
from vitrail.benchmark.report import BenchmarkReport

__all__ = ["BenchmarkReport", "SpeedOptions", "measure_speed"]
