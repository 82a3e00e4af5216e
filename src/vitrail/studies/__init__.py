"""The paper's claims as studies: what is varied, what is measured, and a rule that decides.

A study of your own is a `Study` with its `Arm`s, a function that measures one, and its checks; `vitrail.study` runs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitrail.studies.results import StudyResults
    from vitrail.studies.scales import Scale
    from vitrail.studies.study import Arm, Measured, Study
    from vitrail.studies.verdict import Check, check_equal, check_greater
    from vitrail.studies.workbench import Workbench

__all__ = ["Arm", "Check", "Measured", "Scale", "Study", "StudyResults", "Workbench", "check_equal", "check_greater"]

_HOMES = {
    "Arm": "study",
    "Check": "verdict",
    "Measured": "study",
    "Scale": "scales",
    "Study": "study",
    "StudyResults": "results",
    "Workbench": "workbench",
    "check_equal": "verdict",
    "check_greater": "verdict",
}
"""The module of each public name: listing studies needs no torch."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
