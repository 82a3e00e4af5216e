"""The first sections of the report: how often the model is right, its mistakes as photos, confusions, and each class.

Bars and the confusion matrix are plain HTML, so that they fit any screen and can be read aloud.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from vitrail.evaluation.report import CalibrationBin, ClassScore, EvaluationReport
from vitrail.inference.class_names import translate_wnid
from vitrail.inspection.findings import ScoredPhoto, Scores
from vitrail.inspection.page.inline import encode_picture, escape_text
from vitrail.system.intervals import Estimate
from vitrail.system.results import format_count

MOST_IN_MATRIX, MOST_IN_SMALL_MATRIX = 20, 8
"""Classes in a confusion matrix, and in one that fits a phone."""
MOST_CONFUSIONS = 8
MOST_CLASSES = 20
"""More classes are folded: the worst are shown, the rest opens on a click."""
SMALL = 64
"""Photos with a longer side below this are enlarged as they are, without smoothing."""
QUALITY = 80
"""Of a small photo as JPEG."""
TRUSTED_ACCURACY = 0.8
"""Below this accuracy, most doubted labels are right and the model is wrong."""
USUAL_MATCH = "the same names in the same order"
"""How the data's classes were matched with the model's, if nothing needs to be said about it."""


def show_accuracy(scores: Scores) -> str:
    """Return the HTML of the accuracy with its interval, what it was measured on, and how sure the model may be."""
    report = scores.report
    top = report.top1
    lines = [f'<p class="told" dir="auto">{_say_remark(scores)}</p>']
    if report.was_trained_on:
        lines.append(
            '<p class="warning">The model has learned from these very images. On new ones it will be right less often: '
            "measure it on images that it has never seen.</p>"
        )
    if report.top5 is not None:
        five = f"{_format_share(report.top5.value)} ({_format_interval(report.top5)})"
        lines.append(f'<p class="told">The right class is among the first five guesses for {five}.</p>')
    if (worst := report.worst_class) is not None and sum(score.images > 0 for score in report.classes) > 1:
        balanced = f"{_format_share(report.balanced.value)} ({_format_interval(report.balanced)})"
        lines.append(
            f'<p class="told">If rare classes count as much as frequent ones, it is right for {balanced}; macro F1 '
            f'{_format_share(report.macro_f1.value)}. Its worst class is <b dir="auto">{_name(worst.name)}</b>: '
            f"{_format_share(worst.accuracy.value)}, {worst.hits:,} of {worst.images:,}.</p>"
        )
    if report.labels != USUAL_MATCH:
        lines.append(f'<p class="told">Classes of images and model were matched {_say_match(report)}.</p>')
    right = f"right, {_count_hits(report):,} of {report.images:,}"
    return f"""<p class="figure"><b>{_format_share(top.value)}</b> <span>{right}</span></p>
<p class="interval">{draw_bar(top)}<span>95% interval {_format_interval(top)}</span></p>
{"".join(lines)}{_fold_calibration(report)}"""


def _say_remark(scores: Scores) -> str:
    """Return the remark as a sentence."""
    remark = scores.remark.strip().rstrip(".")
    words = remark if remark[:1].isupper() else f"Measured on {remark}"
    broken = scores.report.broken
    return escape_text(f"{words}. {format_count(broken, 'image')} could not be read." if broken else f"{words}.")


def _say_match(report: EvaluationReport) -> str:
    how = report.labels
    return escape_text(how if how.startswith("by ") else f"by name: {how}")


def show_mistakes(scores: Scores) -> str:
    """Return the HTML of a grid of photos with label and wrong guess, the surest first."""
    wrong = scores.report.images - _count_hits(scores.report)
    if not wrong:
        return _say("It made none on these images.")
    if not scores.mistakes:
        return _say(f"{format_count(wrong, 'mistake')}, but none of the images can be shown.")
    rest = f"; the {len(scores.mistakes)} of which it is surest are shown" if wrong > len(scores.mistakes) else ""
    count = f'<p class="told">{format_count(wrong, "mistake")}{rest}.</p>'
    return f'<ul class="photos">{"".join(map(_show_photo, scores.mistakes))}</ul>{count}'


def show_doubtful(scores: Scores) -> str:
    """Return the HTML of the photos whose label is most doubtful; a sentence if there is none."""
    if not scores.doubtful:
        return _say("No label is in doubt.")
    words = ""
    if scores.all_doubtful > len(scores.doubtful):
        words = f"The first {len(scores.doubtful)} of {format_count(scores.all_doubtful, 'doubtful label')}."
    if scores.report.top1.value < TRUSTED_ACCURACY:
        words += (
            f" With {_format_share(scores.report.top1.value)} right, most of these will be the model's own mistakes: a "
            "better model doubts fewer."
        )
    told = f'<p class="told">{words.strip()}</p>' if words else ""
    return f'<ul class="photos few">{"".join(map(_show_photo, scores.doubtful))}</ul>{told}'


def _show_photo(photo: ScoredPhoto) -> str:
    label, guess, name = (escape_text(words) for words in (photo.label, photo.guess, photo.name))
    small = ' class="small"' if max(photo.pixels.shape[:2]) < SMALL else ""
    alt = f"{name}: labelled {label}, taken for {guess}"
    picture = f'<img src="{encode_picture(photo.pixels, QUALITY)}" alt="{alt}" title="{name}"{small}>'
    arrow = '<span class="arrow" aria-hidden="true">→</span>'
    return (
        f'<li><span class="photo">{picture}</span><span class="label" dir="auto">{label}</span> <span class="guess">'
        f'{arrow}<span dir="auto">{guess}</span> <b>{_format_percent(photo.probability)}</b></span></li>'
    )


def show_confusions(scores: Scores) -> str:
    """Return the HTML of the most frequent confusions, and of the matrix if there are few classes."""
    report = scores.report
    if not report.confusions:
        return _say("Nothing was taken for anything else.")
    totals = {score.name: score.images for score in report.classes}
    rows = "".join(
        f'<tr><th scope="row" dir="auto">{_name(label)}</th><td dir="auto">{_name(guess)}</td>'
        f'<td class="number">{count:,} <span class="of">of {totals.get(label, 0):,}</span></td></tr>'
        for label, guess, count in report.confusions[:MOST_CONFUSIONS]
    )
    rest = len(report.confusions) - MOST_CONFUSIONS
    more = f'<p class="told">and {format_count(rest, "rarer confusion")}.</p>' if rest > 0 else ""
    head = '<th scope="col">label</th><th scope="col">taken for</th><th scope="col" class="number">images</th>'
    table = f'<table class="confusions"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{more}'
    return table + _show_matrix(report)


def _show_matrix(report: EvaluationReport) -> str:
    """Return the confusion matrix: a row for each label, a numbered column for each guess; "" if it is too large."""
    present = [n for n, score in enumerate(report.classes) if score.images or report.confusion[:, n].any()]
    if not 2 <= len(present) <= MOST_IN_MATRIX:
        return ""
    columns = [*present, *([-1] if report.foreign_guesses else [])]
    counts = report.confusion[np.ix_(present, columns)]
    names = [_name(report.classes[n].name) for n in present]
    across = [*range(1, len(present) + 1), *(["other"] if report.foreign_guesses else [])]
    heads = "".join(f'<th scope="col">{number}</th>' for number in across)
    rows = "".join(
        f'<tr><th scope="row"><span class="row"><span dir="auto">{name}</span><i>{number}</i></span></th>'
        f"{''.join(_show_cell(int(n), int(line.sum()), place == number - 1) for place, n in enumerate(line))}</tr>"
        for number, (name, line) in enumerate(zip(names, counts, strict=True), start=1)
    )
    kind = " large" if len(present) > MOST_IN_SMALL_MATRIX else ""
    told = "A row for each label, and a column for what it was taken for, by the same number. Blue is right."
    return f"""<div class="matrix{kind}" style="--classes: {len(columns)}">
<table><thead><tr><td></td>{heads}</tr></thead><tbody>{rows}</tbody></table>
<p class="told">{told}</p></div>"""


def _show_cell(count: int, total: int, right: bool) -> str:
    share = count / total if total else 0.0
    kind = "right" if right else "wrong"
    return f'<td class="{kind}" style="--share: {share:.3f}">{count if count else ""}</td>'


def show_classes(scores: Scores) -> str:
    """Return the HTML of a bar with its interval for each class, the worst first; of many, the rest is folded."""
    scored = [score for score in scores.report.classes if score.images]
    scored.sort(key=lambda score: (score.accuracy.value, -score.images, score.name))
    shown, rest = scored[:MOST_CLASSES], scored[MOST_CLASSES:]
    folded = ""
    if rest:
        summary = f"the other {format_count(len(rest), 'class')}"
        folded = f"<details><summary>{summary}</summary>{_list_classes(rest)}</details>"
    told = '<p class="told">The worst first. The thin line is the 95% interval: the fewer images, the longer.</p>'
    return f"{_list_classes(shown)}{folded}{told}"


def _list_classes(classes: Sequence[ClassScore]) -> str:
    return (
        '<ul class="bars">'
        + "".join(
            f'<li><span class="name" dir="auto">{_name(score.name)}</span><span class="number">'
            f"<b>{_format_percent(score.accuracy.value)}</b> "
            f'<span class="of">{score.hits:,} of {score.images:,}</span></span>{draw_bar(score.accuracy)}'
            f'<span class="heard">95% interval {_format_interval(score.accuracy)}</span></li>'
            for score in classes
        )
        + "</ul>"
    )


def _fold_calibration(report: EvaluationReport) -> str:
    """Return a folded table: guesses by their probability, and how many of them are right."""
    if not report.bins or not math.isfinite(report.calibration.value):
        return ""
    gap = f"{report.calibration.value:.1%} (95% interval {_format_interval(report.calibration)})"
    return f"""<details><summary>Can its probabilities be trusted?</summary>
<p class="told">On average, the probability of a guess and the share of such guesses that are right differ by {gap}.
The mark on each bar is where it would end if the probabilities were exact.</p>
<ul class="bars">{"".join(map(_show_bin, report.bins))}</ul></details>"""


def _show_bin(each: CalibrationBin) -> str:
    mark = f'<i class="exact" style="--at: {each.confidence:.4f}"></i>'
    return (
        f'<li><span class="name">{each.low:.0%} to {each.high:.0%} sure</span><span class="number">'
        f'<b>{_format_percent(each.accuracy)}</b> <span class="of">right, of {each.images:,}</span></span>'
        f'<span class="bar" style="--share: {each.accuracy:.4f}" aria-hidden="true">{mark}</span></li>'
    )


def draw_bar(share: Estimate) -> str:
    """Return a bar from 0 to 1 with a line for the interval; only the numbers beside it are read aloud."""
    value, low, high = (each if math.isfinite(each) else 0.0 for each in share)
    place = f"--share: {value:.4f}; --low: {low:.4f}; --high: {high:.4f}"
    return f'<span class="bar" style="{place}" aria-hidden="true"><i class="whisker"></i></span>'


def _count_hits(report: EvaluationReport) -> int:
    return sum(score.hits for score in report.classes)


def _say(words: str) -> str:
    return f'<p class="absent">{escape_text(words)}</p>'


def _name(words: str) -> str:
    return escape_text(translate_wnid(words))


def _format_interval(share: Estimate) -> str:
    return f"{_format_share(share.low)} to {_format_share(share.high)}"


def _format_share(share: float) -> str:
    return f"{share:.1%}" if math.isfinite(share) else "–"


def _format_percent(share: float) -> str:
    """Return whole percents; near 100% one digit more, because almost certain is not certain."""
    if not math.isfinite(share):
        return "–"
    return f"{min(share, 0.999):.1%}" if 0.995 <= share < 1 else f"{share:.0%}"
