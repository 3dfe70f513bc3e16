"""Mark a method that overrides one of a base class, whose docstring it inherits.

``typing.override`` came with Python 3.12, and type checkers know it from ``typing_extensions``,
which is not needed to run.
"""

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from typing_extensions import override as override
else:
    _Method = TypeVar("_Method")

    def override(method: _Method) -> _Method:
        """Return a method unchanged."""
        return method
