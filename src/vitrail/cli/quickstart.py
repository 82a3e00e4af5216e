"""vitrail quickstart: everything in miniature, offline."""

from __future__ import annotations


def quickstart() -> None:
    """Everything in miniature on built-in handwritten digits, offline. This version does not train yet."""
    from vitrail.workflows.quickstart import quickstart as run

    for line in run():
        print(line, flush=True)
    print("Training is not in this version yet, so the weights are random and no accuracy is claimed.")
    print("Next: `vitrail models` lists what can be built, `vitrail doctor` checks this machine.")
