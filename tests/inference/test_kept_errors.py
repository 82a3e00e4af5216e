"""Errors that a caller keeps hold no images: their tracebacks and contexts are cut off."""

from __future__ import annotations

import gc
import io

from PIL import Image

import vitrail
from vitrail.errors import DataError, detach_error


def test_detached_errors_hold_nothing():
    def fail() -> None:
        try:
            raise ValueError("inside")
        except ValueError as inner:
            raise DataError("outside") from inner

    try:
        fail()
    except DataError as caught:
        error = detach_error(caught)
    assert (str(error), error.__traceback__, error.__cause__, error.__context__) == ("outside", None, None, None)


def test_predictions_with_errors_keep_no_images():
    file = io.BytesIO()
    Image.new("RGB", (60, 60)).save(file, "PPM")
    model = vitrail.create_model("Ti/16", image_size=32, num_classes=2)
    predictions = list(vitrail.Predictor(model, batch_size=2).stream([file.getvalue()[:-5]] * 5))
    gc.collect()
    assert not [each for each in gc.get_objects() if issubclass(type(each), Image.Image) and each.size == (60, 60)]
    for prediction in predictions:
        assert isinstance(prediction.error, DataError)
        assert prediction.error.__traceback__ is prediction.error.__context__ is None
