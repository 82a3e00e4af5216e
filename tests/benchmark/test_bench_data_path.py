"""The data path on tiny models and a few pictures: what is timed, and what is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from benched import CPU, Clock
from pictures import make_folder, picture

from vitrail.benchmark import data_path
from vitrail.benchmark.case import Case
from vitrail.benchmark.data_path import STOCK, DataSupply, measure_data_path, time_bursts, time_from_loader
from vitrail.benchmark.measure import MeasureOptions
from vitrail.errors import ConfigError, DataError
from vitrail.fast.timing import Stopwatch
from vitrail.model.cost import compute_cost
from vitrail.model.variants import SIZES, Size, make_architecture


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(SIZES, "Ti", Size(depth=2, width=32, mlp_dim=64, num_heads=2))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    return str(make_folder(tmp_path_factory.mktemp("data"), {"cat": 6, "dog": 6}, kind="JPEG"))


def supply_case(what: str, batch: int = 4) -> Case:
    return Case(what, "Ti/16", make_architecture("Ti/16", image_size=32), batch, "fp32", CPU)


class TestSupply:
    def test_open(self, data):
        supply = DataSupply.open(data, 0, [supply_case("loader")])
        assert len(supply.source) == 12
        assert supply.describe() == "data: 12 images, 1 kB each on average; 0 workers"
        assert data not in supply.describe()
        assert DataSupply.open(data, None, [supply_case("loader")]).workers >= 1
        with pytest.raises(ConfigError, match="--batch 13"):
            DataSupply.open(data, 0, [supply_case("loader", 13)])
        with pytest.raises(DataError, match="nowhere"):
            DataSupply.open("nowhere/at/all", 0, [supply_case("loader")])

    def test_a_loader_is_that_of_training(self, data):
        case = supply_case("loader")
        supply = DataSupply.open(data, 0, [case])
        batch = next(supply.start_loader(case, 8))
        assert (batch.images.shape, batch.images.dtype) == ((4, 3, 32, 32), torch.uint8)
        setup = data_path.prepare_run(
            data_path.make_run_config(case, supply, compiles=False), data_path.Ranks(0, 1, CPU)
        )
        assert torch.equal(next(data_path.build_training_loader(setup, 8)).images, batch.images)


class TestTiming:
    def test_what_was_in_stock_is_not_counted(self, monkeypatch):
        """Three workers: what they had ready takes no time, then each batch takes half a second."""
        monkeypatch.setattr(data_path, "SUPPLY_SECONDS", 2.0)
        clock, done = Clock(), []

        def step() -> None:
            done.append(clock.time)
            clock.time += 0.5 if len(done) > STOCK * 3 else 0.0

        assert time_from_loader(Stopwatch(CPU, clock), step, 3) == [0.5]
        assert len(done) == STOCK * 3 + 1 + 6  # whole rounds of three: one and a half seconds would be too few

    def test_at_least_one_burst(self, monkeypatch):
        monkeypatch.setattr(data_path, "SUPPLY_SECONDS", 0.0)
        clock, done = Clock(), []

        def step() -> None:
            done.append(clock.time)
            clock.time += 2.0

        assert time_bursts(Stopwatch(CPU, clock), step, 4) == 2.0
        assert len(done) == 4


class TestMeasured:
    def test_the_loader_with_a_worker(self, data):
        case = supply_case("loader")
        found = measure_data_path(case, DataSupply.open(data, 1, [case]), MeasureOptions(rounds=2), compiles=False)
        (row,) = found.rows
        assert (row.library, row.way, row.what, row.precision) == ("vitrail", "1 worker", "loader", "uint8")
        assert len(row.seconds) == 2
        assert row.images_per_second == pytest.approx(4 / row.median_seconds)
        assert (row.flops_per_second, row.share_of_product, found.products, found.missing) == (None, None, [], [])

    def test_end_to_end(self, data, monkeypatch):
        case, trained = supply_case("end-to-end"), []
        step = data_path.train_step

        def watched(run, state) -> None:
            trained.append(type(run.training_loader).__name__)
            step(run, state)

        monkeypatch.setattr(data_path, "train_step", watched)
        found = measure_data_path(case, DataSupply.open(data, 0, [case]), MeasureOptions(rounds=2), compiles=False)
        assert not found.missing
        assert [row.way for row in found.rows] == ["from the loader, 0 workers", "already on the device"]
        assert trained[: data_path.WARM_UPS] == ["RepeatedBatch"] * data_path.WARM_UPS
        assert {"TrainingLoader", "RepeatedBatch"} == set(trained)
        shape = case.architecture.model_copy(update={"num_classes": 2})
        for row in found.rows:
            assert row.parameters == compute_cost(shape).parameters
            assert row.flops_per_second == pytest.approx(compute_cost(shape).flops * 4 * 3 / row.median_seconds)
            assert row.share_of_product > 0

    def test_what_fails_is_named(self):
        case = supply_case("end-to-end")
        alike = [(picture(number), "cat") for number in range(12)]  # a classifier needs two classes
        supply = replace(DataSupply.open(alike, 0, [case]), data="nowhere")
        found = measure_data_path(case, supply, MeasureOptions(rounds=1), compiles=False)
        assert not found.rows
        (missing,) = found.missing
        assert "DATA" in missing.reason
        assert "nowhere" not in missing.reason
