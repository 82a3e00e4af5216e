"""Models from the hub, against stand-ins: its cache on disk without network, and its interface on this machine."""

from __future__ import annotations

import shutil
from pathlib import Path

import forked
import pytest
from hub_stand_in import COMMIT, hub

from peer_models import huggingface_model, timm_folder, timm_model

LOAD = """
import sys, vitrail
try:
    model = vitrail.load(sys.argv[1])
except vitrail.VitrailError as error:
    sys.exit(f"{type(error).__name__}: {error}")
print(model.origin.format, model.num_classes, model.preprocessing.mean[0], model.origin.licence)
"""
UNREACHABLE = "http://127.0.0.1:9"
"""The discard port: nothing listens there."""


@pytest.fixture(scope="module")
def process():
    with forked.forks() as process:
        yield process


@pytest.fixture
def load(process, tmp_path):
    """vitrail.load in a process of its own, which reads the hub's variables anew."""

    def load(source: str, home: Path, endpoint: str = UNREACHABLE, offline: bool = False):
        environment = {
            "HF_HOME": str(home),
            "HF_ENDPOINT": endpoint,
            "HF_HUB_ETAG_TIMEOUT": "2",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": str(int(offline)),
        }
        return forked.run(process, LOAD, [source], environment, tmp_path)

    return load


@pytest.fixture(scope="module")
def repositories(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("repositories")
    timm_folder("DeiT-Ti", timm_model("DeiT-Ti"), root / "timm")
    (root / "timm" / "README.md").write_text("---\nlicense: apache-2.0\n---\n# DeiT\n")
    huggingface_model("ViT").save_pretrained(root / "transformers")
    (root / "transformers" / "model.py").write_text("raise SystemExit('ran')")
    huggingface_model("DeiT").save_pretrained(root / "bin")
    from safetensors.torch import load_file
    from torch import save

    save(load_file(root / "bin" / "model.safetensors"), root / "bin" / "pytorch_model.bin")
    (root / "bin" / "model.safetensors").unlink()
    return {f"someone/{folder.name}": folder for folder in root.iterdir()}


def cache(home: Path, name: str, folder: Path) -> None:
    """The hub's cache layout: blobs, and a snapshot of links to them."""
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    for number, path in enumerate(sorted(folder.iterdir())):
        shutil.copy(path, repository / "blobs" / str(number))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))


EXPECTED = {
    "someone/timm": "timm 1000 0.485 apache-2.0\n",
    "someone/transformers": "huggingface 10 0.5 None\n",
    "someone/bin": "huggingface 10 0.485 None\n",
}


CACHED = [(name, offline) for name in EXPECTED for offline in (True, False)]
DEFAULT = [("someone/transformers", False)]


@pytest.mark.parametrize(
    ("name", "offline"), [case if case in DEFAULT else pytest.param(*case, marks=pytest.mark.slow) for case in CACHED]
)
def test_from_the_cache_without_network(name, offline, repositories, tmp_path, load):
    """Switched off by HF_HUB_OFFLINE, or simply not there."""
    cache(tmp_path, name, repositories[name])
    child = load(f"hf:{name}", tmp_path, offline=offline)
    assert child.stdout == EXPECTED[name], child.stderr


@pytest.mark.parametrize(
    "name",
    [
        "someone/transformers",
        pytest.param("someone/timm", marks=pytest.mark.slow),
        pytest.param("someone/bin", marks=pytest.mark.slow),
    ],
)
def test_from_the_network_then_from_the_cache(name, repositories, tmp_path, load):
    with hub(repositories) as (endpoint, requests):
        child = load(f"hf:{name}", tmp_path, endpoint)
        assert child.stdout == EXPECTED[name], child.stderr
        assert any("resolve" in request for request in requests)
        assert not any("model.py" in request for request in requests)
    again = load(f"hf:{name}", tmp_path, offline=True)
    assert again.stdout == EXPECTED[name], again.stderr


@pytest.mark.slow
def test_a_pinned_revision(repositories, tmp_path, load):
    with hub(repositories) as (endpoint, requests):
        assert load(f"hf:someone/transformers@{COMMIT}", tmp_path, endpoint).returncode == 0
        assert load("hf:someone/transformers@v1", tmp_path, endpoint).returncode == 0
        missing = load("hf:someone/transformers@v2", tmp_path, endpoint)
    assert missing.stderr.startswith("WeightsError: hf:someone/transformers@v2 cannot be downloaded")
    assert any("/revision/v1" in request for request in requests)


def test_what_is_said_when_it_cannot_be_had(repositories, tmp_path, load):
    for offline in (True, False):
        child = load("hf:someone/transformers", tmp_path, offline=offline)
        assert child.returncode == 1
        assert "is not in the cache" in child.stderr
        assert "pane" in child.stderr
        assert ("unset" in child.stderr) == offline
        assert "Traceback" not in child.stderr
    with hub(repositories) as (endpoint, _):
        child = load("hf:someone/unknown", tmp_path, endpoint)
    assert child.stderr.startswith("WeightsError: hf:someone/unknown cannot be downloaded")
