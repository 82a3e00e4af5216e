"""Compare our models with other libraries' models of the same shape, in one process, in turns.

    python benchmarks/against_peers.py                                        # B/16: inference, training, latency
    python benchmarks/against_peers.py B/16 L/16 --what inference --batch 128 --out speed.json --plot speed.png
    python benchmarks/against_peers.py B/16 --device cpu --threads 2 --precision int8
    python benchmarks/against_peers.py B/16 --grow resolution --out growth.json     # also batch, model
    python benchmarks/against_peers.py --from growth.json --plot growth.png         # draw a figure from a JSON file

The peers are timm, torchvision, transformers and vit-pytorch; on a CPU also our own model exported to onnxruntime and
OpenVINO. A peer that is not installed, or cannot be measured, is named with the reason. The JSON has the keys of
`vitrail bench --out`, and `vitrail bench --from FILE` shows it as a table.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from peer_libraries.conclusions import compare_libraries, note_parameters
from peer_libraries.figures import draw_report
from peer_libraries.growth import measure_growth, plan_growth
from peer_libraries.models import PEERS, build_peer, import_peer, parse_peers
from peer_libraries.runtimes import list_runtime_candidates
from vitrail.benchmark.bench import (
    GPU_ONLY_MEMORY,
    WITHOUT_DATA,
    SpeedOptions,
    choose_precisions,
    describe_request,
    make_cases,
    parse_what,
    use_device,
)
from vitrail.benchmark.candidates import plain_candidates
from vitrail.benchmark.case import Candidate, CandidateKey, Case, NotMeasured, RandomBatch
from vitrail.benchmark.machine import describe_machine, read_versions
from vitrail.benchmark.measure import MeasureOptions, measure_case
from vitrail.benchmark.report import BenchmarkReport, Measurements
from vitrail.benchmark.report_file import check_output
from vitrail.errors import ConfigError, NotApplicableError, VitrailError
from vitrail.model.base import ImageModel
from vitrail.system.device import choose_device


def list_peer_candidates(
    case: Case, batch: RandomBatch, ours: ImageModel, *, peers: Sequence[str], modes: Sequence[str]
) -> Iterator[Candidate | NotMeasured]:
    """Yield the candidates of the peers; each model is built when its turn comes."""
    for library in peers:
        if library not in PEERS:
            yield from list_runtime_candidates(library, case, batch, ours)
            continue
        try:
            theirs = build_peer(library, case.architecture)
        except NotApplicableError as error:
            yield NotMeasured(str(case), library, "", str(error))
            continue
        yield from plain_candidates(library, theirs, case, batch, modes)


def measure_with_peers(
    case: Case, peers: Sequence[str], skip: set[CandidateKey], *, options: MeasureOptions
) -> Measurements:
    """Measure a case with our candidates and those of the peers."""
    extra = partial(list_peer_candidates, peers=peers, modes=options.modes)
    return measure_case(case, options, extra, skip)


def find_importable(peers: Sequence[str], device: torch.device, results: Measurements) -> list[str]:
    """Return the peers that can be imported; the reasons for the others go into `results`."""
    importable = []
    for library in peers:
        try:
            import_peer(library, device)
            importable.append(library)
        except NotApplicableError as error:
            results.missing.append(NotMeasured("", library, "", str(error)))
    return importable


def compare_with_peers(
    names: Sequence[str] = (),
    options: SpeedOptions | None = None,
    *,
    peers: str = "all",
    grow: str | None = None,
    seconds: float = 600.0,
    on_message=lambda line: None,
) -> BenchmarkReport:
    """Measure our models and other libraries' models of the same shape.

    Args:
        names: Of our models; B/16 if empty.
        options: As for `vitrail bench`.
        peers: all, none, or names separated by commas.
        grow: resolution, batch or model; None for the cases of `options`.
        seconds: With `grow`: begin no case that would end later.
        on_message: Gets a line of text about every step.
    """
    options = options or SpeedOptions(thorough=True)
    device = choose_device(options.device)
    whats = parse_what(options.what, None, ["inference"] if grow else WITHOUT_DATA)
    if grow is not None:
        precisions = choose_precisions(options.precision, device)
        cases = plan_growth(grow, names, whats, options.batch, precisions, options.size, device)
    else:
        cases = make_cases(names, whats, options, device)
    libraries, modes = parse_peers(peers, device), options.modes(device)
    results = Measurements(missing=options.explain_modes(modes))
    measure = partial(measure_with_peers, options=MeasureOptions(modes, options.rounds, options.plain, on_message))
    notes = []
    with use_device(device, options.threads):
        machine = describe_machine(device)
        machine["versions"] |= read_versions(libraries)
        present = find_importable(libraries, device, results)
        if grow:
            notes += measure_growth(cases, present, measure, seconds, results)
        else:
            for case in cases:
                results.add(measure(case, present, set()))
    request = describe_request(cases, options, modes, peers=libraries, seconds=seconds if grow else None)
    notes += [*([GPU_ONLY_MEMORY] if device.type == "cpu" else ()), *note_parameters(results.rows)]
    comparisons = compare_libraries(results.rows, cases[0].precision)
    return BenchmarkReport(machine, request, results.rows, results.missing, results.products, notes, grow, comparisons)


def check_plot(path: Path | None) -> None:
    """Refuse, before minutes of measuring, a figure that could not be drawn."""
    if path is None:
        return
    if path.suffix != ".png":
        raise ConfigError(f"--plot {path}: a figure is a .png, with an .svg beside it")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"--plot {path}: matplotlib is not installed; use --out, and --from with --plot elsewhere")
    check_output("--plot", path)


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="models, e.g. B/16 L/16; B/16 if none")
    parser.add_argument("--what", help="some of inference,training,latency")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--precision", help="fp32 or bf16; besides: fp8 on a GPU, int8 or auto on a CPU")
    parser.add_argument("--size", type=int, help="side of the images, pixels")
    parser.add_argument("--peers", default="all", help=f"all, none, or some of {','.join(PEERS)},onnxruntime,openvino")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", dest="compiles", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--autotune", action="store_true", help="max-autotune too, for all; takes many minutes")
    parser.add_argument("--fast", action="store_true", help="of our candidates only those of vitrail.fast")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--grow", help="resolution (224 to 1024 px), batch (1 to 256) or model (Ti to H)")
    parser.add_argument("--seconds", type=float, default=600.0, help="with --grow: begin nothing that would end later")
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--plot", type=Path, help="figure: a .png, and an .svg beside it")
    parser.add_argument("--from", dest="source", type=Path, help="read this JSON instead of measuring")
    return parser.parse_args(words)


def run_comparison(arguments: argparse.Namespace) -> BenchmarkReport:
    """Measure, or read a report; write it and draw it as the arguments say."""
    check_plot(arguments.plot)
    check_output("--out", arguments.out)
    if arguments.source is not None:
        report = BenchmarkReport.read(arguments.source)
    else:
        same = ("what", "batch", "precision", "size", "threads", "rounds", "compiles", "autotune", "device")
        options = SpeedOptions(
            **{name: getattr(arguments, name) for name in same}, plain=not arguments.fast, thorough=True
        )
        report = compare_with_peers(
            arguments.names,
            options,
            peers=arguments.peers,
            grow=arguments.grow,
            seconds=arguments.seconds,
            on_message=lambda line: print(line, file=sys.stderr, flush=True),
        )
    if arguments.out is not None:
        report.write(arguments.out)
    if arguments.plot is not None and report.rows:
        draw_report(report, arguments.plot)
    return report


def main(words: Sequence[str] | None = None) -> None:
    try:
        report = run_comparison(parse_arguments(words))
    except VitrailError as error:
        sys.exit(f"error: {error}")
    for row in report.rows:
        print(f"{row.name} {row.what} {row.size} px batch {row.batch} {row}: {row.images_per_second:,.1f} images/s")
    print(*report.comparisons, sep="\n")
    print(*(f"not measured: {missing}" for missing in report.missing), sep="\n")
    print(*(f"note: {note}" for note in report.notes), sep="\n")
    sys.exit(0 if report.rows else 1)


if __name__ == "__main__":
    main()
