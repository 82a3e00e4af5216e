"""Apple's GPU, by a stand-in (apple.py): what is chosen, and that nothing computes in float64 on it."""

from __future__ import annotations

import logging
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import runs
import torch
from striped import stripes

import vitrail
from apple import APPLE, apple_gpu
from vitrail.data.loader import EvaluationLoader, TrainingLoader
from vitrail.data.transforms.augment import Augmentation
from vitrail.errors import ConfigError, Stopped, TrainingError
from vitrail.system import device as devices
from vitrail.system.device import choose_device, device_name, to_float64
from vitrail.system.doctor import examine_machine
from vitrail.system.failures import print_failure
from vitrail.system.precision import choose_precision
from vitrail.system.ranks import join_ranks
from vitrail.training.run_training import run_training

pytestmark = pytest.mark.slow  # every verb, on a stand-in for a device

FEW_STEPS = {"steps": 4, "warmup_steps": 1}
OPTIONS = {"checkpoint_every": 2, "evaluate_every": 3, "deterministic": False}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return stripes(tmp_path_factory.mktemp("data") / "stripes", classes=2, images=12)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    return tmp_path


# ---- The stand-in itself ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plant",
    [
        lambda x: x.double(),
        lambda x: x.to(torch.float64),
        lambda x: x.to("cpu", torch.float64),
        lambda x: x.new_zeros(3, dtype=torch.float64),
        lambda x: torch.arange(3, dtype=torch.float64, device=x.device),
        lambda x: torch.tensor([0.5], dtype=torch.float64, device=x.device),
        lambda x: torch.ones(3, dtype=torch.float64).to(x.device),
        lambda x: x.sum(dtype=torch.float64),
    ],
)
def test_the_stand_in_has_no_float64(plant):
    with apple_gpu(), pytest.raises(TypeError, match="float64"):
        plant(torch.ones(3, device="mps"))


def test_the_stand_in_refuses_what_is_wrong_on_a_real_one():
    with apple_gpu():
        x = torch.ones(3, device="mps")
        assert x.device == APPLE
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(3)
        with pytest.raises(AssertionError, match="waited"):
            torch.ones(3).to("mps", non_blocking=True)
        with pytest.raises(AssertionError, match="waited"):
            x.to("cpu", non_blocking=True)
        with pytest.raises(TypeError, match="numpy"):
            x.numpy()


def test_the_stand_in_computes_like_the_cpu():
    torch.manual_seed(0)
    model = vitrail.create_model("Ti/4", image_size=8, num_classes=2, width=32, depth=1, num_heads=2, mlp_dim=32)
    images, labels = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 1, 0])

    def step(model, images, labels):
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}

    with apple_gpu() as operations:
        on_apple = vitrail.create_model("Ti/4", image_size=8, num_classes=2, width=32, depth=1, num_heads=2, mlp_dim=32)
        on_apple.load_state_dict(model.state_dict())
        moved = step(on_apple.to("mps"), images.to("mps"), labels.to("mps"))
    assert operations["aten.mm.default"] + operations["aten.addmm.default"] > 0
    for name, tensor in step(model, images, labels).items():
        torch.testing.assert_close(moved[name], tensor)


# ---- Choosing --------------------------------------------------------------------------------------------------------


def test_auto_takes_apples_gpu_where_there_is_no_other(monkeypatch):
    with apple_gpu():
        assert choose_device("auto").type == choose_device("mps").type == "mps"
        assert device_name(choose_device("auto")) == "Apple M0 GPU"
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert choose_device("auto").type == "cuda"
    monkeypatch.undo()
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ConfigError, match="doctor"):
        choose_device("mps")


def test_the_name_of_an_unnamed_chip(monkeypatch):
    with apple_gpu():
        monkeypatch.delattr(torch.backends.mps, "get_name")
        assert device_name(APPLE) == "Apple GPU"


def test_doctor_names_the_gpu(monkeypatch, capsys):
    from vitrail.system import doctor, processor

    def run_here(program, cap):
        exec(doctor.LIST_DEVICES, {})  # in this process, where the stand-in is
        return processor.ProbeResult(True, ""), capsys.readouterr().out

    monkeypatch.setattr(processor, "run_probe", run_here)
    monkeypatch.setattr(processor, "announces_amx", lambda: False)
    with apple_gpu():
        found = {finding.name: finding.state for finding in examine_machine() if finding.subject == "device"}
    assert "Apple M0" in found["mps"]
    assert "8 GiB" in found["mps"]
    assert "accelerator" not in found


def test_precisions():
    with apple_gpu():
        assert choose_precision("auto", APPLE) == choose_precision("fp32", APPLE) == torch.float32
        with pytest.raises(ConfigError, match="NVIDIA"):
            choose_precision("fp16", APPLE)


@pytest.mark.parametrize(("version", "allowed"), [((14, 0), True), ((13, 6), False)])
def test_bf16_needs_macos_14(monkeypatch, version, allowed):
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *asked: version >= asked)
    with apple_gpu():
        if allowed:
            assert choose_precision("bf16", APPLE) == torch.bfloat16
        else:
            with pytest.raises(ConfigError, match="macOS 14"):
                choose_precision("bf16", APPLE)


@pytest.mark.parametrize("precision", ["fp16", "fp8", "int8"])
def test_other_precisions_of_inference_are_refused(precision):
    with apple_gpu(), pytest.raises(ConfigError, match=precision):
        vitrail.Predictor("pane", device="mps", precision=precision)


def test_auto_precision_is_fp32():
    with apple_gpu():
        predictor = vitrail.Predictor("pane", device="mps", precision="auto")
        assert predictor.engine.precision == "fp32"
        assert predictor.engine.device.type == "mps"


@pytest.mark.parametrize("device", ["auto", "mps"])
def test_processes_do_not_share_it(monkeypatch, device):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("vitrail.system.ranks._connect_store", _refuse_to_connect)
    with apple_gpu():
        if device == "mps":
            with pytest.raises(ConfigError, match="cpu"), join_ranks(device, 1):
                pass
        else:  # goes on to connect, on the CPU
            with pytest.raises(TrainingError, match="cannot reach"), join_ranks(device, 1):
                pass


def _refuse_to_connect(limit):
    raise RuntimeError("no store")


# ---- Sentences -------------------------------------------------------------------------------------------------------


def test_an_operation_that_falls_back_is_told_in_a_sentence(caplog, monkeypatch):
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    message = (
        "The operator 'aten::linalg_eigh' is not currently supported on the MPS backend and will fall back to run on "
        "the CPU. This may have performance implications."
    )
    shown = []
    with apple_gpu(), caplog.at_level(logging.WARNING, "vitrail"), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda *details, **options: shown.append(str(details[0]))
        choose_device("mps")
        choose_device("mps")
        warnings.warn(message, UserWarning, stacklevel=1)
        warnings.warn("something else", UserWarning, stacklevel=1)
    assert [record.getMessage() for record in caplog.records if "linalg_eigh" in record.getMessage()]
    assert len(caplog.records) == 1
    assert "CPU" in caplog.text
    assert shown == ["something else"]


MISSING = (
    "The operator 'aten::frobnicate' is not currently implemented for the MPS device. If you want this op to be "
    "considered for addition please comment on the issue. As a temporary fix, you can set the environment variable "
    "`PYTORCH_ENABLE_MPS_FALLBACK=1` to use the CPU as a fallback for this op."
)
NO_MEMORY = "MPS backend out of memory (MPS allocated: 18.04 GB, other allocations: 94.00 MB, max allowed: 18.13 GB)."


def test_a_missing_operation_is_explained(capsys):
    assert print_failure(NotImplementedError(MISSING)) == 1
    said = capsys.readouterr().err
    assert "aten::frobnicate" in said
    assert "PYTORCH_ENABLE_MPS_FALLBACK" in said
    assert "run.device=cpu" in said
    assert print_failure(NotImplementedError("another")) is None


@pytest.mark.parametrize(
    ("error", "word"),
    [(RuntimeError(NO_MEMORY), "optimizer.accumulate"), (NotImplementedError(MISSING), "aten::frobnicate")],
)
def test_a_training_explains_its_failure(here, monkeypatch, error, word):
    from vitrail.training import run_training as module

    def fail(run, state):
        raise error

    monkeypatch.setattr(module, "train", fail)
    with apple_gpu(), pytest.raises(TrainingError, match=word):
        run_training(runs.config(here / "run", schedule=FEW_STEPS, run=OPTIONS))


def test_too_little_memory_in_a_command_is_one_line(capsys):
    assert print_failure(RuntimeError(NO_MEMORY)) == 1
    assert "smaller batch" in capsys.readouterr().err


@pytest.mark.parametrize(("platform", "expected"), [("darwin", "1"), ("linux", None)])
def test_the_fallback_is_allowed_before_torch_is_imported(platform, expected):
    import subprocess
    import sys

    code = (
        "import sys, os; os.environ.pop('PYTORCH_ENABLE_MPS_FALLBACK', None); "
        f"sys.platform = {platform!r}; import vitrail; assert 'torch' not in sys.modules; "
        "print(os.environ.get('PYTORCH_ENABLE_MPS_FALLBACK'))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == str(expected)


# ---- Copies ----------------------------------------------------------------------------------------------------------


def test_batches_are_copied_and_waited_for(photos):
    source = vitrail.open_data(photos)
    loader = EvaluationLoader(source, vitrail.load("pane").preprocessing, 8)
    batch = next(iter(loader))
    with apple_gpu():
        moved = batch.to("mps")
        assert moved.images.device == APPLE
        assert torch.equal(moved.images.cpu(), batch.images)


def test_float64_moves_to_the_cpu():
    with apple_gpu():
        moved = to_float64(torch.ones(3, device="mps"))
    assert moved.dtype == torch.float64
    assert moved.device.type == "cpu"
    assert to_float64(torch.ones(3)).device.type == "cpu"


# ---- The verbs -------------------------------------------------------------------------------------------------------


@contextmanager
def on_device(name):
    if name == "cpu":
        yield None
    else:
        with apple_gpu() as operations:
            yield operations


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"data": {"on_device": True}},
        {
            "data": {
                "on_device": True,
                "augmentation": {"crop_area": (0.6, 1.0), "rand_augment": (2, 9), "erasing": 0.5, "shift": 0.1},
            }
        },
        {"data": {"mixing": {"mixup": 0.2, "cutmix": 0.5}}, "optimizer": {"clip_norm": 1.0, "kind": "sgd"}},
        {"optimizer": {"kind": "muon", "averaging": None}},
        {"objective": {"kind": "masked-patches"}},
    ],
    ids=["plain", "on-device", "augmented", "mixing", "muon", "masked"],
)
def test_training_computes_what_the_cpu_computes(here, changes):
    for name in ("cpu", "mps"):
        with on_device(name) as operations:
            configuration = runs.config(
                here / name, **{**changes, "schedule": FEW_STEPS, "run": {**OPTIONS, "device": name}}
            )
            if name == "mps":
                configuration = configuration.model_copy(
                    update={"run": configuration.run.model_copy(update={"device": "auto"})}
                )
            result = run_training(configuration)
    assert operations["aten.bmm.default"] + operations["aten.addmm.default"] > 0
    assert torch.allclose(torch.tensor(runs.losses(here / "mps")), torch.tensor(runs.losses(here / "cpu")), rtol=1e-5)
    assert next(result.model.parameters()).device.type == "cpu"


def test_a_stopped_training_goes_on(here):
    configuration = runs.config(here / "whole", schedule=FEW_STEPS, run=OPTIONS)
    with apple_gpu():
        run_training(configuration)

    def stop(kind, values):
        if kind == "step" and values["step"] == 3:
            raise KeyboardInterrupt

    parts = runs.config(here / "parts", schedule=FEW_STEPS, run=OPTIONS)
    with apple_gpu():
        with pytest.raises(Stopped):
            run_training(parts, on_event=stop)
        assert [path.name for path in runs.checkpoints(here / "parts")][-1] == "step-00000003"
        run_training(parts)
    runs.assert_same_run(here / "whole", here / "parts")


def test_finetune_predict_evaluate(photos, here):
    settings = {"schedule.steps": 2, "schedule.warmup_steps": 1, "run.trackers": (), "run.report": False}
    with apple_gpu() as operations:
        tuned = vitrail.finetune(photos, "pane", settings={**settings, "model.image_size": 32}, folder="tuned")
        assert operations["aten.addmm.default"] > 0
        photo = next(Path(photos).rglob("*.png"))
        answers = list(vitrail.predict(photo, "tuned"))
        report = vitrail.evaluate("tuned", photos)
    assert tuned.accuracy is not None
    assert len(answers) == 1
    again = vitrail.evaluate("tuned", photos, device="cpu")
    assert again.accuracy.value == pytest.approx(report.accuracy.value)


def test_frozen_features(photos, here):
    with apple_gpu() as operations:
        quick = vitrail.finetune(photos, "pane", quick=True, folder="quick")
        few = vitrail.fewshot("pane", photos, shots=[1], seeds=[0], methods=("least-squares", "linear", "knn"))
        assert operations["aten.linear.default"] + operations["aten.addmm.default"] > 0
    assert next(quick.model.parameters()).device.type == "cpu"
    expected = vitrail.fewshot("pane", photos, shots=[1], seeds=[0], device="cpu", methods=("least-squares",))
    assert few.rows[0].accuracy == pytest.approx(expected.rows[0].accuracy)


@pytest.mark.slow
def test_inspect(photos, here):
    with apple_gpu():
        vitrail.inspect("pane", images=photos, out="report.html")
    assert Path("report.html").exists()


def test_optimize_and_attention(photos):
    with apple_gpu():
        fast = vitrail.optimize("pane", precision="fp32")
        model = vitrail.load("pane", device="mps")
        images = torch.zeros(2, 3, *model.image_size, device="mps")
        assert fast(images).device == APPLE
        maps = vitrail.inspection.attention_rollout(model, images)
        assert maps is not None


def test_a_planted_float64_is_found(here, monkeypatch):
    """What all tests above rely on: one `double()` in the loss of a training is an error."""
    from vitrail.objectives import classification

    original = classification.sum_and_count
    monkeypatch.setattr(classification, "sum_and_count", lambda values, *mask: original(values.double().float(), *mask))
    with apple_gpu(), pytest.raises(TypeError, match="float64"):
        run_training(runs.config(here / "run", schedule=FEW_STEPS, run=OPTIONS))


def test_the_order_of_augmented_batches_does_not_depend_on_the_device(photos):
    from vitrail.data.resident import ResidentLoader

    augmentation = Augmentation(crop_area=(0.5, 1.0), rand_augment=(2, 9), three_augment=True)
    expected = next(ResidentLoader(photos, 8, 16, device="cpu", augmentation=augmentation))
    with apple_gpu():
        batch = next(ResidentLoader(photos, 8, 16, device="mps", augmentation=augmentation))
        assert torch.equal(batch.images.cpu(), expected.images)
    assert isinstance(next(TrainingLoader(photos, 8, 16)).images, torch.Tensor)
    assert devices.free_memory(torch.device("cpu")) is None
