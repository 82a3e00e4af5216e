"""The report as a file: what it says, what it carries, and that nothing it was given can break out of it."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import json
import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

import made_up
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitrail.inspection.findings import Absent, Attention, Distance, Neighbours, ShownImage
from vitrail.inspection.page.inline import embed_drawing, encode_json, encode_picture, escape_text
from vitrail.inspection.page.report import TASK_SECTIONS, write_report
from vitrail.inspection.page.words import TITLES
from vitrail.system.figures import new_figure, set_title

HOSTILE = "</script><img src=x onerror=alert(1)>\"'&amp;<!--"


def written(folder: Path, *findings, **others) -> str:
    figures = [made_up.made_figures(each, folder / f"model-{number}") for number, each in enumerate(findings)]
    return write_report(findings, figures, folder / "report.html", **others).read_text("utf-8")


class Structure(HTMLParser):
    """Elements with their attributes, and the words outside of scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self._silent = False
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self._silent = tag in ("script", "style")

    def handle_endtag(self, tag):
        self._silent = False

    def handle_data(self, data):
        self.words += "" if self._silent else data

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def data_of(page: str):
    return json.loads(re.search(r'id="findings">(.*?)</script>', page, re.DOTALL).group(1))


def drawings_of(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    return written(tmp_path_factory.mktemp("full"), made_up.vit(embeddings=2))


def test_sections_stand_in_their_order(full):
    headings = re.findall(r"<h2[^>]*>(.*?)</h2>", full)
    assert headings == [title for name, title in TITLES.items() if name not in TASK_SECTIONS]
    contents = re.search(r"<nav.*?</nav>", full).group()
    assert re.findall(r'href="#(.*?)"', contents) == [part["id"] for part in Structure(full).of("section")]


def test_there_is_a_title_a_card_and_the_numbers_in_words(full):
    words = Structure(full).words
    assert "Inside vit" in words
    assert "12 layers, width 192" in words
    assert "Trained on nothing." in words
    assert "128 images that are made up" in words
    assert "mean similarity of 0.81, all others of −0.05" in words
    assert "9,999 times, p = 0.0001: they tell neighbours from others" in words
    assert "6 components of the patch embedding 2 hold 84% of the variance." in words
    assert "Averaged over 128 images of 96×64 pixels." in words


@pytest.mark.parametrize(
    ("test", "told"),
    [(None, "too few to test"), (Neighbours(0.1, 0.1, 0.43, 99), "99 times, p = 0.43: that can be chance.")],
)
def test_neighbours_that_are_not_alike(tmp_path, test, told):
    positions = dataclasses.replace(made_up.made_positions((4, 6)), neighbours=test)
    assert told in Structure(written(tmp_path, made_up.vit(positions=positions))).words


@pytest.mark.parametrize(
    ("pixels", "told"),
    [
        ([[1.4, 7.6], [30, 40]], "The heads of the first layer reach 1 to 8 pixels, those of the last 30 to 40."),
        ([[5, np.nan]], "The heads of the first layer reach 5 pixels."),
        ([[np.nan, np.nan], [1, 2]], "of 96×64 pixels."),
    ],
)
def test_how_far_heads_reach(tmp_path, pixels, told):
    distance = Distance(tuple("12"[: len(pixels)]), np.array(pixels), (64, 96), 1)
    words = Structure(written(tmp_path, made_up.vit(distance=distance))).words
    assert f"Averaged over 1 image of 96×64 pixels.{' ' + told if told.startswith('The') else ''}" in words
    assert told in words
    assert "nan" not in words


def test_the_same_findings_give_the_same_bytes(tmp_path, full):
    assert written(tmp_path, made_up.vit(embeddings=2)) == full


def test_only_its_own_script_may_run_and_nothing_may_be_fetched(full):
    [policy] = [meta["content"] for meta in Structure(full).of("meta") if "http-equiv" in meta]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    [code] = re.findall(r"<script>(.*?)</script>", full, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    assert rules["script-src"] == f"'sha256-{digest}'"
    assert (rules["default-src"], rules["img-src"]) == ("'none'", "data:")


def test_everything_it_shows_is_inside(full):
    structure = Structure(full)
    sources = [value for _, attributes in structure.elements for name, value in attributes.items()
               if name in ("src", "href", "xlink:href", "srcset", "action")]  # fmt: skip
    assert sources
    for source in sources:
        assert source.startswith(("#", "data:")) or not urlsplit(source).scheme
    assert "@import" not in full
    assert not re.search(r"url\((?!#)", full)


def test_absent_parts_say_why_under_their_heading(tmp_path):
    page = written(tmp_path, made_up.nothing(), made_up.resnet())
    assert page.count('<p class="absent">Nothing of the kind is in it.</p>') == 7
    assert re.search(r'id="positions".*?A ResNet has no position embeddings\.', page, re.DOTALL)
    alone = written(tmp_path / "alone", made_up.vit(tokens=Absent("timm's network has none")))
    assert '<p class="absent">timm\'s network has none.</p>' in html.unescape(alone).replace("&#x27;", "'")


def test_without_curves_there_is_no_section_on_training(tmp_path):
    assert 'id="curves"' not in written(tmp_path, made_up.resnet())
    both = written(tmp_path / "both", made_up.resnet(), made_up.vit())
    assert "No record of a training is kept with these weights." in both


def test_a_model_without_attention_still_shows_its_guesses(tmp_path):
    structure = Structure(written(tmp_path, made_up.resnet()))
    assert "disc 0" in structure.words
    assert "60.0%" in structure.words
    assert len(structure.of("img")) == 2


def test_models_have_columns_with_their_names(tmp_path):
    page = written(tmp_path, made_up.vit("one"), made_up.resnet("two"), made_up.vit("three"))
    sections = re.findall(r"<section.*?</section>", page, re.DOTALL)
    for section in sections:
        assert re.findall(r"<h3[^>]*>(.*?)</h3>", section) == ["one", "two", "three"]
    assert "Inside one beside two beside three" in Structure(page).words
    assert "--models: 3" in page


def test_layers_of_two_models_against_each_other(tmp_path):
    pair = made_up.vit("one"), made_up.resnet("two")
    between = made_up.made_layers(("block 1",), ("stage 1", "stage 2"))
    (tmp_path / "files").mkdir()
    figure = made_up.made_figure(tmp_path / "files" / "between.png")
    page = written(tmp_path, *pair, between=between, between_figure=figure)
    section = re.search(r'<section id="layers".*?</section>', page, re.DOTALL).group()
    assert "one against two" in Structure(section).words
    assert len(drawings_of(section)) == 3
    assert 'href="files/between.svg"' in page
    refused = written(tmp_path / "refused", *pair, between=Absent("there are 3 images, and it takes 4"))
    assert "There are 3 images, and it takes 4." in Structure(refused).words


def test_links_lead_to_every_file(tmp_path):
    findings = made_up.vit(embeddings=2)
    folder = tmp_path / "figures of #1 & 100%?"
    figures = made_up.made_figures(findings, folder)
    for extra in ("distance.csv", "neighbours.csv", "guesses.csv", "unrelated.csv"):
        (folder / extra).write_text("layer,head,pixels\n")
    page = write_report([findings], [figures], tmp_path / "out" / "report.html").read_text("utf-8")
    section = re.search(r'<section id="files".*?</section>', page, re.DOTALL).group()
    links = [attributes["href"] for attributes in Structure(section).of("a")]
    found = {(tmp_path / "out" / unquote(urlsplit(link).path)).resolve() for link in links}
    assert found == {path for path in folder.iterdir() if path.name != "unrelated.csv"}
    assert len(links) == len(found)


def test_a_relative_path_serves_as_well(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    figures = made_up.made_figures(made_up.vit(), Path("figures"))
    page = write_report([made_up.vit()], [figures], Path("report.html")).read_text("utf-8")
    assert 'href="figures/distance.npz"' in page


def saying(words: str) -> made_up.Findings:
    """A model whose every name, label and text is this."""
    plain = made_up.vit()
    shown = [dataclasses.replace(image, name=words, guesses=((words, 0.5),)) for image in plain.images]
    attention = dataclasses.replace(plain.attention, prefix=(words, words), reads=words)
    tokens = dataclasses.replace(plain.tokens, layers=(words,) * 3)
    photo = dataclasses.replace(plain.scores.mistakes[0], name=words, label=words, guess=words)
    scored = made_up.made_report(((2, 1), (1, 2)), (words, f"{words} "), was_trained_on=True)
    return made_up.vit(
        words,
        scores=made_up.made_scores(scored, remark=words, mistakes=(photo,), doubtful=(photo,), all_doubtful=1),
        facts=((words, words),),
        card=words,
        images=shown,
        images_from=words,
        measured_on=words,
        attention=attention,
        tokens=tokens,
        positions=Absent(words),
        filters=(dataclasses.replace(plain.filters[0], of=words),),
    )


def test_nothing_breaks_out(tmp_path):
    harmless = Structure(written(tmp_path / "harmless", saying("Harmless"), made_up.resnet()))
    structure = Structure(written(tmp_path, saying(HOSTILE), made_up.resnet()))
    assert [tag for tag, _ in structure.elements] == [tag for tag, _ in harmless.elements]
    assert not any(name.startswith("on") for _, attributes in structure.elements for name in attributes)
    assert structure.words.count(HOSTILE) == harmless.words.count("Harmless") > 10
    carried = data_of((tmp_path / "report.html").read_text("utf-8"))
    assert carried[0]["images"][0]["name"] == carried[0]["attention"]["reads"] == HOSTILE


@given(st.text())
def test_any_words_survive(words):
    assert html.unescape(escape_text(words)) == words or "&" in words or "\0" in words or "\r" in words
    assert not set("<>\"'") & set(escape_text(words))
    carried = encode_json({"words": words})
    assert json.loads(carried) == {"words": words}
    assert not set("<>&\u2028\u2029") & set(carried)


def test_names_of_files_in_no_encoding(tmp_path):
    name = os.fsdecode(b"caf\xe9") if sys.platform != "win32" else "caf\udce9"
    page = written(tmp_path, made_up.vit(name, images=[dataclasses.replace(made_up.vit().images[0], name=name)]))
    assert "Inside caf?" in page


def unpacked(base64_text: str, *shape: int) -> np.ndarray:
    return np.frombuffer(base64.b64decode(base64_text), np.uint8).reshape(shape).astype(np.float64)


def test_maps_are_carried_to_within_half_a_step(tmp_path):
    findings = made_up.vit(images=2, depth=3, heads=2, grid=(4, 6))
    [carried] = data_of(written(tmp_path, findings))
    for name, maps, prefix in (
        ("rollout", findings.attention.rollout, findings.attention.rollout_prefix),
        ("heads", findings.attention.heads, findings.attention.heads_prefix),
    ):
        part = carried["attention"][name]
        peaks = np.array(part["peaks"])
        np.testing.assert_allclose(peaks, maps.max(axis=(-2, -1)), rtol=1e-3)
        values = unpacked(part["maps"], *maps.shape) / 255 * peaks[..., None, None]
        np.testing.assert_allclose(values, maps, atol=maps.max() * 0.003)
        np.testing.assert_allclose(part["prefix"], prefix, rtol=1e-3)
    for layer, similarity in zip(carried["tokens"]["maps"], findings.tokens.similarity, strict=True):
        lows = np.array(layer["lows"])[:, None, None, None, None]
        values = lows + unpacked(layer["maps"], *similarity.shape) / 255 * (1 - lows)
        np.testing.assert_allclose(values, similarity, atol=0.005)
        assert (layer["rows"], layer["columns"]) == (4, 6)


def test_maps_of_nothing_and_of_no_numbers(tmp_path):
    grid, prefix = (1, 1, 2, 2), np.array([[[np.nan]]])
    attention = Attention(("1",), np.full(grid, np.nan), prefix, np.zeros((1, 1, 1, 2, 2)), prefix[None], ("r",), "it")
    alike = made_up.Tokens(("block 1",), (np.ones((1, 2, 2, 2, 2)),))
    image = ShownImage("grey", np.zeros((8, 8, 1), np.uint8), (("nan", float("nan")),))
    [carried] = data_of(written(tmp_path, made_up.vit(images=[image], attention=attention, tokens=alike)))
    assert carried["attention"]["rollout"]["peaks"] == [[0]]
    assert carried["attention"]["rollout"]["prefix"] == [[[None]]]
    assert not unpacked(carried["attention"]["heads"]["maps"], -1).any()
    assert carried["tokens"]["maps"][0]["lows"] == [1]
    assert carried["images"][0]["guesses"] == [["nan", None]]


def test_small_pictures_stay_exact_and_photographs_are_small():
    small = np.arange(27, dtype=np.uint8).reshape(3, 3, 3)
    assert encode_picture(small).startswith("data:image/png;base64,")
    assert encode_picture(small[..., :1]).startswith("data:image/png;base64,")
    large = made_up.made_images(1, (128, 96))[0].pixels
    assert encode_picture(large).startswith("data:image/jpeg;base64,")


def test_ids_of_drawings_do_not_meet(full):
    drawings = drawings_of(full)
    assert len(drawings) == 8
    ids = [part.get("id") for each in drawings for part in each.iter() if part.get("id")]
    assert len(ids) == len(set(ids)) > 0
    for each in drawings:
        own = {part.get("id") for part in each.iter()}
        wanted = re.findall(r"(?:url\(|\"| href=\")#([^)\"]+)", ElementTree.tostring(each, encoding="unicode"))
        assert wanted
        assert set(wanted) <= own


def test_drawings_take_their_colours_from_the_page(full):
    styles = [part.get("style", "") for each in drawings_of(full) for part in each.iter()]
    for name in ("ink", "faint", "grid", "edge", "paper", "blue"):
        assert any(f"var(--{name})" in style for style in styles), name
    for colour in ("#333333", "#666666", "#e6e6e6", "#bbbbbb", "#0072b2"):
        assert not any(colour in style for style in styles), colour
    style = Structure(full).elements
    assert "style" not in [tag for tag, _ in style][[tag for tag, _ in style].index("body") :]
    assert "DOCTYPE svg" not in full


@pytest.mark.parametrize("title", ["A title y", "モデル y 模型", "$x", "a\nb\0"])
def test_a_drawing_loses_its_title_and_nothing_else(tmp_path, title):
    for name, words in (("without", None), ("with", title)):
        with new_figure(tmp_path / f"{name}.png", 4, 3) as figure:
            axes = figure.add_subplot()
            axes.plot([0, 1], [0, 1])
            axes.set(xticks=[0, 1], yticks=[0, 1])
            axes.set_title("A title y", fontweight="bold")  # the same letters: their outlines are still wanted
            figure.supxlabel("below")
            if words:
                set_title(figure, words)
    plain, titled = (
        ElementTree.fromstring(embed_drawing(tmp_path / f"{name}.png", name, "")) for name in ("without", "with")
    )
    letters = [sum(part.tag.endswith("use") for part in each.iter()) for each in (plain, titled)]
    assert letters[0] == letters[1]
    assert plain.get("viewBox") == "0 0 288 216"
    _, top, width, height = map(float, titled.get("viewBox").split())
    assert 15 < top < 40
    assert (width, top + height) == (288, pytest.approx(216))
    for part in titled.iter("{*}g"):  # what is left lies below the cut
        if (place := re.match(r"translate\(\S+ (\S+)\)", part.get("transform", ""))) and part.findall("{*}use"):
            assert float(place.group(1)) > top


def test_a_drawing_that_is_too_large_is_carried_as_pixels(tmp_path):
    path = made_up.made_figure(tmp_path / "large.png")
    assert embed_drawing(path, "a", "words").startswith("<svg")
    vector = path.with_suffix(".svg")
    vector.write_bytes(vector.read_bytes() + b"<!--" + b" " * 1_500_000 + b"-->")
    carried = embed_drawing(path, "a", 'with "words"')
    assert carried == (
        f'<img src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}" alt="with &quot;words&quot;">'
    )
    vector.unlink()
    assert embed_drawing(path, "a", 'with "words"') == carried


def test_white_that_is_no_background_stays(tmp_path):
    with new_figure(tmp_path / "white.png", 4, 3) as figure:
        axes = figure.add_subplot()
        axes.plot([0, 1], [0, 1], color="white")
        axes.text(0, 0, "white", color="white")
    carried = embed_drawing(tmp_path / "white.png", "a", "")
    assert carried.count("fill: var(--paper)") == 2  # the figure's and the axes'
    assert "fill: #ffffff" in carried
    assert "stroke: #ffffff" in carried
