"""class_only: a class method that cannot be called on an instance."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    class_only = classmethod
else:

    class class_only(classmethod):  # a decorator, named like ``classmethod``
        """A class method that builds a new object; called on an instance, it raises an error.

        The instance would stay as it is, although the call reads as if it were changed.
        """

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            method = super().__get__(instance, owner)
            if instance is None:
                return method

            @wraps(method)
            def refused(*args: Any, **kwargs: Any) -> Any:
                owner_name, name = type(instance).__name__, method.__name__
                raise ConfigurationError(
                    f"{name} was called on an instance of {owner_name}.",
                    "it returns a new object and does not change the instance.",
                    f"write {owner_name.lower()} = {owner_name}.{name}(...).",
                )

            return refused
