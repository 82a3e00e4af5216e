"""The command to give instead, where a folder of images has to be opened in another way."""

from __future__ import annotations

import shlex

import pytest
from pictures import picture

from vitrail.cli.proposals import propose_command


@pytest.mark.parametrize(
    ("command", "data", "labels_from", "wanted"),
    [
        (
            ["finetune", "--data", "my photos/", "--quick"],
            "my photos",
            "NAME_*",
            "vitrail finetune --data 'my photos/' --quick --labels-from 'NAME_*'",
        ),
        (
            ["data", "check", "./my photos"],
            "my photos/images",
            "NAME (*)",
            "vitrail data check 'my photos/images' --labels-from 'NAME (*)'",
        ),
        (
            ["evaluate", "--data=my photos", "--model", "x"],
            "my photos/images",
            None,
            "vitrail evaluate '--data=my photos/images' --model x",
        ),
        (
            ["train", "small", "data.source=my photos"],
            "my photos",
            "NAME.*",
            "vitrail train small 'data.source=my photos' 'data.labels_from=NAME.*'",
        ),
        (["train", "run.toml"], "my photos", "NAME.*", None),
        (["bench", "--data", "my photos"], "my photos", "NAME_*", None),
        (["evaluate", "--suite", "vtab", "--data", "my photos"], "my photos", "NAME_*", None),
    ],
)
def test_the_command_to_give_instead(command, data, labels_from, wanted):
    assert propose_command(command, "my photos", data, labels_from) == wanted


def test_the_command_that_is_proposed_works(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my photos" / "images"
    folder.mkdir(parents=True)
    for number in range(6):
        (folder / f"{'cat' if number < 3 else 'dog'} ({number}).png").write_bytes(picture(number))
    code, out, err = run("data", "check", "my photos", "--workers", "1")
    assert (code, out) == (1, "")
    first, last = err.splitlines()
    assert first.startswith("error: ")
    assert "2 classes, such as cat (3)" in first
    assert last == "try: vitrail data check 'my photos/images' --workers 1 --labels-from 'NAME (*)'"
    code, out, err = run(*shlex.split(last.removeprefix("try: vitrail ")))
    assert code == 0
    assert "6 images, 6 readable, 2 classes" in err
