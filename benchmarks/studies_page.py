"""Write docs/studies from the raw results of the studies: a page and a figure for each, and the page of all claims.

    python benchmarks/studies_page.py            write them
    python benchmarks/studies_page.py --check    write nothing; the exit code is 1 if something is out of date

The raw results are benchmarks/results/studies_*.jsonl: the rows that `vitrail study` writes to results.jsonl. Only
seeds that all arms of a study have are used.
"""

from __future__ import annotations

import html
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from vitrail.model.cost import FORWARD_AND_BACKWARD, compute_cost
from vitrail.model.variants import make_architecture
from vitrail.studies.catalogue import list_studies
from vitrail.studies.page import (
    OUTCOMES,
    SIGNS,
    UNKNOWN,
    choose_digits,
    draw_figure,
    format_interval,
    format_number,
    make_page,
)
from vitrail.studies.results import StudyResults, collect_results, keep_complete_seeds, read_rows
from vitrail.studies.scales import SMALL
from vitrail.studies.verdict import Check
from vitrail.system.results import format_count

ROOT = Path(__file__).parent.parent
RAW = ROOT / "benchmarks/results"
PAGES = ROOT / "docs/studies"
SCALE = SMALL
REMARKS = {
    "data-size": (
        "With every share of the data BiT is ahead, then the hybrid, the ViT and the larger ViT. A hundred thousand "
        "images lie to the left of the paper's figure; at its left end BiT is ahead of ViT too. The larger ViT gains "
        "least from more images; it is trained for as many steps as the others, which may be too few for it."
    ),
    "compute": (
        "Only BiT gains from more compute here. The largest ViT and the largest hybrid are worse than their smaller "
        "relatives, probably for want of images and steps. The paper's figure is about models that have enough."
    ),
    "resolution": (
        "Of four resolutions 48 px is best, one and a half times that of pre-training; the paper's factor is 1.7. At "
        "twice the resolution the sequence is four times as long, and 500 steps may be too few for it. "
        "Interpolated tables are three points better than others."
    ),
    "positions": (
        "Tables in one or two dimensions, and one that all layers share, are equally good, and two points better than "
        "no positions; a table in every layer may be a little better. Relative positions lose most of that gain here, "
        "which the paper does not find; three seeds leave open whether they lose more than the one point that the rule "
        "allows."
    ),
    "pooling": (
        "At the higher rate the average is as good as the class token. What fails is the direction: here the lower "
        "rate is worse for both, and more so for the average. We did not search for the best rate of each."
    ),
    "shape": (
        "Smaller patches gain most for the operations that they cost, then more layers, which help up to four and "
        "hardly beyond. Width helps up to 192 and harms at 384. The size of the MLP makes no difference. After the "
        "runs we narrowed the claim and reworded the rule; its checks are the old ones. The paper also says that depth "
        "helps most and width least. That does not hold here: patches gain more than depth, and the MLP no more than "
        "width."
    ),
    "optimizer": (
        "At the better of two rates SGD is as good as Adam, within what three seeds can tell. At the other rate SGD is "
        "almost four points worse, and Adam is as good as before: Adam asks for less care with the rate."
    ),
    "axial": "Axial models are better, and compute about twice as much.",
    "self-supervision": (
        "Fine-tuned on 3,680 photographs, masked patches are three points ahead of pre-training with labels if they "
        "predict the mean colour, as the rule asks, and six points if they predict 4×4 colours. In the paper labels "
        "are four points ahead; there they are 21,000 classes, and here 200."
    ),
    "attention-distance": (
        "After training the lowest layer is the most local one, as in the paper; from the third on, the distance "
        "hardly changes. What fails is the variety: the heads of the lowest layer differ by 9% of uniform attention, "
        "where the rule asks for 20. Whether the hybrid's are less local, three seeds leave open."
    ),
    "attention-focus": (
        "Training moves attention to the animal, but a fixed map of the centre does better: photographs have their "
        "animal in the middle. After the first two seeds we gave each arm an interval of its own, which made that of "
        "the fine-tuned model wider. The rule stayed as it was."
    ),
}
"""What we have to say about the results of a study."""
ONE_SEED = "one seed so far"
KINDS = {"holds here": "holds", "does not hold here": "fails", "not decided": "open"}
INTRODUCTION = """---
hide: [toc]
---

# The paper's claims, tested

Most of what the paper concludes is a comparison: over data, compute, resolution, positions, pooling, shape or
supervision. Here each claim is a command. It trains what is compared, with several seeds, and a rule that was written
down before the runs says whether the claim **holds here**, **does not hold here**, or is **not decided**. Negative
results stay.

```bash
vitrail study positions                       # on handwritten digits, on any machine, in a minute
vitrail study --list                          # all of them
vitrail study positions --scale small --data tiny-imagenet/ --transfer pets/ --transfer cifar10/ --jobs 14
```
"""
SCALE_WORDS = """
## What "here" means

The numbers on this page are of the scale `small`: pre-training on 95,000 images of Tiny-ImageNet at {size} pixels,
{steps:,} steps of {batch} images ({epochs:.1f} epochs), with a ViT of {depth} layers of width {width} and patches of
{patch} pixels as the common base. Few-shot accuracy is the mean over Oxford-IIIT Pets and CIFAR-10, {shots} images of
each class, as the paper measures it; fine-tuning is on Pets. Pre-training the base takes {petaflops:.1f} · 10¹⁵
operations, where the paper's B/16 on JFT-300M took 224 · 10¹⁸: what a claim needs at a large scale, no verdict here can
show, and every page says what this scale leaves open.

Pets are Oxford-IIIT Pets with the official split, as folders `train/BREED` and `test/BREED`. Only seeds that all arms
of a study have are shown. Every table and figure is made from the raw results, `benchmarks/results/studies_*.jsonl`, by
`python benchmarks/studies_page.py`. How studies work, and how to write one of your own:
[Studies of your own](own.md).
"""


def read_results() -> list[StudyResults]:
    """Return the results of every study at the small scale; without rows if it has not been run."""
    rows = [row for path in sorted(RAW.glob("studies_*.jsonl")) for row in read_rows(path)]
    found = []
    for study in list_studies():
        arms = [arm.name for arm in study.list_arms(SCALE)]
        own = [row for row in rows if row["study"] == study.name and row["scale"] == SCALE.name and row["arm"] in arms]
        complete = keep_complete_seeds(own) if {row["arm"] for row in own} == set(arms) else []
        found.append(collect_results(study, complete, arms))
    return found


def make_files(results: Sequence[StudyResults]) -> dict[str, bytes]:
    """Return the contents of all files below docs/studies, by their names."""
    files = {"index.md": make_index(results).encode()}
    for each in results:
        name = each.study.name
        if not each.rows:
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}.png"
            draw_figure(each, path)
            for suffix in (".png", ".svg"):
                files[f"images/{name}{suffix}"] = path.with_suffix(suffix).read_bytes()
        files[f"{name}.md"] = make_page(each, f"images/{name}.svg", REMARKS.get(name, "")).encode()
    return files


def make_index(results: Sequence[StudyResults]) -> str:
    """Return the page of all claims."""
    state = count_verdicts(results)
    cards = "\n".join(make_card(each) for each in results)
    pretraining = SCALE.pretraining
    batch, model = pretraining["data"]["batch_size"], pretraining["model"]
    words = SCALE_WORDS.format(
        size=SCALE.image_size,
        steps=SCALE.steps,
        batch=batch,
        epochs=SCALE.steps * batch / 95_000,
        depth=model["depth"],
        width=model["width"],
        patch=SCALE.patch_size,
        shots=SCALE.shots,
        petaflops=FORWARD_AND_BACKWARD * compute_cost(make_architecture(**model)).flops * SCALE.steps * batch / 1e15,
    )
    count = f'<p class="claims-count">{state}</p>'
    return f'{INTRODUCTION}\n{count}\n\n{make_summary(results)}\n\n<div class="claims">\n{cards}\n</div>\n{words}'


def count_verdicts(results: Sequence[StudyResults]) -> str:
    """Return a sentence that says how many claims hold, do not hold, and are still open."""
    found = Counter(name_verdict(each) if each.rows else "not run" for each in results)
    words = {
        "holds here": ("holds here", "hold here"),
        "does not hold here": ("does not hold", "do not hold"),
        "not decided": ("is not decided", "are not decided"),
        ONE_SEED: ("has one seed so far", "have one seed so far"),
        "not run": ("has not been run at this scale yet", "have not been run at this scale yet"),
    }
    parts = [f"{found[kind]} {each[found[kind] > 1]}" for kind, each in words.items() if found[kind]]
    listed = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
    return f"Of {len(results)} claims, {listed}."


def make_summary(results: Sequence[StudyResults]) -> str:
    """Return a table with a row for each claim: the verdict, and how many of its parts hold."""
    rows = []
    for each in results:
        study = each.study
        claim, where, title = (html.escape(text) for text in (study.claim, study.where, study.title))
        kind, parts = '<span class="verdict none">not run yet</span>', "–"
        if each.rows:
            outcomes = [check.outcome for check in each.make_checks()]
            kind = f'<span class="verdict {KINDS[each.decide()]}">{SIGNS[each.decide()]} {name_verdict(each)}</span>'
            parts = f"{outcomes.count('holds')} of {len(outcomes)}"
        rows.append(
            f'<tr><td><a href="#{study.name}">{title}</a><small>{claim}</small></td>'
            f"<td>{where}</td><td>{kind}</td><td>{parts}</td></tr>"
        )
    head = "<tr><th>the claim</th><th>in the paper</th><th>here</th><th>parts that hold</th></tr>"
    body = "\n".join(rows)
    return f'<div class="claims-table"><table><thead>{head}</thead><tbody>\n{body}\n</tbody></table></div>'


def make_card(results: StudyResults) -> str:
    """Return a claim as HTML: its verdict, the figure, what was measured, and the paper's numbers."""
    study = results.study
    claim, where, title = (html.escape(text) for text in (study.claim, study.where, study.title))
    paper = "".join(f"<dt>{html.escape(what)}</dt><dd>{html.escape(how)}</dd>" for what, how in study.paper[:3])
    if not results.rows:
        return (
            f'<section class="claim" id="{study.name}"><h2>{title}</h2>'
            '<p class="verdict none">not run at this scale yet</p>'
            f"<p>{claim} <small>{where}</small></p>"
            f"<pre><code>vitrail study {study.name}</code></pre></section>"
        )
    verdict, link = results.decide(), f"{study.name}/"
    checks = "".join(
        f'<li class="{check.outcome}"><b>{OUTCOMES[check.outcome]}</b> {html.escape(describe_difference(check))}</li>'
        for check in results.make_checks()
    )
    seeds = "" if results.seeds == 1 else f" <small>{format_count(results.seeds, 'seed')}</small>"
    return (
        f'<section class="claim" id="{study.name}"><h2><a href="{link}">{title}</a></h2>'
        f'<p class="verdict {KINDS[verdict]}">{SIGNS[verdict]} {name_verdict(results)}{seeds}</p>'
        f"<p>{claim} <small>{where}</small></p>"
        f'<a href="{link}"><img src="images/{study.name}.svg" alt="{title}"></a>'
        f'<h3>Here</h3><ul class="checks">{checks}</ul><h3>In the paper</h3><dl>{paper}</dl></section>'
    )


def name_verdict(results: StudyResults) -> str:
    """Return the verdict, or that there is one seed only, from which no rule decides."""
    return ONE_SEED if results.seeds == 1 else results.decide()


def describe_difference(check: Check) -> str:
    """Return what the claim says and what was measured, with its interval if there is one."""
    value, digits = check.difference.value, choose_digits(check.difference)
    interval = format_interval(check.difference, digits, "+")
    if not math.isfinite(value):
        return f"{check.statement}: needs a second seed"
    number = format_number(value, digits, "+")
    return f"{check.statement}: {number}" + ("" if interval == UNKNOWN else f" ({interval})")


def find_stale(results: Sequence[StudyResults]) -> list[str]:
    """Return the names of files below docs/studies that are not what the raw results make.

    A PNG, whose bytes depend on libraries, need only be there: the SVG beside it shows the same.
    """
    return [
        name
        for name, content in make_files(results).items()
        if not (PAGES / name).exists() or (not name.endswith(".png") and (PAGES / name).read_bytes() != content)
    ]


def main() -> int:
    results = read_results()
    if "--check" in sys.argv[1:]:
        stale = find_stale(results)
        for name in stale:
            print(f"docs/studies/{name} is out of date: run python benchmarks/studies_page.py")
        return int(bool(stale))
    for name, content in make_files(results).items():
        path = PAGES / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
