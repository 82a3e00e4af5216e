"""The check: every bad file is named with what is wrong with it, every good one passes, and nothing hangs or grows."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hostile import GOOD, Deadly, encoded, make_hostile, picture, png, run_here
from pictures import make_folder, make_parquet, make_tar

from vitrail.data.check.check import check_data
from vitrail.data.check.report import FACTS, FINDING_KINDS, DataReport, SplitFacts
from vitrail.data.packing.pack import pack_data
from vitrail.data.parallel import KILLED, map_samples
from vitrail.data.sources.list_source import ListSource
from vitrail.data.sources.source import make_printable
from vitrail.errors import ConfigError, DataError


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vitrail", "data", "check", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment})


@pytest.fixture
def here(capsys, monkeypatch):
    """The command in this process, where torch is loaded already: its exit code, stdout and stderr."""
    return lambda *arguments: run_here(capsys, monkeypatch, "check", *arguments)


def kinds_by_name(report: DataReport) -> dict[str, set[str]]:
    found = defaultdict(set)
    for finding in report.findings():
        found[finding.name].add(finding.kind)
    return dict(found)


def sentences(report: DataReport, kind: str) -> list[str]:
    return [finding.sentence for finding in report.findings(kind)]


def colourful(folder: Path, classes: dict[str, int], first: int = 0) -> Path:
    """Class folders without anything to find."""
    for name, count in classes.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            (folder / name / f"{number}.jpg").write_bytes(encoded(picture(first)))
            first += 1
    return folder


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile") / "photos"
    return folder, make_hostile(folder)


@pytest.fixture(scope="module")
def report(hostile):
    return check_data(hostile[0], workers=2)


# The hostile folder.


def test_the_hostile_folder_is_what_it_says(hostile):
    made = list(hostile[1].values())
    assert len(made) > 190
    assert set(made) == {GOOD, "unreadable", "truncated", "duplicate", "extension", "tiny", "greyscale", "ignored"}


def test_each_bad_file_is_named_with_its_kind_and_each_good_one_passes(hostile, report):
    expected = {make_printable(path): {kind} for path, kind in hostile[1].items() if kind != GOOD}
    assert kinds_by_name(report) == expected
    assert report.failed


def test_counts_are_those_of_the_findings(report):
    found = [finding.kind for finding in report.findings()]
    assert report.counts == {kind: found.count(kind) for kind in FINDING_KINDS}
    assert found == sorted(found, key=list(FINDING_KINDS).index)


def test_what_is_said_of_each(hostile, report):
    folder = hostile[0]
    said = {Path(finding.name).name: finding.sentence for finding in report.findings()}
    assert said["empty.jpg"] == "empty"
    assert said["text.jpg"] == "not an image of a known kind"
    assert said["bomb.png"] == "more than 100,000,000 pixels"
    assert said["pipe.jpg"] == said["zero.jpg"] == "not a file"
    assert said["dangling.png"] == "cannot be read: No such file or directory"
    assert "symbolic links" in said["itself.jpg"]
    assert "truncated" in said["half.png"]
    assert said["really-png.jpg"] == "is PNG, unlike its name"
    assert said["strip.png"] == "20000×10 pixels"
    assert said["up"] == "a link that leads back to a folder above it"
    assert said["notes.txt"].startswith("its name ends in none of .jpg")
    assert said["b-again.jpg"] == f"the same content as {folder}/cat/a-first.jpg"
    assert said["copy.jpg"].endswith("and conflicting labels: dog here, cat there")


@pytest.mark.skipif(os.geteuid() == 0, reason="the super-user may read everything")
def test_what_may_not_be_read_is_named_or_an_error(tmp_path, here):
    colourful(tmp_path, {"a": 2, "b": 2})
    (tmp_path / "a/0.jpg").chmod(0)
    assert sentences(check_data(tmp_path, workers=1), "unreadable") == ["cannot be read: Permission denied"]
    (tmp_path / "b").chmod(0)
    code, _, told = here(tmp_path)
    (tmp_path / "b").chmod(0o755)
    assert (code, told) == (1, f"error: {tmp_path / 'b'} cannot be listed: Permission denied\n")


def test_a_folder_that_cannot_be_opened_is_a_data_error(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(DataError, match="Permission denied"):
        check_data(tmp_path)


# The command.


def test_behind_a_pipe_there_is_one_finding_on_a_line(hostile, report):
    child = run(hostile[0])
    assert child.returncode == 1
    lines = [tuple(line.split("\t")) for line in child.stdout.split("\n")[:-1]]
    assert lines == [(finding.kind, finding.name, finding.sentence) for finding in report.findings()]
    assert "found: " in child.stderr
    assert "Traceback" not in child.stderr


def test_json_to_stdout_and_to_a_file(hostile, report, tmp_path, here):
    code, out, _ = here(str(hostile[0]), "--json", "--out", str(tmp_path / "report.json"))
    assert code == 1
    found = json.loads(out)
    assert found == json.loads((tmp_path / "report.json").read_text())
    assert found == json.loads(json.dumps(report.to_dict()))
    assert set(found) == {"counts", "findings", "classes", "sizes", "notes"}
    assert len(found["findings"]) == sum(found["counts"].values())
    assert set(found["findings"][0]) == {"kind", "split", "name", "sentence"}


@pytest.mark.slow
def test_at_a_terminal_there_is_a_table(hostile):
    import pty

    outer, inner = pty.openpty()
    command = [sys.executable, "-m", "vitrail", "data", "check", str(hostile[0])]
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": "200", "TERM": "xterm"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=inner, text=True, env=environment) as child:
        os.close(inner)
        screen = b""
        with contextlib.suppress(OSError):  # at its end, where the other side is closed
            while part := os.read(outer, 4096):
                screen += part
        printed = child.stdout.read()
    os.close(outer)
    assert child.returncode == 1
    assert "Findings" in printed
    assert "conflicting labels" in printed
    assert "the smallest class" in printed
    assert b"checking" in screen


def test_nothing_to_find_is_exit_code_0_and_no_line(tmp_path, here):
    code, printed, told = here(colourful(tmp_path / "photos", {"a": 2, "b": 3}))
    assert (code, printed) == (0, "")
    assert told.splitlines()[0] == "all: 5 images, 5 readable, 2 classes"
    assert told.splitlines()[-1] == "found: nothing"


def test_findings_that_spoil_nothing_are_exit_code_0(tmp_path, here):
    colourful(tmp_path / "photos", {"a": 3})
    (tmp_path / "photos/a/9.jpg").write_bytes((tmp_path / "photos/a/0.jpg").read_bytes())
    code, printed, _ = here(tmp_path / "photos")
    assert code == 0
    assert printed.startswith("duplicate\t")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nowhere"], 1, "error: there is no data set 'nowhere'"),
        (["digits", "--workers", "0"], 2, "--workers"),
        (
            ["digits", "--out", "no/such/folder.json"],
            2,
            "error: --out no/such/folder.json: give the name of a file in a folder that is there",
        ),
        ([], 2, "DATA"),
    ],
)
def test_wrong_commands(arguments, code, words, tmp_path, monkeypatch, here):
    monkeypatch.chdir(tmp_path)
    found, printed, told = here(*arguments)
    assert (found, printed) == (code, "")
    assert words in told


def test_workers_below_one_are_refused():
    with pytest.raises(ConfigError, match="workers = 0"):
        check_data("digits", workers=0)


# Content in two places.


def test_content_in_two_splits_is_a_leak(tmp_path, here):
    train = colourful(tmp_path / "train", {"cat": 3, "dog": 3})
    val = colourful(tmp_path / "val", {"cat": 2, "dog": 2}, first=50)
    (val / "dog/leaked.jpg").write_bytes((train / "dog/1.jpg").read_bytes())
    (val / "cat/wrong.jpg").write_bytes((train / "dog/1.jpg").read_bytes())
    found = check_data(tmp_path, workers=2)
    assert [(f.split, f.name, f.sentence) for f in found.findings("leak")] == [
        (
            "val",
            f"{val}/cat/wrong.jpg",
            f"the same content as {train}/dog/1.jpg of train, and conflicting labels: cat here, dog there",
        ),
        ("val", f"{val}/dog/leaked.jpg", f"the same content as {train}/dog/1.jpg of train"),
    ]
    assert [(f.split, f.name) for f in found.findings("duplicate")] == [("val", f"{val}/dog/leaked.jpg")]
    assert here(tmp_path)[0] == 1


def test_data_without_splits_has_no_leaks(tmp_path):
    images = [(encoded(picture(number % 3)), number % 2) for number in range(6)]
    found = check_data(images, workers=1)
    assert (found.counts["leak"], found.counts["duplicate"]) == (0, 3)
    assert [finding.name for finding in found.findings("duplicate")] == ["sample 3", "sample 4", "sample 5"]
    assert sentences(found, "duplicate")[0] == "the same content as sample 0, and conflicting labels: 1 here, 0 there"


def test_twins_are_found_as_a_plain_search_finds_them():
    rng = np.random.default_rng(0)
    contents = [encoded(picture(int(number))) for number in rng.integers(0, 40, 120)]
    found = check_data([(content, 0) for content in contents], workers=2)
    expected = [
        (f"sample {index}", f"the same content as sample {contents.index(content)}")
        for index, content in enumerate(contents)
        if contents.index(content) < index
    ]
    assert [(finding.name, finding.sentence) for finding in found.findings("duplicate")] == expected


def test_contents_are_told_apart_by_every_byte_of_their_digests():
    facts = np.zeros(4, FACTS)
    facts["readable"] = True
    facts["digest"] = [
        np.void(first + bytes(14) + last) for first, last in [(b"a", b"b"), (b"a", b"c"), *[(b"d", b"b")] * 2]
    ]
    found = DataReport([SplitFacts("all", ListSource([(None, 0)] * 4), facts)])
    assert [finding.name for finding in found.findings("duplicate")] == ["sample 3"]


def test_pixels_are_compared_with_their_shape():
    pixels = torch.arange(96, dtype=torch.uint8)
    found = check_data(
        [(pixels.reshape(3, 4, 8), 0), (pixels.reshape(3, 8, 4), 0), (pixels.reshape(3, 4, 8), 0)], workers=1
    )
    assert [finding.name for finding in found.findings("duplicate")] == ["sample 2"]


# What is said about a data set.


def test_balance_and_sizes(tmp_path):
    colourful(tmp_path / "train", {"cat": 4, "dog": 1, "bird": 0})
    (tmp_path / "train/cat/wide.png").write_bytes(encoded(picture(70, 60, 300), "PNG"))
    (tmp_path / "train/dog/bad.jpg").write_bytes(b"")
    found = check_data(tmp_path, workers=1)
    assert found.classes == {
        "train": {
            "images": 7,
            "readable": 6,
            "classes": 3,
            "smallest": "dog",
            "largest": "cat",
            "empty": ["bird"],
            "counts": {"bird": 0, "cat": 5, "dog": 1},
        }
    }
    assert found.sizes == {
        "width": {"min": 40, "median": 40.0, "max": 300},
        "height": {"min": 48, "median": 48.0, "max": 60},
    }
    assert "train: no images of bird" in found.lines()


def test_tiny_and_grey_data_sets_are_told_once():
    found = check_data("digits", workers=2)
    assert found.counts == dict.fromkeys(FINDING_KINDS, 0)
    assert len(found.notes) == 2
    assert found.classes["all"]["readable"] == 1797
    assert not found.failed


def test_half_of_the_images_tiny_are_still_named_one_by_one():
    small, large = [(encoded(picture(n, 31, 31)), 0) for n in range(3)], [(encoded(picture(n)), 0) for n in range(3, 6)]
    assert check_data(small + large, workers=1).counts["tiny"] == 3
    more = check_data([*small, (encoded(picture(9, 8, 90)), 0), *large], workers=1)
    assert more.counts["tiny"] == 0
    assert "32 pixels" in more.notes[0]


def test_huge_is_above_40_megapixels():
    black = [png(width, 5000, 1, 0, (bytes(width // 8) for _ in range(5000))) for width in (8000, 8008)]
    found = check_data([(content, 0) for content in black], workers=1)
    assert [(f.name, f.sentence) for f in found.findings("huge")] == [("sample 1", "8008×5000 pixels")]


def test_labels_that_mean_nothing_are_named():
    class Two(ListSource):
        def __init__(self, labels):
            super().__init__([(encoded(picture(n)), label) for n, label in enumerate(labels)], ("cat", "dog"))

    found = check_data(Two([0, 1, 2, -1]), workers=1)
    assert {f.name: f.sentence for f in found.findings("unreadable")} == {
        "sample 2": "its label is 2, and there are 2 classes",
        "sample 3": "has no label",
    }
    assert sentences(check_data([(encoded(picture(0)), 1 << 40)], workers=1), "unreadable")[0].startswith(
        "its label is"
    )


@pytest.mark.parametrize(
    ("classes", "how"),
    [
        (("cat", "dog", "eel"), "without bird and with eel"),
        (("bird", "dog"), "without cat"),
        (("bird", "dog", "cat"), "in another order"),
    ],
)
def test_splits_whose_classes_differ_are_told(classes, how):
    parts = [("train", ("bird", "cat", "dog")), ("val", ("bird", "cat", "dog")), ("test", classes)]
    found = DataReport([SplitFacts(split, ListSource([], names), np.zeros(0, FACTS)) for split, names in parts])
    sentence = f"its classes are not those of train: {how}, so that labels do not agree"
    assert [(f.split, f.sentence) for f in found.findings()] == [("test", sentence)]
    assert found.counts["classes"] == 1


def test_images_beside_the_class_folders_are_told(tmp_path):
    colourful(tmp_path, {"a": 1})
    (tmp_path / "lonely.jpg").write_bytes(encoded(picture(9)))
    (tmp_path / "README.md").write_text("about")
    (tmp_path / ".hidden.jpg").write_bytes(b"")
    found = [(f.name, f.sentence) for f in check_data(tmp_path, workers=1).findings()]
    assert found == [(f"{tmp_path}/lonely.jpg", "lies in no class folder")]


def test_a_csv_names_what_it_wants(tmp_path):
    colourful(tmp_path, {"a": 3})
    (tmp_path / "a/notes.txt").write_text("")
    (tmp_path / "labels.csv").write_text("image,label\na/0.jpg,x\na/missing.jpg,y\n")
    for data in (tmp_path, tmp_path / "labels.csv"):
        assert kinds_by_name(check_data(data, workers=1)) == {f"{tmp_path}/a/missing.jpg": {"unreadable"}}


def test_bad_images_inside_shards_are_named(tmp_path):
    tar = make_tar(tmp_path / "tar/train-0.tar", [0, 1, 0, 1])
    content = tar.read_bytes()
    at = content.index(b"000002.png") + 512
    tar.write_bytes(content[:at] + b"nothing!" + content[at + 8 :])
    found = check_data(tmp_path / "tar", workers=1)
    assert [f.name for f in found.findings("unreadable")] == [f"{tar}:000002.png"]
    parquet = make_parquet(tmp_path / "parquet/train.parquet", [0, 1, None, 1] * 4, rows=3)
    found = check_data(tmp_path / "parquet", workers=2)
    assert [f.name for f in found.findings("unreadable")] == [f"{parquet}:{row}" for row in (2, 6, 10, 14)]


def test_files_that_are_not_those_that_were_packed_are_named(tmp_path):
    make_folder(tmp_path / "photos", {"a": 8, "b": 8})
    shards = tmp_path / "shards"
    pack_data(tmp_path / "photos", shards, shard_mb=0.001, workers=1)
    assert not check_data(shards, workers=1).failed
    sums = shards / "SHA256SUMS"
    (shards / "classes.txt").write_text("b\na\n")  # labels would be swapped, in shards without names
    shard = next(path for path in shards.iterdir() if path.suffix == ".tar")
    shard.rename(tmp_path / "elsewhere")
    (tmp_path / "secret").write_text("x")
    secret = hashlib.sha256(b"x").hexdigest()
    os.mkfifo(shards / "pipe")
    sums.write_text(sums.read_text() + f"{secret}  pipe\n{secret}  ../secret\nnonsense\n{secret} *..\n")
    lines = len(sums.read_text().splitlines())
    report = check_data(shards, workers=1)
    assert {(found.name, found.sentence) for found in report.findings("changed")} == {
        ("classes.txt", "is not the file that SHA256SUMS was written for"),
        (shard.name, "is missing, or no file: SHA256SUMS names it"),
        ("pipe", "is missing, or no file: SHA256SUMS names it"),
        *(
            ("SHA256SUMS", f"line {number} is not the hash and the name of a file in this folder")
            for number in range(lines - 2, lines + 1)
        ),
    }
    assert report.failed
    assert report.counts["changed"] == 6
    sums.write_bytes(b"\xff\xfe")
    assert [found.sentence for found in check_data(shards, workers=1).findings("changed")] == [
        f"{sums} cannot be read: no UTF-8 text"
    ]


def test_progress_goes_from_the_first_to_the_last(tmp_path):
    make_folder(tmp_path / "train", {"a": 50, "b": 50})
    make_folder(tmp_path / "val", {"a": 5, "b": 5}, first=200)
    seen = []
    check_data(tmp_path, workers=2, on_event=lambda kind, values: seen.append((values["done"], values["total"])))
    assert seen == sorted(seen)
    assert seen[-1] == (110, 110)
    assert len(seen) > 2


# Processes that die, and memory.


@pytest.mark.timeout(60)
@pytest.mark.parametrize("workers", [1, 3])
def test_a_process_that_is_killed_is_replaced(workers, tmp_path, caplog):
    found = check_data(Deadly(200, tmp_path, once=(7, 8, 150)), workers=workers)
    assert found.counts == dict.fromkeys(FINDING_KINDS, 0)
    assert found.classes["all"]["readable"] == 200
    assert "ended by the system" in caplog.text


@pytest.mark.timeout(60)
def test_an_image_that_kills_every_process_is_named(tmp_path):
    found = check_data(Deadly(100, tmp_path, always=(0, 42, 99)), workers=2)
    assert [(f.name, f.sentence) for f in found.findings()] == [(f"sample {n}", KILLED) for n in (0, 42, 99)]
    assert found.classes["all"]["readable"] == 97


def large_answer(source: Deadly, index: int) -> bytes:
    """So long that it is still on its way when its sender is killed."""
    flag = source.flags / str(index)
    if index in source.once and not flag.exists():
        flag.touch()
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return bytes([index]) * (30 << 20)


@pytest.mark.timeout(60)
def test_a_process_that_is_killed_while_it_answers_is_replaced(tmp_path):
    source = Deadly(6, tmp_path, once=(0, 2, 3))
    answers = []
    for _, (answer,) in map_samples(large_answer, source, [[index] for index in range(6)], 2):
        time.sleep(0.1)  # answers wait in their pipes meanwhile
        answers.append((len(answer), answer[0]))
    assert answers == [(30 << 20, index) for index in range(6)]


def test_answers_come_in_order_and_not_far_ahead(tmp_path):
    asked = []

    def jobs():
        for first in range(0, 300, 3):
            asked.append(first)
            yield range(first, first + 3)

    taken = 0
    for job, answers in map_samples(twice, ListSource([(None, 0)] * 300), jobs(), 2):
        assert answers == [2 * index for index in job]
        assert job.start == 3 * taken
        taken += 1
        assert len(asked) <= taken + 4
    assert taken == 100


def twice(source: ListSource, index: int) -> int:
    return 2 * index


def failing(source: ListSource, index: int) -> int:
    if index == 1:
        raise DataError("two\nlines")
    if index == 2:
        raise ZeroDivisionError("by nothing")
    return index


def test_what_goes_wrong_in_a_process_is_told_in_the_place_of_an_answer():
    (found,) = map_samples(failing, ListSource([(None, 0)] * 4), [range(4)], 1)
    assert found == (range(4), [0, "two lines", "unexpected ZeroDivisionError: by nothing", 3])


SCRIPT = """
import multiprocessing, sys
from vitrail.data.check.check import check_data

def work():
    multiprocessing.set_start_method("spawn")
    report = check_data(sys.argv[1], workers=2)
    print(report.counts["unreadable"], report.classes["all"]["readable"])

{call}
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("call", "code", "printed", "error"),
    [
        ("if __name__ == '__main__':\n    work()", 0, "1 3\n", ""),
        ("work()", 1, "", "DataError: processes that read images"),
    ],
    ids=["guarded", "not guarded"],
)
def test_processes_may_be_spawned(call, code, printed, error, tmp_path):
    colourful(tmp_path / "photos", {"a": 3})
    (tmp_path / "photos/a/bad.jpg").write_bytes(b"")
    (tmp_path / "script.py").write_text(SCRIPT.format(call=call))
    command = [sys.executable, tmp_path / "script.py", tmp_path / "photos"]
    child = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (child.returncode, child.stdout) == (code, printed)
    assert error in child.stderr


PEAK = """
import pathlib, resource, sys
from vitrail.data.check.check import check_data
report = check_data(sys.argv[1], workers=1)
assert report.parts
# Not by getrusage for this process: that would tell of the one that started it, too.
lines = pathlib.Path("/proc/self/status").read_text().splitlines()
print(next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM")))
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)
"""


def peak_megabytes(folder: Path) -> tuple[int, ...]:
    """Of the command's process, and of the one that reads."""
    child = subprocess.run([sys.executable, "-c", PEAK, folder], capture_output=True, text=True, check=True)
    return tuple(map(int, child.stdout.split()))


@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted otherwise elsewhere")
@pytest.mark.slow
def test_memory_stays_flat(hostile, tmp_path):
    few = peak_megabytes(colourful(tmp_path / "few", {"a": 20}))
    many = peak_megabytes(colourful(tmp_path / "many", {"a": 2000, "b": 2000}))
    assert max(many) < max(few) + 25
    assert max(peak_megabytes(hostile[0])) < 700
