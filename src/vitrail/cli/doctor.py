"""vitrail doctor: what this machine has, and what works on it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Check this machine: versions, devices, extras, and whether bf16 products run on its CPU."""
    from vitrail.cli.printing import print_table
    from vitrail.system.doctor import examine_machine

    findings = examine_machine()
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
        return
    rows = [[finding.subject, finding.name, finding.state] for finding in findings]
    print_table("This machine", ["", "what", "state"], rows, left=3)
