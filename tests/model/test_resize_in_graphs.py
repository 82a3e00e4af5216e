"""Every way to resize a position table computes the same in a graph for changing sizes, and trains there."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from vitrail.model.architecture import PositionResize
from vitrail.model.positions import LearnedPositions1d, LearnedPositions2d

pytestmark = pytest.mark.slow  # compiled and exported graphs

OWN = (5, 5)
GRIDS = [OWN, (5, 9), (7, 5), (8, 9), (3, 2), (1, 4)]


class TableOfImage(nn.Module):
    """The table for the grid of an input: (rows, columns) → (1 + N, D)."""

    def __init__(self, kind: type[LearnedPositions1d] | type[LearnedPositions2d], how: PositionResize) -> None:
        super().__init__()
        self.positions = kind(OWN, 4, 1, how)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for table in self.positions.parameters():
                table.normal_(generator=generator)

    def forward(self, image: Tensor) -> Tensor:
        table: Tensor = self.positions((image.shape[0], image.shape[1]))
        return table


@pytest.mark.parametrize("kind", [LearnedPositions1d, LearnedPositions2d])
@pytest.mark.parametrize("how", get_args(PositionResize))
def test_an_exported_graph_resizes_as_the_module_does(kind, how):
    """At its own grid too, where DINOv2's code adds no offset; a graph cannot ask whether the grid is its own."""
    module = TableOfImage(kind, how).double()
    rows, columns = (torch.export.Dim(name, min=1, max=64) for name in ("rows", "columns"))
    example = (torch.zeros(6, 7),)
    graph = torch.export.export(module, example, dynamic_shapes=({0: rows, 1: columns},)).module()
    for grid in GRIDS:
        torch.testing.assert_close(graph(torch.zeros(grid)), module(torch.zeros(grid)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("how", get_args(PositionResize))
def test_the_table_learns_in_a_compiled_graph(how):
    module = TableOfImage(LearnedPositions1d, how).double()
    compiled = torch.compile(module, dynamic=True, backend="aot_eager")
    for grid in ((8, 9), (3, 2), (7, 5)):
        weights = torch.randn(1 + grid[0] * grid[1], 4, dtype=torch.float64)
        gradients = []
        for run in (module, compiled):
            module.zero_grad()
            (run(torch.zeros(grid)) * weights).sum().backward()
            gradients.append(module.positions.table.grad.clone())
        torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-12)
        assert gradients[0][1:].abs().sum() > 0
