"""Build a run from its configuration. Whatever is wrong is raised here, before anything is written or trained."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from vitrail.data.balance import balance_source, count_classes
from vitrail.data.loader import EvaluationLoader, TrainingLoader
from vitrail.data.open import (
    DEFAULT_HOLDOUT,
    Data,
    add_labels_from,
    list_splits,
    open_data,
    open_training_images,
    propose_data,
)
from vitrail.data.resident import CachedBatches, ResidentImages, ResidentLoader
from vitrail.data.sources.memory import InMemorySource
from vitrail.data.sources.source import Source, compute_fingerprint, halve_source, hold_out, take_share
from vitrail.data.transforms.augment import Augmentation
from vitrail.errors import ConfigError, DataError
from vitrail.fast.gpu.cuda_graph import CudaGraph
from vitrail.model.base import ImageModel
from vitrail.model.cost import compute_cost
from vitrail.model.create import copy_model, create_from_architecture
from vitrail.model.initialise import initialise_head
from vitrail.model.timm_model import TimmModel
from vitrail.model.variants import make_architecture
from vitrail.objectives.build import build_objective
from vitrail.objectives.multi_crop import MultiCropObjective
from vitrail.objectives.supervised import Supervised
from vitrail.system.events import OnEvent, ignore_event
from vitrail.system.precision import choose_precision
from vitrail.system.ranks import Ranks
from vitrail.training.averaging import Average
from vitrail.training.checkpoint_folder import CheckpointFolder
from vitrail.training.config import DataConfig, RunConfig
from vitrail.training.distributed import distribute
from vitrail.training.fewshot import Fewshot, FewshotRun, OpenFewshot, choose_place, open_run_fewshot
from vitrail.training.fused_kernels import describe_computation, get_kernels, use_fused_kernels
from vitrail.training.graph_step import GraphStep, check_graphs
from vitrail.training.optim import build_optimizer, initialise_state
from vitrail.training.records import Records
from vitrail.training.run import Learner, Progress, RunSetup, TrainingRun
from vitrail.training.task import add_run_task, check_task, name_outputs, set_task
from vitrail.training.trackers import Tracker
from vitrail.weights.digest import compute_weights_digest
from vitrail.weights.known import TRAINING_ONLY
from vitrail.weights.load import load

WHOLE_IMAGES = Augmentation(crop_area=(1.0, 1.0), crop_ratio=(1.0, 1.0), flip=0.0)
"""The largest square in the middle of an image, unchanged."""


@dataclass(frozen=True)
class TrainingData:
    """The images to train on, and those to validate on."""

    training: Source
    evaluation: Source | None
    unused_holdout: float | None = None
    """The share of `data.holdout`, if nothing is set aside because the data has its own part "val"."""


def prepare_run(
    config: RunConfig,
    ranks: Ranks,
    *,
    source: Data | None = None,
    start: ImageModel | None = None,
    open_fewshot: OpenFewshot | None = None,
) -> RunSetup:
    """Open the data, check the configuration against it and build what learns. Nothing is written.

    Args:
        config: The configuration.
        ranks: The processes that train.
        source: Images in place of those of `data.source`.
        start: The model of `model.weights`, if it is loaded already. It becomes the model that learns.
        open_fewshot: Opens the images for few-shot accuracy, if the configuration asks for it.

    Raises:
        ConfigError: The configuration does not fit the data, the model or the machine.
        DataError: The data cannot be trained on.
    """
    data = open_training_data(config.data, source)
    config = set_task(config, data.training.task)
    shown = balance_source(data.training, config.data.balance)
    steps = count_steps(config, len(shown))
    check_run(config, data, ranks)
    fewshot = open_run_fewshot(config, data.training, data.evaluation, open_fewshot)
    precision = choose_precision(config.run.precision, ranks.device)
    model = build_model(config, data.training, start)
    digest = compute_weights_digest(model) if config.model.weights is not None and ranks.is_first else ""
    learner = build_learner(config, model, ranks, precision, _count_balanced(config, data.training, shown))
    return RunSetup(
        config=config,
        steps=steps,
        ranks=ranks,
        learner=learner,
        images=ResidentImages(shown, ranks.device) if config.data.on_device else shown,
        evaluation_loaders=tuple(
            build_evaluation_loader(config, part, model, ranks) for part in divide_validation(config, data.evaluation)
        ),
        checkpoints=CheckpointFolder(config.run.folder / "checkpoints", ranks, config.run.keep),
        records=Records(config.run.folder / "metrics.jsonl"),
        fewshot=None if fewshot is None else build_fewshot(config, fewshot, model, ranks),
        repeats=len(shown) - len(data.training),
        unused_holdout=data.unused_holdout,
        data_fingerprint=compute_fingerprint(data.training),
        choosing_fingerprint=_compute_choosing_fingerprint(config, data.evaluation),
        weights_digest=digest,
    )


def _compute_choosing_fingerprint(config: RunConfig, validation: Source | None) -> str | None:
    chooses = config.schedule.result == "best" or config.schedule.patience is not None
    return compute_fingerprint(validation) if chooses and validation is not None else None


def build_run(
    setup: RunSetup, progress: Progress, trackers: Sequence[Tracker] = (), on_event: OnEvent = ignore_event
) -> TrainingRun:
    """Return a run that goes on from `progress`: its loader starts at that position. Only the first rank has events."""
    return TrainingRun(
        **vars(setup),
        training_loader=build_training_loader(setup, progress.position),
        trackers=tuple(trackers),
        on_event=on_event if setup.ranks.is_first else ignore_event,
    )


def _count_balanced(config: RunConfig, training: Source, shown: Source) -> dict[str, list[int]]:
    """Return the counts of classes that the objective needs to balance them; none if nothing is balanced."""
    if config.objective.kind != "classification" or (config.objective.balance == "none" and not config.data.balance):
        return {}
    counts = {"counts": count_classes(training)}
    return {**counts, "drawn": count_classes(shown)} if config.data.balance else counts


def build_learner(
    config: RunConfig, model: ImageModel, ranks: Ranks, precision: torch.dtype, counts: Mapping[str, Any]
) -> Learner:
    """Build the objective around a model, distribute it over the ranks, and build its optimizer and average.

    `counts` are those of the classes that `build_objective` takes, if they are balanced.
    """
    options: dict[str, Any] = {name: value for name, value in config.objective if name != "head_bias"}
    objective = build_objective(model, mixing=config.data.mixing, seed=config.run.seed, **counts, **options)
    objective.set_gradient_checkpointing(config.run.gradient_checkpointing)
    if isinstance(model, TimmModel):
        compute_cost(model.architecture)  # raises now, not in the first record, if a timm network cannot be counted
        if ranks.size > 1:
            model.share_batch_statistics(ranks.device)
    module = distribute(objective, ranks, config.run.parallel, precision)
    obstacle = use_fused_kernels(model, config, ranks, precision)
    wants_compiled = config.run.compile if config.run.compile is not None else ranks.device.type == "cuda"
    is_compiled = obstacle is not None and wants_compiled
    if is_compiled:
        # Kernels of earlier runs in this process would count against torch's limit, after which nothing is compiled.
        torch.compiler.reset()
        for part in objective.parts_to_compile():
            # A run has few shapes, and kernels for any shape are slower; some cannot be compiled at all.
            part.compile(dynamic=False)
    optimizer = build_optimizer(objective, config.optimizer, ranks.device)
    initialise_state(optimizer)
    averaging = config.optimizer.averaging
    average = None if averaging is None else Average(objective, averaging, config.optimizer.averaging_ramp)
    fused = get_kernels(model) if obstacle is None else None
    graph_step = None
    if config.run.graphs:
        check_graphs(config, ranks, precision)
        assert isinstance(objective, Supervised)
        graph_step = GraphStep(objective, precision, optimizer, config.optimizer.clip_norm, average, fused)
    objective.train()
    return Learner(
        objective=objective,
        module=module,
        parameters=[parameter for parameter in objective.parameters() if parameter.requires_grad],
        optimizer=optimizer,
        average=average,
        scaler=torch.amp.GradScaler(ranks.device.type, enabled=precision == torch.float16),
        precision=precision,
        skips_on_device=graph_step is not None or can_skip_on_device(objective, optimizer, config, precision, ranks),
        graph_step=graph_step,
        fused=fused,
        computed_by=describe_computation(obstacle, is_compiled, config),
    )


def can_skip_on_device(
    objective: nn.Module, optimizer: torch.optim.Optimizer, config: RunConfig, precision: torch.dtype, ranks: Ranks
) -> bool:
    """Return whether the optimizer can skip a step by itself, told by a number on the device. Fused optimizers can.

    Not with sharded weights. Not in fp16, whose loss scale must be known before the next step. And not if an average
    follows running statistics: the next step's forward pass would change them before the average is updated.
    """
    is_fused = all(group.get("fused") for group in optimizer.param_groups)
    is_sharded = ranks.size > 1 and config.run.parallel != "ddp"
    has_average = config.optimizer.averaging is not None
    averages_statistics = has_average and any(isinstance(part, _NormBase) for part in objective.modules())
    on_gpu = ranks.device.type == "cuda"
    return on_gpu and is_fused and not is_sharded and not averages_statistics and precision != torch.float16


def open_training_data(config: DataConfig, given: Data | None = None) -> TrainingData:
    """Open the images to train on and those to validate on.

    Images that are held out are never trained on, even if `validate_on` asks for another part. `share` is taken of
    what is left to train on, so that the images to validate on are the same for every share. `given` images take the
    place of `source`.

    Raises:
        ConfigError: The share leaves no image of a class.
        DataError: There is no such data, or it has no part "test" to validate on.
    """
    source = add_run_task(config, add_labels_from(config.source if given is None else given, config.labels_from))
    part, splits, share = config.validate_on, list_splits(source), config.holdout
    if part == "holdout":
        whole = open_training_images(source)
        rest, out = hold_out(whole, share or DEFAULT_HOLDOUT, config.holdout_seed)
        _check_not_empty(config, rest, out)
        return TrainingData(_keep_in_memory(config, _take_share(config, rest)), _keep_in_memory(config, out))
    if share is None:
        share = DEFAULT_HOLDOUT if part == "val" and not splits else 0.0
    unused = share if "val" in splits and share else None
    if "val" in splits:
        share = 0.0  # the data has been split already
    training = open_data(source, "train", share, config.holdout_seed) if share or splits else open_data(source)
    if part == "val" and share:
        evaluation: Source | None = open_data(source, "val", share, config.holdout_seed)
    elif part in splits or part == "test":
        if part not in splits:
            has = f"it has {', '.join(splits)}" if splits else "it has one part"
            raise DataError(
                f"{config.source} has no part 'test' to validate on: {has}; give data.validate_on=val, which is held "
                "out of train where there is none, or none"
            )
        evaluation = open_data(source, part)
    else:
        evaluation = None
    _check_not_empty(config, training, evaluation)
    evaluation = None if evaluation is None else _keep_in_memory(config, evaluation)
    return TrainingData(_keep_in_memory(config, _take_share(config, training)), evaluation, unused)


def _check_not_empty(config: DataConfig, training: Source, evaluation: Source | None) -> None:
    """Raise a DataError if nothing can be trained or validated on: of a class with one image none is held out."""
    if not len(training):
        raise DataError(f"{config.source} has no images to train on")
    if evaluation is not None and not len(evaluation):
        raise DataError(
            f"{config.source} has no images to validate on: a class needs two or more before one is held out; add "
            "images, or give data.validate_on=none"
        )


def _take_share(config: DataConfig, training: Source) -> Source:
    """Return the share of the images that is trained on."""
    return training if config.share is None else take_share(training, config.share, config.share_seed)


def _keep_in_memory(config: DataConfig, source: Source) -> Source:
    """Return the source with its pixels in memory, if the configuration asks for it."""
    return InMemorySource(source) if config.in_memory and not config.on_device else source


def count_steps(config: RunConfig, samples: int) -> int:
    """Return the number of steps of a run on so many samples, whether the configuration gives steps or epochs."""
    schedule = config.schedule
    if schedule.steps is not None:
        return schedule.steps
    assert schedule.epochs is not None
    steps = math.ceil(schedule.epochs * samples / config.data.batch_size)
    if schedule.warmup_steps >= steps:
        raise ConfigError(
            f"schedule.warmup_steps = {schedule.warmup_steps} leaves nothing of the {steps} steps that "
            f"{schedule.epochs:g} epochs of {samples} images in batches of {config.data.batch_size} are: "
            f"give schedule.warmup_steps={steps // 10} too"
        )
    return steps


def check_run(config: RunConfig, data: TrainingData, ranks: Ranks) -> None:
    """Check what no section of the configuration can check alone.

    Raises:
        ConfigError: The batch size or the optimizer does not fit the data or the ranks.
        DataError: The classes cannot be learned, or differ between the parts.
    """
    batch, samples = config.data.batch_size, len(data.training)
    if batch > samples:
        raise ConfigError(
            f"data.batch_size = {batch} is more than the {samples} images to train on: give {samples} or fewer"
        )
    parts = ranks.size * config.optimizer.accumulate
    if batch % parts:
        raise ConfigError(
            f"data.batch_size = {batch} cannot be shared by {ranks.size} ranks in {config.optimizer.accumulate} parts: "
            f"give a multiple of {parts}"
        )
    if config.schedule.decay != "none" and config.schedule.final_learning_rate > config.optimizer.learning_rate:
        raise ConfigError(
            f"schedule.final_learning_rate = {config.schedule.final_learning_rate:g} is more than "
            f"optimizer.learning_rate = {config.optimizer.learning_rate:g}, which falls to it: give less, such as 0"
        )
    if config.optimizer.kind == "muon" and ranks.size > 1 and config.run.parallel != "ddp":
        raise ConfigError(
            f'optimizer.kind = "muon" needs matrices whole, and run.parallel = "{config.run.parallel}" shards them: '
            "give optimizer.kind=adamw or run.parallel=ddp"
        )
    if config.objective.kind == "task":
        check_task(config, data.training, data.evaluation)
    if config.objective.kind != "classification":
        return
    classes = data.training.num_classes
    if classes < 2:
        name = f", {data.training.classes[0]!r}" if data.training.classes else ""
        raise propose_data(config.data.source) or DataError(
            f"{config.data.source} has one class{name}: a classifier needs two or more"
        )
    if data.evaluation is not None and (
        data.evaluation.classes != data.training.classes or data.evaluation.num_classes > classes
    ):
        raise DataError(
            f"{config.data.source}: the classes of {config.data.validate_on} are not those of train; "
            "`vitrail data check` lists the differences"
        )


def build_model(config: RunConfig, source: Source, start: ImageModel | None = None) -> ImageModel:
    """Create a model with fresh weights, or load weights and give them a new head for the task of the data.

    `start` is the model of `model.weights`, if it is loaded already; it is changed in place.
    """
    section, kind, task = config.model, config.objective.kind, source.task
    classes = source.num_classes if kind == "classification" else len(task.output_names) if kind == "task" else 0
    size: dict[str, Any] = {} if section.image_size is None else {"image_size": section.image_size}
    model: ImageModel
    if section.weights is not None:
        wrong = set(section.options) - set(TRAINING_ONLY)
        if wrong:
            raise ConfigError(
                f"model.{min(wrong)} is decided by the weights: only {', '.join(TRAINING_ONLY)} can be given with them"
            )
        # In fp32 whatever the file holds: small steps would vanish in the rounding of bf16.
        if start is not None:
            model = (copy_model(start, **section.options) if section.options else start).float()
            if not section.keep_head:
                model.replace_head(classes)
            if section.image_size is not None:
                model.resize(section.image_size)
        else:
            kept = None if section.keep_head else classes
            model = load(section.weights, num_classes=kept, dtype=torch.float32, **size, **section.options)
        if section.keep_head:
            if model.num_classes != classes:
                raise ConfigError(
                    f"model.keep_head: the head of {section.weights} has {model.num_classes} classes, and the data "
                    f"has {classes}: leave keep_head out"
                )
        elif isinstance(model, TimmModel):
            model.initialise_head(config.objective.head_bias)
        else:
            initialise_head(model.head, config.objective.head_bias)
    else:
        assert section.name is not None
        if "num_classes" in section.options and section.options["num_classes"] != classes:
            raise ConfigError(
                f"model.num_classes = {section.options['num_classes']}, but the data has {classes} classes: "
                "leave it out"
            )
        options: dict[str, Any] = {**section.options, "num_classes": classes}
        bias = config.objective.head_bias
        architecture = make_architecture(section.name, **size, **options)
        model = create_from_architecture(architecture, seed=config.run.seed, head_bias=bias)
    if kind == "task":
        name_outputs(model, task, section.keep_head)
    elif kind == "classification":
        model.stored_task = None
        if source.classes:
            model.labels = source.classes
    return model


def build_training_loader(setup: RunSetup, position: int) -> TrainingLoader | ResidentLoader:
    """Return a loader that starts after the first `position` samples."""
    config, objective, ranks = setup.config, setup.learner.objective, setup.ranks
    augmentation, size = config.data.augmentation, objective.model.image_size
    if isinstance(objective, MultiCropObjective):  # it crops and augments by itself
        augmentation, size = WHOLE_IMAGES, objective.source_size
    shared: dict[str, Any] = {
        "seed": config.run.seed,
        "augmentation": augmentation,
        "channels": objective.model.in_channels,
        "position": position,
        "rank": ranks.rank,
        "ranks": ranks.size,
    }
    if isinstance(setup.images, ResidentImages):
        loader = ResidentLoader(setup.images, config.data.batch_size, size, device=ranks.device, **shared)
        if config.run.graphs:
            loader.make = CudaGraph(loader.make, generators=[loader.generator])
            loader.aside = torch.cuda.Stream(ranks.device)
        return loader
    pinned, workers = ranks.device.type == "cuda", config.data.workers
    return TrainingLoader(setup.images, config.data.batch_size, size, workers=workers, pin_memory=pinned, **shared)


def divide_validation(config: RunConfig, source: Source | None) -> tuple[Source, ...]:
    """Return the images to validate on as the parts that evaluations measure: none, one, or two halves.

    A class has about as many images in one half as in the other. Images that are too few to divide stay whole.
    """
    if source is None:
        return ()
    if config.data.divide_validation == "no" or len(source) < 2:
        return (source,)
    return halve_source(source)


def build_evaluation_loader(
    config: RunConfig, source: Source, model: ImageModel, ranks: Ranks, kept_on: torch.device | None = None
) -> EvaluationLoader | CachedBatches:
    """Return a loader over images to evaluate on.

    It keeps its prepared batches on `kept_on`; if left out, on the training device if the training images stay there.
    """
    if kept_on is None and config.data.on_device:
        kept_on = ranks.device
    share = max(config.data.batch_size // config.optimizer.accumulate, ranks.size)
    loader = EvaluationLoader(
        source,
        model.preprocessing,
        share - share % ranks.size,
        workers=config.data.workers,
        rank=ranks.rank,
        ranks=ranks.size,
        pin_memory=ranks.device.type == "cuda",
    )
    return loader if kept_on is None else CachedBatches(loader, kept_on)


def build_fewshot(config: RunConfig, task: Fewshot, model: ImageModel, ranks: Ranks) -> FewshotRun:
    """Return what measures few-shot accuracy. Its images are prepared once and kept."""
    image_bytes = model.in_channels * math.prod(model.image_size)
    places = [choose_place(source, image_bytes, ranks.device) for source in task.sources]
    return FewshotRun(
        task,
        tuple(
            build_evaluation_loader(config, source, model, ranks, kept_on)
            for source, kept_on in zip(task.sources, places, strict=True)
        ),
    )
