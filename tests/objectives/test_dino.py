"""DINO: its loss against a loop, balanced answers, and a teacher that follows exactly."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from test_lejepa import batch, draw, vit

from vitrail.errors import ConfigError
from vitrail.objectives.dino import Dino, balance_answers, compare_answers
from vitrail.training.optim import count_layers_above, group_parameters

SMALL = {"projector_width": 24, "prototypes": 12}


def test_the_loss_equals_a_loop():
    answers, logits = draw(2, 3, 5).softmax(dim=2), draw(4, 3, 5, seed=1)
    found = compare_answers(answers, logits).tolist()
    for image in range(3):
        total, pairs = 0.0, 0
        for teacher in range(2):
            for view in range(4):
                if view == teacher:
                    continue
                row = logits[view, image].tolist()
                largest = math.log(sum(math.exp(value) for value in row))
                total -= sum(a.item() * (b - largest) for a, b in zip(answers[teacher, image], row, strict=True))
                pairs += 1
        assert pairs == 6
        assert found[image] == pytest.approx(total / pairs, rel=1e-12)


def test_gradients_are_exact():
    answers, logits = draw(2, 3, 4).softmax(dim=2), draw(3, 3, 4, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda values: compare_answers(answers, values), (logits,))


def test_balanced_answers_are_probabilities_and_equally_common():
    logits = draw(200, 8) + torch.arange(8)  # without balance most would choose the last
    assert logits.softmax(dim=1).mean(dim=0).max() > 0.5
    answers = balance_answers(logits)
    assert torch.allclose(answers.sum(dim=1), torch.ones(200, dtype=torch.float64))
    assert torch.allclose(answers.mean(dim=0), torch.full((8,), 1 / 8, dtype=torch.float64), atol=0.02)
    assert balance_answers((logits * 1000).float()).isfinite().all()


def test_the_teacher_starts_as_the_model_and_follows_it_exactly():
    trained = Dino(vit(), teacher_momentum=0.9, **SMALL).train()
    before = {name: tensor.clone() for name, tensor in trained.teacher.state_dict().items()}
    ours = {**{f"model.{n}": t for n, t in trained.model.state_dict().items()}}
    ours |= {f"projector.{n}": t for n, t in trained.projector.state_dict().items()}
    assert before.keys() == ours.keys()
    assert all(torch.equal(before[name], ours[name]) for name in ours)
    with torch.no_grad():
        for parameter in [*trained.model.parameters(), *trained.projector.parameters()]:
            parameter.add_(torch.ones_like(parameter))
    trained.finish_step(0.5)  # halfway the momentum is halfway from 0.9 to 1
    for name, tensor in trained.teacher.state_dict().items():
        assert torch.equal(tensor, torch.lerp(before[name], ours[name], 1 - 0.95)), name
    kept = {name: tensor.clone() for name, tensor in trained.teacher.state_dict().items()}
    trained.finish_step(1.0)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in trained.teacher.state_dict().items())


def test_the_teacher_neither_learns_nor_drops():
    trained = Dino(vit(stochastic_depth=0.5, dropout=0.5), **SMALL).train()
    assert trained.model.training
    assert not any(part.training for part in trained.teacher.modules())
    trained(batch(), 5).loss.backward()
    assert not any(p.requires_grad or p.grad is not None for p in trained.teacher.parameters())
    learning = {id(p) for group in group_parameters(trained, 0.1) for p in group["params"]}
    assert not learning & {id(p) for p in trained.teacher.parameters()}
    assert learning >= {id(p) for p in trained.projector.parameters()}


def test_layers_are_counted_without_the_teacher():
    above = count_layers_above(Dino(vit(depth=3), **SMALL))
    assert above["projector.prototypes.weight"] == 0
    assert above["model.encoder.blocks.2.mlp.fc1.weight"] == 1
    assert above["model.class_token"] == 4


def test_all_weights_learn():
    trained = Dino(vit(), **SMALL).train()
    trained(batch(), 5).loss.backward()
    assert not [name for name, p in trained.named_parameters() if p.requires_grad and not p.grad.any()]


def test_an_evaluation_ignores_padding():
    evaluated, whole = Dino(vit(), **SMALL).eval(), batch()
    mask = torch.tensor([True, True, True, True, False, False])
    padded = replace(whole, mask=mask, images=whole.images * mask[:, None, None, None])
    short = whole.change_tensors(lambda values: values[:4])
    pairs = evaluated(padded, 1).sums["loss"].tolist(), evaluated(short, 1).sums["loss"].tolist()
    assert pairs[0] == pytest.approx(pairs[1], rel=1e-5)
    assert evaluated(replace(whole, mask=torch.zeros(6, dtype=torch.bool)), 1).sums["loss"].tolist() == [0, 0]


def test_a_wrong_momentum_is_refused():
    with pytest.raises(ConfigError, match=r"such as 0\.996"):
        Dino(vit(), teacher_momentum=1.0)
