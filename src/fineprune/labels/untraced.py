"""Untraced: an object with a method that ``torch.compile`` leaves out, and that can be pickled."""

from collections.abc import Callable
from typing import Any

import torch


class Untraced:
    """An object whose method ``_record`` a compiled step must not trace.

    A compiled step calls ``self._record_untraced(self, ...)`` instead. What the compiler returns
    cannot be pickled, as a launcher does that spawns its ranks, so a copy makes its own. It is not
    made with the class, since this would import the compiler at the start of every program.
    """

    _record: Callable[..., None]

    def __init__(self) -> None:
        self._record_untraced: Callable[..., None] = torch.compiler.disable(type(self)._record)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_record_untraced"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        Untraced.__init__(self)
