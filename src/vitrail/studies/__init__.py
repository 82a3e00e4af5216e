"""The paper's claims as studies: what is varied, what is measured, and a rule that decides.

A study of your own is a `Study` with its `Arm`s, a function that measures one, and its checks; `vitrail.study` runs it.
"""

from vitrail.studies.results import StudyResults as StudyResults
from vitrail.studies.scales import Scale as Scale
from vitrail.studies.study import Arm as Arm
from vitrail.studies.study import Study as Study
from vitrail.studies.verdict import Check as Check
from vitrail.studies.verdict import check_equal as check_equal
from vitrail.studies.verdict import check_greater as check_greater
from vitrail.studies.workbench import Workbench as Workbench
