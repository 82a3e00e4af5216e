"""Learning curves: what is drawn is what was recorded, for runs of every length and kind, and the same bytes again."""

from __future__ import annotations

import math
import sys
import xml.etree.ElementTree as ET

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from vitrail.training import curves
from vitrail.training.curves import draw_curves, smooth


def run(records: int, accuracy: bool = True, every: int = 50, evaluations: int = 5) -> list[dict]:
    noise, made, last = np.random.default_rng(0), [], records * every
    for step in range(every, last + 1, every):
        share = step / last
        values = {"loss": 0.4 + 2 * math.exp(-5 * share) + 0.05 * noise.random()}
        values |= {"accuracy": 0.9 - 0.7 * math.exp(-5 * share)} if accuracy else {}
        made.append({"kind": "train", "step": step, **values, "learning_rate": 1e-3 * (1 - share), "clock": {}})
        if step % max(every, last // evaluations // every * every) == 0:
            made.append({"kind": "evaluation", "step": step, "part": "val", **values, "clock": {}})
    return made


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Puts a figure together, and gives its parts instead of painting them, which takes most of the time."""
    figures: list[Figure] = []

    def savefig(self, file, **options):
        figures.append(self)
        file.write(b"painted")

    monkeypatch.setattr(Figure, "savefig", savefig)

    def draw(records: list[dict], title: str = "a run") -> dict:
        assert draw_curves(records, tmp_path / "curves.png", title) is True
        assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.png", "curves.svg"]
        return {axes.get_title("left").split(" (")[0]: axes for axes in figures[-1].axes}

    return draw


def line(axes, label: str) -> tuple[list, list]:
    (found,) = [line for line in axes.lines if str(line.get_label()).split(",")[0] == label]
    return list(found.get_xdata()), list(found.get_ydata())


def test_what_is_drawn_is_what_was_recorded(drawn):
    records = run(10)
    axes = drawn(records)
    assert list(axes) == ["Loss", "Accuracy", "Learning rate"]
    for name in ("loss", "accuracy"):
        for label, kind in (("training", "train"), ("val", "evaluation")):
            of = [record for record in records if record["kind"] == kind]
            expected = [record["step"] for record in of], [record[name] for record in of]
            assert line(axes[name.capitalize()], label) == expected
    (rates,) = axes["Learning rate"].lines
    assert list(rates.get_ydata()) == [record["learning_rate"] for record in records if record["kind"] == "train"]
    assert {part.get_yscale() for part in axes.values()} == {"linear"}


def test_the_picture_is_1200_by_700(tmp_path):
    draw_curves(run(100), tmp_path / "curves.png", "S/16 on flowers")
    with Image.open(tmp_path / "curves.png") as image:
        assert image.size == (1200, 700)
        assert image.getpixel((2, 2))[:3] == (255, 255, 255)
    assert ET.parse(tmp_path / "curves.svg").getroot().tag.endswith("svg")


def test_the_best_evaluation_is_named(drawn):
    evaluations = [(10, 2.0, 0.5), (20, 1.0, 0.75), (30, 1.5, 0.875), (40, math.nan, math.nan)]
    axes = drawn(
        [
            {"kind": "evaluation", "step": step, "part": "test", "loss": loss, "accuracy": accuracy}
            for step, loss, accuracy in evaluations
        ]
    )
    texts = {name: [text.get_text() for text in part.get_legend().get_texts()] for name, part in axes.items()}
    assert texts == {"Loss": ["test, best 1 at step 20"], "Accuracy": ["test, best 87.5% at step 30"]}


def test_long_runs_are_smoothed_over_their_raw_line(drawn):
    records = run(400)
    axes = drawn(records)["Loss"]
    raw = [record["loss"] for record in records if record["kind"] == "train"]
    faint, heavy = axes.lines[:2]
    assert list(faint.get_ydata()) == raw
    assert faint.get_linewidth() < heavy.get_linewidth()
    assert faint.get_alpha() < 0.5
    assert np.abs(np.diff(heavy.get_ydata())).sum() < np.abs(np.diff(raw)).sum() / 2


def test_without_accuracy_loss_has_the_whole_width(drawn):
    axes = drawn(run(30, accuracy=False))
    assert list(axes) == ["Loss", "Learning rate"]
    assert axes["Loss"].get_subplotspec().colspan == axes["Learning rate"].get_subplotspec().colspan


@pytest.mark.parametrize(
    "records",
    [
        run(1),
        run(1, evaluations=1)[:1],
        [{"kind": "evaluation", "step": 0, "part": "val", "loss": 2.0}],
        [{"kind": "train", "step": 7, "loss": math.inf, "learning_rate": math.nan}],
        run(curves.SMOOTHED_FROM),
    ],
    ids=["one", "one of training", "one at the start", "nothing finite", "smoothed"],
)
def test_few_records(tmp_path, records):
    assert draw_curves(records, tmp_path / "curves.png", "x") is True
    with Image.open(tmp_path / "curves.png") as image:
        colours = {colour for _, colour in image.convert("RGB").getcolors(1_000_000)}
    finite = {record["kind"] for record in records if math.isfinite(record["loss"])}
    seen = {kind for kind, colour in (("train", (0, 114, 178)), ("evaluation", (213, 94, 0))) if colour in colours}
    assert seen == finite  # even a single dot


def test_without_records_there_is_no_file(tmp_path):
    for records in ([], [{"kind": "train", "step": 1}]):
        assert draw_curves(records, tmp_path / "curves.png", "x") is False
    assert not list(tmp_path.iterdir())


KNOWN = {"kind": "evaluation", "step": 5, "part": "val", "loss": 1.0, "accuracy": 0.5}


@pytest.mark.parametrize(
    "other",
    [
        {"part": None},
        {"part": ["val"]},
        {"kind": ["train"]},
        {"kind": None},
        {"kind": "a note", "part": "val"},
        {"step": 10**30},
        {"step": -1},
        {"step": "7"},
        {"step": 7.5},
        {"step": True},
        {"step": None},
        {"loss": {"total": 2.0}},
        {"loss": "low"},
        {"loss": [2.0]},
        {"loss": True},
        {"accuracy": [0.5]},
        {"kind": "train", "learning_rate": {}},
    ],
    ids=str,
)
def test_records_of_another_shape_are_left_out(drawn, tmp_path, other):
    strange = {**KNOWN, "step": 9, **other}
    axes = drawn([strange, KNOWN])
    assert list(axes) == ["Loss", "Accuracy"]
    assert [line(axes[name], "val") for name in axes] == [([5], [1.0]), ([5], [0.5])]
    assert all(len(part.lines) == 1 for part in axes.values())
    assert draw_curves([strange], tmp_path / "none.png", "x") is False


@pytest.mark.parametrize("name", ["kind", "step", "part"])
def test_records_that_lack_a_name_are_left_out(drawn, name):
    axes = drawn([{key: value for key, value in (KNOWN | {"step": 9}).items() if key != name}, KNOWN])
    assert line(axes["Loss"], "val") == ([5], [1.0])


def test_records_that_are_none_are_left_out(tmp_path):
    assert draw_curves([None, [], "loss", 3], tmp_path / "curves.png", "x") is False


def test_an_evaluation_of_the_part_that_is_trained_on_is_a_line_of_its_own(drawn):
    training = [{"kind": "train", "step": step, "loss": 1.0} for step in (1, 2)]
    axes = drawn([*training, {"kind": "evaluation", "part": "train", "step": 2, "loss": 3.0}])["Loss"]
    assert line(axes, "training") == ([1, 2], [1.0, 1.0])
    assert line(axes, "train") == ([2], [3.0])


@pytest.mark.parametrize(
    "parts", [["$\\frac{$", "", "\ud800\udcff\0\n"], ["_hidden"], ["花" * 500, "W" * 40]], ids=["odd", "_", "long"]
)
def test_parts_of_any_name(tmp_path, monkeypatch, parts):
    legends = []
    legend = Axes.legend
    monkeypatch.setattr(Axes, "legend", lambda self, **options: legends.append(legend(self, **options)) or legends[-1])
    records = [KNOWN | {"part": part, "step": 10**15} for part in parts]
    assert draw_curves(records, tmp_path / "curves.png", "\ud800") is True
    assert [len(each.get_texts()) for each in legends] == [len(parts)] * 2
    assert ET.parse(tmp_path / "curves.svg").getroot().tag.endswith("svg")


@pytest.mark.parametrize("value", [10**400, -1e308, 1e30, 5e-324, -75.5], ids=lambda value: f"{value!s:.6}")
def test_values_of_any_size(tmp_path, value):
    records = [
        {"kind": "train", "step": step, "loss": value, "accuracy": value, "learning_rate": value}
        for step in (0, 10**15)
    ]
    records += [KNOWN, KNOWN | {"loss": value, "accuracy": value, "step": 10**15}]
    assert draw_curves(records, tmp_path / "curves.png", "x") is True


def test_accuracy_that_is_no_share_is_all_in_the_frame(drawn):
    axes = drawn([KNOWN | {"step": step, "accuracy": 50.0 + step} for step in range(9)])["Accuracy"]
    low, high = axes.get_ylim()
    assert low < 50 < 58 < high


def test_what_is_not_finite_is_a_gap(drawn):
    records = run(60)
    training = [record for record in records if record["kind"] == "train"]
    training[30]["loss"], training[31]["loss"], training[32]["loss"] = math.nan, math.inf, -math.inf
    for curve in drawn(records)["Loss"].lines[:2]:
        assert [int(index) for index in np.flatnonzero(np.isnan(curve.get_ydata()))] == [30, 31, 32]


def test_nothing_finite_is_said(drawn):
    axes = drawn([{"kind": "train", "step": step, "loss": math.nan} for step in (1, 2)])["Loss"]
    assert [text.get_text() for text in axes.texts] == ["no finite value"]


def test_a_wild_beginning_does_not_press_the_rest_flat(drawn, tmp_path):
    records = run(100)
    records[0]["loss"] = 15141.0
    axes = drawn(records)["Loss"]
    assert axes.get_title("left") == "Loss (up to 15,141, above the frame)"
    assert axes.get_ylim()[1] < 10
    assert np.max(axes.lines[1].get_ydata()) < 10  # nor the smoothed line
    assert drawn(run(100))["Loss"].get_title("left") == "Loss"


def test_accuracy_that_jumps_late_is_all_in_the_frame(drawn):
    records = [{"kind": "train", "step": step, "loss": 1.0, "accuracy": 0.1 + 0.8 * (step > 95)} for step in range(100)]
    axes = drawn(records)["Accuracy"]
    assert axes.get_ylim()[1] > 0.9
    assert max(axes.lines[1].get_ydata()) > 0.5


def test_very_many_records_make_no_large_file_and_lose_no_extreme(drawn, tmp_path):
    records = run(50_000, every=1, accuracy=False)
    records[31_234]["loss"] = 2.75
    axes = drawn(records)["Loss"]
    steps, values = axes.lines[0].get_data()
    training = [record for record in records if record["kind"] == "train"]
    assert len(steps) <= curves.MOST_POINTS
    assert (min(steps), max(steps)) == (1, 50_000)
    assert sorted(steps) == list(steps)
    losses = [record["loss"] for record in training]
    assert (min(values), max(values)) == (min(losses), max(losses))


def test_smoothing_against_a_loop():
    values = np.random.default_rng(1).random(211)
    values[[0, 50, 51, 200]] = np.nan
    expected = values.copy()
    for _ in range(2):
        before = expected.copy()
        for index in range(len(values)):
            around = before[max(0, index - 5) : index + min(5, index) + 1]
            expected[index] = np.mean(around[~np.isnan(around)]) if not np.isnan(values[index]) else np.nan
    np.testing.assert_allclose(smooth(values), expected, rtol=1e-12)


@pytest.mark.parametrize("length", [1, 2, 3, 40, 5000])
def test_smoothing_leaves_what_is_smooth(length):
    np.testing.assert_allclose(smooth(np.full(length, 2.5)), 2.5)
    assert np.isnan(smooth(np.full(length, np.nan))).all()


def test_smoothing_follows_a_steep_beginning():
    falling = np.linspace(3, 1, 1000)
    np.testing.assert_allclose(smooth(falling)[:900], falling[:900], atol=0.02)


def test_the_same_records_give_the_same_bytes_whatever_is_set(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # whose state is everyone's: it must not be needed
    for name, style in (("a", {"font.size": 30, "axes.facecolor": "black", "svg.hashsalt": "other"}), ("b", {})):
        with matplotlib.rc_context(style):
            draw_curves(run(25), tmp_path / f"{name}.png", "a $run_1")
            assert all(matplotlib.rcParams[key] == value for key, value in style.items())
    for suffix in ("png", "svg"):
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()


@pytest.mark.parametrize("title", ["a $run_1$ \\frac <&>", "花" * 500])
def test_any_title(tmp_path, title):
    assert draw_curves(run(3), tmp_path / "curves.png", title)
    assert ET.parse(tmp_path / "curves.svg").getroot().tag.endswith("svg")


def test_a_failure_leaves_the_old_pictures(drawn, tmp_path, monkeypatch):
    drawn(run(5))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", lambda self, file, **_: file.write(b"painted again"))
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        draw_curves(run(10), tmp_path / "curves.png", "x")
    assert {(tmp_path / name).read_bytes() for name in ("curves.png", "curves.svg")} == {b"painted"}


@pytest.mark.parametrize("accuracy", [True, False])
def test_few_shot_accuracies_stand_beside_the_others(drawn, accuracy):
    """Also where nothing else has an accuracy; and the colour of the validation is the same in both panels."""
    found = [{"kind": "fewshot", "step": step, "part": "5-shot", "accuracy": step / 1000} for step in (100, 200)]
    axes = drawn([*found, *run(10, accuracy=accuracy)])
    assert line(axes["Accuracy"], "5-shot") == ([100, 200], [0.1, 0.2])
    assert not [each for each in axes["Loss"].lines if "5-shot" in str(each.get_label())]
    if accuracy:
        colours = [
            each.get_color()
            for panel in ("Loss", "Accuracy")
            for each in axes[panel].lines
            if str(each.get_label()).startswith("val")
        ]
        assert len(colours) == 2
        assert len(set(colours)) == 1
