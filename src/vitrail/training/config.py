"""The configuration of a training run: typed, small, and checked before anything is trained.

It lives here rather than in vitrail.config because it is made of the parts of the rooms it configures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, ConfigDict, Field, field_validator, model_validator

from vitrail.config import Config, ImageSize
from vitrail.data.transforms.augment import Augmentation, Probability
from vitrail.data.transforms.mixing import Mixing
from vitrail.errors import ConfigError
from vitrail.objectives.build import Kind
from vitrail.objectives.views import Views
from vitrail.system.remote import check_address, is_address
from vitrail.tasks.registry import find_task

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
"""The seeds that torch's generators take."""
MOST_PROCESSES = 1024
"""More workers or threads than this on one rank are a mistake: no machine has so many cores for them."""


def _to_tuple(value: object) -> object:
    """Accept a single name as a list of one."""
    return (value,) if isinstance(value, str) else value


def _check_utf8(name: str, value: str) -> None:
    """Raise a ValueError for a name of the file system that config.toml cannot hold."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{name} = {value!r}: it is not UTF-8, so config.toml cannot hold it: rename it") from None


class Section(Config):
    """A section of the configuration. TOML and the command line have no null: they write "none"."""

    @model_validator(mode="before")
    @classmethod
    def _none(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name, value in values.items():
            if isinstance(value, str | Path) and not str(value).isascii():
                _check_utf8(name, str(value))
        return {name: None if value == "none" and cls._may_be_none(name) else value for name, value in values.items()}

    @classmethod
    def _may_be_none(cls, name: str) -> bool:
        return name in cls.model_fields and type(None) in get_args(cls.model_fields[name].annotation)


class ModelConfig(Section):
    """The model. Options of the architecture (dropout, pool, representation_size …) are keys of this section too."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str | None = None
    """A name from the paper, such as "B/16", for fresh weights."""
    weights: str | None = None
    """The MODEL to start from: a folder, a file, hf:owner/name, timm:name, pane. Its head is replaced."""
    keep_head: bool = False
    """Start with the head of the weights, which must be for the classes of the data, instead of a new one."""
    image_size: ImageSize | None = None
    """Height and width in pixels; the model's own if left out. Weights for another size are resized."""

    @classmethod
    def _may_be_none(cls, name: str) -> bool:
        return super()._may_be_none(name) or name in ("representation_size", "conv_stem", "layer_scale")

    @property
    def options(self) -> dict[str, Any]:
        """The options of the architecture in this section."""
        return dict(self.__pydantic_extra__ or {})

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.name is None) == (self.weights is None):
            raise ValueError(
                'give either model.name, such as "S/16", for fresh weights, or model.weights to start from'
            )
        return self


class DataConfig(Section):
    """The training data, and how samples become batches."""

    source: str
    """DATA: a folder, a .csv, .parquet or .tar file, a folder of shards, hf:owner/name, or digits."""
    labels_from: str | None = None
    """Where the class stands in the names of a folder's images: "NAME_*" for cat_1.jpg, or a regular expression with
    one group. If left out, folders tell the classes."""
    task: str | None = None
    """What is learned: labels (one class an image), tags, numbers, levels or attributes. If left out: labels, unless
    images with other targets are given from Python."""
    labels: str | None = None
    """The columns of a table that targets are read from, such as "colour,shape". If left out, they are found."""
    validate_on: Literal["val", "test", "holdout", "none"] = "val"
    """The part that evaluations during training use. holdout: a share of train, even if the data has a part "val",
    which is then left for a test."""
    holdout: Share | None = None
    """Share of each class that is set aside if the data has no part "val": not trained on, and validated on unless
    `validate_on` says otherwise. 0: train on everything. If left out: a tenth, if the data comes in one part. If the
    data has a part "val", nothing is set aside, and the run says so at its start."""
    holdout_seed: Seed = 0
    """The seed that chooses which images are set aside."""
    share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of each class that is trained on, for studies of how much data a model needs. It is taken of what is left
    after holding out: every share has the same validation images, and the images of a smaller share are among those of
    a larger one. An epoch is one pass over the share. If left out, or 1: everything."""
    share_seed: Seed = 0
    """The seed that chooses which images make up the share."""
    balance: Annotated[float, Field(ge=0, le=1)] = 0.0
    """How often rare classes are shown: from 0, as they are, to 1, every class as often as the largest. Their images
    are repeated, and augmented anew each time; an epoch is longer then."""
    divide_validation: Literal["no", "halves", "cross-fit"] = "no"
    """How the accuracy of the chosen weights is measured on images that did not choose them. halves: one half of the
    validation images chooses, the other reports. cross-fit: both choose, and each half is measured at the step that the
    other would have chosen; for few images."""
    batch_size: Positive = 128
    """Images in a step, over all ranks and accumulated parts. For `vitrail train` also "auto": the recipe's number (128
    without one), in as many accumulated parts as let it fit into the GPU's memory."""
    workers: Annotated[int, Field(ge=0, le=MOST_PROCESSES)] = 0
    """Processes on each rank that read and augment ahead; with 0 the training process does it itself."""
    in_memory: bool = False
    """Decode everything once and keep the pixels: for small images that are seen many times."""
    on_device: bool = False
    """Keep all pixels on the training device and augment there: for small images of one size that are seen many times.
    Replaces in_memory; workers are then used in the first evaluation only. Random crops differ from those of a run
    without it, so it cannot be changed on resume."""
    augmentation: Augmentation = Augmentation()
    mixing: Mixing = Mixing()

    @field_validator("task")
    @classmethod
    def _check_task(cls, task: str | None) -> str | None:
        if task is not None:
            find_task(task)
        return task

    @field_validator("labels", mode="before")
    @classmethod
    def _join_columns(cls, labels: object) -> object:
        return ",".join(map(str, labels)) if isinstance(labels, list | tuple) else labels

    @field_validator("share")
    @classmethod
    def _take_all(cls, share: float | None) -> float | None:
        """Write everything in one way, so that a run can be resumed with either."""
        return None if share == 1 else share

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.validate_on == "holdout" and self.holdout == 0:
            raise ValueError(
                'validate_on = "holdout" with holdout = 0 leaves nothing to look at: give a share such as 0.1'
            )
        return self


OBJECTIVE_KEYS = {
    "classification": ("loss", "label_smoothing", "head_bias", "balance", "balance_strength"),
    "task": (),
    "masked-patches": ("target", "corrupted", "masked", "swapped"),
    "masked-autoencoding": ("hidden", "normalised", "decoder_width", "decoder_depth", "decoder_heads"),
    "lejepa": ("views", "projector_width", "projector_norm", "projected", "normality", "directions"),
    "dino": (
        *("views", "projector_width", "prototypes"),
        *("temperature", "teacher_temperature", "teacher_momentum"),
    ),
}
"""The keys of `objective` that each kind has for itself."""


class ObjectiveConfig(Section):
    """What the model is trained for."""

    kind: Kind = "classification"
    """classification: one label an image. task: the tags, numbers, levels or attributes that data.task names."""
    loss: Literal["softmax", "sigmoid"] = "softmax"
    """Of classification: one class of many, or yes and no for each class, as the paper pre-trains on ImageNet-21k."""
    label_smoothing: Share = 0.0
    """Of classification: this share of every target is spread evenly over the classes."""
    head_bias: float = 0.0
    """Of classification: the head's initial bias; the released code pre-trains a sigmoid loss from −10."""
    balance: Literal["none", "loss", "logits"] = "none"
    """Of classification: how rare classes count more. logits: by logit adjustment, which adds the logarithm of each
    class's share of the images to its logit in training. loss: by weights from the effective number of images."""
    balance_strength: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    """Of classification: the factor of what `balance` adds to logits, or the power of the weights; 0 is none."""
    target: Literal["mean-colour", "colours-4x4", "pixels"] = "mean-colour"
    """Of masked patches: the 3-bit mean colour (512 classes), that of each cell of 4×4, or all pixels by L2."""
    corrupted: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Of masked patches: the share of an image's patches that is corrupted and predicted; the paper also tried 0.15."""
    masked: Probability = 0.8
    """Of the corrupted patches, the share replaced by the learned mask embedding."""
    swapped: Probability = 0.1
    """Of the corrupted patches, the share replaced by another patch's embedding; the rest stays as it is."""
    hidden: Annotated[float, Field(gt=0, lt=1)] = 0.75
    """Of masked autoencoding: the share of an image's patches that the encoder does not see."""
    normalised: bool = True
    """Of masked autoencoding: whether the pixels of each patch are predicted with mean 0 and deviation 1."""
    decoder_width: Positive = 512
    """Of masked autoencoding: the width of the decoder, which is thrown away after training."""
    decoder_depth: Positive = 8
    """Of masked autoencoding: the number of the decoder's blocks."""
    decoder_heads: Positive = 16
    """Of masked autoencoding: the number of the decoder's heads."""
    views: Views = Views()
    """Of LeJEPA and DINO: the views of an image that are compared. They take the place of data.augmentation."""
    projector_width: Positive = 2048
    """Of LeJEPA and DINO: the width of the projector's hidden layers. It is thrown away after training."""
    projector_norm: Literal["batch", "layer"] = "batch"
    """Of LeJEPA: the norm in the projector, over the batch of all ranks or over each projection."""
    projected: Positive = 64
    """Of LeJEPA: the width of the projections that are compared."""
    normality: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Of LeJEPA: the share of the loss that asks projections to be normally distributed."""
    directions: Positive = 256
    """Of LeJEPA: the number of random directions along which they are tested in a step."""
    prototypes: Positive = 4096
    """Of DINO: the number of prototypes that a view is compared with."""
    temperature: PositiveFloat = 0.1
    """Of DINO: divides the model's similarities to prototypes."""
    teacher_temperature: PositiveFloat = 0.04
    """Of DINO: divides the teacher's similarities to prototypes."""
    teacher_momentum: Annotated[float, Field(gt=0, lt=1)] = 0.996
    """Of DINO: the share of itself that the teacher keeps in the first step; it rises to 1 by a cosine."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.masked + self.swapped > 1 + 1e-9:
            raise ValueError(f"masked = {self.masked} and swapped = {self.swapped} are shares of one whole: at most 1")
        own = OBJECTIVE_KEYS[self.kind]
        for name in (name for names in OBJECTIVE_KEYS.values() for name in names if name not in own):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f'{name} means nothing to objective.kind = "{self.kind}": leave it out')
        return self


class OptimizerConfig(Section):
    """The optimizer, gradient clipping and averaging."""

    kind: Literal["adamw", "adam", "sgd", "muon"] = "adamw"
    """muon: the matrices of encoder blocks move by orthogonal steps as large as AdamW's, all else by AdamW."""
    learning_rate: PositiveFloat = 1e-3
    """The highest learning rate, reached after the warm-up."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """As PyTorch counts it: AdamW shrinks a weight by learning_rate · weight_decay of itself in a step. Recipes in JAX
    often write the product: their 1e-4 at a learning rate of 1e-3 is 0.1 here. Acts on the kernels of dense and
    convolutional layers alone; biases, norms and embeddings are left alone."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Of Adam."""
    eps: PositiveFloat = 1e-8
    """Of Adam."""
    momentum: Share = 0.9
    """Of SGD; and of Muon, where 0.95 is usual."""
    clip_norm: PositiveFloat | None = 1.0
    """Gradients longer than this, all together, are scaled down to it. 0 is not "off": write "none"."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    """The learning rate of each layer is that of the next layer times this factor."""
    averaging: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Polyak averaging: the average keeps this share of itself in every step, less in early ones with
    `averaging_ramp`. It is what is evaluated and saved."""
    averaging_ramp: bool = True
    """Whether the average keeps (1 + step) / (10 + step) of itself as long as that is less than `averaging`: it follows
    about the last ninth of the steps so far, instead of remembering the initial weights for long. At 0.9999 that is so
    for 90,000 steps. False: the same share in every step, as in the paper's recipes. A run begun before this key
    existed has the ramp."""
    accumulate: Positive = 1
    """Number of parts in which a rank computes its share of a batch, to save memory."""


class ScheduleConfig(Section):
    """The length of the training, and the course of the learning rate."""

    steps: Positive | None = None
    """Number of steps; give either this or epochs."""
    epochs: PositiveFloat | None = None
    """How often every sample is seen; rounded up to whole steps."""
    warmup_steps: Count = 0
    """Number of steps in which the learning rate grows linearly from 0."""
    decay: Literal["cosine", "linear", "staircase", "none"] = "cosine"
    """How the learning rate falls from the end of the warm-up to `final_learning_rate` after the last step; a staircase
    falls as `decay_at` says."""
    decay_at: tuple[Positive, ...] = ()
    """Steps after which the rate of a staircase falls to a tenth, as in BiT's rule."""
    final_learning_rate: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Where the decay ends. The authors' released code ends its linear decay at 1e-5, and so do the paper's recipes
    with linear decay; its cosine ends at 0. A run begun before this key existed ends at 0."""

    patience: Positive | None = None
    """Training ends after so many evaluations in a row without a better one. If left out: after the last step."""
    result: Literal["last", "best"] = "last"
    """Which weights the run writes as its model: the last, or those of the best evaluation."""
    choose_by: Literal["validation", "fewshot"] = "validation"
    """Which evaluations `patience` and `result` compare: those on validation images, by accuracy or else by loss; or
    those of few-shot accuracy, which `run.fewshot_every` asks for."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError("give either schedule.steps or schedule.epochs")
        if self.steps is not None and self.warmup_steps >= self.steps:
            raise ValueError(
                f"warmup_steps = {self.warmup_steps} leaves nothing of {self.steps} steps: give schedule.warmup_steps="
                f"{self.steps // 10} too"
            )
        if (self.decay == "staircase") != bool(self.decay_at) or list(self.decay_at) != sorted(self.decay_at):
            raise ValueError('decay = "staircase" and decay_at, rising numbers of steps, go together')
        return self


class RunSection(Section):
    """Where and how the run is computed. Only seed, fp8 and precision change what is learned; seed and fp8 stay as they
    are when a run is resumed, precision may change."""

    folder: Path = Path("runs/run")
    """The folder of all results. If it holds an unfinished run, training goes on from its newest checkpoint."""
    seed: Seed = 0
    """The seed of initial weights, order, augmentation, dropout and masks."""
    device: str = "auto"
    """cpu, cuda, mps, or auto: a GPU of NVIDIA or Apple if there is one."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Precision of matrix products; weights stay in fp32. auto: bf16 on GPUs that support it, else fp32."""
    compile: bool | None = None
    """Whether to use torch.compile. If left out: on a GPU."""
    fused: bool | None = None
    """Use our own kernels instead of compiled ones, for plain Vision Transformers in bf16 on a Hopper GPU or newer. If
    left out: where that is possible and the model is at least as wide as B/16. The fastest kernels are found by
    measuring at the start, so two runs may differ in their last bits: not allowed with `deterministic`."""
    fp8: bool = False
    """With `fused`: compute forward products after norms in FP8, with a scale per token; gradients stay in bf16."""
    graphs: bool = False
    """Capture a step as a CUDA graph and replay it: for small models, whose kernels take less time than starting them.
    For classification on one GPU, without accumulation."""
    deterministic: bool = False
    """Use only algorithms that give the same bits every time; on a GPU they can be slower."""
    threads: Annotated[int, Field(ge=1, le=MOST_PROCESSES)] | None = None
    """Torch's CPU threads on each rank; torch chooses if left out. Small models are fastest with one."""
    parallel: Literal["ddp", "fsdp", "hybrid"] = "ddp"
    """On several ranks: a whole model on each, one sharded over all, or sharded in a node and copied over nodes."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them."""
    log_every: Positive = 50
    """Steps from one record to the next."""
    evaluate_every: Positive | None = None
    """Steps from one evaluation to the next; there is always one at the end."""
    evaluate_start: bool = False
    """Whether to evaluate before the first step too, so that the weights at the start can be the best."""
    fewshot_every: Positive | None = None
    """Steps from one measurement of few-shot accuracy to the next, as `vitrail fewshot` computes it by least squares;
    there is also one at the end. If left out: it is not measured."""
    fewshot_data: str | None = None
    """DATA with classes for few-shot accuracy, divided as for `vitrail fewshot`. If left out: the run's own; the
    training images give the shots, and the validation images are scored."""
    fewshot_shots: Positive = 10
    """Images of each class that a few-shot classifier is fitted to. The accuracy is the mean of three draws."""
    fewshot_images: Positive = 10_000
    """The most images that few-shot accuracy is scored on; out of more, always the same are chosen."""
    most_seconds: PositiveFloat | None = None
    """Training ends after so many seconds, over all starts, even if steps are left."""
    checkpoint_every: Positive = 1000
    """Steps from one checkpoint to the next."""
    keep: Positive = 2
    """How many of the newest checkpoints are kept; the best by evaluation is kept too."""
    most_skipped: Positive = 20
    """The run stops after this many steps in a row without a finite gradient."""
    copy_to: str | None = None
    """An address such as s3://bucket/runs/name: every checkpoint is copied there in the background, and at the end the
    results. Where the folder has no newer checkpoint, the run goes on from the copy. If left out: there is no copy."""
    trackers: Annotated[tuple[Literal["tensorboard", "wandb", "mlflow"], ...], BeforeValidator(_to_tuple)] = (
        "tensorboard",
    )
    """Where metrics go besides metrics.jsonl."""
    report: bool = True
    """At the end, write a report on the model's inside: report.html."""
    timeout: PositiveFloat = 600.0
    """Seconds that ranks wait for each other before the run ends."""

    @field_validator("copy_to")
    @classmethod
    def _check_copy_to(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if not is_address(value):
            raise ValueError(f"copy_to = {value!r} is no address: give one such as s3://bucket/runs/name")
        try:
            return check_address(value)
        except ConfigError as error:
            raise ValueError(f"copy_to cannot be used: {error}") from None


class RunConfig(Config):
    """The whole configuration of a training run."""

    model: ModelConfig
    data: DataConfig
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig
    run: RunSection = RunSection()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if "views" in OBJECTIVE_KEYS[self.objective.kind] and self.data.augmentation != Augmentation():
            raise ValueError(
                f'data.augmentation means nothing to objective.kind = "{self.objective.kind}", which makes views of '
                "whole images: leave it out, and set objective.views"
            )
        return self
