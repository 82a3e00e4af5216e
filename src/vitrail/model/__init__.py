"""The architectures: Vision Transformers, hybrids and BiT ResNets. No files, no logging, no parallelism.

Read in the order of the paper: patches → positions → encoder → heads → vit; resnet for the hybrids and the
baselines; variants for the names and sizes; initialise for every initial value.
"""

from vitrail.system import processor

# Before the first matrix product of the process: on some machines bf16 products would kill it.
processor.prevent_amx_crash()
