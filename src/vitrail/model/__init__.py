"""The architectures: Vision Transformers, hybrids and BiT ResNets. No files, no logging, no parallelism.

Read in the order of the paper: patches.py (equation 1) → positions.py (equation 1; interpolation to other image sizes)
→ encoder.py (equations 2 and 3) → pooling.py (equation 4; add a pooling here) → heads.py → vit.py, which puts them
together. resnet.py is the backbone of hybrids and of bit.py; architecture.py holds all options; variants.py knows the
names and sizes; initialise.py sets every initial value.
"""

from vitrail.system import processor

# Before the first matrix product of the process: on some machines bf16 products would kill it.
processor.prevent_amx_crash()
