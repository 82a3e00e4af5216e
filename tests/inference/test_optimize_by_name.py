"""`optimize` from Python: names, photos, events and errors."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

import vitrail
from samples import randomise
from vitrail.errors import ConfigError, DataError, NotApplicableError, WeightsError
from vitrail.inference.optimize import optimize
from vitrail.inference.prepare import fit_image

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="int8 is for CPUs, and names load onto the GPU here")


def make_model():
    return randomise(vitrail.create_model("Ti/16", image_size=32, num_classes=4, depth=2)).eval()


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def photo():
    return Image.linear_gradient("L").convert("RGB").resize((50, 40))


def test_a_name_gives_what_the_model_gives(model, tmp_path):
    vitrail.save(model, tmp_path / "saved")
    events = []
    fast = optimize(tmp_path / "saved", precision="int8", on_event=lambda *event: events.append(event))
    assert [kind for kind, _ in events] == ["loading", "message"]
    assert events[0][1] == {"model": str(tmp_path / "saved")}
    assert "int8" in events[1][1]["text"]
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(fast(images), optimize(model, "latency", "int8")(images), atol=1e-5, rtol=1e-5)
    assert repr(fast) == f"FastModel({fast.describe()})"


def test_photos_measure_the_distance(model, photo, tmp_path):
    fast = optimize(model, precision="int8", images=[photo, photo.rotate(90)])
    assert fast.measured_on == "the images given"
    pixels = torch.stack([fit_image(each, model.preprocessing) for each in (photo, photo.rotate(90))])
    same = optimize(model, precision="int8", images=(pixels / 255 - 0.5) / 0.5)
    assert fast.distance == pytest.approx(same.distance, rel=1e-3)
    assert optimize(model, precision="int8", images=photo).distance > 0  # one image, without a list
    photo.save(tmp_path / "photo.png")
    assert optimize(model, precision="int8", images=tmp_path).measured_on == "the images given"


def test_half_precision_is_optimized_as_float32(model):
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    half = make_model().half()
    torch.testing.assert_close(optimize(half, precision="fp32")(images), model(images), atol=2e-3, rtol=2e-3)


def test_errors_are_exceptions(model, tmp_path):
    for asked, error, told in [
        ({"model": tmp_path / "nowhere"}, WeightsError, "nowhere"),
        ({"model": tmp_path / "model.onnx"}, WeightsError, "exported"),
        ({"model": 3}, ConfigError, "int is no model"),
        ({"precision": "int7"}, ConfigError, "did you mean 'int8'"),
        ({"precision": "fp8"}, NotApplicableError, "GPU"),
        ({"images": []}, ConfigError, "no images"),
        ({"images": tmp_path}, DataError, "no images"),
        ({"images": [tmp_path / "absent.jpg"]}, DataError, "absent.jpg: "),
        ({"batch": 0}, ConfigError, "batch = 0"),
    ]:
        with pytest.raises(error, match=told):
            optimize(**{"model": model, **asked}, on_event=lambda kind, values: None)
