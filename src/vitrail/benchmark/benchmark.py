"""A whole benchmark: what was asked for, measured case by case, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vitrail.benchmark.candidates import AUTOTUNED, COMPILED, EAGER
from vitrail.benchmark.case import OURS, Case, Key, Missing
from vitrail.benchmark.figures import draw
from vitrail.benchmark.loading import Supply, measure_supply
from vitrail.benchmark.machine import describe_machine
from vitrail.benchmark.measure import Tell, measure
from vitrail.benchmark.peers import importable, parse_peers
from vitrail.benchmark.plan import WITH_DATA, check_places, checked_precision, planned
from vitrail.benchmark.report import Measured, Report, Row
from vitrail.errors import NotApplicableError
from vitrail.system.device import choose_device

ROUNDS, SECONDS = 5, 600.0


def run(
    names: Sequence[str] = (),
    *,
    what: str | None = None,
    batch: int | None = None,
    precision: str | None = None,
    size: int | None = None,
    peers: str = "all",
    data: str | None = None,
    workers: int | None = None,
    threads: int | None = None,
    rounds: int = ROUNDS,
    compiles: bool | None = None,
    autotune: bool = False,
    plain: bool = True,
    device: str = "auto",
    grow: str | None = None,
    seconds: float = SECONDS,
    out: Path | None = None,
    plot: Path | None = None,
    tell: Tell = lambda line: None,
) -> Report:
    """Measure models by their names; see `vitrail bench --help` for what the options mean."""
    target = choose_device(device)
    usual, beyond = checked_precision(precision, target)
    cases = planned(names, what, batch, (usual, beyond), size, grow, target, data)
    wanted = parse_peers(peers, target) if any(case.what not in WITH_DATA for case in cases) else []
    check_places(out, plot)
    supply = None if data is None else Supply.opened(data, workers, cases)
    compiled = target.type == "cuda" or autotune if compiles is None else compiles
    modes = (EAGER, *([COMPILED] if compiled else ()), *([AUTOTUNED] if autotune else ()))
    found, threads_before = Measured(missing=left_out(compiled, compiles, cases)), torch.get_num_threads()
    torch.set_num_threads(threads or threads_before)
    if target.type == "cuda" and target.index is not None:
        torch.cuda.set_device(target)  # graphs are recorded on the current one
    try:
        machine = describe_machine(target, wanted)
        present = [library for library in wanted if is_present(library, target, found)]
        how = partial(
            measure_either, supply=supply, modes=modes, plain=plain, compiles=compiles, rounds=rounds, tell=tell
        )
        if grow:
            notes = measure_growing(cases, present, how, seconds, found)
        else:
            notes = measure_all(cases, present, how, found)
    finally:
        torch.set_num_threads(threads_before)
    if target.type == "cpu":
        notes.append("memory is measured on a GPU alone")
    if supply is not None:
        notes.append(supply.described())
    asked = {
        "cases": [str(case) for case in cases],
        "precision": usual,
        "beyond": beyond,
        "peers": wanted,
        "workers": None if supply is None else supply.workers,
        "rounds": rounds,
        "modes": list(modes),
        "seconds": seconds if grow else None,
    }
    report = Report(machine, asked, found.rows, found.missing, found.products, notes + unlike(found.rows), grow)
    if out is not None:
        report.write(out)
    if plot is not None and report.rows:
        draw(report, plot)
    return report


def shown_again(path: Path, plot: Path | None = None) -> Report:
    """What `run` wrote to `out`, perhaps elsewhere; drawn now, if a figure is asked for."""
    check_places(None, plot)
    report = Report.read(path)
    if plot is not None and report.rows:
        draw(report, plot)
    return report


def measure_either(
    case: Case,
    peers: Sequence[str],
    *,
    supply: Supply | None,
    modes: Sequence[str],
    plain: bool = True,
    compiles: bool | None = None,
    **how: Any,
) -> Measured:
    """A case of models, or of the data path, which trains as `vitrail train` does unless `compiles` says otherwise."""
    if case.what not in WITH_DATA:
        return measure(case, peers, modes=modes, plain=plain, **how)
    assert supply is not None
    return measure_supply(case, supply, compiles=compiles, **how)


def left_out(compiled: bool, asked: bool | None, cases: Sequence[Case]) -> list[Missing]:
    """Compiled ways, where they are not measured."""
    if compiled or all(case.what == "loader" for case in cases):
        return []
    reason = "--no-compile" if asked is False else "on a CPU it takes minutes to compile: ask for it with --compile"
    return [Missing("", "every library", "compiled", f"left out, {reason}")]


def is_present(library: str, device: torch.device, found: Measured) -> bool:
    """Whether a peer can be imported; if not, `found` has the reason."""
    try:
        importable(library, device)
    except NotApplicableError as error:
        found.missing.append(Missing("", library, "", str(error)))
        return False
    return True


def measure_all(
    cases: Sequence[Case], peers: Sequence[str], how: Callable[..., Measured], found: Measured
) -> list[str]:
    """One case after the other, into `found`."""
    for case in cases:
        found.add(how(case, peers))
    return []


def measure_growing(
    cases: Sequence[Case],
    peers: Sequence[str],
    how: Callable[..., Measured],
    seconds: float,
    found: Measured,
    clock: Callable[[], float] = time.perf_counter,
) -> list[str]:
    """Cases that grow, into `found`, as long as there is memory and time; a note on where it ended.

    A way that fails takes no part in larger cases.
    """
    began, last, given_up = clock(), 0.0, set[Key]()
    for case in cases:
        start = clock()
        if found.rows and start - began + last > seconds:
            return [f"ended before {case}: it would not have fitted into the {seconds:g} s of --seconds"]
        measured = how(case, [peer for peer in peers if (peer, "") not in given_up], without=given_up)
        found.add(measured)
        given_up |= {(each.library, each.way) for each in measured.missing}
        last = clock() - start
        if not measured.rows:
            return [f"ended at {case}: nothing could be measured there any more"]
    return []


def unlike(rows: Sequence[Row]) -> list[str]:
    """Notes on peers with a few parameters more or fewer than ours."""
    ours: dict[Any, int] = {row.case: row.parameters for row in rows if row.library == OURS}
    pairs = [(row, ours.get(row.case, row.parameters)) for row in rows]
    told = [
        f"{row.name}: the model of {row.library} has {row.parameters:,} parameters and ours {own:,}"
        for row, own in pairs
        if row.parameters != own
    ]
    return list(dict.fromkeys(told))
