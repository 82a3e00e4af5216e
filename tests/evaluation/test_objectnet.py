"""ObjectNet's images have a red frame of two pixels, which must not be shown to a model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from vitrail.data.open import open_data
from vitrail.data.transforms.decode import decode_image
from vitrail.evaluation.evaluate import score_model
from vitrail.evaluation.labels import match_classes
from vitrail.evaluation.predictions import select_known_images
from vitrail.inference.batches import InferenceOptions
from vitrail.inference.class_names import read_objectnet


@pytest.fixture
def folders(tmp_path):
    """Twelve of ObjectNet's folders with an image each: "framed" with the red frame, "bare" without."""
    noise = np.random.default_rng(0)
    for name in sorted(read_objectnet())[:12]:
        bare = noise.integers(0, 256, (20, 26, 3), dtype=np.uint8)
        framed = np.full((24, 30, 3), (255, 0, 0), dtype=np.uint8)
        framed[2:-2, 2:-2] = bare
        for kind, pixels in (("bare", bare), ("framed", framed)):
            folder = tmp_path / kind / name
            folder.mkdir(parents=True)
            Image.fromarray(pixels).save(folder / "photo.png")
    return tmp_path


def test_the_frame_is_cut_off_once(folders):
    bare, framed = (open_data(str(folders / kind)) for kind in ("bare", "framed"))
    labels = match_classes(None, 1000, framed.classes, framed.num_classes)
    assert "red frames" in labels.explanation
    expected = [decode_image(bare.read(index).content) for index in range(len(bare))]
    for source in (bare, framed):
        seen = select_known_images(source, labels)
        assert len(seen) == len(source) == 12
        for index, pixels in enumerate(expected):
            sample = seen.read(index)
            content = sample.content if isinstance(sample.content, torch.Tensor) else decode_image(sample.content)
            assert torch.equal(content, pixels)
            assert (sample.label, seen.name(index)) == (source.read(index).label, source.name(index))


def test_a_model_sees_the_same_with_and_without_frames(folders):
    sizes = {"image_size": 16, "width": 32, "depth": 1, "num_heads": 2, "mlp_dim": 64}
    model = vitrail.create_model("Ti/4", seed=0, num_classes=1000, **sizes)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    reports = [
        score_model(model, open_data(str(folders / kind)), options=InferenceOptions(device="cpu"))[0]
        for kind in ("bare", "framed")
    ]
    assert reports[0].likelihood == reports[1].likelihood
    assert reports[0].images == reports[1].images == 12


def test_other_data_keeps_its_red_frames(folders):
    framed = open_data(str(folders / "framed"))
    labels = match_classes(framed.classes, 12, framed.classes, 12)
    assert select_known_images(framed, labels) is framed
