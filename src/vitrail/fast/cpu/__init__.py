"""Faster inference on a CPU: packed layers, int8 kernels, and a search for the fastest."""
