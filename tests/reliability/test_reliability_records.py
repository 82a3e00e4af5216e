"""The record in a file: what is written is read, and what strangers wrote is checked."""

from __future__ import annotations

import base64
import copy
import json

import numpy as np
import pytest

from vitrail.errors import ConfigError
from vitrail.reliability.packed import PackedArray
from vitrail.reliability.record import Reliability, read_reliability, require_sets, require_unknown
from vitrail.reliability.sets import LabelSets
from vitrail.reliability.unknown import UnknownScore


def make_record(kind: str = "neighbours") -> Reliability:
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet(np.ones(3), size=1000).astype(np.float32)
    sets = LabelSets.fit(probabilities, np.eye(3, dtype=bool)[rng.integers(3, size=1000)])
    rows = rng.normal(size=(120, 4)).astype(np.float32)
    return Reliability(images=1000, data="photos", sets=sets, unknown=UnknownScore.fit(kind, rows, rows))


@pytest.mark.parametrize("kind", ["neighbours", "energy", "softmax"])
def test_a_record_comes_back_as_it_was(kind):
    record = make_record(kind)
    again = read_reliability(json.loads(record.model_dump_json()), 3, has_labels=True)
    assert again == record
    assert hash(again) == hash(record)
    np.testing.assert_array_equal(again.sets.beliefs.values, record.sets.beliefs.values)


def test_rounding_to_float32_is_exact_for_float32():
    values = np.random.default_rng(1).random((7, 3)).astype(np.float32)
    assert (PackedArray.pack(values, "float32").values == values).all()
    with pytest.raises(ValueError, match="read-only"):
        PackedArray.pack(values, "float32").values[0, 0] = 1


def pack(values: list[float] | np.ndarray) -> dict[str, object]:
    array = np.asarray(values, "<f4")
    return {"kind": "float32", "shape": list(array.shape), "data": base64.b64encode(array.tobytes()).decode()}


RISING = np.linspace(0, 1, 1000)
HOSTILE = {
    "a shape that is not the data's": (("sets", "beliefs", "shape"), [999], "bytes"),
    "an enormous shape": (("sets", "beliefs", "shape"), [10**9], "an array has from 1 to"),
    "a negative shape": (("sets", "beliefs", "shape"), [-1000], "an array has from 1 to"),
    "three dimensions": (("sets", "beliefs", "shape"), [10, 10, 10], "at most 2"),
    "no base64": (("sets", "beliefs", "data"), "@@@@", "not base64"),
    "another kind of number": (("sets", "beliefs", "kind"), "object", "float16"),
    "beliefs that do not ascend": (("sets", "beliefs"), pack(RISING[::-1]), "ascend"),
    "beliefs above 1": (("sets", "beliefs"), pack(RISING * 2), "ascend from 0 to 1"),
    "beliefs that are no numbers": (("sets", "beliefs"), pack(np.full(1000, np.nan)), "not finite"),
    "too few beliefs": (("sets", "beliefs"), pack(RISING[:999]), "999 beliefs"),
    "beliefs in a table": (("sets", "beliefs"), pack(RISING.reshape(10, 100)), "one number for each image"),
    "a score that there is not": (("unknown", "kind"), "luck", "softmax"),
    "a bank beside a score of logits": (("unknown", "kind"), "energy", "only neighbours has a bank"),
    "no bank": (("unknown", "bank"), None, "only neighbours has a bank"),
    "a flat bank": (("unknown", "bank"), pack(np.ones(100)), "bank has the shape"),
    "a small bank": (("unknown", "bank"), pack(np.ones((3, 4))), "bank has the shape"),
    "a wide bank": (("unknown", "bank"), pack(np.ones((50, 5000))), "bank has the shape"),
    "no neighbours": (("unknown", "neighbours"), 0, "greater than or equal to 1"),
    "all images accepted": (("unknown", "accepted"), 1.0, "less than 1"),
    "falling scores": (("unknown", "known"), pack(RISING[:60][::-1]), "ascend"),
    "few scores": (("unknown", "known"), pack(RISING[:10]), "known has the shape"),
    "a later version": (("version",), 2, "less than or equal to 1"),
    "an unknown key": (("surprise",), 1, "surprise"),
    "no images": (("images",), 0, "greater than or equal to 1"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_strangers_wrote_is_refused(name):
    place, value, reason = HOSTILE[name]
    values = json.loads(make_record().model_dump_json())
    part = copy.deepcopy(values)
    inner = part
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    with pytest.raises(ConfigError, match=reason):
        read_reliability(part, 3, has_labels=True)


def test_a_record_must_fit_its_model():
    values = json.loads(make_record("energy").model_dump_json())
    with pytest.raises(ConfigError, match="one label of several"):
        read_reliability(values, 3, has_labels=False)
    del values["sets"]
    with pytest.raises(ConfigError, match="computed from logits"):
        read_reliability(values, 0, has_labels=True)
    del values["unknown"]
    with pytest.raises(ConfigError, match="neither"):
        read_reliability(values, 3, has_labels=True)


def test_what_was_not_fitted_says_how_to_fit_it():
    for record in (None, make_record().model_copy(update={"sets": None})):
        with pytest.raises(ConfigError, match=r"vitrail calibrate --model MODEL --data DATA"):
            require_sets(record)
    for record in (None, make_record().model_copy(update={"unknown": None})):
        with pytest.raises(ConfigError, match=r"vitrail calibrate --model MODEL --data DATA"):
            require_unknown(record)
