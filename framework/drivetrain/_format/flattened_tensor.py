"""FlattenedTensor: a tensor of a subclass as plain tensors and values, by torch's protocol for such subclasses.

A subclass that wraps other tensors, such as a block-quantised one, has no memory of its own that could be written.
torch.compile and checkpoints take it apart with its ``__tensor_flatten__``, and ``__tensor_unflatten__`` rebuilds it.
See https://docs.pytorch.org/docs/stable/notes/extending.html .
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from drivetrain.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class FlattenedTensor:
    """A tensor of a subclass, taken apart.

    Attributes:
        class_name: the subclass, with its module.
        tensors: the tensors that the subclass wraps, by attribute.
        context: the other values that ``__tensor_unflatten__`` needs.
        shape: shape of the tensor.
        stride: stride of the tensor, in elements.
    """

    class_name: str
    tensors: Mapping[str, Any]
    context: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> FlattenedTensor:
        """Return the tensor, for which `is_flattenable` is true, taken apart."""
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        kind = type(tensor)
        tensors = {name: getattr(tensor, name) for name in names}
        return cls(f"{kind.__module__}.{kind.__qualname__}", tensors, context, tuple(tensor.shape), tensor.stride())

    def map(self, change: Callable[[Any], Any]) -> FlattenedTensor:
        """Return a copy with ``change`` applied to each wrapped tensor."""
        tensors = {name: change(tensor) for name, tensor in self.tensors.items()}
        return FlattenedTensor(self.class_name, tensors, self.context, self.shape, self.stride)

    def restore(self) -> torch.Tensor:
        """Return the tensor as it was.

        The class is looked up among the imported modules only: reading a checkpoint imports nothing.

        Raises:
            CheckpointError: the class is not imported, or cannot be built from these values.
        """
        kind = _imported_class(self.class_name)
        if kind is None:
            module = self.class_name.rpartition(".")[0]
            raise CheckpointError(
                f"A checkpoint holds a tensor of class {self.class_name}, which is not imported.",
                "reading a checkpoint imports no code that the checkpoint names.",
                f"import {module} first, from the package version that was used when the checkpoint was saved.",
            )
        try:
            tensor = kind.__tensor_unflatten__(dict(self.tensors), self.context, self.shape, self.stride)
        except Exception as error:
            raise CheckpointError(
                f"A tensor of class {self.class_name} cannot be restored: {type(error).__name__}: {error}.",
                "its __tensor_unflatten__ does not accept the stored values.",
                "use the package version that was used when the checkpoint was saved, or another checkpoint.",
            ) from error
        assert isinstance(tensor, torch.Tensor)
        return tensor


def is_flattenable(value: Any) -> bool:
    """Return whether a value is a tensor of a subclass that can be taken apart. A DTensor is not: it has shards."""
    return (
        isinstance(value, torch.Tensor)
        and callable(getattr(value, "__tensor_flatten__", None))
        and callable(getattr(value, "__tensor_unflatten__", None))
        and not hasattr(value, "full_tensor")
    )


def _imported_class(name: str) -> Any:
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:count]))
        if found is None:
            continue
        for part in parts[count:]:
            found = vars(found).get(part)
            if not isinstance(found, type):
                return None
        is_subclass = issubclass(found, torch.Tensor) and hasattr(found, "__tensor_unflatten__")
        return found if is_subclass and not hasattr(found, "full_tensor") else None
    return None
