"""What the measurement of a study works with: it pre-trains, fine-tunes and scores models at the study's scale.

Every training has a folder of its own, named after a digest of its configuration. A training that several arms or
studies need is done once, and an interrupted one goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.data.loader import Batch, EvaluationLoader
from vitrail.data.open import open_data
from vitrail.data.resident import CachedBatches
from vitrail.data.sources.source import Source, Subset, compute_fingerprint
from vitrail.data.transforms.preprocess import normalise
from vitrail.evaluation.features import Features
from vitrail.evaluation.least_squares import SEEDS, choose_shots, score_few_shot
from vitrail.evaluation.training_fewshot import open_training_fewshot
from vitrail.model.base import ImageModel
from vitrail.model.create import create_model
from vitrail.studies.scales import Scale
from vitrail.studies.study_data import StudyData, TransferSet, choose_test_images
from vitrail.system.device import choose_device
from vitrail.system.events import OnEvent, ignore_event
from vitrail.system.locks import lock_file
from vitrail.training.config import OBJECTIVE_KEYS
from vitrail.training.resolve import resolve
from vitrail.training.run_training import run_training
from vitrail.weights.save import save

Settings = Mapping[str, Any]
WAIT_SECONDS = 0.2
DECISIVE = (
    *("seed", "precision", "fp8", "evaluate_every", "evaluate_start", "most_seconds"),
    *("fewshot_every", "fewshot_data", "fewshot_shots", "fewshot_images"),
)
"""Settings under `run` that change what a training gives."""
BATCH = 500
"""Images that are scored at a time."""


@dataclass(frozen=True)
class Trained:
    """A trained model and what it cost."""

    model: ImageModel
    weights: Path
    validation: float
    """Accuracy in percent on the images held out of the training; NaN if none were."""
    flops: float
    """Operations of this training."""
    seconds: float
    """How long this training took, on a device that other runs may have shared."""


@dataclass
class Workbench:
    """A seed, a scale and the data, with everything that a measurement does with them."""

    scale: Scale
    seed: int
    data: StudyData
    folder: Path
    """Where trainings are kept."""
    device: str = "auto"
    on_event: OnEvent = ignore_event
    batches: dict[Any, CachedBatches] = field(default_factory=dict)
    """Prepared images, kept from one run to the next."""
    seconds: float = 0.0
    """Seconds of training that this run has needed."""
    flops: float = 0.0
    """Operations of these trainings."""

    def pretrain(self, settings: Settings | None = None) -> Trained:
        """Train a fresh model on the pre-training images.

        Args:
            settings: What differs from the scale's pre-training, such as {"model.depth": 12}. "model" with a whole
                section takes the place of the scale's model.
        """
        assert self.data.pretraining is not None
        return self._train(self.scale.pretraining, settings or {}, self.data.pretraining)

    def finetune(self, start: Trained | None, settings: Settings | None = None) -> Trained:
        """Fine-tune a model on the training images of the first data set to transfer to.

        Args:
            start: The model to start from; None trains a fresh one, whose name the settings give.
            settings: What differs from the scale's fine-tuning.
        """
        weights = {} if start is None else {"model.weights": str(start.weights)}
        return self._train(self.scale.finetuning, {**weights, **(settings or {})}, self.data.transfer[0].train)

    def create_model(self, section: Settings) -> ImageModel:
        """Return an untrained model without a head, from a section `model` of a configuration."""
        options = {key: value for key, value in section.items() if key != "name"}
        return create_model(section["name"], num_classes=0, seed=self.seed, **options)

    def save_start(self, start: Trained, model: ImageModel, name: str) -> Trained:
        """Save changed weights of a trained model, to start a fine-tuning from.

        Args:
            start: What the model comes from.
            model: The changed model.
            name: What was changed; the same change of the same model has the same folder.
        """
        digest = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
        folder = start.weights.parent.with_name(f"{start.weights.parent.name}-{digest}") / "model"
        with _wait_for_lock(folder.parent.with_suffix(".lock")):
            if not folder.is_dir():
                save(model, folder)
        return replace(start, model=model, weights=folder)

    def score_test(self, model: ImageModel) -> float:
        """Return the accuracy, in percent, on the test images of the first data set to transfer to."""
        hits = count = 0
        for logits, labels in self._compute(model, self.data.transfer[0].test, model.forward):
            hits, count = hits + int((logits.argmax(dim=1) == labels).sum()), count + len(labels)
        return 100 * hits / count

    def score_fewshot(self, model: ImageModel) -> float:
        """Return the few-shot accuracy in percent: the mean over all data sets to transfer to, and over three draws."""
        scores = [self.score_fewshot_on(model, each) for each in self.data.transfer]
        return math.fsum(scores) / len(scores)

    def score_fewshot_on(self, model: ImageModel, target: TransferSet) -> float:
        """Return the few-shot accuracy on one data set, in percent."""
        labels = torch.from_numpy(target.train.labels(0, len(target.train)).copy())
        chosen = torch.cat([choose_shots(labels, self.scale.shots, seed) for seed in SEEDS]).unique()
        # Only the images that are drawn are looked at; in their own order they are drawn again.
        train = self.extract_features(model, Subset(target.train, chosen.numpy()))
        test = self.extract_features(model, choose_test_images(target.test, self.scale.test_images))
        rows = []
        for seed in SEEDS:
            drawn = torch.isin(chosen, choose_shots(labels, self.scale.shots, seed))
            rows += score_few_shot(train[drawn], test, target.train.num_classes, (self.scale.shots,), (seed,))
        return 100 * math.fsum(row.accuracy for row in rows) / len(rows)

    def extract_features(self, model: ImageModel, images: Source) -> Features:
        """Return the representation of every image."""
        values, labels = zip(*self._compute(model, images, model.embed), strict=True)
        together = torch.cat(labels)
        return Features(torch.cat(values).cpu(), together.cpu(), torch.arange(len(together)))

    def prepare_images(self, model: ImageModel, images: Source) -> Tensor:
        """Return images as the model takes them, (N, C, height, width), on the device."""
        return torch.cat([_normalise(model, batch) for batch in self._open_batches(model, images)])

    @property
    def torch_device(self) -> torch.device:
        """The device that computes."""
        return choose_device(self.device)

    @torch.no_grad()
    def _compute(
        self, model: ImageModel, images: Source, function: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what a function of the model returns for each batch of images, and their labels."""
        model.eval().to(self.torch_device)
        for batch in self._open_batches(model, images):
            yield function(_normalise(model, batch)), batch.labels[batch.mask]

    def _open_batches(self, model: ImageModel, images: Source) -> CachedBatches:
        key = (compute_fingerprint(images), model.preprocessing.model_dump_json())
        if key not in self.batches:
            self.batches[key] = CachedBatches(EvaluationLoader(images, model.preprocessing, BATCH), self.torch_device)
        return self.batches[key]

    def _train(self, base: Settings, settings: Settings, images: Source) -> Trained:
        base = {**base, "model": settings["model"]} if "model" in settings else base
        rest = {key: value for key, value in settings.items() if key != "model"}
        config = resolve(base, self._fit_device({"run.seed": self.seed, "data.source": "study", **rest}))
        facts = config.model_dump(mode="json")
        if config.model.weights is not None:  # the folder of weights is named after their digest
            facts["model"]["weights"] = Path(config.model.weights).parent.name
        facts["run"] = {name: facts["run"][name] for name in DECISIVE}
        for kind in ("masked-autoencoding", "lejepa", "dino"):  # younger than the others: old folders keep their names
            for name in set(OBJECTIVE_KEYS[kind]) - set(OBJECTIVE_KEYS[config.objective.kind]):
                facts["objective"].pop(name, None)
        key = json.dumps([facts, compute_fingerprint(images), self.scale.kept_size], sort_keys=True)
        folder = self.folder / hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
        quiet = {"folder": folder, "trackers": (), "keep": 1, "device": self.device}
        config = config.model_copy(update={"run": config.run.model_copy(update=quiet)})
        with _wait_for_lock(folder.with_suffix(".lock")):
            is_done = (folder / "model").is_dir()
            listener = partial(_pass_on, self.on_event)
            result = run_training(config, source=open_data(images), fewshot=open_training_fewshot, on_event=listener)
        model = result.model
        assert model.training_cost is not None
        own = model.training_cost.own
        if not is_done:
            self.seconds, self.flops = self.seconds + own.device_seconds, self.flops + own.flops
        accuracy = math.nan if result.accuracy is None else 100 * result.accuracy.value
        return Trained(model, result.weights, accuracy, own.flops, own.device_seconds)

    def _fit_device(self, settings: Settings) -> Settings:
        """Leave out what the device cannot do."""
        return settings if self.torch_device.type == "cuda" else {**settings, "run.graphs": False}


def _normalise(model: ImageModel, batch: Batch) -> Tensor:
    return normalise(batch.images[batch.mask], model.preprocessing)


def _pass_on(on_event: OnEvent, kind: str, values: dict[str, Any]) -> None:
    """Pass on the steps of a training, and nothing else of it: a study has many."""
    if kind == "step":
        on_event(kind, values)


@contextmanager
def _wait_for_lock(path: Path) -> Iterator[None]:
    """Hold a lock in the block; wait as long as another process has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            file = lock_file(path)
            break
        except BlockingIOError:
            time.sleep(WAIT_SECONDS)
    try:
        yield
    finally:
        file.close()
