"""Commands and configuration files that people get wrong: each is answered by a sentence that names what is wrong."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from commands import Command

ENOUGH = b'[data]\nsource = "photos"\n[model]\nname = "Ti/16"\n'
FILES = {
    "broken.toml": b"[data\nsource = 1\n",
    "two_values.toml": b'[data]\nsource = "photos"\nsource = "pictures"\n',
    "wrong_key.toml": b'[data]\nsorce = "photos"\n',
    "wrong_section.toml": b'[dta]\nsource = "photos"\n',
    "wrong_value.toml": ENOUGH + b'[schedule]\nsteps = "many"\n',
    "negative.toml": ENOUGH + b"[schedule]\nsteps = -1\n",
    "not_a_section.toml": b'data = "photos"\n',
    "list.toml": b"[[data]]\n",
    "no_data.toml": b"[schedule]\nsteps = 3\n",
    "no_model.toml": b'[data]\nsource = "photos"\n[schedule]\nsteps = 3\n',
    "empty.toml": b"",
    "binary.toml": bytes(range(256)),
    "recipe.yaml": b"data:\n  source: photos\n",
}

TYPED_WRONGLY = """
  trian photos                                   | no such command 'trian' | train
  --folder runs/x                                | no such option: --folder
  train --fodler runs/x                          | no such option: --fodler | try: vitrail train -h
  train --recipe                                 | --recipe
  finetune                                       | missing option '--data': A folder | try: vitrail finetune -h
  finetune --data                                | option '--data' requires an argument
  finetune --data photos pane                    | 'pane' is not key=value
  finetune --data photos --minutes soon          | invalid value for '--minutes' | number
  finetune --data photos --quik                  | no such option: --quik | --quick
  evaluate                                       | vitrail evaluate --model MODEL --data DATA
  evaluate pane                                  | vitrail evaluate --model MODEL --data DATA
  evaluate --model pane                          | --data is missing
  evaluate --model pane --data photos test       | test
  evaluate --model pane --data photos --batch 8  | no such option: --batch | --batch-size
  predict photos --format xml                    | no such option: --format
  predict photos --top many                      | invalid value for '--top'
  predict photos --top 0                         | invalid value for '--top'
  predict photos --top -3                        | invalid value for '--top'
  predict photos --batch-size 0                  | invalid value for '--batch-size'
  predict photos --json --csv                    | --json | --csv
  predict photos --csv --out answers.csv         | --json | --csv | the ending of --out
  predict photos --out answers.xml               | .jsonl | .csv
  calibrate --model pane                         | missing option '--data'
  calibrate --data photos                        | missing option '--model'
  calibrate pane --data photos                   | --model
  serve pane                                     | models are named by an option: vitrail serve --model pane
  serve --port http                              | invalid value for '--port'
  serve --batch many                             | invalid value for '--batch'
  serve --wait long                              | invalid value for '--wait'
  data chek photos                               | no such command 'chek' | check
  data check                                     | missing argument
  data pack photos                               | missing
  study                                          | vitrail study --list
  study --seed 3                                 | no such option: --seed | --seeds
  study patches --seeds 0                        | invalid value for '--seeds'
  bench --images ten                             | no such option: --images
  bench B/16 --batch 0                           | invalid value for '--batch'
  bench B/16 --size -1                           | invalid value for '--size'
  bench B/16 --rounds 0                          | invalid value for '--rounds'
  export pane --too onnx                         | no such option: --too | --to
  export pane model.onnx                         | missing option '--to'
  export --to onnx                               | missing argument
  convert                                        | missing argument
  convert pane                                   | missing argument
  convert pane model                             | missing option '--to'
  convert pane model other --to timm             | unexpected extra argument
  inspect pane --nothing                         | no such option: --nothing
  inspect pane --most 0                          | invalid value for '--most'
  quickstart --nothing                           | no such option: --nothing
"""

WRONG_NAMES = """
  train cifar10-scratc                           | did you mean 'cifar10-scratch'?
  train absent.toml                              | absent.toml
  finetune --data photos --task tgas             | did you mean 'tags'?
  finetune --data hf:                            | 'hf:' is not hf:owner/name
  finetune --data hf:/                           | 'hf:/' is not hf:owner/name
  finetune --data hf:one                         | 'hf:one' is not hf:owner/name
  finetune --data hf:one/two/three               | is not hf:owner/name
  finetune --data photos --from hf:one           | 'hf:one' is not hf:owner/name
  evaluate --model hf:one --data photos          | 'hf:one' is not hf:owner/name
  evaluate --model pane --data photos --split tst | tst
  evaluate --model pane --data photos --suite vtba | vtba
  export pane model.onnx --to onxx               | did you mean 'onnx'?
  convert pane model --to tim                    | did you mean 'timm'?
  convert pane model --to timm --push nobody     | 'nobody' is not hf:owner/name
  convert pane model --to timm --push hf:nobody  | 'hf:nobody' is not hf:owner/name
  study shap                                     | did you mean 'shape'?
  study shape --scale big                        | give tiny or small
  bench B/17                                     | does not divide into patches of 17
  bench Q/16                                     | Q/16
  bench B/16 --what speed                        | speed
  bench B/16 --precision fp7                     | fp7
  predict photos --device tpu                    | give cpu
  predict photos --precision fp7                 | fp7
  serve --backend tensorflow                     | tensorflow
  serve --access-log loud                        | loud
  serve --log-level loud                         | loud
"""

WRONG_NUMBERS = """
  finetune --data photos --minutes nan           | above 0 and up to a year
  finetune --data photos --minutes -3            | above 0 and up to a year
  finetune --data photos --minutes 0             | above 0 and up to a year
  finetune --data photos --quick --minutes 3     | give --quick or --minutes
  finetune --data photos run.seed                | is not key=value
  finetune --data photos run.sed=1               | unknown option 'run.sed', did you mean 'seed'?
  predict photos --coverage 1.5                  | between 0 and 1
  predict photos --coverage 0                    | between 0 and 1
  predict photos --coverage 95                   | between 0 and 1
  serve --port 70000                             | from 1 to 65535
  serve --port 0                                 | from 1 to 65535
  serve --deadline 0                             | deadline
  serve --batch 0                                | batch
  serve --wait -1                                | wait
  serve --queue 0                                | queue
  serve --threads 0                              | threads
"""

WRONG_SETTINGS = """
  data.source                                    | is not key=value
  data.sorce=photos                              | unknown option 'data.sorce', did you mean 'source'?
  dta.source=photos                              | unknown section 'dta', did you mean 'data'?
  rum.seed=1                                     | unknown section 'rum', did you mean 'run'?
  run=1                                          | run is a section: give run.KEY=value
  =3                                             | is not key=value
  run.seed.more=1                                | run.seed
  run.seed=one                                   | run.seed = 'one'
  run.seed=1.5                                   | run.seed = 1.5
  run.steps=5                                    | unknown option 'run.steps'
  schedule.steps=-1                              | schedule.steps = -1
  schedule.steps=many                            | schedule.steps = 'many'
  schedule.steps=1e400                           | schedule.steps
  schedule.warmup_steps=-5                       | schedule.warmup_steps = -5
  optimizer.name=                                | is not key=value
  optimizer.name=adam                            | unknown option 'optimizer.name'
  optimizer.kind=adamm                           | optimizer.kind = 'adamm'
  optimizer.learning_rate=fast                   | optimizer.learning_rate = 'fast'
  optimizer.learning_rate=-0.1                   | optimizer.learning_rate = -0.1
  optimizer.learning_rate=nan                    | optimizer.learning_rate
  optimizer.weight_decay=-1                      | optimizer.weight_decay = -1
  optimizer.betas=0.9                            | optimizer.betas
  optimizer.betas=[0.9,1.5]                      | optimizer.betas
  objective.kind=clasification                   | objective.kind = 'clasification'
  objective.label_smoothing=1.5                  | objective.label_smoothing = 1.5
  objective.balance=logit                        | objective.balance = 'logit'
  data.batch_size=0                              | data.batch_size = 0
  data.batch_size=some                           | data.batch_size = 'some'
  data.workers=-2                                | data.workers = -2
  data.holdout=2                                 | data.holdout
  data.task=tgas                                 | data.task
  model.name=Q/16                                | Q/16
  model.dropout=2                                | dropout = 2
"""

WRONG_FILES = """
  train broken.toml                              | broken.toml
  train two_values.toml                          | two_values.toml
  train wrong_key.toml                           | unknown option 'data.sorce', did you mean 'source'?
  train wrong_section.toml                       | unknown section 'dta', did you mean 'data'?
  train wrong_value.toml                         | schedule.steps = 'many'
  train negative.toml                            | schedule.steps = -1
  train not_a_section.toml                       | data
  train list.toml                                | data
  train no_data.toml                             | there is no data to train on
  train no_model.toml                            | give either model.name
  train empty.toml                               | there is no data to train on
  train binary.toml                              | binary.toml
  train recipe.yaml                              | recipe.yaml
  train photos                                   | photos
"""


def read_table(table: str, before: str = "") -> list[tuple[str, list[str]]]:
    """Return the commands of a table, each with the words that its answer holds."""
    rows = [[cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()]
    return [(before + command, [word for word in words if word]) for command, *words in rows]


RIGHT_SETTINGS = (
    "train cifar10-scratch data.source=photos data.validate_on=none data.batch_size=2 schedule.warmup_steps=0 "
    "schedule.steps=1 "
)
CASES = [
    *(case for table in (TYPED_WRONGLY, WRONG_NAMES, WRONG_NUMBERS, WRONG_FILES) for case in read_table(table)),
    *read_table(WRONG_SETTINGS, RIGHT_SETTINGS),
]


@pytest.fixture
def desk(tmp_path, monkeypatch) -> Path:
    """A working folder with photos and files of settings."""
    for animal in ("cats", "dogs"):
        (tmp_path / "photos" / animal).mkdir(parents=True)
        for number in range(2):
            pixels = np.full((16, 16, 3), 40 * number, np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / animal / f"{number}.png")
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    return tmp_path


NAMES = [command.removeprefix(RIGHT_SETTINGS) for command, _ in CASES]


@pytest.mark.parametrize(("command", "words"), CASES, ids=NAMES)
def test_a_wrong_command_is_told_in_a_sentence(command: str, words: list[str], desk: Path, run: Command):
    before = sorted(desk.rglob("*"))
    code, out, err = run(*shlex.split(command))
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") <= 2
    for word in words:
        assert word in err
    assert sorted(desk.rglob("*")) == before, "nothing is written"
