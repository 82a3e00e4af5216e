"""What training the largest models takes on 8 to 512 GPUs, worked out from what one GPU measured.

    python benchmarks/scale_plan.py benchmarks/results/scale_h200.json

Prints the tables of docs/scale.md. From the measurement: the bytes of weights, gradients and AdamW; the peak of memory
and the time of a step for a micro-batch. Worked out, with FSDP2 over N GPUs:

    memory of a GPU   states / N + two layers gathered in bf16 + activations of a micro-batch (measured peak − states)
    time of a step    parts · measured time of a part; the exchange runs beside it, and counts where it takes longer
    exchange          2 gathers of the weights in bf16 for each part, once a step their gradients in fp32, (N − 1)/N of
                      it over the stated bandwidth; where sharding is hybrid, the gradients once more between nodes

The bandwidths are assumptions, printed with the table; nothing on several GPUs was measured.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

GIB = 1 << 30
BATCH = 4096
PER_NODE = 8
WITHIN_NODE, BETWEEN_NODES = 300e9, 40e9
"""Bytes a second and GPU that a collective reaches: NVLink, and a network of 400 Gbit/s a GPU."""
GPUS = (8, 16, 32, 64, 128, 256, 512)
LENGTHS = {"H/14": ("JFT-300M, 14 epochs", 303_000_000 * 14), "g/14": ("JFT-300M, 14 epochs", 303_000_000 * 14)}
ROOM = 0.92
"""Share of a GPU's memory that is planned with."""
DEPTH = {"H/14": 32, "g/14": 40}


def plan(measured: dict[str, Any], name: str, gpus: int) -> dict[str, Any] | None:
    """The fastest way to train a model on so many GPUs among the measured micro-batches, if any fits."""
    states = next(row for row in measured["states"] if row["model"] == name)
    ways = [_way(measured, states, row, gpus) for row in measured["steps"] if row["model"] == name and row["ms"]]
    fitting = [way for way in ways if way is not None and way["bytes"] <= ROOM * measured["device_bytes"]]
    return min(fitting, key=lambda way: (way["seconds"], way["bytes"]), default=None)


def batch_of(measured: dict[str, Any], gpus: int) -> int:
    """The paper's, as long as a GPU's share of it is not smaller than what was measured."""
    return max(BATCH, gpus * min(row["batch"] for row in measured["steps"]))


def _way(measured: dict[str, Any], states: dict[str, Any], row: dict[str, Any], gpus: int) -> dict[str, Any] | None:
    share = batch_of(measured, gpus) // gpus
    if row["batch"] > share or share % row["batch"]:
        return None
    parts = share // row["batch"]
    weights = states["parameters"] * 2
    activations = row["peak_bytes"] - states["with_gradients_bytes"]
    # Sharded over a node, or over all: whichever exchange is shorter, if the shards of a node fit.
    nodes = math.ceil(gpus / PER_NODE)
    found = []
    for shards in {min(gpus, PER_NODE), gpus}:
        memory = states["with_gradients_bytes"] / shards + 2 * weights / DEPTH[states["model"]] + activations
        speed = WITHIN_NODE if shards <= PER_NODE else BETWEEN_NODES
        exchange = (2 * weights * parts + 2 * weights) * (shards - 1) / shards / speed
        if nodes > 1 and shards <= PER_NODE:
            exchange += 2 * states["parameters"] * 4 / shards * (nodes - 1) / nodes / BETWEEN_NODES
        seconds = max(parts * row["ms"] / 1000, exchange)
        found.append(
            {
                "bytes": memory,
                "seconds": seconds,
                "exchange": exchange,
                "parallel": "fsdp" if shards == gpus else "hybrid",
            }
        )
    fits = [way for way in found if way["bytes"] <= ROOM * measured["device_bytes"]] or found
    best = min(fits, key=lambda way: way["seconds"])
    return {**best, "batch": row["batch"], "parts": parts, "checkpointing": row["checkpointing"], "mode": row["mode"]}


def table(measured: dict[str, Any], name: str) -> str:
    """In Markdown."""
    length, images = LENGTHS[name]
    lines = [
        f"**{name}**, {length}:",
        "",
        "| GPUs | batch | `run.parallel` | images at once | recomputed | memory | exchange / step | images/s | days |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for gpus in GPUS:
        way = plan(measured, name, gpus)
        if way is None:
            lines.append(f"| {gpus} | | | does not fit | | | | | |")
            continue
        batch = batch_of(measured, gpus)
        speed = batch / way["seconds"]
        parts = f"{way['batch']}" + (f" × {way['parts']}" if way["parts"] > 1 else "")
        kept = "yes" if way["checkpointing"] else "no"
        lines.append(
            f"| {gpus} | {batch:,} | {way['parallel']} | {parts} | {kept} | {way['bytes'] / GIB:.0f} GiB | "
            f"{way['exchange']:.2f} / {way['seconds']:.2f} s | {speed:,.0f} | {images / speed / 86400:.1f} |"
        )
    return "\n".join(lines)


def measurements(measured: dict[str, Any]) -> str:
    """What the tables are worked out from."""
    lines = [
        "| model | weights, gradients, AdamW | images at a time | checkpointing | peak memory | images/s | TFLOP/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for states in measured["states"]:
        rows = [row for row in measured["steps"] if row["model"] == states["model"]]
        for row in sorted(rows, key=lambda row: (row["checkpointing"], row["batch"], row["mode"])):
            if row["mode"] != "blocks":
                continue
            head = f"| {row['model']} | {states['with_gradients_bytes'] / GIB:.1f} GiB | {row['batch']} |"
            kept = "yes" if row["checkpointing"] else "no"
            if row["ms"] is None:
                lines.append(f"{head} {kept} | does not fit | | |")
            else:
                memory, speed = f"{row['peak_bytes'] / GIB:.0f} GiB", f"{row['images_per_s']:,.0f}"
                lines.append(f"{head} {kept} | {memory} | {speed} | {row['tflops_per_s']:.0f} |")
    return "\n".join(lines)


def page(measured: dict[str, Any]) -> str:
    """The part of docs/scale.md that numbers are in."""
    saved = measured["checkpoint"][0] if measured["checkpoint"] else None
    parts = [
        f"Measured on one {measured['device']}, torch {measured['torch']}, bf16, every block compiled "
        "(`benchmarks/scale_measure.py`):",
        measurements(measured),
    ]
    if saved is not None:
        during = saved["all_step_ms_while_writing"]
        parts.append(
            f"A checkpoint of {saved['model']} ({saved['bytes'] / 1e9:.1f} GB) held the loop up for "
            f"{saved['held_up_s']:.1f} s and was whole {saved['whole_after_s']:.0f} s after its start; steps took "
            f"{saved['step_ms_before']:.0f} ms before, {saved['step_ms_while_writing'] or math.nan:.0f} ms meanwhile "
            f"(medians; the longest of {len(during)} took {max(during, default=math.nan) / 1000:.1f} s)."
        )
    parts.append(
        "Worked out from these (`benchmarks/scale_plan.py` says how), assuming that a collective reaches "
        f"{WITHIN_NODE / 1e9:.0f} GB/s for each GPU within a node of {PER_NODE} and {BETWEEN_NODES / 1e9:.0f} GB/s "
        "between nodes, and runs beside the computation; reading data and evaluating are not in it. Nothing on several "
        "GPUs was measured: take these as what to plan with, and measure."
    )
    parts += [table(measured, name) for name in LENGTHS if any(row["model"] == name for row in measured["states"])]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path)
    print(page(json.loads(parser.parse_args().measured.read_text())), end="")


if __name__ == "__main__":
    main()
