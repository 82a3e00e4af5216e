"""Figures of findings: what is drawn is what was found, for models of every shape and name; the same bytes again."""

from __future__ import annotations

import itertools
import math
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest
from made_up import made_layers, nothing, resnet, vit
from matplotlib.figure import Figure
from PIL import Image

from vitrail.inspection.draw.canvas import NARROW, OVERLAY, join_tiles, shorten_text
from vitrail.inspection.draw.charts import find_farthest
from vitrail.inspection.draw.figures import _overlay_heat, draw_between, draw_findings
from vitrail.inspection.findings import Absent, Distance, Filters, Layers, Positions, ShownImage, Tokens
from vitrail.training.curves import draw_curves

pytestmark = pytest.mark.slow  # every figure of every kind

ALL = ["filters-1", "positions", "distance", "rollout", "components", "tokens", "layers", "curves"]
HOSTILE = "$\\frac{ <b>&amp;</b> \x1b[31m\n中文 \udcff ]]>"
ABSENT = Absent("there is none")


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """Puts figures together, and gives them by name instead of painting them, which takes most of the time."""
    figures: list[Figure] = []

    def savefig(self, file, **options):
        figures.append(self)
        file.write(b"painted")

    monkeypatch.setattr(Figure, "savefig", savefig)

    def draw(findings, **options):
        figures.clear()
        names = draw_findings(findings, tmp_path, **options)
        return dict(zip(names, figures[::2], strict=True))  # each is saved as PNG and as SVG

    return draw


def only(part: str, value, **others):
    """Findings of one part."""
    return replace(nothing(), **{part: value}, **others)


def shown_in(axes) -> np.ndarray:
    (image,) = axes.images
    return image.get_array()


def labels(axis) -> list[str]:
    return [text.get_text() for text in axis.get_ticklabels()]


def test_all_parts_are_drawn_as_png_and_svg_and_the_same_again(tmp_path):
    findings = vit(embeddings=2)
    first = draw_findings(findings, tmp_path / "first")
    assert sorted(first) == sorted([*ALL, "filters-2"])
    for name, path in first.items():
        assert path == tmp_path / "first" / f"{name}.png"
        assert np.ptp(np.asarray(Image.open(path).convert("L"))) > 100
        assert ET.parse(path.with_suffix(".svg")).getroot().tag.endswith("svg")
    assert len(list((tmp_path / "first").iterdir())) == 2 * len(first)
    two = replace(nothing("vit"), positions=findings.positions, layers=findings.layers)  # for the others as well
    second = draw_findings(two, tmp_path / "second")
    assert sorted(second) == ["layers", "positions"]
    for name, path in second.items():
        for suffix in (".png", ".svg"):
            assert path.with_suffix(suffix).read_bytes() == first[name].with_suffix(suffix).read_bytes()


@pytest.fixture
def laid_out(monkeypatch):
    """Every figure as it was painted: places are settled."""
    figures: list[Figure] = []
    savefig = Figure.savefig

    def keep(self, file, format, **options):
        if format == "svg":
            figures.append(self)
            return file.write(b"left out")
        return savefig(self, file, format=format, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


@pytest.mark.parametrize(
    "grid", [(1, 1), (3, 50), *(pytest.param(each, marks=pytest.mark.slow) for each in ((1, 16), (16, 1), (1, 2)))]
)
def test_long_and_narrow_grids_can_be_seen(tmp_path, laid_out, grid):
    found = vit(grid=grid, layers=ABSENT, filters=ABSENT, records=())  # which no grid is in
    assert list(draw_findings(found, tmp_path)) == ["positions", "distance", "rollout", "components", "tokens"]
    for figure in laid_out:
        assert max(figure.get_size_inches()) <= 12
        whole = figure.bbox
        title = figure._suptitle.get_window_extent()
        for axes in [*figure.axes, *(bar for each in figure.axes for bar in each.child_axes)]:
            if axes.images:
                assert min(axes.get_window_extent().size) > 45  # pixels
                assert axes.get_tightbbox().y1 < title.y0
            words = [axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
            ticks = [axes.get_xticklabels(), axes.get_yticklabels()] if axes.axison else []
            for text in itertools.chain(words, *ticks):
                if text.get_text():
                    box = text.get_window_extent()
                    assert whole.x0 <= box.x0 <= box.x1 <= whole.x1, text
                    assert whole.y0 <= box.y0 <= box.y1 <= whole.y1, text
            for labels in ticks:  # one beside the other
                boxes = [label.get_window_extent() for label in labels if label.get_text()]
                assert not any(one.overlaps(other) for one, other in itertools.pairwise(boxes))


@pytest.mark.slow
def test_filters_of_any_shape_and_one_layer_against_many_can_be_seen(tmp_path, laid_out):
    draw = np.random.default_rng(0)
    shapes = [(28, 1, 64, 3), (28, 64, 1, 3), (1, 1, 1, 1), (300, 1, 1, 5)]
    filters = tuple(Filters("it", draw.normal(size=shape), np.full(shape[0], 0.01)) for shape in shapes)
    draw_findings(only("filters", filters), tmp_path)
    many = tuple(f"block {number}" for number in range(60))
    for names in (("stem",), many), (many, ("stem",)), (("stem",), ("stem",)):
        draw_between(made_layers(*names), tmp_path / "between.png", "one", "other")
    assert len(laid_out) == 7
    for figure in laid_out:
        assert max(figure.get_size_inches()) <= 12
        assert min(figure.axes[0].get_window_extent().size) > 45


def test_what_is_absent_is_not_drawn(tmp_path, parts):
    assert draw_findings(nothing(), tmp_path) == {}
    assert not list(tmp_path.iterdir())
    assert list(parts(resnet())) == ["filters-1", "tokens", "layers"]
    assert list(parts(vit(images=()))) == ["filters-1", "positions", "distance", "layers", "curves"]


@pytest.mark.slow
def test_names_of_any_kind_break_nothing(tmp_path):
    image = ShownImage(HOSTILE, np.zeros((8, 8, 3), np.uint8), ((HOSTILE * 9, 0.5), (HOSTILE, float("nan"))))
    found = vit(HOSTILE * 9, images=[image])
    layers = Layers((HOSTILE, "$"), ("$x^{", HOSTILE), np.eye(2), 4)
    distance = replace(found.distance, layers=(HOSTILE, "$_", "<b>"))
    filters = (replace(found.filters[0], of=HOSTILE),)
    tokens = replace(found.tokens, layers=(HOSTILE,) * 3)
    attention = replace(found.attention, reads=HOSTILE)
    positions = replace(found.positions, kind=HOSTILE)
    hostile = replace(found, layers=layers, distance=distance, filters=filters, tokens=tokens, attention=attention,
                      positions=positions)  # fmt: skip
    paths = [*draw_findings(hostile, tmp_path).values(), draw_between(layers, tmp_path / "b.png", HOSTILE, HOSTILE)]
    assert len(paths) == len(ALL) + 1
    for path in paths:
        ET.parse(path.with_suffix(".svg"))


@pytest.mark.slow
def test_the_vectors_of_a_large_model_stay_small(tmp_path, monkeypatch):
    savefig = Figure.savefig

    def only_vectors(self, file, format, **options):
        return savefig(self, file, format=format, **options) if format == "svg" else file.write(b"left out")

    monkeypatch.setattr(Figure, "savefig", only_vectors)
    draw = np.random.default_rng(0)
    images = [ShownImage("noise", draw.integers(0, 256, (224, 224, 3), np.uint8), ()) for _ in range(8)]
    filters = (Filters("patch embedding", draw.normal(size=(28, 16, 16, 3)), np.full(28, 0.02)),)
    findings = vit(images=images, depth=12, heads=12, grid=(14, 14), filters=filters)
    paths = draw_findings(findings, tmp_path)
    sizes = [path.with_suffix(".svg").stat().st_size for path in paths.values()]
    assert min(sizes) > 10_000
    assert sum(sizes) < 3_000_000
    assert max(sizes) < 1_500_000  # of which a page makes no vectors any more


# Filters


def test_a_filter_is_grey_at_zero_and_reaches_black_or_white(parts):
    components = np.zeros((9, 2, 3, 3))
    components[0, 0, 0] = (2, -4, 0)
    components[8, 1, 2] = (0, 0, -0.5)
    figure = parts(only("filters", (Filters("patch embedding", components, np.full(9, 0.1)),)))["filters-1"]
    picture = shown_in(figure.axes[0])
    assert picture.shape == (2 * 2 + 1, 7 * 3 + 6, 4)  # two rows of seven, gaps of one pixel
    assert picture[0, 0].tolist() == [0.75, 0, 0.5, 1]
    assert picture[0, 1].tolist() == [0.5, 0.5, 0.5, 1]
    assert picture[4, 6].tolist() == [0.5, 0.5, 0, 1]  # the ninth: second row, second column
    assert not picture[2, :, 3].any()  # a gap, transparent
    assert not picture[3:, 8:, 3].any()  # there is no tenth
    assert picture[0, 4].tolist() == [0.5, 0.5, 0.5, 1]  # the second, which is zero
    assert "9 principal components" in figure.axes[0].get_title("left")
    assert "90.0%" in figure.axes[0].get_title("left")
    assert figure.get_suptitle() == "Patch embedding: nothing"


def test_filters_of_one_channel_are_grey(parts):
    components = np.random.default_rng(0).normal(size=(28, 4, 4, 1))
    picture = shown_in(parts(only("filters", (Filters("", components, np.full(28, 0.03)),)))["filters-1"].axes[0])
    assert (picture[..., :1] == picture[..., :3]).all()
    assert np.ptp(picture[..., 0]) > 0.5


@pytest.mark.parametrize("shape", [(28, 1, 1, 1024), (5, 2, 2, 6), (1, 16, 16, 4)])
def test_other_channels_than_colours_are_a_strip(parts, shape):
    components = np.random.default_rng(0).normal(size=shape)
    axes, *_ = parts(only("filters", (Filters("patch projection", components, np.ones(1)),)))["filters-1"].axes
    strip = shown_in(axes)
    assert strip.shape == (shape[0], math.prod(shape[1:]))
    flat = components.reshape(shape[0], -1)
    assert np.allclose(strip, flat / np.abs(flat).max(axis=1, keepdims=True))
    assert axes.images[0].get_clim() == (-1, 1)


# Position embeddings


@pytest.mark.parametrize("grid", [(1, 1), (2, 3), (14, 14), (6, 12), (16, 4), (24, 24), (3, 50)])
def test_each_small_map_stands_in_the_place_of_its_patch(parts, grid):
    similarity = np.random.default_rng(0).uniform(-1, 1, (*grid, *grid))
    axes, *_ = parts(only("positions", Positions("learned-2d", similarity, None)))["positions"].axes
    picture = shown_in(axes)
    assert axes.images[0].get_clim() == (-1, 1)
    places = [[int(label) - 1 for label in labels(axis)] for axis in (axes.yaxis, axes.xaxis)]
    middles = [axes.get_yticks(), axes.get_xticks()]
    there = ~np.isnan(picture)
    spans = [there.any(axis=1 - axis).sum() // (len(places[axis]) * grid[axis]) for axis in (0, 1)]  # pixels of a place
    for (row, y), (column, x) in itertools.product(*(zip(*pair, strict=True) for pair in zip(places, middles))):  # noqa: B905
        sides = [side * span for side, span in zip(grid, spans, strict=True)]
        top, left = (round(middle - (side - 1) / 2) for middle, side in zip((y, x), sides, strict=True))
        tile = picture[top : top + sides[0], left : left + sides[1]]
        assert np.array_equal(tile, np.kron(similarity[row, column], np.ones(spans)))
    shown = [len(found) for found in places]
    assert all(count == side if side <= 16 else 10 <= count <= 14 for count, side in zip(shown, grid, strict=True))
    assert ("is shown" in axes.get_title("left")) == (max(grid) > 16)
    assert "learned-2d" in axes.get_title("left")


def test_how_much_of_a_large_grid_is_shown_is_said(parts):
    def told(rows: int, columns: int) -> str:
        similarity = np.zeros((rows, columns, rows, columns), np.float16)
        return parts(only("positions", Positions("", similarity, None)))["positions"].axes[0].get_title("left")

    assert told(24, 24).endswith("every second row and column is shown")
    assert told(4, 32).endswith("every row and every third column is shown")
    assert told(45, 2).endswith("every 4th row and every column is shown")


def test_a_mosaic_has_gaps_of_what_is_not_a_number():
    tiles = np.arange(24.0).reshape(2, 3, 2, 2)
    picture = join_tiles(tiles, 1)
    assert picture.shape == (5, 8)
    assert np.isnan(picture[2]).all()
    assert np.isnan(picture[:, [2, 5]]).all()
    assert picture[3:, 6:].tolist() == tiles[1, 2].tolist()


# Attention distance


def dots(axes) -> np.ndarray:
    (found,) = axes.collections
    return np.ma.filled(found.get_offsets(), np.nan)


def line(axes, label: str):
    (found,) = [line for line in axes.lines if line.get_label() == label]
    return found


def test_a_dot_for_each_head_and_a_line_through_their_means(parts):
    found = vit(depth=5, heads=3)
    pixels = found.distance.pixels
    axes, *_ = parts(only("distance", found.distance))["distance"].axes
    assert dots(axes)[:, 1].tolist() == pixels.ravel().tolist()
    assert np.round(dots(axes)[:, 0]).tolist() == np.repeat([1, 2, 3, 4, 5], 3).tolist()
    assert len({tuple(dot) for dot in dots(axes)[:, :1]}) == 15  # none hides another
    assert line(axes, "mean of the heads").get_ydata() == pytest.approx(pixels.mean(axis=1))
    assert axes.get_ylim()[0] == 0
    assert axes.get_ylim()[1] > pixels.max()
    assert labels(axes.xaxis) == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize("grid", [(1, 1), (4, 6), (7, 7), (3, 1)])
def test_the_line_of_uniform_attention_is_the_mean_over_all_pairs(parts, grid):
    places = [(16 * row, 16 * column) for row in range(grid[0]) for column in range(grid[1])]
    expected = np.mean([math.dist(one, other) for one in places for other in places])
    found = replace(vit(grid=grid), images=(), filters=ABSENT, layers=ABSENT, tokens=ABSENT, records=())
    axes, *_ = parts(found)["distance"].axes
    assert line(axes, "uniform attention").get_ydata() == pytest.approx([expected] * 2)
    by_positions, *_ = parts(replace(found, attention=ABSENT))["distance"].axes
    assert line(by_positions, "uniform attention").get_ydata() == pytest.approx([expected] * 2)
    unknown, *_ = parts(replace(found, attention=ABSENT, positions=ABSENT))["distance"].axes
    assert {each.get_label() for each in unknown.lines} == {"mean of the heads"}


def test_the_axis_ends_where_it_is_told_to(parts):
    found = only("distance", vit().distance)
    assert parts(found, top=321.0)["distance"].axes[0].get_ylim() == (0, 321)
    assert parts(found, top=float("nan"))["distance"].axes[0].get_ylim()[1] < 200


def test_a_line_outside_of_the_axis_is_not_in_the_legend(parts):
    def legend(top):
        axes = parts(found, top=top)["distance"].axes[0]
        return {text.get_text() for text in axes.get_legend().get_texts()}

    near = Distance(("1",), np.array([[3.0, 4.0]]), (64, 96), 1)
    found = only("distance", near, positions=vit().positions)
    uniform = find_farthest(found)
    assert uniform > 30
    heads = {"a head", "mean of the heads"}
    assert legend(top=1.05 * uniform) == heads | {"uniform attention"}
    assert legend(top=None) == heads | {"uniform attention"}
    assert legend(top=uniform / 2) == heads


def test_how_far_an_axis_must_reach():
    nowhere = Distance(("1", "2"), np.array([[np.nan, np.inf], [np.nan, np.nan]]), (64, 96), 1)
    far = Distance(("1", "2"), np.array([[np.nan, np.inf], [7.5, 500.0]]), (64, 96), 1)
    assert find_farthest(nothing()) == find_farthest(only("distance", nowhere)) == 0
    assert find_farthest(only("distance", far)) == 500
    places = [(16 * row, 16 * column) for row in range(4) for column in range(6)]
    uniform = np.mean([math.dist(one, other) for one in places for other in places])
    known = only("distance", nowhere, positions=vit(grid=(4, 6)).positions)
    assert find_farthest(known) == pytest.approx(uniform)
    assert find_farthest(replace(known, distance=far)) == 500
    axial = replace(nowhere, layers=("1 rows", "1 columns"))
    assert find_farthest(replace(known, distance=axial)) == 0


def test_heads_that_never_attend_to_patches_are_left_out(parts):
    pixels = np.array([[1.0, np.nan, 3.0], [np.nan] * 3, [4.0, 6.0, np.nan]])
    axes, *_ = parts(only("distance", Distance(("1", "2", "3"), pixels, (16, 16), 9)))["distance"].axes
    assert line(axes, "mean of the heads").get_ydata() == pytest.approx([2, np.nan, 5], nan_ok=True)
    assert np.isfinite(dots(axes)).all(axis=1).sum() == 4
    for nowhere in (np.full((1, 1), np.nan), np.zeros((1, 1)), np.full((1, 1), np.inf)):
        axes, *_ = parts(only("distance", Distance(("1",), nowhere, (16, 16), 9)))["distance"].axes
        assert axes.get_ylim()[0] == 0
        assert axes.get_ylim()[1] > 0


def test_axial_layers_are_named(parts):
    names = ("1 rows", "1 columns", "2 rows", "2 columns")
    found = vit(depth=4)
    axial = only("distance", replace(found.distance, layers=names), attention=found.attention)
    axes, *_ = parts(axial)["distance"].axes
    assert labels(axes.xaxis) == list(names)
    assert {each.get_label() for each in axes.lines} == {"mean of the heads"}  # uniform is not the same for both


# Rollout


@pytest.mark.parametrize(
    ("count", "shape"), [(1, (1, 1)), (2, (1, 2)), (3, (1, 3)), (5, (2, 3)), (8, (2, 4)), (9, (2, 4))]
)
def test_at_most_eight_images_each_with_its_guesses(parts, count, shape):
    found = vit(images=count)
    figure = parts(only("attention", found.attention, images=found.images))["rollout"]
    drawn = [axes for axes in figure.axes if axes.images]
    assert len(drawn) == min(count, 8)
    assert figure.axes[0].get_gridspec().get_geometry() == shape
    for number, axes in enumerate(drawn):
        assert axes.get_title("left") == f"image-{number}.png"
        said = "\n".join(text.get_text() for text in axes.texts).split("\n")
        assert said[:2] == [f"disc {number}  {60 + number}.0%", "ground  30.0%"]
        assert said[2] == ("a thing with a long name indeed  0.4%" if count < 8 else "a thing with a long name…  0.4%")


def test_the_map_is_brightest_over_the_patch_with_most(parts):
    image = ShownImage("plain", np.full((16, 24, 1), 100, np.uint8), ())
    found = vit(images=[image], depth=2, grid=(4, 6))
    rollout = np.full((1, 2, 4, 6), 0.01)
    rollout[0, 0, 0, 0] = 0.5  # of the first layer, which is not drawn
    rollout[0, 1, 2, 4] = 0.3
    figure = parts(only("attention", replace(found.attention, rollout=rollout), images=found.images))["rollout"]
    pair = shown_in(figure.axes[0])
    height, times = pair.shape[0], pair.shape[0] // 16
    width = 24 * times
    photo, over = pair[:, :width], pair[:, -width:]
    assert height >= 170  # enlarged, so that the map is smooth
    assert np.allclose(photo, [100 / 255] * 3 + [1])
    row, column = np.unravel_index(over[..., :3].sum(axis=2).argmax(), over.shape[:2])
    assert (row // (4 * times), column // (4 * times)) == (2, 4)
    assert not pair[:, width : pair.shape[1] - width, 3].any()


def test_a_map_of_nothing_is_drawn(parts):
    found = vit(images=1)
    for value in (0.0, np.nan):
        rollout = np.full_like(found.attention.rollout, value)
        attention = replace(found.attention, rollout=rollout)
        pair = shown_in(parts(only("attention", attention, images=found.images))["rollout"].axes[0])
        assert np.isfinite(pair).all()


# Tokens


def test_maps_are_those_of_the_marked_patches(parts):
    found = vit(images=3, depth=7, grid=(5, 4))
    figure = parts(only("tokens", found.tokens, images=found.images))["tokens"]
    rows = figure.axes[0].get_gridspec()
    assert rows.get_geometry() == (5, 5)  # as many as are no taller than a page; photo and four layers
    marked = [(2, 2), (1, 1), (3, 3)]
    for row in range(5):
        photo, *maps = figure.axes[5 * row : 5 * row + 5]
        image, (down, across) = row // 3, marked[row % 3]
        assert photo.get_title("left") == (f"image-{image}.png" if row % 3 == 0 else "")
        for axes, layer in zip(maps, (0, 2, 4, 6), strict=True):
            assert np.array_equal(shown_in(axes), found.tokens.similarity[layer][image, down, across])
            assert axes.get_title("left") == (f"block {layer + 1}" if row == 0 else "")
        for axes in (photo, *maps):
            frame = axes.patches[-1]
            assert (frame.get_x(), frame.get_y()) == (across * 16 - 0.5, down * 16 - 0.5)
            assert (frame.get_width(), frame.get_height()) == (16, 16)
        assert len({axes.images[0].get_clim() for axes in maps}) == 1


def test_layers_of_different_grids_lie_over_the_same_image(parts):
    found = resnet()
    photo, first, second, *_ = parts(found)["tokens"].axes
    assert shown_in(first).shape == (8, 12)
    assert shown_in(second).shape == (4, 6)
    assert first.images[0].get_extent() == second.images[0].get_extent() == photo.images[0].get_extent()
    assert np.array_equal(shown_in(second), found.tokens.similarity[1][0, 2, 3])


def test_tokens_all_alike_have_a_scale(parts):
    similarity = (np.ones((1, 2, 2, 2, 2)),)
    figure = parts(only("tokens", Tokens(("block 1",), similarity), images=vit(images=1).images))["tokens"]
    low, high = figure.axes[1].images[0].get_clim()
    assert low < high == 1


# Layers


def test_the_first_layer_is_at_the_bottom_left(parts):
    cka = np.random.default_rng(0).uniform(0, 1, (30, 30))
    names = tuple(f"block {number}" for number in range(1, 31))
    axes, *_ = parts(only("layers", Layers(names, names, cka, 8)))["layers"].axes
    assert np.array_equal(shown_in(axes), cka)
    assert axes.get_ylim()[0] < axes.get_ylim()[1]
    assert axes.images[0].get_clim() == (0, 1)
    assert labels(axes.xaxis) == labels(axes.yaxis) == [str(number) for number in range(1, 31, 2)]
    assert axes.get_xlabel() == "block"
    assert not axes.texts


def test_few_layers_bear_their_numbers(parts):
    axes, *_ = parts(
        only("layers", Layers(("stem", "head"), ("stem", "head"), np.array([[1, 0.25], [0.25, np.nan]]), 8))
    )["layers"].axes
    assert [text.get_text() for text in axes.texts] == ["1.00", "0.25", "0.25"]
    assert labels(axes.yaxis) == ["stem", "head"]


def test_two_models_are_named_on_their_sides(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, file, **_: figures.append(self) or file.write(b"painted"))
    layers = Layers(("block 1", "block 2"), ("a", "b", "c"), np.zeros((2, 3)), 8)
    assert draw_between(layers, tmp_path / "between.png", "the other", "the first") == tmp_path / "between.png"
    axes, *_ = figures[0].axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("layer of the other", "block of the first")
    assert (labels(axes.xaxis), labels(axes.yaxis)) == (["a", "b", "c"], ["1", "2"])


def test_long_names_are_cut_where_they_tell_least():
    assert shorten_text("runs/a/model", 12) == "runs/a/model"
    assert shorten_text("runs/a/long/model", 8) == "…g/model"
    assert shorten_text("Egyptian cat", 8, end=True) == "Egyptia…"
    assert shorten_text("two\nlines\t$", 40) == "two\\nlines\\t$"


def test_one_head_of_one_layer(parts):
    tiny = vit(
        depth=1, heads=1, grid=(1, 1), images=[ShownImage("dot", np.zeros((4, 4, 1), np.uint8), (("zero", 1.0),))]
    )
    drawn = parts(tiny)
    assert list(drawn) == ALL
    assert dots(drawn["distance"].axes[0]).tolist() == [[1, tiny.distance.pixels.item()]]
    assert shown_in(drawn["layers"].axes[0]).tolist() == [[1]]


def test_figures_for_a_phone_are_narrow_vectors(tmp_path):
    records = [
        {"kind": "train", "step": n, "loss": 1 / n, "accuracy": n / 9, "learning_rate": 0.1} for n in range(1, 9)
    ]
    found = vit(embeddings=2, depth=12, grid=(14, 14), records=tuple(records))
    wide, narrow = draw_findings(found, tmp_path / "wide"), draw_findings(found, tmp_path / "narrow", narrow=True)
    assert set(wide) - set(narrow) == {"rollout", "components", "tokens"}, "the page shows these"
    assert set(narrow) <= set(wide)
    assert {path.name for path in (tmp_path / "narrow").iterdir()} == {f"{name}.svg" for name in narrow}
    for name, path in narrow.items():
        size = [
            float(ET.parse(each).getroot().get("width").removesuffix("pt"))
            for each in (path, wide[name].with_suffix(".svg"))
        ]
        assert size[0] < 72 * NARROW + 0.01 < size[1], name
    assert draw_between(found.layers, tmp_path / "between.svg", "one", "two", narrow=True).is_file()


@pytest.mark.parametrize("metrics", [("loss",), ("loss", "accuracy")])
def test_curves_for_a_phone_stand_one_below_the_other(tmp_path, metrics, monkeypatch):
    boxes = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *given, **options: (
        save(figure, *given, **options), boxes.append([axes.get_position() for axes in figure.axes])))  # fmt: skip
    records = [{"kind": "train", "step": n, "learning_rate": 0.1, **dict.fromkeys(metrics, 0.5)} for n in range(1, 4)]
    assert draw_curves(records, tmp_path / "curves.svg", "a run", narrow=True)
    [places] = boxes
    assert len(places) == len(metrics) + 1
    for above, below in itertools.pairwise(places):
        assert above.y0 > below.y1


def test_a_photo_stays_recognisable_under_its_map():
    photo = np.zeros((8, 8, 3))
    photo[:, :4] = 1
    for heat in (np.zeros((2, 2)), np.ones((2, 2))):
        mixed = _overlay_heat(photo, heat)
        assert np.abs(mixed[:, :4] - mixed[:, 4:]).min() == pytest.approx(1 - OVERLAY)
    assert 0.3 <= OVERLAY <= 0.4
