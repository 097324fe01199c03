"""Images, figures, histograms, texts and tables in CSVLogger and TensorBoardLogger. L-04"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from services import log_all_media

from drivetrain import Logger
from drivetrain.errors import ConfigurationError
from drivetrain.loggers import CSVLogger, Histogram, Table, TensorBoardLogger
from drivetrain.loggers.media import pixels_of
from drivetrain.testing import requires_package


@requires_package("PIL")
@pytest.mark.parametrize("url", [False, True])
def test_csv_logger_writes_files(tmp_path: Path, url: bool) -> None:  # L-04
    from PIL import Image

    logger = CSVLogger(tmp_path.as_uri() if url else tmp_path, version=0, prefix="a")
    assert not list(tmp_path.iterdir())
    log_all_media(logger)
    media = tmp_path / "drivetrain_logs/version_0/media"
    picture = Image.open(media / "a-seen/picture/step=2.png")
    assert (picture.size, picture.getpixel((0, 0))) == ((6, 4), (128, 128, 128))
    assert Image.open(media / "a-figure/step=2.png").getpixel((0, 0)) == (255, 0, 0)
    assert sum(json.loads((media / "a-weights/step=2.json").read_text())["counts"]) == 8
    assert (media / "a-text/step=2.txt").read_text() == "# Hello"
    assert list(csv.reader((media / "a-table/step=2.csv").open())) == [["x", "y"], ["1", "a|b"], ["2", ""]]


def test_csv_logger_writes_only_to_its_folder_and_a_rewind_removes_later_media(tmp_path: Path) -> None:  # L-04
    logger = CSVLogger(tmp_path / "logs", version=0)
    for key in ("../../out", "/abs", "a//b", "", "nul\0byte", "a:b*c"):
        logger.log_text(key, "x", 0)
    media = tmp_path / "logs/drivetrain_logs/version_0/media"
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 6
    assert all(media in path.parents for path in files)
    for step in (9, 10, 100):
        logger.log_text("text", str(step), step)
    logger.rewind(10)
    assert sorted(path.name for path in (media / "text").iterdir()) == ["step=10.txt", "step=9.txt"]


@requires_package("tensorboard")
def test_tensorboard_logger_writes_events(tmp_path: Path) -> None:  # L-04
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, version=0, prefix="a")
    log_all_media(logger)
    logger.finalize("success")
    events = EventAccumulator(str(logger.log_dir), size_guidance={"tensors": 0, "histograms": 0}).Reload()
    images = [events.Images(name)[0] for name in ("a-seen/picture", "a-figure")]
    assert [(one.step, one.width, one.height) for one in images] == [(2, 6, 4), (2, 5, 3)]
    (weights,) = events.Histograms("a-weights")
    written = weights.histogram_value
    assert (weights.step, written.num, written.sum, written.sum_squares) == (2, 8.0, 28.0, 140.0)
    counts, edges = np.histogram(np.arange(8.0, dtype=np.float32), 64)
    assert (list(written.bucket), list(written.bucket_limit)) == (counts.tolist(), edges[1:].tolist())
    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val for tag in events.Tags()["tensors"]}
    assert texts == {
        "a-text/text_summary": [b"# Hello"],
        "a-table/text_summary": [b"| x | y |\n| --- | --- |\n| 1 | a\\|b |\n| 2 |  |"],
    }


class MetricsLogger(Logger):
    """Has only the methods that a logger must have."""

    name, version = "numbers", "0"

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        pass


def test_media_that_a_logger_does_not_support_are_named_once(caplog: pytest.LogCaptureFixture) -> None:  # L-04
    logger = MetricsLogger()
    log_all_media(logger)
    log_all_media(logger, 4)
    log_all_media(MetricsLogger())
    kinds = ("images", "figures", "histograms", "texts", "tables")
    expected = [f"MetricsLogger cannot log {kind}, so they are ignored." for kind in kinds] * 2
    assert [record.getMessage() for record in caplog.records] == expected
    assert logger.experiment is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("bins", [1, 7])
def test_a_histogram_is_numpys(dtype: torch.dtype, bins: int) -> None:  # L-04
    value = (torch.randn(37, 11, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    exact = value.float() if dtype is torch.bfloat16 else value
    counts, edges = np.histogram(exact.double().numpy() if dtype is torch.bool else exact.numpy(), bins)
    found = Histogram.of(value, bins)
    assert found.counts == tuple(counts.tolist())
    assert found.edges == tuple(edges.tolist())
    assert found.total == value.numel()
    assert found.sum == pytest.approx(exact.double().sum().item(), abs=1e-9)


def test_histograms_of_special_tensors() -> None:  # L-04
    found = Histogram.of(torch.tensor([1.0, math.nan, math.inf, 2.0, -math.inf, math.nan]), 2)
    assert (found.counts, found.edges, found.left_out) == ((1, 1), (1.0, 1.5, 2.0), 4)
    assert Histogram.of(found) is found
    assert Histogram.of(torch.tensor([]), 2).edges == (0.0, 0.5, 1.0)
    assert Histogram.of([3, 3, 3], 2).counts == (0, 3)
    assert Histogram.of(torch.tensor([3 + 4j]), 1).total == 2
    gradient = torch.tensor([[0.0, 2.0], [0.0, 0.0]])
    assert Histogram.of(gradient.to_sparse(), 2) == Histogram.of(gradient, 2)


@pytest.mark.parametrize(
    "values",
    [
        np.asarray([1.0, 1.0 + 2**-23] * 3, np.float32),  # a norm's weight after a step of the warm-up
        np.asarray([-1e9] * 3, np.float32),  # a mask
        np.asarray([-1e38, 3e38, 0], np.float32),
        np.asarray([1e-45, 3e-45], np.float32),
        np.asarray([-1.7e308, 0.0, 1.7e308]),
        np.asarray([1e300] * 2),
    ],
)
@pytest.mark.parametrize("bins", [1, 64])
def test_a_histogram_of_a_range_that_numpy_refuses(values: np.ndarray[Any, Any], bins: int) -> None:
    # L-04: between these numbers there are no 64 others of their type, or more than it holds
    found = Histogram.of(torch.from_numpy(values), bins)
    edges = np.asarray(found.edges)
    assert np.isfinite(edges).all()
    assert (np.diff(edges / 2) > 0).all()
    assert (edges[0] <= values.min(), values.max() <= edges[-1]) == (True, True)
    assert found.counts == tuple(np.histogram(values.astype(np.float64), edges)[0].tolist())


@requires_package("tensorboard")
def test_text_that_utf8_cannot_encode_is_escaped(tmp_path: Path) -> None:
    # L-04: bytes that a model made, decoded with "surrogateescape", and a number
    for logger in (CSVLogger(tmp_path / "csv", version=0), TensorBoardLogger(tmp_path / "board", version=0)):
        logger.log_text("text", "a\udcff", 1)
        logger.log_text("text", 3, 2)  # type: ignore[arg-type]
        logger.log_table("table", {"text": ["a\udcff"]}, 1)
        logger.finalize("success")
    media = tmp_path / "csv/drivetrain_logs/version_0/media"
    assert (media / "text/step=1.txt").read_text() == "a\\udcff"
    assert (media / "text/step=2.txt").read_text() == "3"
    assert (media / "table/step=1.csv").read_text() == "text\na\\udcff\n"


@requires_package("PIL")
def test_images_of_every_kind_become_pixels() -> None:
    from PIL import Image

    assert pixels_of(torch.tensor([[0.0, 1.0, 2.0, float("nan")]])).tolist() == [[[0], [255], [255], [0]]]
    assert pixels_of(np.full((2, 3, 4), 7, np.uint8)).shape == (2, 3, 4)
    assert pixels_of(torch.full((4, 2, 3), 7, dtype=torch.uint8)).shape == (2, 3, 4)
    assert pixels_of(torch.rand(1, 2, 3, dtype=torch.bfloat16, requires_grad=True)).shape == (2, 3, 1)
    palette = Image.new("RGB", (3, 2), (9, 8, 7)).convert("P", palette=Image.Palette.ADAPTIVE)
    assert pixels_of(palette)[0, 0].tolist() == [9, 8, 7]


class Frame:
    """The part of a DataFrame that is used."""

    columns = ("x", 2)

    def to_dict(self) -> dict[str, Any]:
        return {}

    def __getitem__(self, name: Any) -> list[int]:
        return [1, 3] if name == "x" else [2, 4]


def test_tables_of_every_kind() -> None:
    assert Table.of(Frame()) == Table(["x", "2"], [[1, 2], [3, 4]])
    assert Table.of({"x": np.array([1.5]), "y": [Path("a")]}) == Table(["x", "y"], [[1.5, "a"]])
    assert Table.of([]) == Table([], [])


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("log_histogram", "text", r"log_histogram got a str(?s:.*)trainer\.log_histogram"),
        ("log_histogram", [[1], [1, 2]], "log_histogram got a list"),
        ("log_image", torch.rand(2, 3, 4, 5), "log_image got"),
        ("log_image", torch.rand(2, 4, 5), "log_image got"),
        ("log_image", "picture.png", "log_image got"),
        ("log_table", {"x": [1], "y": []}, "log_table got"),
        ("log_table", [1, 2], "log_table got"),
        ("log_table", "text", "log_table got"),
        ("log_figure", torch.rand(3, 2, 2), "savefig"),
    ],
)
def test_a_value_of_another_kind_is_refused(tmp_path: Path, method: str, value: Any, message: str) -> None:  # L-04
    with pytest.raises(ConfigurationError, match=message):
        getattr(CSVLogger(tmp_path), method)("key", value, 0)
