"""Class names against what people call them elsewhere, and every way of matching one set of classes with another."""

from __future__ import annotations

import ast
import importlib.util
import json
import random
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.errors import DataError
from vitrail.evaluation.labels import LabelMap, match_classes, read_label_map
from vitrail.inference import class_names as imagenet

WNIDS = imagenet.list_wnids()
FULL = [", ".join(words) for words in imagenet.list_class_words()]
"""The labels of most checkpoints on the hub."""
CRANES, MAILLOTS, MISSILES, SUNGLASSES, CARDIGANS = (134, 517), (638, 639), (657, 744), (836, 837), (264, 474)


def shuffled(names):
    order = random.Random(0).sample(range(len(names)), len(names))
    return [names[number] for number in order], order


@pytest.fixture(scope="module")
def torchvision_names():
    """The short names that torchvision gives its weights, read without importing it."""
    source = Path(importlib.util.find_spec("torchvision").origin).parent / "models" / "_meta.py"
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "_IMAGENET_CATEGORIES":
            return ast.literal_eval(node.value)
    pytest.fail("torchvision keeps its names elsewhere now")


# ImageNet's classes


def test_the_classes_are_timm_s_in_order():
    timm = Path(importlib.util.find_spec("timm").origin).parent / "data" / "_info"
    assert list(WNIDS) == (timm / "imagenet_synsets.txt").read_text().split()
    words = dict(line.split("\t") for line in (timm / "imagenet_synset_to_lemma.txt").read_text().splitlines())
    assert [words[wnid] for wnid in WNIDS] == FULL


def test_the_classes_by_hand():
    assert len(WNIDS) == len(imagenet.list_class_words()) == 1000
    assert list(WNIDS) == sorted(set(WNIDS))
    assert imagenet.list_class_words()[0] == ("tench", "Tinca tinca")
    assert imagenet.list_class_words()[999] == ("toilet tissue", "toilet paper", "bathroom tissue")
    assert (WNIDS[281], imagenet.list_class_words()[281]) == ("n02123045", ("tabby", "tabby cat"))
    assert [imagenet.list_class_words()[number][0] for number in (207, 817, 949, 963)] == [
        "golden retriever",
        "sports car",
        "strawberry",
        "pizza",
    ]


def test_names_that_are_several_classes():
    for pair, word in [(CRANES, "crane"), (MAILLOTS, "maillot"), (MISSILES, "missile"), (CARDIGANS, "cardigan")]:
        assert imagenet.build_vocabulary().find(word) == set(pair)
    assert [imagenet.build_vocabulary().find(word) for word in ("sunglass", "sunglasses")] == [{836}, {837}]


def test_objectnet_by_names():
    table = imagenet.read_objectnet()
    assert len(table) == 113
    assert all(0 <= number < 1000 for numbers in table.values() for number in numbers)
    expected = {
        "alarm_clock": ["analog clock", "digital clock"],
        "banana": ["banana"],
        "bench": ["park bench"],
        "bicycle": ["bicycle-built-for-two", "mountain bike"],
        "butchers_knife": ["cleaver"],
        "chair": ["barber chair", "folding chair", "rocking chair"],
        "dress_shoe_men": ["Loafer"],
        "full_sized_towel": ["bath towel"],
        "helmet": ["crash helmet", "football helmet"],
        "orange": ["orange"],
        "pen": ["ballpoint", "fountain pen", "quill"],
        "plate": ["plate"],
        "still_camera": ["Polaroid camera", "reflex camera"],
        "sunglasses": ["sunglasses"],
        "t-shirt": ["jersey"],
        "tie": ["bow tie", "Windsor tie"],
        "toilet_paper_roll": ["toilet tissue"],
        "trash_bin": ["ashcan"],
        "weight_exercise": ["dumbbell"],
        "wok": ["wok"],
    }
    assert {folder: [imagenet.list_class_words()[n][0] for n in table[folder]] for folder in expected} == expected
    # Where a folder is called as a class is, it is that class.
    for folder, numbers in table.items():
        assert imagenet.build_vocabulary().find(folder) in (set(), set(numbers)), folder


# By number


def test_by_number_without_names():
    found = match_classes(None, 10, (), 10)
    assert found.is_identity
    assert found.unmatched == ()
    assert found.explanation == "by number: neither the model nor the data names its classes"
    assert match_classes(["cat", "dog"], 2, (), 2).explanation == "by number: the data does not name its classes"
    one = match_classes(None, 3, ("ant", "bee", "cow"), 3)
    assert one.is_identity
    assert one.explanation == "by number: the model does not name its classes"


@pytest.mark.parametrize(("model", "data"), [(1000, 997), (10, 9), (2, 1), (1000, 900)])
def test_the_last_classes_may_have_no_image(model, data):
    found = match_classes(None, model, (), data)
    assert found.accepted == tuple((number,) for number in range(data))
    assert f"largest label is {data - 1}" in found.explanation
    assert f"{model} classes" in found.explanation


@pytest.mark.parametrize(
    ("model", "data"), [(1000, 10), (1000, 899), (10, 8), (10, 11), (10, 0), (0, 0), (21843, 1000)]
)
def test_numbers_that_do_not_agree(model, data):
    with pytest.raises(DataError, match=f"{data} classes .*{model}.*classes.txt"):
        match_classes(None, model, (), data)


def test_names_on_one_side_and_counts_that_differ():
    with pytest.raises(DataError, match=r"3 classes .*ant, bee, cow.* 5 "):
        match_classes(None, 5, ("ant", "bee", "cow"), 3)


@pytest.mark.parametrize("labels", [FULL, None])
def test_folders_called_by_numbers_mean_these(labels):
    folders = sorted(str(number) for number in range(1000))  # 0, 1, 10, 100, 101, …, as ImageNetV2 has them
    found = match_classes(labels, 1000, folders, 1000)
    assert found.accepted == tuple((int(name),) for name in folders)
    assert found.explanation == "the data's names are the numbers of the model's classes"


def test_folders_called_by_numbers_where_nothing_tells_their_order():
    assert match_classes(None, 10, [str(number) for number in range(10)], 10).is_identity
    with pytest.raises(DataError, match=r"called 0, 1, 10, 11, 2, .*order"):
        match_classes(None, 12, sorted(map(str, range(12))), 12)
    names = [f"kind {letter}" for letter in "abcdefghijkl"]
    assert match_classes(names, 12, sorted(map(str, range(12))), 12).accepted[2] == (10,)
    with pytest.raises(DataError, match="12 classes"):  # from 1 on: what 1 means cannot be known
        match_classes(names, 12, [str(number) for number in range(1, 13)], 12)


# By name


def test_identical():
    assert match_classes(["b", "a"], 2, ["b", "a"], 2) == LabelMap(((0,), (1,)), "the same names in the same order")
    assert match_classes(FULL, 1000, FULL, 1000).is_identity  # though two are called crane


def test_another_order():
    assert match_classes(["ant", "bee", "cow"], 3, ["cow", "ant", "bee"], 3) == LabelMap(
        ((2,), (0,), (1,)), "the same names in another order"
    )


def test_a_part_of_the_names():
    found = match_classes(["ant", "bee", "cow"], 3, ["cow", "bee"], 2)
    assert found == LabelMap(((2,), (1,)), "the same names, 2 of 3")
    more = match_classes(["ant", "bee"], 2, ["ant", "bee", "cow", "dog"], 4)
    assert more.accepted == ((0,), (1,), (), ())
    assert more.unmatched == (2, 3)
    assert not more.is_identity
    assert more.explanation.endswith("left out, since the model has no such class: cow, dog")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("Golden Retriever", "golden_retriever"),
        ("golden-retriever", "golden   retriever"),
        ("hotdog, hot dog, red hot", "hot_dog"),
        ("hot dog", "hotdog, hot dog, red hot"),
        ("STRASSE", "straße"),
        ("café", unicodedata.normalize("NFD", "café")),
    ],
)
def test_names_that_differ_in_spelling(ours, theirs):
    found = match_classes(["other", ours], 2, [theirs], 1)
    assert found.accepted == ((1,),)
    assert found.explanation == "by names that are the same but for case, blanks, hyphens and synonyms"


def test_names_of_nothing_but_marks_are_not_all_the_same():
    assert match_classes(["-", "_", ","], 3, [",", "-"], 2).accepted == ((2,), (0,))


def test_case_decides_where_it_is_all_there_is():
    letters = ["A", "B", "a", "b"]
    assert match_classes(letters, 4, ["a", "B"], 2).accepted == ((2,), (1,))
    assert match_classes(["-1", "0", "1"], 3, ["1", "-1"], 2).accepted == ((2,), (0,))
    found = match_classes(["Polish", "polish", "other"], 3, ["POLISH", "other"], 2)
    assert found.accepted == ((), (2,))
    assert "can stand for several classes: POLISH" in found.explanation


@pytest.mark.parametrize("word", ["crane", "maillot", "missile", "cardigan", "Cardigan", "panther"])
@pytest.mark.parametrize("model", ["names", "ids", "short", "none"])
def test_a_word_for_several_classes_is_left_out_and_told(word, model, torchvision_names):
    labels = {"names": FULL, "ids": WNIDS, "short": torchvision_names, "none": None}[model]
    found = match_classes(labels, 1000, ["banana", word, "tench"], 3)
    assert found.accepted == ((954,), (), (0,))
    assert f"can stand for several classes: {word}" in found.explanation
    with pytest.raises(DataError, match=r"certainly|without names"):
        match_classes(labels, 1000, [word], 1)


def test_a_word_is_certain_where_the_other_class_has_its_own():
    found = match_classes(FULL, 1000, ["maillot, tank suit", "maillot"], 2)
    assert found.accepted == ((639,), (638,))
    assert match_classes(FULL, 1000, ["maillot", "banana"], 2).accepted == ((), (954,))
    assert match_classes(FULL, 1000, ["projectile,_missile", "sunglass", "sunglasses"], 3).accepted == (
        (744,),
        (836,),
        (837,),
    )


def test_a_model_with_one_of_two_cranes(torchvision_names):
    ids = list(WNIDS[100:200])
    found = match_classes(ids, 100, ["crane", "flamingo"], 2)
    assert found.accepted == ((), (30,))
    # But what a model itself calls so is so.
    labels = [*torchvision_names[:9], "crane"]
    assert match_classes(labels, 10, ["crane", "tench"], 2).accepted == ((9,), (0,))


def test_a_name_whose_synonyms_are_different_classes_is_left_out():
    found = match_classes(["cat, puss", "dog, hound", "cow"], 3, ["puss, hound", "cow"], 2)
    assert found.accepted == ((), (2,))
    assert found.explanation.endswith("can stand for several classes: puss, hound")


def test_one_word_in_common_is_no_proof_where_each_has_another():
    with pytest.raises(DataError, match="2 classes"):
        match_classes(["dog, small", "cat, small"], 2, ["dog, large", "cat, large"], 2)
    assert match_classes(["dog, hound", "cat"], 2, ["dog", "cat, puss"], 2).accepted == ((0,), (1,))


# ImageNet by its ids and names


@pytest.mark.parametrize("model", ["names", "ids", "short", "none"])
def test_data_by_wordnet_ids(model, torchvision_names):
    labels = {"names": FULL, "ids": WNIDS, "short": torchvision_names, "none": None}[model]
    data, order = shuffled(WNIDS)
    found = match_classes(labels, 1000, data, 1000)
    assert found.accepted == tuple((number,) for number in order)
    assert match_classes(labels, 1000, WNIDS, 1000).is_identity
    part = match_classes(labels, 1000, ["n02123045", "n99999999", "n01440764"], 3)
    assert part.accepted == ((281,), (), (0,))
    assert part.explanation.endswith("left out, since the model has no such class: n99999999")
    if labels is None:
        assert "1000 classes without names, taken to be ImageNet's" in found.explanation
    elif model != "ids":
        assert found.explanation == "by WordNet ids: both have classes of ImageNet"


def test_models_in_another_order_or_of_some_classes():
    labels, order = shuffled(WNIDS)
    data = match_classes(labels, 1000, FULL, 1000)
    for number, classes in enumerate(data.accepted):
        assert classes == (() if number in CRANES else (order.index(number),))
    names = [FULL[number] for number in (0, 217, 482, 491, 497, 566, 569, 571, 574, 701)]  # Imagenette
    ids = [WNIDS[number] for number in (701, 0, 491)]
    assert match_classes(names, 10, ids, 3).accepted == ((9,), (0,), (3,))


def test_all_short_names_in_alphabetical_folders(torchvision_names):
    """Would be wrong by number, and hardly anyone would notice why."""
    data = sorted(torchvision_names)
    truth = [torchvision_names.index(name) for name in data]
    assert match_classes(torchvision_names, 1000, data, 1000).accepted == tuple((number,) for number in truth)
    for labels in (None, FULL, WNIDS):
        found = match_classes(labels, 1000, data, 1000)
        wrong = [n for n, classes in enumerate(found.accepted) if classes not in ((), (truth[n],))]
        assert wrong == []
        assert {data[number] for number in found.unmatched} >= {"crane", "crane bird"}
        assert len(found.unmatched) <= 13


def test_a_thousand_classes_of_something_else_stay_numbers():
    names = [f"kind {number}" for number in range(990)] + [words[0] for words in imagenet.list_class_words()[:10]]
    assert match_classes(None, 1000, names, 1000).explanation == "by number: the model does not name its classes"


def test_which_models_are_imagenet_s(torchvision_names):
    every = tuple(range(1000))
    assert all(imagenet.find_class_numbers(labels, 1000) == every for labels in (FULL, WNIDS, torchvision_names, None))
    assert imagenet.find_class_numbers(None, 999) is None
    assert imagenet.find_class_numbers(["cat", "dog", "banana"], 3) is None
    assert imagenet.find_class_numbers(["n07753592", "n01440764"], 2) == (954, 0)
    labels, order = shuffled(FULL)
    found = imagenet.find_class_numbers(labels, 1000)
    assert found == tuple(None if number in CRANES else number for number in order)


# ObjectNet

OTHERS = ["notebook", "napkin", "air_freshener", "wrench", "ziploc_bag", "hat"]


@pytest.mark.parametrize("labels", [FULL, WNIDS, None])
def test_objectnet(labels):
    folders = sorted([*imagenet.read_objectnet(), *OTHERS])
    found = match_classes(labels, 1000, folders, len(folders))
    assert found.accepted == tuple(imagenet.read_objectnet().get(folder, ()) for folder in folders)
    # By name alone a notebook would be a computer, and a napkin a diaper.
    assert {folders[number] for number in found.unmatched} == set(OTHERS)
    assert "ObjectNet's table of the 113" in found.explanation
    assert "left out" in found.explanation


def test_a_part_of_objectnet():
    folders = sorted(imagenet.read_objectnet())[:12]
    found = match_classes(FULL, 1000, folders, 12)
    assert found.accepted == tuple(imagenet.read_objectnet()[folder] for folder in folders)
    assert match_classes(FULL, 1000, folders[:10], 10).accepted == found.accepted[:10]
    # A handful of everyday names is not ObjectNet: chairs are more than what it counts as such.
    assert match_classes(FULL, 1000, ["banana", "chair"], 2).accepted == ((954,), ())


def test_objectnet_with_models_that_are_imagenet_s_in_part_or_not_at_all():
    folders = sorted(imagenet.read_objectnet())
    numbers = [*range(900, 1000), 0]
    found = match_classes([WNIDS[number] for number in numbers], 101, folders, 113)
    place = dict(zip(folders, found.accepted, strict=True))
    assert place["banana"] == (54,)
    assert place["tie"] == (6,)  # Windsor ties, and no bow ties
    assert place["backpack"] == ()
    own = match_classes(folders[::-1], 113, folders, 113)
    assert own.explanation == "the same names in another order"


def test_imagenet_by_short_names_is_not_objectnet():
    assert (
        "ObjectNet"
        not in match_classes(FULL, 1000, sorted({words[0] for words in imagenet.list_class_words()}), 999).explanation
    )


# Nothing in common


def test_nothing_in_common():
    data = [f"kind {letter}" for letter in "abcdefg"]
    with pytest.raises(DataError) as error:
        match_classes(["cat", "dog"], 2, data, 7)
    assert str(error.value) == (
        "none of the data's 7 classes (kind a, kind b, kind c, kind d, kind e, … (7 in all)) is certainly one of the "
        "model's 2 (cat, dog): fine-tune the model on this data, use `vitrail fewshot`, which needs no common classes, "
        "or give --map FILE, a CSV or JSON that says which class is which"
    )


plain = st.text(alphabet="abcXYZ _-,é", min_size=1, max_size=6)


@settings(deadline=None, max_examples=150)
@given(st.lists(plain, min_size=1, max_size=8), st.lists(plain, min_size=1, max_size=8))
def test_whatever_the_names_a_match_shares_a_word_and_no_other_class_is_called_the_same(model, data):
    def words(name):
        parts = [
            " ".join(part.casefold().replace("_", " ").replace("-", " ").split()) or part for part in name.split(",")
        ]
        return {part for part, given in zip(parts, name.split(","), strict=True) if given.strip()} or {name}

    def certain(name, label):
        """Neither has a word too many, or only one of them."""
        return words(name) <= words(label) or words(label) <= words(name)

    try:
        found = match_classes(model, len(model), data, len(data))
    except DataError:
        for name in data:
            labels = [label for label in model if words(label) & words(name)]
            assert len(labels) != 1 or not certain(name, labels[0])
        return
    assert len(found.accepted) == len(data)
    for name, classes in zip(data, found.accepted, strict=True):
        same = [number for number, label in enumerate(model) if words(label) & words(name)]
        if len(same) < 2:
            assert list(classes) == [number for number in same if certain(name, model[number])]
        assert set(classes) <= set(same)


@given(st.lists(plain, min_size=1, max_size=8, unique=True), st.randoms(use_true_random=False))
def test_the_same_names_in_any_order_find_each_other(names, random):
    """Unless they differ only in what folding takes away, besides case."""
    data = random.sample(names, len(names))
    try:
        accepted = match_classes(names, len(names), data, len(data)).accepted
    except DataError:
        accepted = ((),) * len(data)
    for name, classes in zip(data, accepted, strict=True):
        assert classes in ((names.index(name),), ())
        if "," not in name and not any("," in other for other in names):
            assert classes == (names.index(name),)


# Mapping files

MODEL = ["American crow", "raven", "crane, bird", "crane, machine", "zebra"]
DATA = ["crow", "hoist", "horse"]


def written(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("map.csv", 'data,model\ncrow,American crow,raven\nhoist,"crane, machine"\n'),
        ("map.csv", "crow,0\ncrow,1\n\nhoist, 3\nhorse,\n"),
        ("map.csv", "\ufeffCrow;american_crow;RAVEN\r\nhoist;machine\r\n"),
        ("map.tsv", "0\t0\t1\n1\tcrane, machine\n"),
        ("map.json", '{"crow": ["American crow", 1], "hoist": 3}'),
        ("map.json", '{"crow": "raven", "crow": [0, 0], "1": "machine", "horse": null}'),
        ("map", ' {"crow": [0, "1"], "hoist": "3", "horse": []}'),
    ],
)
def test_a_mapping_file(tmp_path, name, content):
    found = read_label_map(written(tmp_path, name, content), MODEL, 5, DATA)
    assert found == LabelMap(((0, 1), (3,), ()), f"by {name}; left out, since it gives no class for them: horse")


def test_a_mapping_file_to_imagenet_and_without_names(tmp_path):
    path = written(tmp_path, "map.csv", "0,n02123045,tiger cat\n2,954\n")
    for labels in (None, FULL, WNIDS):
        assert read_label_map(path, labels, 1000, ()).accepted == ((281, 282), (), (954,))
    found = read_label_map(path, FULL, 1000, (), 4)
    assert found.accepted == ((281, 282), (), (954,), ())
    assert found.explanation == "by map.csv; left out, since it gives no class for them: 1, 3"
    with pytest.raises(DataError, match=r"'2' .* 0 to 1"):
        read_label_map(path, FULL, 1000, (), 2)


def test_numbers_are_names_where_names_are_numbers(tmp_path):
    path = written(tmp_path, "map.json", '{"1": 10, "10": 2}')
    assert read_label_map(path, ["2", "10", "x"], 3, ["1", "10", "2"]).accepted == ((1,), (0,), ())
    with pytest.raises(DataError, match="'0'"):
        read_label_map(written(tmp_path, "zero.csv", "0,x\n"), ["2", "x"], 2, ["1", "2"])


def test_a_class_called_data_is_no_heading(tmp_path):
    assert read_label_map(written(tmp_path, "m.csv", "data,model\n"), ["code", "model"], 2, ["data"]).accepted == (
        (1,),
    )


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("crow,ravn\n", "line 1: 'ravn' .*'raven'"),
        ("data,model\ncrou,raven\n", "line 2: 'crou' .*'crow'"),
        ("crow,crane\n", r"'crane' .*\(2, 3\)"),
        ("crow,5\n", "'5' .* 0 to 4"),
        ("crow,-1\n", "'-1' is no class"),
        ("crow,99999999999999999999\n", "is no class"),
        ("3,raven\n", "'3' .*data"),
        (",raven\n", "line 1: "),
        ("", "names no class"),
        ("crow,\n", "names no class"),
        ("crow,\0\n", "is no class|cannot be read"),
        (b"crow,\xff\xfe\n", "map.csv .*UTF-8"),
        ("crow," + "x" * 200_000, "cannot be read|is no class"),
        ("{", "is no JSON"),
        ('{"crow": ' + "[" * 100_000, "is no JSON"),
        ('{"crow": {"raven": 1}}', "'crow' is no name"),
        ('{"crow": true}', "'crow'"),
        ('{"crow": 1.0}', "'crow'"),
        ('{"crow": ' + "9" * 5000 + "}", "is no JSON"),
    ],
)
def test_mapping_files_that_are_wrong(tmp_path, content, told):
    with pytest.raises(DataError, match=told) as error:
        read_label_map(written(tmp_path, "map.csv", content), MODEL, 5, DATA)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500


def test_mapping_files_that_are_none(tmp_path):
    with pytest.raises(DataError, match=r"none\.csv"):
        read_label_map(tmp_path / "none.csv", MODEL, 5, DATA)
    with pytest.raises(DataError, match="not a file"):
        read_label_map(tmp_path, MODEL, 5, DATA)
    with pytest.raises(DataError, match="JSON object"):
        read_label_map(written(tmp_path, "list.json", json.dumps([1, 2])), MODEL, 5, DATA)
    with (tmp_path / "huge.csv").open("wb") as file:
        file.truncate(10_000_000_000)
    with pytest.raises(DataError, match="10,000,000,000 bytes"):
        read_label_map(tmp_path / "huge.csv", MODEL, 5, DATA)
