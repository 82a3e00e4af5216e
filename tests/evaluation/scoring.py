"""A report made on several ranks: python scoring.py MODEL OUT.json [BATCH]; torchrun's variables say which rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vitrail.evaluation.evaluate import evaluate

if __name__ == "__main__":
    report = evaluate(
        sys.argv[1],
        "digits",
        "val",
        batch_size=int(sys.argv[3]),
        device="cpu",
        folder=Path(sys.argv[2]).with_suffix(""),
    )
    Path(sys.argv[2]).write_text(json.dumps(report.to_dict()))
