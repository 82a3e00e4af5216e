"""calibrate: what is fitted, where it is stored, what is refused."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from calibrated import CLASSES, calibrate_once, calibrated_model, draw_noise, draw_plain, make_model
from task_models import make_task_model
from vitrail.data.sources.source import compute_fingerprint
from vitrail.errors import ConfigError, DataError, WeightsError
from vitrail.evaluation.calibrate import open_unlike
from vitrail.evaluation.reliability import fit_reliability, list_scores
from vitrail.inference.engine import open_engine
from vitrail.inference.predictor import Predictor
from vitrail.model.create import share_model
from vitrail.reliability.sets import LabelSets
from vitrail.reliability.unknown import SCORE_KINDS, UnknownScore


def quiet(kind: str, values: dict[str, object]) -> None:
    """Hear nothing."""


def fit(model, data, **options):
    return vitrail.calibrate(model, data, device="cpu", on_event=quiet, **options)


def test_sets_are_those_of_the_probabilities_that_predict_gives():
    result = calibrate_once()
    pairs = draw_noise(1000)
    probabilities = Predictor(make_model(), device="cpu").probabilities([image for image, _ in pairs])
    right = np.array([[label == name for name in CLASSES] for _, label in pairs])
    expected = LabelSets.fit(probabilities, right)
    np.testing.assert_allclose(result.reliability.sets.beliefs.values, expected.beliefs.values, atol=1e-6)
    assert (result.images, result.score, result.folder) == (1000, "neighbours", None)
    assert result.reliability.data == "a list of 1,000 images"
    assert [check.coverage for check in result.checks] == [0.9, 0.95, 0.99]
    assert "sets at 95%" in repr(result)


def test_predictor_gives_sets_and_knows_what_it_knows():
    predictor = Predictor(calibrated_model(), device="cpu")
    new = [image for image, _ in draw_noise(300, seed=5)]
    sets = predictor.sets(new, coverage=0.9)
    threshold = predictor.engine.reliability.sets.find_threshold(0.9)
    for ranked, row in zip(sets, predictor.probabilities(new), strict=True):
        inside = [(CLASSES[k], float(row[k])) for k in np.argsort(-row, kind="stable") if row[k] >= threshold]
        assert ranked == (inside or [(CLASSES[int(row.argmax())], float(row.max()))])
    assert predictor.sets(new[0], coverage=0.9) == sets[0]
    assert {len(each) for each in predictor.sets(new, coverage=0.9999)} == {3}
    known = predictor.unknown(new)
    assert np.mean([each.is_unknown for each in known]) < 0.15
    assert predictor.unknown(new[0]).share == known[0].share
    assert predictor.unknown(np.zeros((16, 16, 3), np.uint8)).is_unknown
    (both,) = predictor.stream([new[0]], probabilities=False, familiarity=True)
    assert (both.values, both.embedding) == (None, None)
    assert both.familiarity.share == known[0].share


def test_unlike_images_choose_the_score():
    result = calibrate_once(unlike=True)
    assert set(result.aurocs) == set(SCORE_KINDS)
    assert result.score == max(result.aurocs, key=lambda kind: result.aurocs[kind])
    engine = open_engine(make_model(), device="cpu")
    pixels = torch.stack([torch.from_numpy(image).permute(2, 0, 1) for image, _ in draw_plain(60)])
    output = engine.compute(pixels, embeddings=True)
    unknown = result.reliability.unknown
    strange = unknown.measure(output.logits.numpy(), output.embeddings.numpy())
    pairs = [(other > one) + (other == one) / 2 for one in unknown.known.values for other in strange]
    assert result.aurocs[result.score] == pytest.approx(np.mean(pairs), abs=0.01)


def test_labels_of_a_column_with_another_name(tmp_path):
    rows = ["image,kind,id"]
    for place, (image, label) in enumerate(draw_noise(1000)):
        Image.fromarray(image).save(tmp_path / f"{place}.png")
        rows.append(f"{place}.png,{label},x{place}")
    (tmp_path / "rows.csv").write_text("\n".join(rows))
    found = fit(make_model(), tmp_path / "rows.csv", labels="kind").reliability
    assert found.sets == calibrate_once().reliability.sets
    with pytest.raises(DataError, match=r"say which to learn, .*--labels kind"):
        fit(make_model(), tmp_path / "rows.csv")


def test_a_folder_keeps_its_files_and_gets_one_more(tmp_path):
    folder = vitrail.save(make_model(), tmp_path / "model", notes="Trained at home.")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    result = fit(folder, draw_noise(1000))
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(after) == {*before, "reliability.json"}
    assert all(after[name] == content for name, content in before.items() if name != "SHA256SUMS")
    digest = hashlib.sha256(after["reliability.json"]).hexdigest()
    assert f"{digest}  reliability.json" in after["SHA256SUMS"].decode()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    loaded = vitrail.load(folder)
    assert loaded.reliability == result.reliability
    fit(folder, draw_noise(120), sets=False)  # again, in place of the first
    assert vitrail.load(folder).reliability.sets is None


def test_a_record_is_a_part_of_the_weights(tmp_path):
    model = calibrated_model()
    assert model.reliability == calibrate_once().reliability
    folder = vitrail.save(model, tmp_path / "model")
    again = vitrail.save(vitrail.load(folder), tmp_path / "again")
    assert (again / "reliability.json").read_bytes() == (folder / "reliability.json").read_bytes()
    vitrail.save(vitrail.load(again), again)  # over itself
    assert vitrail.load(again).reliability == model.reliability


def test_a_conversion_says_what_it_loses(tmp_path):
    native, timm = (vitrail.convert(calibrated_model(), tmp_path / to, to, on_event=quiet) for to in ("native", "timm"))
    assert not any("vitrail calibrate" in note for note in native.notes)
    assert any("vitrail calibrate" in note for note in timm.notes)
    assert vitrail.load(native.folder).reliability == calibrate_once().reliability
    assert vitrail.load(timm.folder).reliability is None


@pytest.mark.parametrize("change", ["resize", "replace_head", "give_task"])
def test_what_no_longer_holds_is_dropped(change):
    model = calibrated_model()
    if change == "resize":
        assert model.resize(16).reliability is not None
        model.resize(24)
    elif change == "replace_head":
        model.replace_head(3, CLASSES)
    else:
        model.give_task(make_task_model("tags").task)
    assert model.reliability is None


def damage(folder, name, content):
    (folder / name).write_text(content)


@pytest.mark.parametrize("name", ["changed", "missing", "no object", "other width"])
def test_damaged_records_are_refused(tmp_path, name):
    folder = vitrail.save(calibrated_model(), tmp_path / "model")
    path = folder / "reliability.json"
    values = json.loads(path.read_text())
    if name == "missing":
        path.unlink()
    elif name == "changed":
        values["images"] += 1
        path.write_text(json.dumps(values))
    elif name == "no object":
        path.write_text("[1]")
    else:
        narrow = np.random.default_rng(0).normal(size=(100, 5)).astype(np.float32)
        model = calibrated_model()
        unknown = UnknownScore.fit("neighbours", None, narrow)
        model.reliability = model.reliability.model_copy(update={"unknown": unknown})
        predictor = Predictor(vitrail.load(vitrail.save(model, tmp_path / "narrow")), device="cpu")
        with pytest.raises(WeightsError, match="5: `vitrail calibrate` makes new ones"):
            predictor.unknown(draw_noise(1)[0][0])
        return
    with pytest.raises(WeightsError, match=r"reliability\.json"):
        vitrail.load(folder)


def test_too_few_images_are_refused_with_what_to_do():
    with pytest.raises(
        DataError, match=r"at least 1,000 images that chose nothing, and a list of 999 images has 999.*--no-sets"
    ):
        fit(make_model(), draw_noise(999))
    with pytest.raises(DataError, match="at least 100 images that chose nothing, and a list of 99 images has 99"):
        fit(make_model(), draw_noise(99), sets=False)
    result = fit(make_model(), draw_noise(100), sets=False)
    assert (result.reliability.sets, result.checks) == (None, ())


def test_unreadable_images_do_not_count():
    pairs = [*draw_noise(999), (b"no image", "red")]
    with pytest.raises(DataError, match="the readable part of a list of 1,000 images has 999"):
        fit(make_model(), pairs)


def test_images_of_the_training_are_refused():
    pairs, model = draw_noise(1000), make_model()
    model.learned_from = compute_fingerprint(vitrail.open_data(pairs))
    with pytest.raises(ConfigError, match="has learned from a list of 1,000 images"):
        fit(model, pairs)


def test_images_that_chose_the_weights_are_refused(tmp_path):
    data = tmp_path / "photos"
    for split, count in (("train", 6), ("val", 60)):
        for name in ("black", "white"):
            (data / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = np.full((16, 16, 3), 2 * number + 100 * (name == "white"), np.uint8)
                Image.fromarray(pixels).save(data / split / name / f"{split}-{number}.png")
    short = {"schedule.steps": 2, "schedule.warmup_steps": 0, "run.report": False, "model.image_size": 16}
    model = vitrail.finetune(data, make_model(), folder=tmp_path / "run", settings=short).model
    assert model.chosen_by == compute_fingerprint(vitrail.open_data(data, "val"))
    for trained in (model, vitrail.load(tmp_path / "run"), share_model(model)):
        with pytest.raises(ConfigError, match=r"the split val of .* chose the best weights"):
            vitrail.calibrate(trained, data, sets=False)
    others = [(image, "white") for image, _ in draw_noise(110)]
    assert vitrail.calibrate(model, others, sets=False).images == 110


def test_where_nothing_can_be_written_a_folder_is_asked_for(tmp_path):
    with pytest.raises(ConfigError, match="pane is not in a folder of vitrail's own format: give a new folder"):
        fit("pane", draw_noise(1000))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").touch()
    with pytest.raises(ConfigError, match="is there already"):
        fit(make_model(), draw_noise(1000), out=tmp_path / "full")
    result = fit(make_model(), draw_noise(120), sets=False, out=tmp_path / "new")
    assert vitrail.load(result.folder).reliability == result.reliability
    with pytest.raises(ConfigError, match=r"exported file: calibrate the model"):
        fit("model.onnx", draw_noise(1000))


def test_other_tasks_have_a_score_and_no_sets():
    model = make_task_model("tags")
    engine = open_engine(model, device="cpu")
    assert list_scores(engine) == ("neighbours",)
    result = fit(model, draw_noise(120))
    assert (result.score, result.reliability.sets) == ("neighbours", None)
    predictor = Predictor(result.model, device="cpu")
    (familiarity,) = predictor.unknown([np.zeros((16, 16, 3), np.uint8)])
    assert familiarity == result.reliability.unknown.judge(familiarity.score)
    with pytest.raises(ConfigError, match="for models that give one label of several"):
        predictor.sets(np.zeros((16, 16, 3), np.uint8))


def test_unlike_images_need_no_classes(tmp_path):
    for number, (image, _) in enumerate(draw_plain(3)):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
    assert len(open_unlike(tmp_path)) == 3
    with pytest.raises(DataError, match="nowhere"):
        open_unlike("nowhere")


def test_fitting_by_itself_gives_nothing_for_few_images():
    source = vitrail.open_data(draw_noise(99))
    assert fit_reliability(open_engine(make_model(), device="cpu"), source) is None


def test_an_image_that_is_listed_again_says_nothing_new(tmp_path):
    pairs = draw_noise(120)
    for number, (pixels, _) in enumerate(pairs):
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    rows = [f"{number % 120}.png,{pairs[number % 120][1]}" for number in range(1200)]
    (tmp_path / "rows.csv").write_text("\n".join(["image,label", *rows]))
    with pytest.raises(DataError, match=r"rows.csv has 120: give more, or fit only the score .*--no-sets"):
        fit(make_model(), tmp_path / "rows.csv", out=tmp_path / "model")
    assert fit(make_model(), tmp_path / "rows.csv", sets=False, out=tmp_path / "model").images == 120


def test_no_advice_is_given_that_would_be_refused():
    with pytest.raises(DataError, match=r"has 99: give more$"):
        fit(make_model(), draw_noise(99))


def test_labels_stand_in_a_column_of_any_name(tmp_path):
    """As `finetune` reads them."""
    pairs = draw_noise(130)
    for number, (pixels, _) in enumerate(pairs):
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    rows = [f"{number}.png,{label}" for number, (_, label) in enumerate(pairs)]
    reports = []
    for column in ("label", "colour"):
        (tmp_path / "rows.csv").write_text("\n".join([f"image,{column}", *rows]))
        reports.append(vitrail.evaluate(make_model(), tmp_path / "rows.csv", device="cpu", on_event=quiet))
        assert fit(make_model(), tmp_path / "rows.csv", sets=False, out=tmp_path / column).images == 130
    assert reports[0].top1 == reports[1].top1
    assert reports[1].images == 130
