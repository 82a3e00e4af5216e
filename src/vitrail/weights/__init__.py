"""Checkpoints of every format, in and out, without running strangers' code.

files opens a file of tensors, whatever wrote it · pairs says how tensors correspond · one module for each naming
(native, timm, torchvision, huggingface, google) recognises it and knows its pairs · source finds what a person named ·
load and convert are the two doors.
"""
