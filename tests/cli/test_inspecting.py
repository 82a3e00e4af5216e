"""inspect as a person types it; and the page that it writes, opened in a real browser."""

from __future__ import annotations

import pytest
from pictures import make_folder

import vitrail
from browser import chromium, opened
from samples import randomise
from vitrail.inspection import inspect

SMALL = {"image_size": 16, "width": 32, "depth": 3, "num_heads": 2, "mlp_dim": 32, "num_classes": 4}
DRAWN = """all => all.map(it => ({parts: it.querySelectorAll("path, use, image").length,
                                  width: it.getBoundingClientRect().width, shown: it.checkVisibility()}))"""
CANVAS = "all => all.map(it => it.toDataURL())"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / "photos", {"cat": 3, "dog": 2})
    model = randomise(vitrail.create_model("Ti/4", seed=0, registers=2, **SMALL))
    model.labels = ["cat", "dog", "</script><img src=x onerror=alert(1)>", "$\\frac{$"]
    vitrail.save(model, tmp_path / "模型 <b>")
    return tmp_path


def test_what_is_printed_and_written(here, run):
    code, out, err = run("inspect", "模型 <b>", "--images", "photos", "--out", "模型 <b>.html", "--most", "4")
    assert (code, err) == (0, "")
    kinds = [line.partition(": ")[0] for line in out.splitlines()]
    assert kinds == ["figure"] * 7 + ["data"] * (len(kinds) - 8) + ["report"]
    for line in out.splitlines():
        assert (here / line.partition(": ")[2]).stat().st_size
    assert (here / "模型 <b>_files" / "distance.csv").exists()
    vitrail.save(vitrail.load("模型 <b>"), here / "模型 <b>")  # its folder holds nothing else, or this would be refused


@pytest.mark.slow
def test_an_old_report_leaves_nothing_behind(here, run):
    assert run("inspect", "模型 <b>", "--images", "photos", "--out", "report.html")[0] == 0
    assert (here / "report_files" / "guesses.csv").exists()
    vitrail.save(randomise(vitrail.create_model("Ti/8", **{**SMALL, "num_classes": 0, "seed": 0})), here / "other")
    assert run("inspect", "other", "--images", "photos", "--out", "report.html")[0] == 0
    assert not (here / "report_files" / "guesses.csv").exists()
    assert "guesses.csv" not in (here / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["nowhere"], 1, "there is no model 'nowhere'"),
        (["模型 <b>", "--images", "nowhere"], 1, "nowhere does not exist"),
        (["模型 <b>", "--out", "report.pdf"], 2, "ends in .html"),
        (["模型 <b>", "--out", "photos/cat/0000.png/report.html"], 2, "cannot be written"),
        (["模型 <b>", "--device", "abacus"], 2, "abacus"),
    ],
)
def test_what_cannot_be_is_one_sentence(here, run, arguments, code, sentence):
    found, _, err = run("inspect", *arguments)
    assert found == code
    assert sentence in err
    assert err.count("\n") == 1


def test_control_c_says_what_there_is(here, run, monkeypatch):
    def interrupt(*given, **others):
        raise KeyboardInterrupt

    monkeypatch.setattr(inspect, "inspect_model", interrupt)
    code, _, err = run("inspect", "模型 <b>")
    assert (code, err) == (130, "stopped: the report is not finished\n")


@pytest.mark.slow
def test_a_real_report_in_a_real_browser(here, run):
    """A Vision Transformer beside a ResNet, as they come out of the command."""
    vitrail.save(randomise(vitrail.create_model("BiT-R50x1", image_size=32, num_classes=4)), here / "bit")
    assert run("inspect", "模型 <b>", "bit", "--images", "photos", "--out", "both.html")[0] == 0
    with chromium() as window, opened(window, here / "both.html", viewport={"width": 1400, "height": 900}) as page:
        figures = page.locator("figure.drawing").evaluate_all(DRAWN)
        assert len(figures) == 6 + 3 + 1, "ours, the ResNet's filters, tokens and layers, and both together"
        assert all(figure["parts"] > 5 for figure in figures)
        assert all(figure["width"] > 200 for figure in figures if figure["shown"])
        attention = page.locator('[data-instrument="attention"]')
        assert attention.count() == 1
        before = attention.locator(".stage > canvas").evaluate_all(CANVAS)
        attention.get_by_label("one layer").check()
        attention.get_by_label("Layer", exact=True).fill("0")
        attention.get_by_label("Head").select_option(index=2)
        assert attention.locator(".stage > canvas").evaluate_all(CANVAS) != before
        assert "register" in attention.inner_text()
        assert page.locator("p.absent").count() >= 3, "what a ResNet does not have"
        assert "alert(1)" in page.inner_text("body"), "a label is text"
