"""What a shell completes: verbs, recipes, and the words of options, without loading torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from vitrail.cli import completion
from vitrail.exporting.export import KINDS
from vitrail.recipes import RECIPES
from vitrail.system.precision import INFERENCE_PRECISIONS
from vitrail.weights.load import FORMATS

PROGRAM = "import sys; sys.argv[0] = 'vitrail'; from vitrail.cli import app\ntry: app(prog_name='vitrail')\n"
PROGRAM += "finally: print('torch' in sys.modules, file=sys.stderr)"


def complete(*words: str) -> list[str]:
    """What the shell would offer for the last word, by typer's protocol with bash."""
    line = ["vitrail", *words]
    asked = {"_VITRAIL_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(line), "COMP_CWORD": str(len(words))}
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env={**os.environ, **asked}, check=False
    )
    assert answer.stderr.split()[-1] == "False", answer.stderr  # torch was not loaded
    return answer.stdout.split()


def test_verbs():
    assert complete("tr") == ["train"]
    assert {"evaluate", "export"} <= set(complete("e"))


def test_recipes():
    assert set(complete("train", "")) >= set(RECIPES)
    assert complete("train", "cifar10-st") == ["cifar10-stem"]


def test_words_of_options():
    assert complete("convert", "a", "b", "--to", "t") == ["timm", "torchvision"]
    assert complete("convert", "a", "b", "--which", "") == ["last", "best"]


@pytest.mark.parametrize(
    ("complete_words", "words"),
    [
        (completion.complete_format, FORMATS),
        (completion.complete_kind, KINDS),
        (completion.complete_precision, INFERENCE_PRECISIONS),
        (completion.complete_recipe, RECIPES),
    ],
)
def test_the_offered_words_are_those_that_are_taken(complete_words, words):
    assert complete_words("") == list(words)
