"""Every kind of model on a CUDA device, compiled by Inductor without a graph break, against the plain model on the CPU.

    python benchmarks/cuda_check.py

Prints the largest relative difference for each kind in float32, compiled float32, bf16 autocast and compiled bf16
autocast. Exits with 1 where one is out of bounds or a gradient is not finite. Tests run without an accelerator; this
is their counterpart with one.
"""

from __future__ import annotations

import random
import sys

import torch

import vitrail
from vitrail.data.transforms.mixing import Mixing, mix_batch
from vitrail.data.transforms.preprocess import normalise

SMALL = {"width": 128, "depth": 2, "mlp_dim": 256, "num_heads": 4, "image_size": (64, 96), "num_classes": 10}
KINDS: list[tuple[str, dict[str, object]]] = [
    ("S/16", {}),
    ("S/16", {"position": "none", "pool": "average"}),
    ("S/16", {"position": "learned-2d", "position_at": "every-layer"}),
    ("S/16", {"position": "relative", "registers": 2}),
    ("S/16", {"position": "sin-cos", "pool": "attention", "position_at": "shared"}),
    ("S/16", {"block": "axial", "pool": "average", "layer_scale": 0.5}),
    ("S/16", {"conv_stem": [(32, 3, 4), (64, 3, 4, "group", "gelu")]}),
    ("S/16", {"norm": "rms", "gelu": "exact", "input_norm": True, "norm_after_pool": True, "pool": "average"}),
    ("R26+S/32", {}),
    ("BiT-R50x1", {"image_size": 64, "num_classes": 10}),
]
ROUNDING = {"float32": 2e-6, "compiled float32": 2e-6, "bf16": 2e-2, "compiled bf16": 2e-2}
"""What is allowed, times how much the network itself amplifies a small change of its input. Untrained pre-activation
ResNets amplify a lot (57-fold for BiT-R50x1 at 64 pixels), Vision Transformers hardly."""


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    return float((a - b).norm() / b.norm())


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("this checks a CUDA device, and torch sees none here")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    good = True
    for name, options in KINDS:
        options = options if name.startswith("BiT") else {**SMALL, **options}
        model = vitrail.create_model(name, seed=0, **options).eval()
        torch.nn.init.normal_(model.head.weight, std=0.1, generator=torch.Generator().manual_seed(1))
        images = torch.randn(4, 3, *model.image_size, generator=torch.Generator().manual_seed(2))
        reference = model.double()(images.double())
        noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        amplification = max(difference(model(images.double() * (1 + 1e-6 * noise)), reference) / 1e-6, 1.0)
        model = model.float().cuda()
        compiled = torch.compile(model, fullgraph=True)
        found = {}
        for label, function in [
            ("float32", model),
            ("compiled float32", compiled),
            ("bf16", model),
            ("compiled bf16", compiled),
        ]:
            with torch.autocast("cuda", torch.bfloat16, enabled="bf16" in label):
                out = function(images.cuda())
            found[label] = difference(out, reference)
            model.zero_grad()
            out.float().square().sum().backward()
            if any(p.grad is None or not p.grad.isfinite().all() for p in model.parameters()):
                found[label] = float("nan")
        fine = all(found[label] <= bound * amplification for label, bound in ROUNDING.items())
        good &= fine
        found["amplification"] = amplification
        print(
            ("ok  " if fine else "BAD ") + f"{name} {options}: " + ", ".join(f"{k} {v:.1e}" for k, v in found.items()),
            flush=True,
        )
        torch.compiler.reset()
    sys.exit(0 if check_batches() and good else 1)


def check_batches() -> bool:
    """What is done to batches on the device is what the CPU does."""
    pixels = torch.randint(0, 256, (32, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(32) % 10
    options, good = Mixing(mixup=0.8, cutmix=1.0), True
    for seed in range(20):
        results = []
        for device in ("cpu", "cuda"):
            images = normalise(pixels.to(device), vitrail.Preprocessing(image_size=64))
            results.append(mix_batch(images, labels.to(device), 10, options, random.Random(seed)))
        (images, targets), (again, targets_again) = results
        good &= bool((targets_again.sum(dim=1) == 1).all()) and torch.equal(targets, targets_again.cpu())
        good &= difference(again, images) < 1e-6
    print(("ok  " if good else "BAD ") + "normalise, Mixup and CutMix: as on the CPU, label mass exactly 1")
    return good


if __name__ == "__main__":
    main()
