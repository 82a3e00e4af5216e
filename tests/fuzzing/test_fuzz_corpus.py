"""Inputs that fuzzing has found, and what comes of the bytes of strangers: a result, or an error of ours.

`fuzz.py` finds new inputs. Here the kept ones are given to their targets again, whole, cut and changed.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from fuzz_targets import TARGETS, run_target

CORPUS = Path(__file__).parent / "corpus"
CHANGES = 2
"""Changed copies of each input."""


@pytest.mark.parametrize("name", TARGETS)
def test_whole_inputs_are_read(name):
    """Or else the fuzzer would only ever see the first check of a target."""
    assert "read" in {run_target(TARGETS[name], content) for content in TARGETS[name].make_seeds()}


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus(name):
    rng, kept = random.Random(0), [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
    assert len(kept) >= 10
    ends = set()
    for content in (*TARGETS[name].make_seeds(), *kept):
        for changed in (
            content,
            content[: rng.randrange(len(content) + 1)],
            *(change_bytes(content, rng) for _ in range(CHANGES)),
        ):
            ends.add(run_target(TARGETS[name], changed))
    assert len(ends) >= (2 if TARGETS[name].allowed else 1)


def change_bytes(content: bytes, rng: random.Random) -> bytes:
    found = bytearray(content or b"x")
    for _ in range(rng.randint(1, 4)):
        found[rng.randrange(len(found))] = rng.randrange(256)
    return bytes(found)


def test_findings_are_seen():
    """What the fuzzer reports as a finding: an error of another kind."""

    def divide(content: bytes) -> None:
        1 / len(content)

    target = TARGETS["images"]._replace(run=divide)
    assert run_target(target, b"x") == "read"
    with pytest.raises(ZeroDivisionError):
        run_target(target, b"")
