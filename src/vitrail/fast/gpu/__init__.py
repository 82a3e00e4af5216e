"""Faster inference and training on an NVIDIA GPU: Triton kernels and CUDA graphs."""
