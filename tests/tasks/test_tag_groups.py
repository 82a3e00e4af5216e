"""Groups of tags of which every image has exactly one: how they are found, learned and answered."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.data.open import open_data
from vitrail.data.task_data import TaskData
from vitrail.errors import ConfigError
from vitrail.tasks.tag_groups import LEAST_IMAGES, LEAST_OF_EACH, MOST_TAGS, find_tag_groups
from vitrail.tasks.tags import TAGS, Tags

CATS, DOGS = ("Birman", "Siamese"), ("beagle", "boxer", "pug")
PETS = [["cat", breed] for breed in CATS] + [["dog", breed] for breed in DOGS]
TASK = Tags(names=("day", "night", "big", "small", "cat", "dog"), groups=(("day", "night"), ("big", "small")))


def test_species_and_breeds_are_two_groups():
    groups = find_tag_groups(itertools.islice(itertools.cycle(PETS), LEAST_IMAGES))
    assert groups == (("cat", "dog"), (*CATS, *DOGS))


@pytest.mark.parametrize("odd", [[], ["cat"], ["cat", "dog", "pug"], ["cat", "Birman", "pug"]])
def test_one_image_that_differs_undoes_what_it_contradicts(odd):
    rows = [*itertools.islice(itertools.cycle(PETS), 1000), odd]
    groups = find_tag_groups(rows)
    assert all(sum(tag in row for tag in group) == 1 for group in groups for row in rows)
    assert (("cat", "dog") in groups) == (sum(tag in odd for tag in ("cat", "dog")) == 1)


def test_few_images_and_many_tags_have_no_groups():
    assert find_tag_groups(itertools.islice(itertools.cycle(PETS), LEAST_IMAGES - 1)) == ()
    assert find_tag_groups([["a"], ["b"]] * LEAST_IMAGES) == (("a", "b"),)
    assert find_tag_groups([["a"]] * LEAST_IMAGES) == ()  # a tag that all images have excludes nothing
    assert find_tag_groups([[str(number)] for number in range(MOST_TAGS)] * LEAST_OF_EACH) != ()
    assert find_tag_groups([[str(number)] for number in range(MOST_TAGS + 1)] * LEAST_OF_EACH) == ()


def test_rare_tags_complete_no_group():
    """Or else any keyword that one image has instead of another would force a softmax on both."""
    assert find_tag_groups([["indoor"]] * 119 + [["owl"]] * (LEAST_OF_EACH - 1)) == ()
    assert find_tag_groups([["indoor"]] * 119 + [["owl"]] * LEAST_OF_EACH) == (("indoor", "owl"),)
    assert find_tag_groups([[str(number)] for number in range(300)]) == ()


@pytest.mark.parametrize("seed", range(20))
def test_keywords_have_no_groups(seed):
    """A vocabulary as of people: few words are frequent, most are rare, and an image has one to five."""
    rng = np.random.default_rng(seed)
    shares = 1 / np.arange(1, 301)
    rows = [
        [str(word) for word in rng.choice(300, size=rng.integers(1, 6), replace=False, p=shares / shares.sum())]
        for _ in range(int(rng.integers(LEAST_IMAGES, 500)))
    ]
    assert find_tag_groups(rows) == ()


def test_an_image_is_answered_one_tag_of_each_group():
    rng = np.random.default_rng(0)
    values = rng.dirichlet([1] * 5, 200).astype(np.float32)
    task = Tags(names=("a", "b", "c", "d", "e", "x"), groups=(("a", "b", "c", "d", "e"),))
    values = np.concatenate([values, rng.random((200, 1), np.float32)], axis=1)
    targets = {TAGS: np.concatenate([np.eye(5)[rng.integers(0, 5, 200)], rng.integers(0, 2, (200, 1))], axis=1)}
    tuned = task.tune(values, targets)
    assert tuned.thresholds[:5] == (0.5,) * 5
    for each in (task, tuned):
        decided = each.decide(values)
        assert (decided[:, :5].sum(axis=1) == 1).all()
        assert (decided[:, :5].argmax(axis=1) == values[:, :5].argmax(axis=1)).all()
        np.testing.assert_array_equal(decided[:, 5], values[:, 5] >= (each.thresholds or [0.5])[-1])
        assert len(set(each.answer(values[0])["tags"]) & set("abcde")) == 1
    assert (
        Tags(names=tuple("abcde"), groups=(tuple("abcde"),))
        .tune(values[:, :5], {TAGS: targets[TAGS][:, :5]})
        .thresholds
        == ()
    )
    found = task.count(torch.from_numpy(values).logit(), {TAGS: torch.from_numpy(targets[TAGS])})["tag-accuracy"]
    expected = (task.decide(values) == (targets[TAGS] > 0)).mean(axis=1)
    np.testing.assert_allclose(found, expected, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(2, 4), min_size=1, max_size=3), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_groups_hold_on_every_image(sizes, alone, seed):
    """Images with one tag of each planted group, and others at random: what is found is exact, and something is."""
    rng = np.random.default_rng(seed)
    planted = [[f"g{group}-{number}" for number in range(size)] for group, size in enumerate(sizes)]
    rows = [
        [group[rng.integers(len(group))] for group in planted] + [f"t{k}" for k in range(alone) if rng.random() < 0.5]
        for _ in range(200)
    ]
    groups = find_tag_groups(rows)
    assert groups
    assert len(set(itertools.chain(*groups))) == sum(map(len, groups))
    for row, group in itertools.product(rows, groups):
        assert sum(tag in row for tag in group) == 1


def test_a_search_ends():
    rng = np.random.default_rng(0)
    rows = [[str(tag) for tag in rng.choice(200, 5, replace=False)] for _ in range(3000)]
    assert find_tag_groups(rows) == ()


def make_csv(folder, rows):
    """Write a table of tags; every row is (tags, split)."""
    lines = ["image,tags,split", *(f"{number}.png,{tags},{split}" for number, (tags, split) in enumerate(rows))]
    (folder / "data.csv").write_text("\n".join(lines))
    from PIL import Image

    for number in range(len(rows)):
        Image.new("RGB", (4, 4)).save(folder / f"{number}.png")
    return folder / "data.csv"


def test_only_images_to_train_on_make_groups(tmp_path):
    rows = [(tags, "train") for tags in ("day|cat", "night|dog|cat", "night", "day|dog") * 30]
    table = make_csv(tmp_path, [*rows, ("cat", "test"), ("day|night|owl", "test")])
    task = open_data(TaskData(table, "tags"), "train").task
    assert isinstance(task, Tags)
    assert task.groups == (("day", "night"),)
    assert task.names == ("day", "night", "cat", "dog", "owl")  # groups first; names also of test
    test = open_data(TaskData(table, "tags"), "test")
    np.testing.assert_array_equal(test.targets(0, 2)[TAGS], [[0, 0, 1, 0, 0], [1, 1, 0, 0, 1]])


def test_rows_that_cannot_be_read_undo_no_group(tmp_path):
    rows = [(tags, "train") for tags in ("day", "night") * 60]
    task = open_data(TaskData(make_csv(tmp_path, [*rows, ('"[""day"', "train"), ("", "tset")]), "tags"), "train").task
    assert task.groups == (("day", "night"),)


def test_columns_of_yes_and_no_have_groups():
    task = Tags.learn({"big": ["1", "0"], "day": ["0", "1"], "night": ["1", "0"]})
    cells = {"big": ["1", "0", "1"] * 40, "day": ["0", "1", "1"] * 40, "night": ["1", "0", "0"] * 40}
    cells["day"][5], cells["night"][5] = "2", "0"  # no row of yes and no
    found = task.learn_values(cells)
    assert (found.groups, found.names, found.columns) == ((("day", "night"),),) + (("day", "night", "big"),) * 2
    assert found.encode({"big": 1, "day": 0, "night": 1})[TAGS].tolist() == [0, 1, 1]


def compute_loss_by_hand(outputs: list[float], tags: list[float]) -> float:
    """The loss of an image of TASK: two choices of one in two, and two questions of yes and no, each a quarter."""
    loss = 0.0
    for part in (slice(0, 2), slice(2, 4)):
        total = sum(math.exp(output) for output in outputs[part])
        loss -= sum(
            tag * math.log(math.exp(output) / total) for output, tag in zip(outputs[part], tags[part], strict=True)
        )
    for output, tag in zip(outputs[4:], tags[4:], strict=True):
        share = 1 / (1 + math.exp(-output))
        loss -= math.log(share if tag else 1 - share)
    return loss / 4


def test_the_loss_is_that_of_a_loop_and_its_gradient_right():
    outputs = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    rows = [[1, 0, 0, 1, 0, 0], [0, 1, 0, 1, 1, 0], [1, 0, 1, 0, 1, 1], [1, 1, 0, 0, 0, 1]]  # the last breaks both
    tags = torch.tensor(rows, dtype=torch.float64)
    found = TASK.compute_losses(outputs, {TAGS: tags}).detach()
    expected = [compute_loss_by_hand(*pair) for pair in zip(outputs.tolist(), tags.tolist(), strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert torch.autograd.gradcheck(lambda each: TASK.compute_losses(each, {TAGS: tags}), outputs)


def test_one_group_alone_is_a_classifier():
    task = Tags(names=("a", "b", "c"), groups=(("a", "b", "c"),))
    outputs, labels = torch.randn(5, 3, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 2, 0])
    losses = task.compute_losses(outputs, {TAGS: torch.eye(3)[labels]})
    torch.testing.assert_close(losses, torch.nn.functional.cross_entropy(outputs, labels, reduction="none"))
    torch.testing.assert_close(task.activate(outputs), outputs.softmax(dim=1))


def test_probabilities_of_a_group_sum_to_one():
    values = TASK.activate(3 * torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2)))
    assert values[:, :2].sum(dim=1).tolist() == pytest.approx([1] * 7)
    assert values[:, 2:4].sum(dim=1).tolist() == pytest.approx([1] * 7)
    counted = TASK.count(values.logit(), {TAGS: (values > 0.5).double()})["tag-accuracy"]
    assert counted.shape == (7,)


def test_groups_stand_first():
    with pytest.raises(ConfigError, match="they stand first in names"):
        Tags(names=("cat", "day", "night"), groups=(("day", "night"),))
    with pytest.raises(ConfigError):
        Tags(names=("day", "night"), groups=(("day",),))
    assert "exactly one of day, night; of big, small" in TASK.describe_values()
    assert Tags(names=("day",)).describe_values() == ""
