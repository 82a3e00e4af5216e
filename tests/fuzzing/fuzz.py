"""Fuzzing guided by coverage: bytes that reach new lines are kept and changed further.

    pip install atheris
    python tests/fuzzing/fuzz.py --seconds 300 --out FILE.json          # all targets, one after the other
    python tests/fuzzing/fuzz.py images --seconds 60 --grow             # one, and keep its new inputs in corpus/

Every target (fuzz_targets.py) is fuzzed in a process of its own. An input that ends in anything but a result or an
error of ours, or takes more than 20 seconds or 3 GB, is a finding: it is written to findings/, and the exit code is 1.
With `--grow` the inputs that reached something new last, and the smallest, become the corpus, which the tests replay.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CORPUS, FINDINGS = HERE / "corpus", HERE / "findings"
MEMORY = Path("/dev/shm")
"""Where the files of the targets go, if it is there: in memory."""
MOST_BYTES = 12_288
LIMITS = ["-timeout=20", "-report_slow_units=20", "-rss_limit_mb=3000", f"-max_len={MOST_BYTES}"]
MOST_KEPT = 60
"""Files of each target in the corpus."""
PARTS = ["vitrail.data", "vitrail.weights", "vitrail.training.resolve", "vitrail.training.config", "vitrail.tasks"]
PARTS += [
    "vitrail.serving.image_header",
    "vitrail.serving.request_body",
    "vitrail.model.architecture",
    "vitrail.config",
]


def fuzz_here(name: str, arguments: list[str]) -> None:
    """Fuzz in this process until it ends."""
    import atheris  # type: ignore[import-not-found]

    with atheris.instrument_imports(include=[*PARTS, "PIL", "python_multipart", "tomllib"]):
        from fuzz_targets import TARGETS, run_target

    target = TARGETS[name]
    atheris.Setup([sys.argv[0], *arguments], lambda content: run_target(target, content) and None)
    atheris.Fuzz()


def fuzz(name: str, seconds: int, seed: int, grow: bool) -> dict[str, Any]:
    """Fuzz a target in another process, and return what came of it."""
    from fuzz_targets import TARGETS

    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as temporary:
        place = Path(temporary)
        seeds, new, findings = (place / part for part in ("seeds", "new", "findings"))
        for folder in (seeds, new, findings):
            folder.mkdir()
        for number, content in enumerate(TARGETS[name].make_seeds()):
            (seeds / f"seed-{number:02}").write_bytes(content)
        words = place / "words"
        words.write_text("".join(f'"{escape(word)}"\n' for word in dict.fromkeys(TARGETS[name].words)))
        known = [str(folder) for folder in (seeds, CORPUS / name) if folder.is_dir()]
        options = [f"-max_total_time={seconds}", f"-seed={seed}", "-print_final_stats=1", *LIMITS]
        options += [f"-dict={words}"] if TARGETS[name].words else []
        told = start(place, name, [*options, f"-artifact_prefix={findings}/", str(new), *known])
        found = sorted(findings.iterdir())
        for path in found:
            (FINDINGS / name).mkdir(parents=True, exist_ok=True)
            shutil.copy(path, FINDINGS / name)
        if grow and not found:
            keep_inputs(new, CORPUS / name)
    runs = re.findall(r"stat::number_of_executed_units:\s*(\d+)", told)
    reached = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", told)
    return {
        "inputs": int(runs[-1]) if runs else 0,
        "edges": int(reached[-1][0]) if reached else 0,
        "inputs that reached something new": int(reached[-1][2]) if reached else 0,
        "findings": [path.name for path in found],
        "ended": "" if runs else told[-3000:],
    }


def keep_inputs(new: Path, corpus: Path) -> None:
    """Make a corpus of the inputs that were found: half of them the last, which go deepest, half the smallest."""
    corpus.mkdir(parents=True, exist_ok=True)
    old = sorted(corpus.iterdir(), key=lambda path: path.stat().st_size)
    found = sorted(new.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    by_size = sorted([*old, *found], key=lambda path: path.stat().st_size)
    last = [*old, *found][-MOST_KEPT // 2 :]
    kept = {path.name: path.read_bytes() for path in (*last, *by_size[: MOST_KEPT // 2])}
    for path in old:
        path.unlink()
    for name, content in kept.items():
        (corpus / name).write_bytes(content)


def escape(word: str) -> str:
    """Write a word as libFuzzer's dictionaries have it."""
    return "".join(f"\\x{byte:02X}" for byte in word.encode())


def start(place: Path, name: str, arguments: list[str]) -> str:
    """Run this file for one target, with its files in a folder, and return what it printed."""
    child = subprocess.run(
        [sys.executable, __file__, "--here", name, *arguments],
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(place)},
    )
    return child.stdout.decode(errors="replace")


def main() -> None:
    if sys.argv[1:2] == ["--here"]:
        fuzz_here(sys.argv[2], sys.argv[3:])
        return
    from fuzz_targets import TARGETS

    from vitrail.benchmark.machine import read_commit

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, []], help="by default all")
    parser.add_argument("--seconds", type=int, default=300, help="for each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--grow", action="store_true", help="keep new inputs in the corpus")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report: dict[str, Any] = {"seconds for each": options.seconds, "seed": options.seed, "commit": read_commit()}
    report["targets"] = {}
    for name in options.targets or TARGETS:
        report["targets"][name] = fuzz(name, options.seconds, options.seed, options.grow)
        print(name, json.dumps(report["targets"][name]), flush=True)
        report["inputs"] = sum(each["inputs"] for each in report["targets"].values())
        report["findings"] = sum(len(each["findings"]) for each in report["targets"].values())
        if options.out is not None:
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(bool(report["findings"]) or not all(each["inputs"] for each in report["targets"].values()))


if __name__ == "__main__":
    main()
