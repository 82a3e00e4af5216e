"""Running studies: rows are kept, missing ones are measured, failures are told, and processes share the work."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
from toy_study import BASE, TOY, measure_nothing_twice, measure_or_die

import vitrail
from vitrail.errors import ConfigError, DataError, TrainingError
from vitrail.studies.catalogue import NAMES, find_study, list_studies
from vitrail.studies.results import read_rows
from vitrail.studies.run_study import run_studies
from vitrail.studies.scales import SCALES, TINY, find_scale


class TestNames:
    def test_all_are_found(self):
        assert [study.name for study in list_studies()] == list(NAMES)

    def test_a_wrong_name(self):
        with pytest.raises(ConfigError, match="did you mean 'positions'"):
            vitrail.study("position")
        with pytest.raises(ConfigError, match="tiny or small"):
            vitrail.study("positions", scale="large")

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("scale", SCALES.values(), ids=lambda scale: scale.name)
    def test_arms_have_names_of_their_own_and_can_be_saved(self, name, scale):
        arms = find_study(name).list_arms(scale)
        assert len({arm.name for arm in arms}) == len(arms) > 1
        assert all(arm.weight > 0 for arm in arms)
        json.dumps([[dict(arm.settings), dict(arm.facts)] for arm in arms])

    @pytest.mark.parametrize("study", list_studies(), ids=lambda study: study.name)
    def test_words(self, study):
        for text in (study.claim, study.rule, study.limits):
            assert text.endswith(".")
            assert text[0].isupper()
        assert study.paper

    def test_listing_needs_no_torch(self):
        code = "from vitrail.studies.catalogue import list_studies as f; f(); import sys; print('torch' in sys.modules)"
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert child.stdout.strip() == "False"


class TestRows:
    def test_a_study_is_measured_once(self, tmp_path):
        seen = []
        first = vitrail.study(TOY, folder=tmp_path, on_event=lambda kind, values: seen.append(kind))
        assert first.verdict == "holds here"
        assert seen.count("measured") == 2 * TINY.seeds
        seen.clear()
        again = vitrail.study(TOY, folder=tmp_path, on_event=lambda kind, values: seen.append(kind))
        assert not seen
        assert again.checks == first.checks

    def test_more_seeds_add_to_the_old_ones(self, tmp_path):
        vitrail.study(TOY, folder=tmp_path, seeds=2, on_event=lambda *_: None)
        measured = []
        vitrail.study(TOY, folder=tmp_path, seeds=3, on_event=lambda kind, values: measured.append(values.get("seed")))
        assert [seed for seed in measured if seed is not None] == [2, 2]

    def test_rows_say_where_they_come_from(self, tmp_path):
        result = vitrail.study(TOY, folder=tmp_path, on_event=lambda *_: None)
        row = read_rows(result.folder / "results.jsonl")[0]
        assert row["machine"]["device"]
        assert row["machine"]["jobs"] == 1
        assert set(row["data"]) == {"pretraining", "transfer 1 digits"}
        assert row["date"]

    def test_an_arm_with_other_settings_is_measured_again(self, tmp_path):
        vitrail.study(TOY, folder=tmp_path, on_event=lambda *_: None)
        other = dataclasses.replace(
            TOY,
            list_arms=lambda scale: [
                dataclasses.replace(arm, facts={**arm.facts, "more": 1}) for arm in TOY.list_arms(scale)
            ],
        )
        seen = []
        vitrail.study(other, folder=tmp_path, on_event=lambda kind, values: seen.append(kind))
        assert seen.count("measured") == 2 * TINY.seeds

    def test_other_images_are_refused(self, tmp_path):
        vitrail.study(TOY, folder=tmp_path, seeds=1, on_event=lambda *_: None)
        pairs = [(image, label) for image, label in zip(_digits(40), [0, 1] * 20, strict=True)]
        with pytest.raises(ConfigError, match="other images"):
            vitrail.study(TOY, folder=tmp_path, seeds=2, data=pairs, on_event=lambda *_: None)

    def test_the_rows_of_another_scale_do_not_count(self, tmp_path):
        def measure_by_shots(workbench, arm):
            return {"score": arm.facts["level"] + workbench.scale.shots + 0.1 * workbench.seed}

        study, other = dataclasses.replace(TOY, measure=measure_by_shots), dataclasses.replace(TINY, shots=50)
        found = [
            vitrail.study(study, scale=scale, folder=tmp_path, on_event=lambda *_: None).results.compute_mean(BASE)
            for scale in (TINY, other, TINY)
        ]
        assert found == pytest.approx([15.05, 60.05, 15.05])

    def test_images_are_looked_at_even_if_nothing_is_missing(self, tmp_path):
        vitrail.study(TOY, folder=tmp_path, on_event=lambda *_: None)
        with pytest.raises(DataError):
            vitrail.study(TOY, folder=tmp_path, data=str(tmp_path / "nowhere"), on_event=lambda *_: None)

    def test_another_set_to_transfer_to_is_refused(self, tmp_path):
        vitrail.study(TOY, folder=tmp_path, seeds=1, on_event=lambda *_: None)
        pairs = list(zip(_digits(40), [0, 1] * 20, strict=True))
        with pytest.raises(ConfigError, match="other images"):
            vitrail.study(TOY, folder=tmp_path, seeds=2, transfer=[pairs], on_event=lambda *_: None)

    def test_two_commands_at_once_are_refused(self, tmp_path):
        code = (
            "import sys, time; from pathlib import Path; from vitrail.system.locks import lock_file\n"
            "lock = lock_file(Path(sys.argv[1])); print('locked', flush=True); time.sleep(60)"
        )
        (tmp_path / "tiny/toy").mkdir(parents=True)
        command = [sys.executable, "-c", code, str(tmp_path / "tiny/toy/.lock")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout.readline() == "locked\n"
            with pytest.raises(ConfigError, match="another command"):
                vitrail.study(TOY, folder=tmp_path, on_event=lambda *_: None)
            child.kill()

    def test_a_line_that_a_killed_process_left_is_dropped(self, tmp_path):
        result = vitrail.study(TOY, folder=tmp_path, on_event=lambda *_: None)
        path = result.folder / "results.jsonl"
        path.write_text(path.read_text()[:-30])
        rows = read_rows(path)
        assert len(rows) == 2 * TINY.seeds - 1
        assert vitrail.study(TOY, folder=tmp_path, on_event=lambda *_: None).seeds == TINY.seeds
        assert len(read_rows(path)) == 2 * TINY.seeds

    def test_a_damaged_line_is_named(self, tmp_path):
        path = tmp_path / "results.jsonl"
        path.write_text('{"a": 1}\n{"b\n{"c": 1}\n')
        with pytest.raises(DataError, match="line 2"):
            read_rows(path)


def _digits(count):
    import torch

    return list(torch.randint(0, 255, (count, 1, 8, 8), dtype=torch.uint8))


class TestFailures:
    def test_others_go_on_and_the_next_call_tries_again(self, tmp_path):
        broken = tmp_path / "broken"
        broken.touch()
        study = dataclasses.replace(TOY, measure=measure_nothing_twice(broken))
        with pytest.raises(TrainingError, match=r"1 of 4 runs failed, the first \(toy: plain, seed 0\)"):
            vitrail.study(study, folder=tmp_path, on_event=lambda *_: None)
        assert len(read_rows(tmp_path / "tiny/toy/results.jsonl")) == 3
        broken.unlink()
        assert vitrail.study(study, folder=tmp_path, on_event=lambda *_: None).seeds == 2

    def test_a_measurement_that_is_no_number(self, tmp_path):
        study = dataclasses.replace(TOY, measure=lambda workbench, arm: {"score": float("nan")})
        with pytest.raises(TrainingError, match="score is no number"):
            vitrail.study(study, folder=tmp_path, on_event=lambda *_: None)

    def test_a_mistake_in_one_measurement_does_not_end_the_others(self, tmp_path, capsys):
        def measure(workbench, arm):
            return {"score": 1 / (arm.facts["level"] - 10) + workbench.seed}

        with pytest.raises(TrainingError, match=r"2 of 4 runs failed.*ZeroDivisionError"):
            vitrail.study(dataclasses.replace(TOY, measure=measure), folder=tmp_path, on_event=lambda *_: None)
        assert len(read_rows(tmp_path / "tiny/toy/results.jsonl")) == 2
        assert "ZeroDivisionError" in capsys.readouterr().err

    def test_mistakes_in_a_study_are_told(self, tmp_path):
        with pytest.raises(ConfigError, match="named twice"):
            run_studies([TOY, TOY], folder=tmp_path)
        twins = dataclasses.replace(TOY, list_arms=lambda scale: [TOY.list_arms(scale)[0]] * 2)
        with pytest.raises(ConfigError, match="same name"):
            vitrail.study(twins, folder=tmp_path)
        other = dataclasses.replace(TOY, measure=lambda workbench, arm: {"loss": 1.0})
        with pytest.raises(TrainingError, match="must return 'score'"):
            vitrail.study(other, folder=tmp_path, on_event=lambda *_: None)
        local = dataclasses.replace(TOY, name="local", measure=lambda workbench, arm: {"score": 1.0})
        with pytest.raises(ConfigError, match="jobs=1"):
            vitrail.study(local, folder=tmp_path, jobs=2, on_event=lambda *_: None)

    def test_data_that_must_be_given(self, tmp_path):
        with pytest.raises(ConfigError, match="--data"):
            vitrail.study(TOY, scale="small", folder=tmp_path)
        with pytest.raises(ConfigError, match="--transfer"):
            vitrail.study(TOY, scale="small", data="digits", folder=tmp_path)
        with pytest.raises(ConfigError, match="--masks"):
            vitrail.study("attention-focus", scale="small", data="x", transfer="y", folder=tmp_path)


class TestFiles:
    def test_page_and_figure(self, tmp_path):
        result = vitrail.study(TOY, folder=tmp_path, on_event=lambda *_: None)
        page = (result.folder / "page.md").read_text()
        assert TOY.claim in page
        assert "Holds here" in page
        assert TOY.limits in page
        assert (result.folder / "figure.png").stat().st_size > 1000
        assert (result.folder / "figure.svg").exists()
        assert "holds here" in repr(result)
        assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["verdict"] == "holds here"
        assert "vitrail.study(STUDY" in page

    def test_one_seed_has_no_interval(self, tmp_path):
        result = vitrail.study(TOY, seeds=1, folder=tmp_path, on_event=lambda *_: None)
        assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["checks"][0]["low"] is None
        assert "1 seed)" in repr(result)
        assert "inf" not in repr(result)


@pytest.mark.slow
class TestProcesses:
    """Slow, because every process imports torch anew."""

    def test_rows_are_those_of_one_process(self, tmp_path):
        alone = vitrail.study(TOY, folder=tmp_path / "a", on_event=lambda *_: None)
        shared = vitrail.study(TOY, folder=tmp_path / "b", jobs=2, on_event=lambda *_: None)
        assert [row["measured"] for row in alone.results.rows] == [row["measured"] for row in shared.results.rows]
        assert shared.results.rows[0]["machine"]["jobs"] == 2

    def test_a_process_that_ends_is_replaced(self, tmp_path):
        told = {}

        def listen(kind, values):
            if kind == "measured":
                told[values["arm"], values["seed"]] = values["failure"]

        study = dataclasses.replace(TOY, measure=measure_or_die)
        with pytest.raises(TrainingError, match="2 of 6 runs failed"):
            vitrail.study(study, folder=tmp_path, seeds=3, jobs=2, on_event=listen)
        assert told.pop((BASE, 0)) == "its process ended (exit code 7)"
        assert told.pop(("better", 0)) == "RuntimeError: nobody expected this"
        assert set(told.values()) == {""}
        assert len(read_rows(tmp_path / "tiny/toy/results.jsonl")) == 4

    def test_real_trainings_agree_bit_by_bit(self, tmp_path):
        alone = vitrail.study("pooling", seeds=1, folder=tmp_path / "a", device="cpu", on_event=lambda *_: None)
        shared = vitrail.study(
            "pooling", seeds=1, folder=tmp_path / "b", device="cpu", jobs=2, on_event=lambda *_: None
        )
        assert [row["measured"] for row in alone.results.rows] == [row["measured"] for row in shared.results.rows]


def test_scales_are_found():
    assert find_scale("tiny") is TINY
    assert TINY.compute_digest() != dataclasses.replace(TINY, shots=7).compute_digest()


def test_several_studies_at_once(tmp_path):
    other = dataclasses.replace(TOY, name="other", list_checks=lambda results: TOY.list_checks(results)[:1])
    results = run_studies([TOY, other], folder=tmp_path, on_event=lambda *_: None)
    assert [result.name for result in results] == ["toy", "other"]
    assert BASE in results[0].results.arms
