"""The numbers behind the figures come back from their files as they were, and the files are the same every time."""

from __future__ import annotations

import csv
import zipfile
from dataclasses import replace

import numpy as np
import pytest
from made_up import nothing, resnet, vit

import vitrail
from vitrail.inspection.findings import Distance, Findings, Layers, Neighbours, Positions, ShownImage, Tokens
from vitrail.inspection.write_data import write_data, write_layers
from vitrail.weights.card import format_model_card, list_facts

FILES = [
    "mistakes.csv",
    "confusions.csv",
    "classes.csv",
    "filters-1.npz",
    "filters-2.npz",
    "positions.npz",
    "neighbours.csv",
    "distance.npz",
    "distance.csv",
    "rollout.npz",
    "components.npz",
    "tokens.npz",
    "layers.npz",
    "layers.csv",
    "guesses.csv",
    "curves.csv",
]


def arrays(path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as found:
        return dict(found)


def rows(path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


@pytest.fixture(scope="module")
def found() -> Findings:
    return vit(embeddings=2)


@pytest.fixture(scope="module")
def folder(found, tmp_path_factory):
    made = tmp_path_factory.mktemp("kept") / "report"
    assert [path.name for path in write_data(found, made)] == FILES
    assert sorted(path.name for path in made.iterdir()) == sorted(FILES)
    return made


def test_filters_and_positions_come_back(found, folder):
    for number, filters in enumerate(found.filters, start=1):
        kept = arrays(folder / f"filters-{number}.npz")
        assert np.array_equal(kept["components"], filters.components)
        assert np.array_equal(kept["explained"], filters.explained)
        assert kept["of"] == filters.of
    kept = arrays(folder / "positions.npz")
    assert np.array_equal(kept["similarity"], found.positions.similarity.astype(np.float32))
    assert (kept["kind"], kept["permutations"]) == ("learned-1d", 9999)
    test = found.positions.neighbours
    assert (kept["near"], kept["far"], kept["p_value"]) == (test.near, test.far, test.p_value)
    names, values = rows(folder / "neighbours.csv")
    assert names == ["near", "far", "p_value", "permutations"]
    assert [float(value) for value in values] == [test.near, test.far, test.p_value, 9999]


def test_scores_come_back_as_tables(found, folder):
    report = found.scores.report
    head, *mistakes = rows(folder / "mistakes.csv")
    assert head == ["image", "label", "guess", "probability"]
    assert [(label, guess, float(p)) for _, label, guess, p in mistakes] == [
        (each.label, each.guess, each.confidence) for each in report.mistakes
    ]
    head, *classes = rows(folder / "classes.csv")
    assert head == ["class", "images", "right", "accuracy", "low", "high"]
    assert [(name, int(images), float(low)) for name, images, _, _, low, _ in classes] == [
        (each.name, each.images, each.accuracy.low) for each in report.classes
    ]
    _, *confusions = rows(folder / "confusions.csv")
    assert [(label, guess, int(count)) for label, guess, count in confusions] == list(report.confusions)


def test_attention_comes_back(found, folder):
    kept = arrays(folder / "rollout.npz")
    for name in ("rollout", "rollout_prefix", "heads", "heads_prefix"):
        assert kept[name].dtype == np.float32
        assert np.array_equal(kept[name], getattr(found.attention, name).astype(np.float32))
    total = kept["rollout"].sum(axis=(2, 3)) + kept["rollout_prefix"].sum(axis=2)
    assert np.abs(total - 1).max() < 1e-6
    assert kept["layers"].tolist() == list(found.attention.layers)
    assert kept["prefix"].tolist() == ["class token", "register 1"]
    assert kept["images"].tolist() == [image.name for image in found.images]
    assert kept["reads"] == "the class token"


def test_tokens_come_back_whatever_their_grids(tmp_path):
    found = resnet()
    write_data(found, tmp_path)
    kept = arrays(tmp_path / "tokens.npz")
    assert kept["layers"].tolist() == list(found.tokens.layers)
    assert kept["similarity_1"].shape != kept["similarity_2"].shape
    for number, similarity in enumerate(found.tokens.similarity, start=1):
        assert np.array_equal(kept[f"similarity_{number}"], similarity.astype(np.float32))


def test_distance_and_layers_come_back_as_tables_too(found, folder):
    heading, *table = rows(folder / "distance.csv")
    assert heading == ["layer", "head", "pixels"]
    depth, heads = found.distance.pixels.shape
    assert [row[:2] for row in table] == [[str(a), str(b)] for a in range(1, depth + 1) for b in range(1, heads + 1)]
    assert np.array_equal(np.array([float(row[2]) for row in table]).reshape(depth, heads), found.distance.pixels)
    kept = arrays(folder / "distance.npz")
    assert np.array_equal(kept["pixels"], found.distance.pixels)
    assert kept["image_size"].tolist() == list(found.distance.image_size)
    heading, *table = rows(folder / "layers.csv")
    assert heading == ["layer", *found.layers.others]
    assert [row[0] for row in table] == list(found.layers.names)
    assert np.array_equal(np.array([row[1:] for row in table], dtype=float), found.layers.cka)
    assert np.array_equal(arrays(folder / "layers.npz")["cka"], found.layers.cka)


def test_guesses_are_a_row_each(found, folder):
    heading, *table = rows(folder / "guesses.csv")
    assert heading == ["image", "place", "label", "probability"]
    assert [(row[0], int(row[1]), row[2], float(row[3])) for row in table] == [
        (image.name, place, *guess) for image in found.images for place, guess in enumerate(image.guesses, start=1)
    ]


def test_records_are_flattened(tmp_path):
    records = (
        {"kind": "train", "step": 1, "epoch": 0.5, "loss": 2.5, "clock": {"seconds": 0.25, "of": {"wait": 1}}},
        {"kind": "evaluation", "step": 1, "part": "val", "loss": float("nan"), "accuracy": 0.5},
    )
    assert [path.name for path in write_data(replace(nothing(), records=records), tmp_path)] == ["curves.csv"]
    assert rows(tmp_path / "curves.csv") == [
        ["step", "kind", "part", "loss", "accuracy", "epoch", "clock.seconds", "clock.of.wait"],
        ["1", "train", "", "2.5", "", "0.5", "0.25", "1"],
        ["1", "evaluation", "val", "nan", "0.5", "", "", ""],
    ]


def test_where_nothing_was_found_nothing_is_kept(tmp_path):
    assert write_data(nothing(), tmp_path) == []
    assert not list(tmp_path.iterdir())
    without = replace(nothing(), positions=Positions("sincos-2d", np.ones((1, 1, 1, 1)), None))
    assert [path.name for path in write_data(without, tmp_path)] == ["positions.npz"]
    assert set(arrays(tmp_path / "positions.npz")) == {"similarity", "kind"}


def test_the_same_findings_are_the_same_bytes(found, folder, tmp_path, monkeypatch):
    import time

    later = time.time() + 1_000_000  # archives note the time to two seconds, where they do
    monkeypatch.setattr(time, "time", lambda: later)
    for path in write_data(found, tmp_path):
        assert path.read_bytes() == (folder / path.name).read_bytes()
        if path.suffix == ".npz":
            with zipfile.ZipFile(path) as archive:
                assert {member.date_time for member in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_names_of_any_kind_can_be_read_again(tmp_path):
    hostile = 'two\nlines, "quoted" \udcff 中文 <b>\x00'
    told = 'two\\nlines, "quoted" \\xff 中文 <b>\\x00'
    image = ShownImage(hostile, np.zeros((2, 2, 3), np.uint8), ((hostile, 0.5),))
    layers = Layers((hostile, "b"), ("=1+1", hostile), np.array([[1, np.nan], [0.5, 1]]), 4)
    tokens = Tokens((hostile,), (np.ones((1, 1, 1, 1, 1)),))
    pixels = np.array([[np.nan, 1.0]])
    distance = Distance((hostile,), pixels, (2, 2), 1)
    found = vit(images=[image], layers=layers, tokens=tokens, distance=distance)
    write_data(found, tmp_path)
    assert arrays(tmp_path / "tokens.npz")["layers"].tolist() == [told]
    assert arrays(tmp_path / "rollout.npz")["images"].tolist() == [told]
    assert rows(tmp_path / "guesses.csv")[1] == [told, "1", told, "0.5"]
    assert rows(tmp_path / "distance.csv")[1:] == [[told, "1", "nan"], [told, "2", "1.0"]]
    assert rows(tmp_path / "layers.csv") == [["layer", "=1+1", told], [told, "1.0", "nan"], ["b", "0.5", "1.0"]]


def test_layers_of_two_models_are_kept_under_a_name(tmp_path):
    layers = Layers(("block 1",), ("stage 1", "stage 2"), np.array([[0.25, 0.5]]), 8)
    assert [path.name for path in write_layers(layers, tmp_path, "between")] == ["between.npz", "between.csv"]
    assert rows(tmp_path / "between.csv") == [["layer", "stage 1", "stage 2"], ["block 1", "0.25", "0.5"]]
    kept = arrays(tmp_path / "between.npz")
    assert (kept["names"].tolist(), kept["others"].tolist(), kept["images"]) == (["block 1"], ["stage 1", "stage 2"], 8)


def test_every_file_is_written_whole(found, tmp_path, monkeypatch):
    from vitrail.inspection import write_data as kept

    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept, "write_whole", full)
    with pytest.raises(OSError, match="No space left"):
        write_data(found, tmp_path)
    assert not list(tmp_path.iterdir())


def test_numbers_of_numpy_are_numbers_in_tables(tmp_path):
    neighbours = Neighbours(np.float64(0.1), np.float64(0.2), np.float64(0.5), 99)
    write_data(replace(nothing(), positions=Positions("", np.ones((1, 1, 1, 1)), neighbours)), tmp_path)
    assert rows(tmp_path / "neighbours.csv")[1] == ["0.1", "0.2", "0.5", "99"]


def test_facts_are_plain_and_stay_in_their_cells_on_the_card():
    model = vitrail.create_model("Ti/4", image_size=16, width=32, depth=2, num_heads=2, mlp_dim=64, num_classes=2)
    model.labels = ["cat|dog", "other"]
    told = dict(list_facts(model))
    assert told["classes"] == "2: cat|dog, other"
    assert {"parameters", "size", "pooling", "resize", "mean, deviation"} <= set(told)
    table = [line for line in format_model_card(model, "name", "native").splitlines() if line.startswith("| ")][1:]
    assert table == [f"| {name} | {value.replace('|', chr(92) + '|')} |" for name, value in list_facts(model)]
