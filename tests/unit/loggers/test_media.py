"""Images, figures, histograms, texts and tables in CSVLogger and TensorBoardLogger. L-04"""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from services import Drawing

from drivetrain import Logger
from drivetrain.errors import ConfigurationError
from drivetrain.loggers import CSVLogger, Histogram, Table, TensorBoardLogger
from drivetrain.loggers.media import pixels_of
from drivetrain.testing import requires_package

ROWS = [{"x": 1, "y": "a|b"}, {"x": torch.tensor(2)}]


def log_all(logger: Logger, step: int = 2) -> None:
    logger.log_image("seen/picture", torch.full((3, 4, 6), 0.5), step)
    logger.log_figure("figure", Drawing(), step)
    logger.log_histogram("weights", torch.arange(8.0), step)
    logger.log_text("said", "# Hello", step)
    logger.log_table("table", ROWS, step)


@requires_package("PIL")
@pytest.mark.parametrize("url", [False, True])
def test_csv_logger_writes_files(tmp_path: Path, url: bool) -> None:
    # L-04
    from PIL import Image

    logger = CSVLogger(tmp_path.as_uri() if url else tmp_path, version=0, prefix="a")
    assert not list(tmp_path.iterdir())
    log_all(logger)
    media = tmp_path / "drivetrain_logs/version_0/media"
    picture = Image.open(media / "a-seen/picture/step=2.png")
    assert (picture.size, picture.getpixel((0, 0))) == ((6, 4), (128, 128, 128))
    assert Image.open(media / "a-figure/step=2.png").getpixel((0, 0)) == (255, 0, 0)
    assert sum(json.loads((media / "a-weights/step=2.json").read_text())["counts"]) == 8
    assert (media / "a-said/step=2.txt").read_text() == "# Hello"
    assert list(csv.reader((media / "a-table/step=2.csv").open())) == [["x", "y"], ["1", "a|b"], ["2", ""]]


def test_csv_logger_keeps_to_its_folder(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path / "logs", version=0)
    for key in ("../../out", "/abs", "a//b", "", "nul\0byte", "a:b*c"):
        logger.log_text(key, "x", 0)
    media = tmp_path / "logs/drivetrain_logs/version_0/media"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 6
    assert all(media in path.parents for path in files)


def test_csv_logger_goes_back(tmp_path: Path) -> None:
    # L-04: media of later steps leave the folder
    logger = CSVLogger(tmp_path, version=0)
    for step in (9, 10, 100):
        logger.log_text("said", str(step), step)
    logger.rewind(10)
    folder = tmp_path / "drivetrain_logs/version_0/media/said"
    assert sorted(path.name for path in folder.iterdir()) == ["step=10.txt", "step=9.txt"]


@requires_package("tensorboard")
def test_tensorboard_logger_writes_events(tmp_path: Path) -> None:
    # L-04
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, version=0, prefix="a")
    log_all(logger)
    logger.finalize("success")
    events = EventAccumulator(str(logger.log_dir), size_guidance={"tensors": 0, "histograms": 0}).Reload()
    (picture,) = events.Images("a-seen/picture")
    assert (picture.step, picture.width, picture.height) == (2, 6, 4)
    (figure,) = events.Images("a-figure")
    assert (figure.width, figure.height) == (5, 3)
    (found,) = events.Histograms("a-weights")
    assert (found.step, found.histogram_value.num, found.histogram_value.sum) == (2, 8.0, 28.0)
    counts, edges = np.histogram(np.arange(8.0, dtype=np.float32), 64)
    assert list(found.histogram_value.bucket) == counts.tolist()
    assert list(found.histogram_value.bucket_limit) == edges[1:].tolist()
    texts = {
        tag: [one.tensor_proto.string_val[0].decode() for one in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }
    assert texts == {
        "a-said/text_summary": ["# Hello"],
        "a-table/text_summary": ["| x | y |\n| --- | --- |\n| 1 | a\\|b |\n| 2 |  |"],
    }


class Numbers(Logger):
    """Of somebody who wrote what must be written."""

    name, version = "numbers", "0"

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        pass


def test_who_cannot_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    # L-04
    logger = Numbers()
    with caplog.at_level(logging.WARNING, "drivetrain"):
        log_all(logger)
        log_all(logger, 4)
        log_all(Numbers())
    told = [record.getMessage() for record in caplog.records]
    kinds = ("images", "figures", "histograms", "texts", "tables")
    assert told == [f"Numbers cannot log {kind}, so they are ignored." for kind in kinds] * 2
    assert logger.experiment is None


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
@pytest.mark.parametrize("bins", [1, 7, 64])
def test_a_histogram_is_numpys(dtype: torch.dtype, bins: int) -> None:
    # L-04
    generator = torch.Generator().manual_seed(1)
    value = (torch.randn(37, 11, generator=generator) * 3).to(dtype)
    exact = value.float() if value.is_floating_point() and value.element_size() == 2 else value
    counts, edges = np.histogram(exact.double().numpy() if dtype is torch.bool else exact.numpy(), bins)
    found = Histogram.of(value, bins)
    assert found.counts == tuple(counts.tolist())
    assert found.edges == tuple(edges.tolist())
    assert found.total == value.numel()
    assert found.sum == pytest.approx(exact.double().sum().item(), abs=1e-9)


def test_a_histogram_of_what_is_not_finite() -> None:
    found = Histogram.of(torch.tensor([1.0, math_nan := float("nan"), float("inf"), 2.0, -float("inf"), math_nan]), 2)
    assert (found.counts, found.edges, found.left_out) == ((1, 1), (1.0, 1.5, 2.0), 4)
    assert Histogram.of(torch.tensor([]), 2).total == 0
    assert Histogram.of([3, 3, 3], 2).counts == (0, 3)
    assert Histogram.of(torch.tensor([3 + 4j]), 1).total == 2
    assert Histogram.of(found) is found


@pytest.mark.parametrize(
    "values",
    [
        np.asarray([1.0, 1.0 + 2**-23] * 3, np.float32),  # a norm's weight after a step of the warm-up
        np.asarray([2**24, 2**24 + 2, 2**24 + 4], np.float32),
        np.asarray([-1e9] * 3, np.float32),  # a mask
        np.asarray([-1e38, 3e38, 0], np.float32),
        np.asarray([1e-45, 3e-45], np.float32),
        np.asarray([1.0, 1.0 + 2**-52]),
        np.asarray([-1.7e308, 0.0, 1.7e308]),
        np.asarray([1e300] * 2),
    ],
)
@pytest.mark.parametrize("bins", [1, 64])
def test_a_histogram_of_what_numpy_refuses(values: np.ndarray[Any, Any], bins: int) -> None:
    # L-04: between these numbers there are no 64 others of their type, or more than it holds
    found = Histogram.of(torch.from_numpy(values), bins)
    edges = np.asarray(found.edges)
    assert np.isfinite(edges).all()
    assert (np.diff(edges / 2) > 0).all()
    assert (edges[0] <= values.min(), values.max() <= edges[-1]) == (True, True)
    counts, _ = np.histogram(values.astype(np.float64), edges)
    assert found.counts == tuple(counts.tolist())
    assert found.total == values.size


def test_a_histogram_of_a_sparse_gradient() -> None:
    # L-04: of an embedding, say
    value = torch.tensor([[0.0, 2.0], [0.0, 0.0]])
    assert Histogram.of(value.to_sparse(), 2) == Histogram.of(value, 2)


@pytest.mark.parametrize("value", ["text", None, {"a": torch.ones(2)}, [[1], [1, 2]]])
def test_a_histogram_of_no_tensor(value: Any) -> None:
    # L-04
    with pytest.raises(ConfigurationError, match="log_histogram got a") as caught:
        Histogram.of(value)
    assert "trainer.log_histogram" in str(caught.value)


@requires_package("tensorboard")
def test_texts_that_no_file_can_hold(tmp_path: Path) -> None:
    # L-04: bytes that a model made, decoded with "surrogateescape", and what is no text
    for logger in (CSVLogger(tmp_path / "csv", version=0), TensorBoardLogger(tmp_path / "board", version=0)):
        logger.log_text("said", "a\udcff", 1)
        logger.log_text("said", 3, 2)  # type: ignore[arg-type]
        logger.log_table("table", {"said": ["a\udcff"]}, 1)
        logger.finalize("success")
    media = tmp_path / "csv/drivetrain_logs/version_0/media"
    assert (media / "said/step=1.txt").read_text() == "a\\udcff"
    assert (media / "said/step=2.txt").read_text() == "3"
    assert (media / "table/step=1.csv").read_text() == "said\na\\udcff\n"


def test_pixels() -> None:
    from PIL import Image

    assert pixels_of(torch.tensor([[0.0, 1.0, 2.0, float("nan")]])).tolist() == [[[0], [255], [255], [0]]]
    assert pixels_of(np.full((2, 3, 4), 7, np.uint8)).shape == (2, 3, 4)
    assert pixels_of(torch.full((4, 2, 3), 7, dtype=torch.uint8)).shape == (2, 3, 4)
    assert pixels_of(torch.rand(1, 2, 3, dtype=torch.bfloat16, requires_grad=True)).shape == (2, 3, 1)
    palette = Image.new("RGB", (3, 2), (9, 8, 7)).convert("P", palette=Image.Palette.ADAPTIVE)
    assert pixels_of(palette)[0, 0].tolist() == [9, 8, 7]


@pytest.mark.parametrize(
    "value", [torch.rand(2, 3, 4, 5), torch.rand(2, 4, 5), "picture.png", None, [torch.rand(3, 2, 2)]]
)
def test_what_is_no_picture(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="log_image got"):
        pixels_of(value)


def test_tables() -> None:
    class Frame:
        """As much of a DataFrame as is asked for."""

        columns = ("x", 2)

        def to_dict(self) -> dict[str, Any]:
            return {}

        def __getitem__(self, name: Any) -> list[int]:
            return [1, 3] if name == "x" else [2, 4]

    assert Table.of(Frame()) == Table(["x", "2"], [[1, 2], [3, 4]])
    assert Table.of({"x": np.array([1.5]), "y": [Path("a")]}) == Table(["x", "y"], [[1.5, "a"]])
    assert Table.of([]) == Table([], [])
    for wrong in ({"x": [1], "y": []}, {"x": 1}, [1, 2], "text"):
        with pytest.raises(ConfigurationError, match="log_table got"):
            Table.of(wrong)


def test_what_draws_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="savefig"):
        CSVLogger(tmp_path).log_figure("figure", torch.rand(3, 2, 2), 0)
