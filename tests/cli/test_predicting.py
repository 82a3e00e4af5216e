"""predict as a person types it: lines, tables, JSON, CSV, standard input, exit codes, closed pipes."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
from pictures import picture

import vitrail
from samples import randomise
from vitrail.inference.predictor import Predictor

SMALL = {"image_size": 16, "width": 32, "depth": 1, "num_heads": 2, "mlp_dim": 32, "seed": 0}
LABELS = ["cat", 'a "b", c', "line\nbreak\ttab", "\x1b[31mred", "Größe"]
STRANGE = ['quote".png', "tab\t.png", "new\nline.png", "comma, .png", "return\r.png", "\udcff.png", "=1+1.png"]


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """Two photos, one file that is none, a model with strange labels, a model without any."""
    monkeypatch.chdir(tmp_path)
    for number in (1, 2):
        (tmp_path / f"{number}.png").write_bytes(picture(number))
    (tmp_path / "broken.png").write_bytes(b"no image")
    model = randomise(vitrail.create_model("Ti/4", num_classes=5, **SMALL))
    model.labels = LABELS
    vitrail.save(model, tmp_path / "model")
    vitrail.save(randomise(vitrail.create_model("Ti/4", num_classes=0, **SMALL)), tmp_path / "bare")
    return tmp_path


@pytest.fixture
def predict(run):
    """On the CPU, with the model of `here`."""
    return lambda *words: run("predict", *words, "--model", "model", "--device", "cpu")


def child(*words: str, **options) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "vitrail", "predict", *words, "--device", "cpu"]
    return subprocess.Popen(command, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options})


def wanted(image, top: int = 5) -> list[tuple[str, float]]:
    return [(label, pytest.approx(share, rel=1e-4)) for label, share in Predictor("model", device="cpu")(image, top)]


def strange(folder: Path) -> dict[str, bytes]:
    """What strange files are called when they are told, and what they hold."""
    (folder / "strange").mkdir()
    for number, name in enumerate(STRANGE):
        (folder / "strange" / name).write_bytes(picture(number))
    return {f"strange/{name}".replace("\udcff", r"\xff"): picture(number) for number, name in enumerate(STRANGE)}


def test_a_line_for_each_file_off_a_terminal(here, predict):
    code, out, err = predict("1.png", "2.png", "--top", "2")
    assert code == 0
    for line, name in zip(out.splitlines(), ["1.png", "2.png"], strict=True):
        file, *cells = line.split("\t")
        assert file == name
        (first, one), (second, two) = wanted(name, 2)
        shown = {"line\nbreak\ttab": r"line\nbreak\ttab", "\x1b[31mred": r"\x1b[31mred"}
        assert cells[::2] == [shown.get(first, first), shown.get(second, second)]
        assert [float(share) for share in cells[1::2]] == pytest.approx([one.expected, two.expected], abs=6e-5)
    assert "\x1b" not in out
    assert err.startswith("2 images, ")
    assert err.endswith(" images/s\n")


def test_what_is_broken_is_left_out_and_the_code_is_1(here, predict):
    code, out, err = predict("1.png", "broken.png", "nowhere.png", "2.png", "--batch-size", "2")
    assert code == 1
    assert [line.split("\t")[0] for line in out.splitlines()] == ["1.png", "2.png"]
    assert [line.split(": ")[:2] for line in err.splitlines()[:2]] == [
        ["left out", "broken.png"],
        ["left out", "nowhere.png"],
    ]
    assert err.splitlines()[2].startswith("2 images, ")
    assert err.endswith("images/s, 2 left out\n")


@pytest.mark.parametrize(
    "words", [["empty"], ["texts"], ["nowhere.png"], ["nowhere.png", "empty", "neither/there.png"]]
)
def test_that_there_are_no_images_is_said_before_torch_is_loaded(words, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "notes.txt").write_text("no image")
    code = "import sys, vitrail.cli\ntry: vitrail.cli.main()\nfinally: print(*sys.modules)"
    command = [sys.executable, "-c", code, "predict", *words]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: ")
    assert words[0] in ended.stderr
    assert ".jpg" in ended.stderr
    assert not {"torch", "numpy"} & set(ended.stdout.split())


def test_a_file_that_does_not_exist_has_a_neighbour(here, predict):
    code, _, err = predict("1.pgn")
    assert code == 1
    assert "did you mean '1.png'" in err


def test_json_parses_back(here, predict):
    files = strange(here)
    code, out, _ = predict("strange", "--json", "--top", "3")
    assert code == 0
    rows = [json.loads(line) for line in out.splitlines()]
    assert {row["file"] for row in rows} == set(files)
    for row in rows:
        found = [(guess["label"], guess["probability"]) for guess in row["labels"]]
        assert found == wanted(files[row["file"]], 3)


def test_csv_parses_back(here, predict):
    files = strange(here)
    code, out, _ = predict("strange", "--csv", "--top", "5")
    assert code == 0
    heading, *rows = csv.reader(io.StringIO(out, newline=""))
    assert heading == ["file", "rank", "label", "probability"]
    assert len(rows) == 5 * len(files)
    found = {}
    for file, rank, label, probability in rows:
        found.setdefault(file, []).append((label, float(probability)))
        assert int(rank) == len(found[file])
    assert found == {file: wanted(content) for file, content in files.items()}


def test_strange_names_are_one_line_each(here, predict):
    strange(here)
    code, out, _ = predict("strange", "--top", "1")
    assert (code, out.count("\n"), out.count("\t")) == (0, len(STRANGE), 2 * len(STRANGE))
    (here / "strange" / "bad\nname.png").write_bytes(b"")
    code, _, err = predict("strange/bad\nname.png")
    assert (code, err) == (1, "left out: strange/bad\\nname.png: empty\n0 images, 1 left out\n")


def test_a_table_on_a_terminal(here, predict, monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    (here / ("long" * 20 + ".png")).write_bytes(picture(5))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    code, out, _ = predict("1.png", "long" * 20 + ".png", "--top", "2")
    lines = out.splitlines()
    assert code == 0
    assert lines[0].split() == ["file", "label", "probability"]
    assert lines[1].startswith("1.png ")
    assert lines[2].startswith("      ")
    assert lines[3] == "long" * 20 + ".png", "a line to itself, and not cut"
    assert len(lines) == 6
    for line in (lines[1], lines[2], lines[4], lines[5]):
        assert len(line) == len(lines[0]) <= 70
        assert line.endswith("%")
    assert lines[1].endswith(f"{wanted('1.png')[0][1].expected:.2%}")


def test_standard_input_both_ways(here, predict, monkeypatch):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(picture(1))))
    code, out, _ = predict("-", "--json")
    row = json.loads(out)
    assert (code, row["file"]) == (0, "-")
    assert [(guess["label"], guess["probability"]) for guess in row["labels"]] == wanted("1.png")
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"2.png\nbroken.png\n1.png\n")))
    code, out, err = predict("-")
    assert (code, [line.split("\t")[0] for line in out.splitlines()]) == (1, ["2.png", "1.png"])
    assert "left out: broken.png: " in err
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(picture(1)[:100])))
    code, out, err = predict("-")
    assert (code, out) == (1, "")
    assert err.startswith("left out: standard input: damaged")


def test_embeddings_beside_the_guesses(here, predict):
    code, out, _ = predict("1.png", "broken.png", "2.png", "--embed", "out.parquet")
    assert (code, len(out.splitlines())) == (1, 2)
    table = pq.read_table("out.parquet")
    assert table["file"].to_pylist() == ["1.png", "2.png"]
    found = Predictor("model", device="cpu").embed(["1.png", "2.png"])
    np.testing.assert_allclose(np.array(table["embedding"].to_pylist()), found, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_an_exported_file_answers_as_its_model(here, run):
    assert run("export", "model", "model.onnx", "--to", "onnx")[0] == 0
    code, out, _ = run("predict", "1.png", "--model", "model.onnx", "--json")
    assert code == 0
    assert [(guess["label"], guess["probability"]) for guess in json.loads(out)["labels"]] == wanted("1.png")


@pytest.mark.parametrize("form", [[], ["--csv"], ["--json"]])
def test_a_model_without_classes_prints_the_count_only(here, run, form):
    code, out, err = run("predict", "1.png", "--model", "bare", "--device", "cpu", "--embed", "out.npz", *form)
    assert (code, out, err.startswith("1 image, ")) == (0, "", True)
    with np.load("out.npz") as file:
        assert (file["names"].tolist(), file["embeddings"].shape) == (["1.png"], (1, 32))


@pytest.mark.parametrize(
    ("words", "code", "words_in_error"),
    [
        (["--model", "model"], 2, "vitrail predict photo.jpg"),
        (["1.png", "--model", "model", "--json", "--csv"], 2, "--json and --csv"),
        (["1.png", "--model", "model", "--embed", "out.txt"], 2, "--embed out.txt"),
        (["1.png", "--model", "bare"], 2, "no classes"),
        (["empty", "--model", "model"], 1, "empty"),
        (["1.png", "--model", "nowhere"], 1, "nowhere"),
    ],
)
def test_what_cannot_be(here, run, words, code, words_in_error):
    (here / "empty").mkdir()
    found, out, err = run("predict", *words)
    assert (found, out) == (code, "")
    assert err.startswith("error: ")
    assert words_in_error in err


def test_ctrl_c_says_what_there_is(here, predict, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr("vitrail.inference.predictor.Predictor._predict_ahead", interrupted)
    code, _, err = predict("1.png", "--embed", "out.npz")
    assert (code, err) == (130, err)
    assert "out.npz" in err
    assert not Path("out.npz").exists()


def test_words_that_an_encoding_lacks_are_told_otherwise(here, predict, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(told := io.BytesIO(), encoding="ascii"))
    (here / "ü.png").write_bytes(picture(1))
    code, _, _ = predict("ü.png")
    lines = told.getvalue().decode("ascii").splitlines()
    assert code == 0
    assert lines[0].startswith("\\xfc.png\t")


@pytest.mark.slow
def test_a_pipe_that_is_closed_ends_quietly(here):
    with child(*["1.png"] * 400, "--model", "model", "--batch-size", "1", "--embed", "out.npz") as reader:
        assert reader.stdout.readline().startswith(b"1.png\t")
        reader.stdout.close()
        err = reader.stderr.read()
    assert (err, reader.returncode) == (b"", 1)
    assert not [path for path in here.iterdir() if "out.npz" in path.name]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudoterminal")
def test_rows_go_to_stdout_while_a_bar_is_on_the_terminal(here):
    terminal, other = os.openpty()
    with child("1.png", "broken.png", "2.png", "--model", "model", stderr=other) as program:
        os.close(other)
        out, told = program.stdout.read(), b""
        while True:
            try:
                part = os.read(terminal, 4096)
            except OSError:  # how the end of a pseudoterminal is told
                break
            if not part:
                break
            told += part
    os.close(terminal)
    assert [line.split(b"\t")[0] for line in out.splitlines()] == [b"1.png", b"2.png"]
    assert b"left out: broken.png: not an image" in told
    assert b"2 images, " in told
    assert b"1.png" not in told


def test_looking_at_the_help_loads_nothing_heavy():
    code = "import sys; sys.argv = ['vitrail', 'predict', '--help']\nfrom vitrail import cli\n"
    code += (
        "try: cli.main()\nexcept SystemExit: print(*sorted({'torch', 'numpy', 'PIL', 'pyarrow'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "--embed" in out
    assert out.splitlines()[-1] == ""


@pytest.mark.parametrize("form", ["json", "csv"])
def test_a_file_has_the_rows_that_are_printed(here, predict, form):
    strange(here)
    (here / "strange" / "bad\nname.png").write_bytes(b"")
    _, printed, _ = predict("strange", "--top", "3", f"--{form}")
    out = Path("answers.jsonl" if form == "json" else "answers.csv")
    code, told, err = predict("strange", "--top", "3", "--out", str(out))
    assert (code, told) == (1, "")
    assert out.read_bytes() == printed.encode()
    assert err.splitlines()[0] == "left out: strange/bad\\nname.png: empty"
    assert err.splitlines()[1].endswith(f"images/s, 1 left out, in {out}")
    code, told, err = predict("strange", "--top", "3", "--out", str(out))
    assert (code, told) == (2, "")
    assert "exists already: delete it" in err


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_what_is_done(here, predict, monkeypatch, stop):
    monkeypatch.setattr("vitrail.inference.prediction_parts.LEAST_IMAGES", 2)
    words = ["1.png", "broken.png", "2.png", "1.png", "2.png", "--batch-size", "1"]
    assert predict(*words, "--out", "whole.jsonl")[0] == 1
    compute = Predictor._predict_batch

    def stop_at_last(self, first, *rest):
        if first == 4:
            signal.raise_signal(stop)
        return compute(self, first, *rest)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        with monkeypatch.context() as patched:
            patched.setattr(Predictor, "_predict_batch", stop_at_last)
            code, out, err = predict(*words, "--out", "answers.jsonl")
    finally:
        signal.signal(signal.SIGINT, handler)
    assert (code, out) == (3, "")
    assert err.splitlines()[-1] == "stopped: the same command goes on with what is not done"
    assert not Path("answers.jsonl").exists()
    code, _, err = predict(*words, "--out", "answers.jsonl")
    assert code == 1
    assert err.splitlines()[0].startswith("left out: broken.png: "), "it is told again"
    assert err.splitlines()[1].endswith("1 left out, 3 were done before, in answers.jsonl")
    assert Path("answers.jsonl").read_bytes() == Path("whole.jsonl").read_bytes()
    assert not Path("answers.jsonl.parts").exists()


@pytest.mark.parametrize(
    ("words", "words_in_error"),
    [
        (["1.png", "--out", "a.csv", "--csv"], "the ending of --out"),
        (["1.png", "--out", "a.txt"], "a file that ends in .jsonl or .csv"),
        (["1.png", "--out", "nowhere/a.csv"], "in a folder that is there"),
    ],
)
def test_files_that_cannot_be(here, predict, words, words_in_error):
    code, out, err = predict(*words)
    assert (code, out) == (2, "")
    assert words_in_error in err


def test_several_ranks_need_a_file(here, predict, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, out, err = predict("1.png")
    assert (code, out) == (2, "")
    assert "under torchrun, give --out answers.jsonl" in err
