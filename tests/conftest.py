"""Each of the processes that tests run in gets one thread: they share the cores. The longest files come first."""

from __future__ import annotations

import os

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for children
    torch.set_num_threads(1)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # our kernels on a CPU; Triton asks when it is first imported

LONGEST = (
    "test_quickstart.py",
    "test_ranks.py",
    "test_never_loses_a_step.py",
    "test_page_in_a_browser.py",
    "test_loader.py",
)
"""A file is one process's work: a long one that came last would leave the others waiting for it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))
