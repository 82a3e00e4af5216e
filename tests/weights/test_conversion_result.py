"""What `convert` returns and tells, and the sources it takes besides files."""

from __future__ import annotations

import inspect
import json

import pytest
import torch

import vitrail
from samples import randomise
from vitrail.weights.convert import ConversionResult

SMALL = {"image_size": 16, "width": 32, "depth": 1, "num_heads": 2, "mlp_dim": 64, "num_classes": 3}


@pytest.fixture
def model():
    return randomise(vitrail.create_model("Ti/4", **SMALL))


def test_the_result_and_its_event(tmp_path, model):
    events = []
    vitrail.save(model, tmp_path / "native")
    result = vitrail.convert(
        tmp_path / "native", tmp_path / "timm", "timm", on_event=lambda kind, values: events.append((kind, values))
    )
    assert isinstance(result, ConversionResult)
    assert (result.folder, result.format, result.url) == (tmp_path / "timm", "timm", None)
    assert (result.max_difference, result.relative_difference) == (0, 0)
    assert result.preprocessing_matches
    assert events == [("converted", result.to_dict())]
    assert json.loads(json.dumps(result.to_dict()))["folder"] == str(tmp_path / "timm")
    assert "matches" in repr(result)
    assert "<table>" in result._repr_html_()


def test_a_loaded_model_is_a_source_and_stays_as_it_is(tmp_path, model):
    model.double().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = vitrail.convert(model, tmp_path / "timm", "timm")
    assert result.max_difference < 1e-5
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert vitrail.load(result.folder).num_classes == 3
    with pytest.raises(vitrail.ConfigError, match="num_heads"):
        vitrail.convert(model, tmp_path / "other", "timm", num_heads=2)


def test_an_upload(tmp_path, model, monkeypatch):
    class Hub:
        def create_repo(self, name, exist_ok): ...

        def upload_folder(self, repo_id, folder_path, commit_message):
            return f"https://hub.example/{repo_id}"

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    assert vitrail.convert(model, tmp_path / "a", "native", push="hf:me/x").url == "https://hub.example/me/x"
    with pytest.raises(vitrail.ConfigError, match="hf:owner/name"):
        vitrail.convert(model, tmp_path / "b", "native", push="me/x")
    assert not (tmp_path / "b").exists()


def test_after_an_upload_that_fails_the_caller_knows_what_was_written(tmp_path, model, monkeypatch):
    class Hub:
        def create_repo(self, name, exist_ok):
            raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    events = []
    with pytest.raises(vitrail.WeightsError, match="hf:me/x"):
        vitrail.convert(model, tmp_path / "a", "native", push="hf:me/x", on_event=lambda *event: events.append(event))
    assert events[0][1]["folder"] == str(tmp_path / "a")
    assert vitrail.load(tmp_path / "a").num_classes == 3


@pytest.mark.parametrize("verb", [vitrail.load, vitrail.convert, vitrail.create_model])
def test_signatures_name_every_option(verb):
    kinds = {parameter.kind for parameter in inspect.signature(verb).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds
