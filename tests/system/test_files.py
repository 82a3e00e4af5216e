"""Short names of models and data, for folders."""

from __future__ import annotations

import pytest

from vitrail.system.files import short_name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("runs/x", "x"),
        ("runs/x/model", "x"),
        ("runs/x/best", "x-best"),
        ("best", "best"),
        ("hf:owner/name", "name"),
        ("timm:vit_tiny", "vit_tiny"),
        ("my photos/", "my-photos"),
        ("/", "data"),
    ],
)
def test_short_names(text, name):
    assert short_name(text) == name
