"""What a rank says when another is lost: the reason, without Gloo's source lines and guesses."""

from __future__ import annotations

import pytest

from vitrail.system.ranks import explain_lost_rank

RESET = "Read error [10.0.0.2]:2933: Connection reset by peer"
WAITED = "Timed out waiting 1000ms for recv operation to complete"
FAILED = "NCCL error: unhandled system error"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"[/a/gloo/transport/tcp/pair.cc:537] {RESET}. This is typically caused by a remote worker hanging", RESET),
        (WAITED, WAITED),
        (f"{FAILED}\nmore", FAILED),
    ],
)
def test_the_reason_is_short(text, expected):
    assert explain_lost_rank(RuntimeError(text)) == f"another rank was lost ({expected})"


def test_other_errors_are_not_lost_ranks():
    assert explain_lost_rank(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
    assert explain_lost_rank(ValueError("gloo")) is None
