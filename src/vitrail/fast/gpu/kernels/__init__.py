"""Triton kernels for NVIDIA GPUs. Tests run them on a CPU, slowly, in Triton's interpreter.

Import these modules only inside functions that need a GPU: Triton is not installed with a PyTorch for CPUs.
"""
