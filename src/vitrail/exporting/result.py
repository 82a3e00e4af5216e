"""What `export` returns: where the file is, and what was measured when it was compared with its model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitrail.system.results import Result, Rows


@dataclass(frozen=True, repr=False)
class ExportResult(Result):
    """A written export, and its comparison with its model."""

    kind: str
    images: int
    """How many images were compared, each counted once."""
    calibrated: int
    """How many images int8 was calibrated on; 0 if ranges are found at run time."""
    images_from: str
    """Where the images came from, in words."""
    sizes: tuple[str, ...]
    """The shapes of the inputs that were run."""
    output: str
    """What was compared: `logits`, `probabilities`, `embedding`, or `values` of another task than labels."""
    relative: bool
    """Whether differences are shares, as with preprocessing inside: of the largest output of the same image, or of the
    usual deviation of numbers."""
    max_difference: float
    """The largest difference of any output."""
    tolerance: float | None
    """The allowed difference; None for int8, where the agreement counts, or the cosine for a model without classes."""
    agreement: float | None
    """The share of images with the same first guess, or how well the answers of another task agree; None for a model
    without classes."""
    cosine: float | None
    """The least cosine similarity of an embedding with the model's own; None for a model with classes."""
    export_bytes: int
    model_bytes: int
    """The bytes of the model's own weights."""
    export_milliseconds: float
    """The latency of one image on this machine's CPU, with torch's number of threads."""
    model_milliseconds: float
    path: Path
    """The file that was written."""
    notes: tuple[str, ...] = ()
    task: str = "labels"
    """The kind of the model's task."""
    has_units: bool = False
    """Whether the outputs are numbers in the units of the data."""

    @property
    def agreement_name(self) -> str:
        """What `agreement` is a share of, in words."""
        return "same first guess" if self.task == "labels" else "same answer"

    @property
    def relative_to(self) -> str:
        """What differences are shares of, if they are relative."""
        return "the usual deviation" if self.has_units else "the image's largest"

    def summary(self) -> Rows:
        remark = f" of {self.relative_to}" if self.relative else ""
        if self.agreement is None:
            agreement = ("least cosine similarity", f"{self.cosine:.4f}")
        else:
            agreement = (self.agreement_name, f"{self.agreement:.2%}")
        return [
            ("kind", self.kind),
            ("path", str(self.path)),
            ("compared on", self.images_from),
            ("largest difference", f"{self.max_difference:.2g} of {self.output}{remark}"),
            agreement,
            ("bytes", f"{self.export_bytes:,}; the model's {self.model_bytes:,}"),
            (
                "milliseconds for one image",
                f"{self.export_milliseconds:.2f}; the model's {self.model_milliseconds:.2f}",
            ),
            *(("note", note) for note in self.notes),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data; the path is `written`."""
        values = super().to_dict()
        values["written"] = values.pop("path")
        return values
