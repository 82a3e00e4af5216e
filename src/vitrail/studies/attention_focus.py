"""Section 4.5 and Figure 6: attention falls on the regions that matter for the class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitrail.studies.results import StudyResults
from vitrail.studies.scales import Scale
from vitrail.studies.study import Arm, Measured, Study
from vitrail.studies.verdict import Check, check_greater

if TYPE_CHECKING:
    from vitrail.studies.workbench import Workbench


IMAGES = 512
TUNED, UNTRAINED, CENTRE = "fine-tuned ViT", "untrained ViT", "centre of the image"


def list_arms(scale: Scale) -> list[Arm]:
    return [Arm(TUNED, weight=2.0), Arm(UNTRAINED, weight=0.1), Arm(CENTRE, weight=0.1)]


def measure(workbench: Workbench, arm: Arm) -> Measured:
    """Measure the share of attention rollout on the object, of all that falls on object and background."""
    from vitrail.inspection.measure.anatomy import patch_grid
    from vitrail.inspection.measure.attention import attention_rollout
    from vitrail.studies.object_masks import make_centre_prior, measure_object_share, read_object_masks
    from vitrail.studies.study_data import choose_test_images

    if arm.name == TUNED:
        model = workbench.finetune(workbench.pretrain()).model
    else:
        model = workbench.create_model(workbench.scale.pretraining["model"])
    images = choose_test_images(workbench.data.transfer[0].test, IMAGES)
    prepared = workbench.prepare_images(model, images)
    grid = patch_grid(model, prepared)
    if arm.name == CENTRE:
        maps = make_centre_prior(grid, len(images))
    else:
        maps = attention_rollout(model.eval().to(prepared.device), prepared)
    masks = read_object_masks(workbench.data, images, grid, workbench.scale.kept_size)
    return {"focus": 100 * measure_object_share(maps, masks)}


def list_checks(results: StudyResults) -> list[Check]:
    tuned, untrained, centre = (results.list_values(arm) for arm in (TUNED, UNTRAINED, CENTRE))
    return [
        check_greater("a fine-tuned model looks at the object more than an untrained one", tuned, untrained),
        check_greater("and more than a prior for the centre of the image", tuned, centre),
    ]


STUDY = Study(
    name="attention-focus",
    title="Where attention falls",
    claim="Attention falls on the regions of an image that matter for its class.",
    where="Section 4.5, Figures 6 and 14",
    list_arms=list_arms,
    measure=measure,
    metric="focus",
    unit="share of attention rollout on the object, %",
    rule="After fine-tuning, more of the rollout falls on the object than with an untrained model, and more than with "
    "a prior for the centre of the image, where most objects are.",
    list_checks=list_checks,
    is_equally_noisy=False,
    limits="The paper shows single images; a share of the rollout on a mask is our measure. The grid of 8 × 8 patches "
    "is coarse, and rollout adds the residual connections by half, which spreads every map.",
    paper=(("ViT-L/16", "pictures: attention on the object, in most of the images shown"),),
    needs=("data", "transfer", "masks"),
)
