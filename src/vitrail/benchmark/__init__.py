"""How fast models are on this machine, in every way there is, beside others'; and whether the data path keeps up."""

from vitrail.benchmark.benchmark import run, shown_again

__all__ = ["run", "shown_again"]
