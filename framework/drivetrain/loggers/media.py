"""Convert users' values to pixels, counts and rows, for drivetrain's loggers and for custom loggers."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from drivetrain.errors import ConfigurationError

_CHUNK = 1 << 22  # elements that are counted at once; the bin numbers of the elements take 8 bytes each


# Images


def pixels_of(value: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return an image as a uint8 array of shape (H, W, C), where C is 1, 3 or 4.

    Args:
        value: a tensor of shape (C, H, W) or (H, W), an array of shape (H, W, C) or (H, W), or a Pillow image. Numbers
            of other dtypes than uint8 are clipped to the range from 0 to 1.

    Raises:
        ConfigurationError: the value has another type or shape.
    """
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value if value.dtype == torch.uint8 else value.float()).numpy()
        array = np.moveaxis(value, 0, -1) if value.ndim == 3 else value
    else:
        mode = getattr(value, "mode", None)
        if mode is not None and mode not in ("L", "RGB", "RGBA"):
            value = value.convert("RGB")  # The numbers of other modes, such as palettes, are not intensities.
        array = np.asarray(value)
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[-1] not in (1, 3, 4) or array.dtype.kind not in "fiub":
        raise ConfigurationError(
            f"log_image got a {type(value).__name__} of shape {tuple(array.shape)} and dtype {array.dtype}.",
            "an image has one, three or four channels of numbers.",
            "pass a tensor of shape (C, H, W) or (H, W), an array of shape (H, W, C) or (H, W), or a Pillow image. For "
            "several images, call log_image for each, or make a grid.",
        )
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    scaled = np.nan_to_num(array.astype(np.float32)).clip(0, 1) * 255
    return np.ascontiguousarray(np.rint(scaled).astype(np.uint8))


def png_of(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    """Encode the result of `pixels_of` as the content of a PNG file. Requires Pillow."""
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(stream, format="PNG")
    return stream.getvalue()


def png_of_figure(figure: Any) -> bytes:
    """Return a figure as the content of a PNG file.

    Args:
        figure: a matplotlib figure, or another object with ``savefig(file, format="png")``.

    Raises:
        ConfigurationError: the figure has no method ``savefig``.
    """
    if not callable(getattr(figure, "savefig", None)):
        raise ConfigurationError(
            f"log_figure got a {type(figure).__name__}.",
            "figures are drawn by their method savefig(file, format='png'), which this object does not have.",
            "pass a matplotlib figure; log_image takes pixels.",
        )
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()


def pixels_of_figure(figure: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a figure, in a form that `png_of_figure` accepts, as a uint8 array of shape (H, W, C). Requires Pillow."""
    from PIL import Image

    with Image.open(io.BytesIO(png_of_figure(figure))) as picture:
        return pixels_of(picture)


# Histograms


@dataclass(frozen=True)
class Histogram:
    """A histogram, counted like ``numpy.histogram``.

    Attributes:
        counts: the count of each bin.
        edges: the edges of the bins, one more than there are bins. Only the last bin includes its right edge.
        sum: the sum of the counted numbers.
        sum_of_squares: the sum of the squares of the counted numbers.
        left_out: how many numbers were not counted because they are infinite or NaN.
    """

    counts: tuple[int, ...]
    edges: tuple[float, ...]
    sum: float
    sum_of_squares: float
    left_out: int = 0

    @property
    def total(self) -> int:
        """How many numbers were counted."""
        return sum(self.counts)

    def with_at_most(self, bins: int) -> Histogram:
        """Return the histogram with at most ``bins`` bins, merging neighbouring bins if necessary."""
        width = -(-len(self.counts) // bins)
        if width <= 1:
            return self
        counts = tuple(sum(self.counts[at : at + width]) for at in range(0, len(self.counts), width))
        return replace(self, counts=counts, edges=(*self.edges[:-1:width], self.edges[-1]))

    @classmethod
    def of(cls, value: Any, bins: int = 64) -> Histogram:
        """Count the numbers of a tensor or array. A `Histogram` is returned unchanged.

        Args:
            value: a tensor or array of any shape, on any device.
            bins: the number of bins of equal width between the smallest and the largest finite number.

        Raises:
            ConfigurationError: the value is not numeric, or is sharded over ranks.
        """
        if isinstance(value, Histogram):
            return value
        tensor = _as_tensor(value)
        if hasattr(tensor, "full_tensor"):
            raise ConfigurationError(
                "log_histogram got a tensor that is sharded over ranks.",
                "this rank holds only a part of the tensor, so the counts would not be those of the whole tensor.",
                "call trainer.log_histogram(name, tensor) on every rank.",
            )
        numbers = FlatValues(tensor)
        return cls.joined(
            [numbers.counted(edges := numbers.value_range.edges(bins))], edges, numbers.value_range.left_out
        )

    @classmethod
    def joined(cls, parts: Sequence[BinCounts], edges: Edges, left_out: int) -> Histogram:
        """Return the histogram of all parts, whose numbers were counted with the same edges."""
        return cls(
            tuple(map(sum, zip(*(part.counts for part in parts), strict=True))),
            tuple(map(float, edges.tolist())),
            float(sum(part.sum for part in parts)),
            float(sum(part.sum_of_squares for part in parts)),
            left_out,
        )


Edges = np.ndarray[Any, Any]


def _as_tensor(value: Any) -> torch.Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(
            f"log_histogram got a {type(value).__name__}.",
            f"log_histogram counts the numbers of one tensor or array ({error}).",
            "pass a tensor, an array, or a Histogram; trainer.log_histogram takes a dict of tensors by name.",
        ) from error


@dataclass(frozen=True)
class ValueRange:
    """The range of the finite numbers of one or several tensors."""

    low: float
    high: float
    left_out: int
    """How many numbers are infinite or NaN."""
    is_float32: bool
    """Whether all tensors have at most float32 precision, so that edges are computed in float32."""

    @property
    def is_empty(self) -> bool:
        """Whether there are no finite numbers."""
        return self.low > self.high

    def edges(self, bins: int) -> Edges:
        """Return the edges of ``bins`` bins, equal to those of ``numpy.histogram`` if NumPy accepts the range.

        NumPy raises an error if the smallest and the largest number are almost equal, like the initial weights of a
        normalization layer, or too far apart for float32. In such cases the edges are computed in float64 or for a
        slightly larger range.
        """
        for dtype in (np.float32, np.float64) if self.is_float32 else (np.float64,):
            try:
                with np.errstate(over="ignore", invalid="ignore"):
                    edges = np.histogram_bin_edges(
                        np.asarray([] if self.is_empty else [self.low, self.high], dtype), bins
                    )
            except ValueError:
                if bins < 1:
                    raise
                continue
            if np.isfinite(edges).all() and (np.diff(edges / 2) > 0).all():
                return edges
        margin = bins * np.spacing(max(abs(self.low), abs(self.high)))
        return 2 * np.linspace((self.low - margin) / 2, (self.high + margin) / 2, bins + 1)

    @classmethod
    def joined(cls, parts: Sequence[ValueRange]) -> ValueRange:
        """Return the range that contains all parts."""
        return cls(
            min(part.low for part in parts),
            max(part.high for part in parts),
            sum(part.left_out for part in parts),
            all(part.is_float32 for part in parts),
        )


EMPTY_RANGE = ValueRange(float("inf"), float("-inf"), 0, True)
"""The range of an empty set of numbers."""


@dataclass(frozen=True)
class BinCounts:
    """The bin counts and sums of a part of the numbers."""

    counts: list[int]
    sum: float
    sum_of_squares: float


class FlatValues:
    """The finite numbers of a tensor, as a flat tensor on the same device.

    Args:
        tensor: a tensor of any shape; a complex tensor contributes its real and imaginary parts.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        flat = tensor.detach()
        flat = flat if flat.layout is torch.strided else flat.to_dense()
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1) if flat.is_complex() else flat.reshape(-1)
        is_float32 = flat.is_floating_point() and flat.element_size() <= 4
        flat = flat.to(torch.float32 if is_float32 else torch.float64)
        finite = flat.isfinite()
        self._flat = flat if bool(finite.all()) else flat[finite]
        left_out = flat.numel() - self._flat.numel()
        low, high = (
            (float(end) for end in self._flat.aminmax()) if self._flat.numel() else (EMPTY_RANGE.low, EMPTY_RANGE.high)
        )
        self.value_range = ValueRange(low, high, left_out, is_float32)

    def counted(self, edges: Edges) -> BinCounts:
        """Return the counts of the bins with these edges, which must be the same for all parts of a histogram."""
        flat = self._flat
        inner = torch.as_tensor(edges[1:-1].copy(), device=flat.device)
        counts = torch.zeros(len(edges) - 1, dtype=torch.int64, device=flat.device)
        for part in torch.split(flat, _CHUNK):
            counts += torch.bincount(torch.bucketize(part.to(inner.dtype), inner, right=True), minlength=len(counts))
        return BinCounts(counts.tolist(), float(flat.sum(dtype=torch.float64)), float(flat.double().square().sum()))


# Texts


def text_of(value: Any) -> str:
    """Return ``str(value)`` with lone surrogates, which UTF-8 cannot encode, escaped like ``\\udcff``."""
    return str(value).encode(errors="backslashreplace").decode()


# Tables


@dataclass(frozen=True)
class Table:
    """A table whose cells are numbers, booleans, None and text. `of` converts other values to text."""

    columns: list[str]
    rows: list[list[Any]]

    @classmethod
    def of(cls, value: Any) -> Table:
        """Make a table from a mapping of columns, a list of mappings (one per row), or a DataFrame.

        Raises:
            ConfigurationError: the value has another type, or its columns differ in length.
        """
        if isinstance(value, Table):
            return value
        if hasattr(value, "to_dict") and hasattr(value, "columns"):
            value = {str(name): list(value[name]) for name in value.columns}
        if isinstance(value, Mapping) and all(_is_list(column) for column in value.values()):
            lengths = {len(column) for column in value.values()}
            if len(lengths) <= 1:
                rows = [list(map(_to_json_value, row)) for row in zip(*value.values(), strict=True)]
                return cls(list(map(str, value)), rows)
        elif _is_list(value) and all(isinstance(row, Mapping) for row in value):
            names = list(dict.fromkeys(name for row in value for name in row))
            return cls(list(map(str, names)), [[_to_json_value(row.get(name)) for name in names] for row in value])
        raise ConfigurationError(
            f"log_table got {_describe(value)}.",
            "a table has named columns of equal length.",
            "pass {'column': [values], ...}, a list of {'column': value, ...}, or a DataFrame.",
        )

    def as_markdown(self) -> str:
        """Return the table as Markdown."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join("| " + " | ".join(_format_cell(cell) for cell in line) + " |" for line in lines)


def _is_list(value: Any) -> bool:
    return hasattr(value, "__len__") and hasattr(value, "__iter__") and not isinstance(value, str | bytes | Mapping)


def _to_json_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        value = value.tolist()
    return value if value is None or isinstance(value, bool | int | float) else text_of(value)


def _format_cell(value: Any) -> str:
    text = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", "<br>")


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return "columns of lengths " + str([len(column) if _is_list(column) else None for column in value.values()])
    return f"a {type(value).__name__}"
