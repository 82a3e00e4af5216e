"""Results that nobody measured: to see which verdict a study gives for them."""

from __future__ import annotations

from vitrail.studies.catalogue import find_study
from vitrail.studies.results import StudyResults, collect_results
from vitrail.studies.scales import SMALL

SMALL_NOISE, LARGE_NOISE = (-0.05, 0.0, 0.05), (-30.0, 0.0, 30.0)


def plant(name, values, noise=SMALL_NOISE) -> StudyResults:
    """Return results of a study in which every seed of an arm has the arm's values plus the noise.

    `values` is called with an arm and returns its measurements, or the one of the study's metric.
    """
    study = find_study(name)
    arms = study.list_arms(SMALL)
    rows = []
    for number, arm in enumerate(arms):
        for seed, shift in enumerate(noise):
            found = values(arm)
            found = found if isinstance(found, dict) else {study.metric: found}
            # Another order of the noise in every arm, or differences from seed to seed would have none.
            turned = noise[(seed + number) % len(noise)] if len(noise) > 1 else shift
            rows.append(
                {
                    "study": name,
                    "scale": "small",
                    "arm": arm.name,
                    "settings": dict(arm.settings),
                    "facts": dict(arm.facts),
                    "seed": seed,
                    "measured": {key: value + turned for key, value in found.items()},
                    "cost": {"seconds": 8.0, "flops": 1e12},
                    "machine": {"device": "planted", "jobs": 4},
                    "commit": "0123456789abcdef",
                }
            )
    return collect_results(study, rows, [arm.name for arm in arms])
