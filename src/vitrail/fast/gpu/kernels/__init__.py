"""Kernels in Triton, for NVIDIA GPUs. In Triton's interpreter they run on a CPU too, slowly: so they are tested.

Only what uses them imports them: Triton is there where PyTorch is built for a GPU, and not elsewhere.
"""
