"""Measure how fast models are on this machine, and whether the data path keeps up with training.

Comparisons with other libraries are a script: benchmarks/against_peers.py.
"""
