"""Each of the processes that tests run in gets one thread: they share the cores."""

from __future__ import annotations

import os

import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for children
    torch.set_num_threads(1)
