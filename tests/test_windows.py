"""Windows, by a stand-in (windows.py) that refuses what it refuses."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import runs
from striped import stripes

import vitrail
from vitrail.errors import NotApplicableError, Stopped, TrainingError
from vitrail.system import files
from vitrail.system.commands import quote_word
from vitrail.system.files import flush_to_disk, rename_when_free, short_name, write_whole
from vitrail.system.locks import lock_file
from vitrail.training.run_training import run_training
from windows import windows

pytestmark = pytest.mark.slow  # every verb, on a stand-in for a system

FEW_STEPS = {"steps": 6, "warmup_steps": 1}
OPTIONS = {"checkpoint_every": 2, "evaluate_every": 3, "keep": 1, "deterministic": False}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return stripes(tmp_path_factory.mktemp("data") / "stripes", classes=2, images=8)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    return tmp_path


# ---- The stand-in itself ---------------------------------------------------------------------------------------------


def test_the_stand_in_refuses_what_windows_refuses(tmp_path):
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.write_text("text")
    folder.mkdir()
    with windows():
        with pytest.raises(PermissionError):
            os.open(folder, os.O_RDONLY)
        handle = os.open(file, os.O_RDONLY)
        with pytest.raises(OSError, match="descriptor"):
            os.fsync(handle)
        with pytest.raises(PermissionError):
            file.rename(tmp_path / "other")
        with pytest.raises(PermissionError):
            file.unlink()
        os.close(handle)
        (folder / "inner").write_text("text")
        with (folder / "inner").open(), pytest.raises(PermissionError):
            folder.rename(tmp_path / "moved")
        with pytest.raises(OSError, match="syntax"):
            (tmp_path / "hf:name").mkdir()
        with pytest.raises(ImportError):
            import fcntl  # noqa: F401
    assert os.name == "posix"
    assert hasattr(os, "fork")


# ---- Files -----------------------------------------------------------------------------------------------------------


def test_files_are_written_whole(tmp_path):
    with windows():
        write_whole(tmp_path / "file", b"one")
        write_whole(tmp_path / "file", b"two")
        flush_to_disk(tmp_path)
    assert (tmp_path / "file").read_bytes() == b"two"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_rename_waits_for_a_virus_scanner(tmp_path, kind):
    path = tmp_path / "draft"
    held = path / "inner" if kind == "folder" else path
    held.parent.mkdir(exist_ok=True)
    held.write_text("text")
    with windows():
        scanner = held.open()
        threading.Timer(0.3, scanner.close).start()
        began = time.monotonic()
        rename_when_free(path, tmp_path / "final")
    assert time.monotonic() - began >= 0.25
    assert (tmp_path / "final").exists()


def test_a_rename_does_not_wait_forever(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "RENAMING_SECONDS", 0.2)
    (tmp_path / "draft").write_text("text")
    with windows(), (tmp_path / "draft").open(), pytest.raises(PermissionError):
        rename_when_free(tmp_path / "draft", tmp_path / "final")


def test_a_refused_rename_elsewhere_is_raised_at_once(tmp_path):
    def refuse(source, target):
        raise PermissionError("not yours")

    path = tmp_path / "draft"
    path.write_text("text")
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(PermissionError):
            rename_when_free(path, tmp_path / "final")
    assert time.monotonic() - began < 1


def test_locks(tmp_path):
    for _ in range(2):  # unlocked by closing
        with windows(), lock_file(tmp_path / "lock"), pytest.raises(BlockingIOError):
            lock_file(tmp_path / "lock")


@pytest.mark.parametrize("text", ["con", "NUL", "aux.jpg", "hf:owner/com1", "lpt9"])
def test_names_that_windows_keeps_for_itself(tmp_path, text):
    with windows():
        (tmp_path / short_name(text)).mkdir()


@pytest.mark.parametrize("text", ["hf:owner/name@main", "timm:vit_tiny", "photos/of: cats?", "what.", "digits"])
def test_names_of_folders_are_allowed(tmp_path, text):
    with windows():
        (tmp_path / short_name(text)).mkdir()


def test_commands_are_quoted_for_its_shells(monkeypatch):
    assert quote_word("a b") == "'a b'"
    monkeypatch.setattr(files, "IS_WINDOWS", True)
    assert quote_word("C:\\Users\\me\\photos") == "C:\\Users\\me\\photos"
    assert quote_word("my photos & more") == '"my photos & more"'


# ---- The verbs -------------------------------------------------------------------------------------------------------


def test_train_checkpoint_resume(here):
    run_training(runs.config(here / "whole", schedule=FEW_STEPS, run=OPTIONS))

    def stop(kind, values):
        if kind == "step" and values["step"] == 3:
            raise KeyboardInterrupt

    parts = runs.config(here / "parts", schedule=FEW_STEPS, run=OPTIONS)
    with windows():
        with pytest.raises(Stopped):
            run_training(parts, on_event=stop)
        run_training(parts)
    runs.assert_same_run(here / "whole", here / "parts")
    assert b"\r" not in (runs.checkpoints(here / "parts")[-1] / "SHA256SUMS").read_bytes()


def test_a_damaged_checkpoint_is_put_aside(here):
    configuration = runs.config(here / "run", schedule=FEW_STEPS, run={**OPTIONS, "keep": 5})
    run_training(configuration)
    *_, before, last = runs.checkpoints(here / "run")
    (last / "state.json").write_text("{}")
    with windows():
        again = run_training(configuration)
    assert again.folder == here / "run"
    assert (last.parent / f"damaged-{last.name}").is_dir()
    assert before.exists()


def test_one_process_trains_in_a_folder(here):
    (here / "run").mkdir()
    configuration = runs.config(here / "run", schedule=FEW_STEPS, run=OPTIONS)
    with windows(), lock_file(here / "run" / ".lock"), pytest.raises(TrainingError, match="another process"):
        run_training(configuration)


def test_finetune_and_what_follows(photos, here):
    settings = {"schedule.steps": 2, "schedule.warmup_steps": 1, "run.trackers": ("tensorboard",), "run.report": False}
    with windows():
        tuned = vitrail.finetune(photos, "pane", settings=settings, folder="tuned")
        vitrail.save(tuned.model, "saved")
        vitrail.save(tuned.model, "saved")  # replaces
        few = vitrail.fewshot("tuned", photos, shots=[1], seeds=[0])
        assert vitrail.fewshot("tuned", photos, shots=[1], seeds=[0]).rows == few.rows  # from the cache
        report = vitrail.evaluate("tuned", photos)
    assert report.accuracy is not None
    assert vitrail.load("saved").labels == tuned.model.labels
    assert not list((here / "cache" / "features").glob("*.unfinished"))


def test_pack_and_check(photos, here):
    with windows():
        packed = vitrail.pack_data(photos, "packed", workers=1)
        again = vitrail.pack_data(photos, "packed", workers=1)
        vitrail.check_data(photos, workers=1)
    assert packed is not None
    assert again is not None
    assert not (here / "packed" / ".unfinished").exists()
    manifest = json.loads((here / "packed" / "dataset.json").read_text())
    assert sum(part["samples"] for part in manifest["splits"].values()) == 16
    assert len(vitrail.open_data("packed")) == 16


def test_embeddings_and_exports(photos, here):
    with windows():
        list(vitrail.predict(photos, "pane", embed="rows.npz"))
        list(vitrail.predict(photos, "pane", embed="rows.npz", out="rows.csv"))
        vitrail.convert("pane", "converted", to="native")
    assert (here / "rows.npz").exists()
    assert (here / "rows.csv").exists()
    assert not (here / "rows.csv.parts").exists()
    assert (here / "converted").is_dir()


def test_kernels_of_our_own_are_not_compiled(monkeypatch, tmp_path):
    from vitrail.system import compiler

    with windows(), pytest.raises(NotApplicableError, match="Windows"):
        compiler._check_ours(tmp_path)


def test_the_server_stops_at_signals_without_a_loop_that_hears_them(monkeypatch):
    from vitrail.serving import server

    stopped = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    async def serve():
        def refuse(*details):
            raise NotImplementedError

        monkeypatch.setattr(asyncio.get_running_loop(), "add_signal_handler", refuse, raising=False)
        server._stop_at_signals(stopped.append)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(0.05)

    try:
        asyncio.run(serve())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert stopped == [True, False]


# ---- Text ------------------------------------------------------------------------------------------------------------

CONSOLE = {"PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0", "LC_ALL": "C.UTF-8"}


def run_vitrail(*arguments: str, **options):
    environment = {**os.environ, **CONSOLE}
    command = [sys.executable, "-m", "vitrail", *arguments]
    return subprocess.run(command, capture_output=True, env=environment, timeout=120, **options)


def test_characters_that_a_code_page_lacks_do_not_end_a_command(tmp_path):
    stripes(tmp_path / "data", classes=2, images=2)
    (tmp_path / "data" / "colour-0").rename(tmp_path / "data" / "猫 → cat")
    done = run_vitrail("data", "check", str(tmp_path / "data"))
    assert b"Traceback" not in done.stderr
    assert b"UnicodeEncodeError" not in done.stderr


@pytest.mark.slow
def test_names_of_classes_that_a_code_page_lacks(tmp_path):
    stripes(tmp_path / "data", classes=2, images=2)
    (tmp_path / "data" / "colour-0").rename(tmp_path / "data" / "猫 → cat")
    done = run_vitrail("finetune", "--data", str(tmp_path / "data"), "--quick", "folder=quick", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    saved = json.loads((tmp_path / "quick" / "model" / "config.json").read_text(encoding="utf-8"))
    assert "猫 → cat" in json.dumps(saved, ensure_ascii=False)
    photo = next((tmp_path / "data" / "猫 → cat").iterdir())
    done = run_vitrail("predict", str(photo), "--model", "quick", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done.stdout.decode("cp1252")


def test_no_file_is_read_or_written_in_the_code_page_of_the_system():
    """Every text file of ours is UTF-8: `open`, `read_text` and `write_text` name it, or the file is bytes."""
    import ast

    root = Path(vitrail.__file__).parent
    wrong = []
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            words = {keyword.arg for keyword in node.keywords}
            texts = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            if name == "read_text" and not node.args and "encoding" not in words:
                wrong.append(f"{path.relative_to(root)}:{node.lineno}")
            if name == "write_text" and "encoding" not in words:
                wrong.append(f"{path.relative_to(root)}:{node.lineno}")
            is_builtin = isinstance(node.func, ast.Name) and name in ("open", "fdopen")
            if is_builtin and "encoding" not in words and not any("b" in str(text) for text in texts):
                wrong.append(f"{path.relative_to(root)}:{node.lineno}")
    # Linux's /proc is ASCII; the standard streams are reopened as they were.
    allowed = ("system/processor.py", "benchmark/machine.py", "benchmark/measure.py", "system/compiler.py")
    assert [place for place in wrong if not place.startswith((*allowed, "system/standard_streams.py"))] == []
