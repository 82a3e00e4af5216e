"""Predictor against model(prepare(image)).softmax: every kind of image, any batch, many threads."""

from __future__ import annotations

import gc
import io
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import picture
from PIL import Image

import peers  # noqa: F401  timm is imported through it
import vitrail
from samples import randomise
from vitrail.errors import ConfigError, DataError, InputError
from vitrail.inference import predictor as predict
from vitrail.inference import prepare
from vitrail.inference.class_names import get_display_labels, list_class_words, list_wnids
from vitrail.inference.predictor import AHEAD, Predictor
from vitrail.model.architecture import TimmArchitecture
from vitrail.model.create import build_empty_model

SMALL = {"image_size": 16, "width": 32, "depth": 2, "num_heads": 2, "mlp_dim": 64, "num_classes": 5, "seed": 0}
COVER = vitrail.Preprocessing(image_size=(16, 16), resize="cover", crop_fraction=0.9, interpolation="bicubic")


def tiny(**options):
    return randomise(vitrail.create_model("Ti/4", **(SMALL | options)))


def pixels(number: int, size: tuple[int, int] = (24, 20)) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(picture(number, size=size))))


@torch.no_grad()
def expected(model, images) -> np.ndarray:
    """One by one."""
    channels = [vitrail.prepare(image, model.preprocessing)[None] for image in images]
    return torch.cat([model(image).softmax(dim=1) for image in channels]).numpy()


def kinds(folder: Path) -> dict[str, object]:
    (folder / "one.png").write_bytes(picture(1))
    (folder / "two.jpg").write_bytes(picture(2, "JPEG"))
    (folder / "grey.png").write_bytes(picture(3))
    Image.open(folder / "grey.png").convert("L").save(folder / "grey.png")
    return {
        "str": str(folder / "one.png"),
        "path": folder / "two.jpg",
        "grey file": folder / "grey.png",
        "bytes": picture(4, "WEBP"),
        "pillow": Image.open(io.BytesIO(picture(5, "JPEG"))),
        "pillow with transparency": Image.open(io.BytesIO(picture(5))).convert("RGBA"),
        "array": pixels(6),
        "array turned": pixels(6)[::-1, ::-1],
        "grey array": pixels(7)[:, :, 0],
        "array of one channel": pixels(7)[:, :, :1],
        "tensor": torch.from_numpy(pixels(8).copy()).permute(2, 0, 1),
        "grey tensor": torch.from_numpy(pixels(8)[None, :, :, 0].copy()),
        "of the model's size": torch.from_numpy(pixels(9, (16, 16)).copy()).permute(2, 0, 1),
    }


@pytest.mark.parametrize("channels", [1, 3])
def test_every_kind_of_image_as_prepare_has_it(tmp_path, channels):
    model = tiny(in_channels=channels)
    images = kinds(tmp_path)
    predictor = Predictor(model, device="cpu", batch_size=4)
    wanted = expected(model, images.values())
    np.testing.assert_allclose(predictor.probabilities(images.values()), wanted, rtol=1e-4, atol=1e-6)
    assert len({row.tobytes() for row in wanted}) > 8, "the model tells them apart"
    for (kind, image), row in zip(images.items(), wanted, strict=True):
        alone = predictor(image, top=2)
        order = np.argsort(-row)[:2]
        assert [label for label, _ in alone] == [f"class {number}" for number in order], kind
        np.testing.assert_allclose([share for _, share in alone], row[order], rtol=1e-4)
        assert all(type(share) is float for _, share in alone)


def test_other_bytes_are_bytes():
    predictor = Predictor(tiny(), device="cpu")
    content = picture(1)
    assert predictor(bytearray(content)) == predictor(memoryview(content)) == predictor(content)


def test_preprocessing_that_crops():
    model = tiny()
    model.preprocessing = COVER
    images = [picture(number, size=(20 + number, 30)) for number in range(5)]
    found = Predictor(model, device="cpu").probabilities(images)
    np.testing.assert_allclose(found, expected(model, images), rtol=1e-4, atol=1e-6)


MODEL = tiny()
IMAGES = [pixels(number) for number in range(9)]
WANTED = expected(MODEL, IMAGES)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 9), st.integers(1, 12))
def test_any_number_in_batches_of_any_size(count, batch_size):
    predictor = Predictor(MODEL, device="cpu", batch_size=batch_size)
    for images in (IMAGES[:count], tuple(IMAGES[:count]), iter(IMAGES[:count])):
        np.testing.assert_allclose(predictor.probabilities(images), WANTED[:count], rtol=1e-4, atol=1e-6)
    assert predictor.embed(IMAGES[:count]).shape == (count, 32)
    assert len(predictor(IMAGES[:count])) == count


def test_shapes_and_types_of_one_and_none():
    predictor = Predictor(MODEL, device="cpu")
    assert predictor.probabilities(IMAGES[0]).shape == (1, 5)
    assert predictor.embed(IMAGES[0]).shape == (1, 32)
    for found in (predictor.probabilities([]), predictor.embed([]), predictor.embed(IMAGES)):
        assert found.dtype == np.float32
    assert predictor.probabilities([]).shape == (0, 5)
    assert predictor([]) == []


def test_best_first_and_no_more_than_there_are():
    predictor = Predictor(MODEL, device="cpu")
    found = predictor(IMAGES[0], top=99)
    assert [share for _, share in found] == pytest.approx(sorted(WANTED[0].tolist(), reverse=True), rel=1e-4)
    assert found[:3] == predictor(IMAGES[0], top=3)
    assert predictor.rank_labels(np.float32([0.2, 0.4, 0.4]), 3) == [
        ("class 1", pytest.approx(0.4)),
        ("class 2", pytest.approx(0.4)),
        ("class 0", pytest.approx(0.2)),
    ]
    for top in (0, -1):
        with pytest.raises(ConfigError, match="give 1 or more"):
            predictor(IMAGES[0], top=top)


def test_embeddings_are_those_of_the_model_also_beside_probabilities():
    predictor = Predictor(MODEL, device="cpu", batch_size=4)
    prepared = torch.stack([vitrail.prepare(image, MODEL.preprocessing) for image in IMAGES])
    with torch.no_grad():
        wanted = MODEL.embed(prepared).numpy()
    np.testing.assert_allclose(predictor.embed(IMAGES), wanted, rtol=1e-4, atol=1e-5)
    both = list(predictor.stream(IMAGES, embeddings=True))
    np.testing.assert_allclose([each.embedding for each in both], wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose([each.probabilities for each in both], WANTED, rtol=1e-4, atol=1e-6)
    assert [each.index for each in both] == list(range(9))


def of_timm():
    model = build_empty_model(TimmArchitecture(name="test_resnet", image_size=(32, 32), num_classes=3))
    empty = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in model.state_dict().items()}
    model.load_state_dict(empty, assign=True)
    return randomise(model)


@pytest.mark.parametrize(
    "make",
    [of_timm, lambda: tiny(representation_size=24), lambda: tiny(pool="average")],
    ids=["timm", "tanh", "average"],
)
def test_other_networks(make):
    model = make()
    images = IMAGES[:3]
    predictor = Predictor(model, device="cpu")
    wanted = expected(model, images)
    np.testing.assert_allclose(predictor.probabilities(images), wanted, rtol=1e-3, atol=1e-5)
    both = list(predictor.stream(images, embeddings=True))
    np.testing.assert_allclose([each.probabilities for each in both], wanted, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose([each.embedding for each in both], predictor.embed(images), rtol=1e-3, atol=1e-5)


def test_half_precision_becomes_float32_and_training_ends(tmp_path):
    model = tiny(dropout=0.5)
    vitrail.save(model.half(), tmp_path / "half")
    whole = vitrail.load(tmp_path / "half").float()
    wanted = expected(whole, IMAGES)
    for given_model in (str(tmp_path / "half"), tmp_path / "half", model.train()):
        np.testing.assert_allclose(Predictor(given_model, device="cpu").probabilities(IMAGES), wanted, rtol=1e-4)


def test_labels_in_words():
    model = tiny(num_classes=3)
    assert get_display_labels(model) == ("class 0", "class 1", "class 2")
    model.labels = ["n01440764", "cat, tom", "Größe"]
    assert Predictor(model, device="cpu").labels == ("tench", "cat, tom", "Größe")
    assert repr(Predictor(model, device="cpu")) == "Predictor(3 classes, fp32 by PyTorch on cpu)"
    model.labels = ["n02012849", "n03126707", "tench"]
    assert get_display_labels(model) == ("crane (n02012849)", "crane (n03126707)", "tench")
    model.labels = ["crane", "n03126707", "tench"]
    assert get_display_labels(model) == ("crane", "crane (n03126707)", "tench")


def test_a_thousand_classes_without_names_are_those_of_imagenet():
    found = get_display_labels(tiny(num_classes=1000))
    assert len(set(found)) == 1000
    for label, words, wnid in zip(found, list_class_words(), list_wnids(), strict=True):
        assert label in (words[0], f"{words[0]} ({wnid})")
    assert found[0] == "tench"


def test_a_model_without_classes_embeds_and_does_not_guess():
    predictor = Predictor(tiny(num_classes=0), device="cpu")
    assert predictor.labels == ()
    assert predictor.embed(IMAGES).shape == (9, 32)
    for call in (predictor, predictor.probabilities, predictor.stream):
        with pytest.raises(ConfigError, match="use embed"):
            call(IMAGES)


@pytest.mark.parametrize(
    ("wrong", "kind", "words"),
    [
        ("nowhere.png", DataError, "nowhere.png: .*No such file"),
        ("a\nb.png", DataError, r"a\\nb.png: cannot be read"),
        (b"no image", DataError, "a bytes: not an image"),
        (picture(1)[:200], DataError, "a bytes: damaged"),
        (np.zeros((4, 4, 3), np.float32), InputError, "a NumPy array: float32 of shape .* give a path"),
        (np.zeros((2, 4, 4, 3), np.uint8), InputError, "several images go in a list"),
        (np.zeros((0, 4, 3), np.uint8), InputError, "no image"),
        (np.zeros((3, 4, 9), np.uint8), InputError, "9 channels.* last .* 3"),
        (torch.zeros(4, 5, 3, dtype=torch.uint8), InputError, "4 channels.* first "),
        (torch.zeros(3, 4, 4), InputError, "a tensor: torch.float32 of shape"),
        (Image.new("F", (4, 4)), DataError, "a Pillow image: .*pixels"),
        (Image.open(io.BytesIO(picture(1, "JPEG")[:700])), DataError, "a Pillow image: damaged"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else None,
)
def test_an_error_says_which_and_why(wrong, kind, words):
    predictor = Predictor(MODEL, device="cpu", batch_size=2)
    with pytest.raises(kind, match=words) as alone:
        predictor(wrong)
    assert "images[" not in str(alone.value)
    with pytest.raises(kind, match=rf"images\[3\], .*{words}"):
        predictor([*IMAGES[:3], wrong, *IMAGES])
    outcomes = list(predictor.stream([*IMAGES[:3], wrong, *IMAGES[3:]]))
    assert [each.index for each in outcomes if each.error is not None] == [3]
    good = [each.probabilities for each in outcomes if each.error is None]
    np.testing.assert_allclose(good, WANTED, rtol=1e-4, atol=1e-6)


def test_what_is_no_image_at_all():
    predictor = Predictor(MODEL, device="cpu")
    for wrong in (None, 3):
        with pytest.raises(InputError, match="is no image: give a path"):
            predictor(wrong)
        with pytest.raises(InputError, match=r"images\[0\], .* is no image: give a path"):
            predictor([wrong])
    with pytest.raises(InputError, match=r"images\[0\], a list: a list is no image"):
        predictor([[IMAGES[0]]])
    with pytest.raises(InputError, match="open file"):
        predictor(io.BytesIO(b"a line\nanother"))
    with pytest.raises(InputError, match="dict is no image"):
        predictor({"a": IMAGES[0]})


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_photo_is_the_same_photo_however_it_comes(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(file, "PNG", exif=exif)
    predictor = Predictor(MODEL, device="cpu")
    opened = Image.open(io.BytesIO(file.getvalue()))
    np.testing.assert_array_equal(predictor.embed(opened), predictor.embed(file.getvalue()))


def test_what_is_no_model():
    with pytest.raises(ConfigError, match="a int is no model"):
        Predictor(7)
    with pytest.raises(ConfigError, match="batch_size = 0"):
        Predictor(MODEL, batch_size=0)


def test_pixels_are_limited():
    predictor = Predictor(MODEL, device="cpu", most_pixels=400)
    for large in (picture(1), Image.open(io.BytesIO(picture(1)))):
        with pytest.raises(DataError, match=r"24×20 .* 400"):
            predictor(large)
    assert len(predictor(picture(1, size=(20, 20)))) == 5


def test_what_is_not_a_number_is_an_error():
    model = tiny()
    with torch.no_grad():
        next(model.head.parameters()).fill_(float("nan"))
    with pytest.raises(InputError, match="not a number"):
        Predictor(model, device="cpu")(IMAGES[0])


def test_many_threads_at_once_are_as_one(tmp_path):
    for number in range(12):
        (tmp_path / f"{number}.jpg").write_bytes(picture(number, "JPEG"))
    lazy = Image.open(tmp_path / "0.jpg")  # read when first asked for, here by all at once
    images = [*sorted(tmp_path.iterdir()), lazy, lazy, *IMAGES]
    predictor = Predictor(MODEL, device="cpu", batch_size=5)
    wanted = Predictor(MODEL, device="cpu", batch_size=5).probabilities(
        [Image.open(tmp_path / "0.jpg") if image is lazy else image for image in images]
    )
    start = threading.Barrier(8)

    def call(_: int) -> np.ndarray:
        start.wait()
        return predictor.probabilities(images)

    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(call, range(8)):
            np.testing.assert_array_equal(found, wanted)


def test_decoding_in_threads_leaves_the_warnings_of_the_process_as_they_were(monkeypatch):
    both, gone, decode = threading.Barrier(2), threading.Event(), prepare.decode_image

    def overlapping(content: bytes, most_pixels: int) -> torch.Tensor:
        """As `decode` does it; the first to enter is the first to leave."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if content == picture(1):
                both.wait(10)
                gone.wait(10)
            else:
                time.sleep(0.05)
                both.wait(10)
        gone.set()
        return decode(content, most_pixels)

    monkeypatch.setattr(prepare, "decode_image", overlapping)
    monkeypatch.setattr(predict, "resolve_worker_count", lambda _: 2)
    before = list(warnings.filters)
    assert len(Predictor(MODEL, device="cpu")([picture(0), picture(1)])) == 2
    assert warnings.filters == before


def test_only_a_few_batches_are_read_ahead():
    taken = 0

    def endless():
        nonlocal taken
        while True:
            taken += 1
            yield IMAGES[0]

    predictor = Predictor(MODEL, device="cpu", batch_size=3)
    with closing(predictor.stream(endless())) as outcomes:
        for number, outcome in enumerate(outcomes):
            assert outcome.index == number
            assert taken <= number + 1 + (1 + AHEAD) * 3
            if number == 20:
                break
    gc.collect()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("vitrail-decode")]


def test_a_call_that_fails_leaves_no_threads():
    with pytest.raises(DataError):
        Predictor(MODEL, device="cpu", batch_size=2)([IMAGES[0], b"", *IMAGES])
    gc.collect()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("vitrail-decode")]
