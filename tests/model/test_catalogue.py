"""The table of models, from Python."""

from __future__ import annotations

import pytest

from vitrail.errors import ConfigError
from vitrail.model.catalogue import ModelEntry, list_models
from vitrail.model.variants import LISTED_NAMES


def test_all_models_are_listed_at_a_size_that_their_patches_divide():
    entries = list_models(image_size=230)
    assert [entry.name for entry in entries] == list(LISTED_NAMES)
    sizes = {entry.name: entry.image_size for entry in entries}
    assert (sizes["B/16"], sizes["H/14"], sizes["BiT-R50x1"]) == (224, 224, 230)


def test_a_row_is_a_plain_record():
    (entry,) = list_models("B/16")
    assert entry == list_models(["B/16"])[0]
    assert isinstance(entry, ModelEntry)
    assert (entry.parameters, entry.tokens, entry.image_size) == (86_567_656, 197, 224)
    assert "name='B/16'" in repr(entry)
    assert list_models("BiT-R50x1")[0].tokens is None


@pytest.mark.parametrize(("name", "size", "word"), [("Q/16", 224, "Q/16"), ("B/16", 225, "224 and 240")])
def test_wrong_names_and_sizes(name, size, word):
    with pytest.raises(ConfigError, match=word):
        list_models([name], image_size=size)
