"""Lines of predictions: every column of a CSV has a name of its own."""

from __future__ import annotations

from vitrail.inference.prediction_rows import choose_format


def test_columns_of_an_answer_are_no_columns_of_ours():
    heading, lines = choose_format("csv", ["file", "size", "unknown"], tells_unknown=True)
    assert heading == "file,file (answer),size,unknown (answer),unknown,known_share"
    row = {
        "file": "a.jpg",
        "labels": [],
        "cells": {"file": 3.5, "size": 2.0, "unknown": 1.0},
        "unknown": False,
        "known_share": 0.5,
    }
    assert list(lines(row)) == ["a.jpg,3.5,2.0,1.0,false,0.5"]
    assert choose_format("csv", ["file"], tells_unknown=False)[0] == "file,file (answer)"
