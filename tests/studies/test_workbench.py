"""The workbench: its scores are those of the verbs, and a training that two arms need is done once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from vitrail.data.open import open_data
from vitrail.errors import ConfigError, DataError
from vitrail.studies.object_masks import make_centre_prior, measure_object_share, read_object_masks
from vitrail.studies.position_tables import get_patch_rows, replace_positions
from vitrail.studies.scales import TINY
from vitrail.studies.study_data import StudyData, TransferSet, choose_data, choose_test_images, cut_square
from vitrail.studies.workbench import Workbench
from vitrail.system.events import ignore_event

pytestmark = pytest.mark.slow  # whole trainings

QUICK = {"schedule.steps": 10, "schedule.warmup_steps": 1}


@pytest.fixture(scope="module")
def digits():
    needs = {"data", "transfer"}
    return choose_data(TINY, needs, None, (), None).load(needs, ignore_event)


@pytest.fixture
def workbench(digits, tmp_path):
    return Workbench(TINY, 0, digits, tmp_path, device="cpu")


class TestTraining:
    def test_the_same_training_is_done_once(self, workbench):
        first = workbench.pretrain(QUICK)
        spent = workbench.seconds
        again = workbench.pretrain(QUICK)
        assert workbench.seconds == spent > 0
        assert again.weights == first.weights
        assert again.validation == first.validation
        assert again.flops == first.flops

    def test_another_seed_or_setting_is_another_training(self, digits, workbench, tmp_path):
        first = workbench.pretrain(QUICK)
        assert workbench.pretrain({**QUICK, "model.depth": 1}).weights != first.weights
        other = Workbench(TINY, 1, digits, tmp_path, device="cpu").pretrain(QUICK)
        assert other.weights != first.weights

    def test_a_share_of_the_data_is_another_training(self, workbench):
        first = workbench.pretrain(QUICK)
        some = workbench.pretrain({**QUICK, "data.share": 0.1})
        assert some.weights != first.weights

    def test_finetuning_starts_from_the_weights(self, workbench):
        start = workbench.pretrain(QUICK)
        tuned = workbench.finetune(start, {**QUICK, "optimizer.learning_rate": 1e-9})
        before, after = (
            torch.cat([each.flatten() for each in part.model.encoder.parameters()]) for part in (start, tuned)
        )
        assert torch.allclose(before, after, atol=1e-6)
        assert tuned.flops == pytest.approx(start.flops, rel=0.1)  # its own, without those of the start

    def test_a_whole_model_takes_the_place_of_the_scales(self, workbench):
        bit = workbench.pretrain({"model": dict(TINY.models["BiT"]), **QUICK})
        assert isinstance(bit.model, vitrail.BitResNet)

    @pytest.mark.parametrize("change", [{"run.precision": "bf16"}, {"run.evaluate_every": 3}])
    def test_what_changes_a_training_under_run_makes_another(self, workbench, change, monkeypatch):
        seen = []
        monkeypatch.setattr("vitrail.studies.workbench.run_training", lambda config, **_: seen.append(config) or 1 / 0)
        for settings in (QUICK, {**QUICK, **change}):
            with pytest.raises(ZeroDivisionError):
                workbench.pretrain(settings)
        assert seen[0].run.folder != seen[1].run.folder

    def test_operations_are_counted(self, workbench):
        trained = workbench.pretrain(QUICK)
        from vitrail.model.cost import compute_cost

        images = 10 * TINY.pretraining["data"]["batch_size"]
        assert trained.flops == 3 * compute_cost(trained.model.architecture).flops * images


class TestScores:
    def test_few_shot_accuracy_is_that_of_the_verb(self, digits, tmp_path):
        model = vitrail.create_model(**TINY.pretraining["model"], num_classes=0, seed=3)
        target = digits.transfer[0]
        scale = TINY
        found = Workbench(scale, 0, digits, tmp_path, device="cpu").score_fewshot(model)
        test = choose_test_images(target.test, scale.test_images)
        data = {"train": _pairs(target.train), "test": _pairs(test)}
        report = vitrail.fewshot(
            model, data, shots=[scale.shots], methods=["least-squares"], cache=None, on_event=ignore_event
        )
        assert found == pytest.approx(100 * report.summaries()[0].accuracy, abs=1e-6)

    def test_the_mean_over_data_sets(self, digits, tmp_path):
        model = vitrail.create_model(**TINY.pretraining["model"], num_classes=0, seed=3)
        target = digits.transfer[0]
        half = TransferSet("half", target.train, choose_test_images(target.test, 100))
        workbench = Workbench(TINY, 0, StudyData(None, (target, half)), tmp_path, device="cpu")
        each = [workbench.score_fewshot_on(model, one) for one in (target, half)]
        assert each[0] != each[1]
        assert workbench.score_fewshot(model) == pytest.approx(sum(each) / 2)

    def test_accuracy_on_test_images_is_that_of_the_verb(self, workbench):
        tuned = workbench.finetune(workbench.pretrain(QUICK), QUICK)
        test = workbench.data.transfer[0].test
        report = vitrail.evaluate(tuned.model, _pairs(test), device="cpu", on_event=ignore_event)
        assert workbench.score_test(tuned.model) == pytest.approx(100 * float(report.accuracy), abs=1e-9)


def _pairs(source):
    return [(sample.content, sample.label) for sample in map(source.read, range(len(source)))]


class TestImages:
    def test_squares(self):
        wide = torch.arange(3 * 40 * 60, dtype=torch.int64).remainder(255).to(torch.uint8).view(3, 40, 60)
        assert cut_square(wide, 20).shape == (3, 20, 20)
        assert cut_square(wide[:, :, :40], 64) is not None
        small = torch.zeros(3, 32, 32, dtype=torch.uint8)
        assert cut_square(small, 64) is small
        middle = torch.zeros(1, 20, 60, dtype=torch.uint8)
        middle[:, :, 20:40] = 200
        assert (cut_square(middle, 20) == 200).all()

    def test_test_images_are_few_and_the_same(self, digits):
        test = digits.transfer[0].test
        first, again = (choose_test_images(test, 50) for _ in range(2))
        assert 40 <= len(first) <= 60
        assert list(first.indices) == list(again.indices)
        assert choose_test_images(test, 10**6) is test


class TestPositionTables:
    def make(self):
        return vitrail.create_model("Ti/4", image_size=16, width=32, depth=1, num_heads=2, mlp_dim=32, seed=0)

    def test_old_rows_in_their_order(self):
        old = get_patch_rows(self.make()).clone()
        model = replace_positions(self.make(), 24, keeps_order=True, seed=0)
        rows = get_patch_rows(model)
        assert len(old) == 16
        assert len(rows) == 36
        assert torch.equal(rows[:16], old)

    def test_a_fresh_table(self):
        model, resized = self.make(), self.make().resize(24)
        fresh = get_patch_rows(replace_positions(model, 24, keeps_order=False, seed=0))
        assert not torch.allclose(fresh[:16], get_patch_rows(self.make()))
        assert not torch.allclose(fresh, get_patch_rows(resized))
        assert float(fresh.detach().std()) == pytest.approx(0.02, rel=0.2)
        assert torch.equal(model.class_token, self.make().class_token)


class TestFocus:
    def test_a_map_on_the_object_alone(self):
        masks = np.zeros((1, 2, 2, 2))
        masks[0, 0, 0, 0] = masks[0, 1, 1, 1] = 1
        on, off = np.zeros((1, 2, 2)), np.ones((1, 2, 2))
        on[0, 0, 0] = 5
        assert measure_object_share(on, masks) == 1
        assert measure_object_share(off, masks) == 0.5

    def test_images_without_object_or_background_do_not_count(self):
        masks = np.zeros((3, 2, 1, 2))
        masks[0, 0, 0, 0] = masks[0, 1, 0, 1] = 1
        masks[1, 0] = masks[2, 1] = 1
        maps = np.tile(np.array([[3.0, 1.0]]), (3, 1, 1))
        assert measure_object_share(maps, masks) == 0.75

    def test_the_centre_is_brightest(self):
        prior = make_centre_prior((4, 4), 2)
        assert prior.shape == (2, 4, 4)
        assert prior[0, 1:3, 1:3].min() > prior[0, 0].max()
        assert np.allclose(prior, prior[:, ::-1, ::-1])

    def test_trimaps_are_read_and_cut_like_images(self, tmp_path):
        folder, masks = tmp_path / "images", tmp_path / "masks"
        for place in (folder / "a", masks):
            place.mkdir(parents=True)
        Image.new("RGB", (60, 20)).save(folder / "a/one.png")
        trimap = np.full((20, 60), 2, np.uint8)
        trimap[:, 20:30] = 1
        trimap[:, 30:35] = 3
        Image.fromarray(trimap).save(masks / "one.png")
        source = open_data(str(folder))
        found = read_object_masks(StudyData(None, (), masks), source, (1, 2), 20)
        assert found[0, 0, 0].tolist() == [1.0, 0.0]
        assert found[0, 1, 0].tolist() == [0.0, 0.5]
        (masks / "one.png").unlink()
        with pytest.raises(DataError, match="needs a mask"):
            read_object_masks(StudyData(None, (), masks), source, (1, 2), 20)


def test_untrained_models_have_the_workbenchs_seed(digits, tmp_path):
    first, second, again = (
        Workbench(TINY, seed, digits, tmp_path, device="cpu").create_model(TINY.models["hybrid"]) for seed in (0, 1, 0)
    )
    assert first.num_classes == 0
    weights = [torch.cat([each.flatten() for each in model.parameters()]) for model in (first, second, again)]
    assert torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[1])


def test_masks_are_asked_for_only_where_they_are_needed():
    with pytest.raises(ConfigError, match="--masks"):
        choose_data(TINY, {"data", "masks"}, None, ("other",), None)
    assert choose_data(TINY, {"data", "masks"}, None, (), None).masks is None


def test_the_description_of_data_tells_order_and_parts():
    first, second = ({"train": _digits(seed), "test": _digits(seed + 9)} for seed in (0, 1))
    one, other = (choose_data(TINY, set(), None, sets, None) for sets in ((first, second), (second, first)))
    needs = {"data", "transfer"}
    assert list(one.describe(needs).items()) != list(other.describe(needs).items())
    changed = choose_data(TINY, set(), None, ({**first, "test": _digits(5)[:7]}, second), None)
    assert one.describe(needs) != changed.describe(needs)
    assert set(one.describe({"data"})) == {"pretraining"}


def _digits(seed):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randint(0, 255, (1, 8, 8), generator=generator, dtype=torch.uint8), i % 2) for i in range(8)]
