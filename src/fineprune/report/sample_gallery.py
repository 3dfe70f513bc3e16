"""Galleries of training samples: pictures or texts with labels, losses and predictions, in HTML."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from fineprune.errors import InputError
from fineprune.inspection.known_samples import KnownSamples
from fineprune.inspection.pictures import neighbours
from fineprune.inspection.shown_samples import Show
from fineprune.inspection.suspects import Suspects
from fineprune.labels.review_page import LINE_HEIGHT, LINE_WIDTH
from fineprune.labels.sample_view import view_of
from fineprune.report.page_template import template
from fineprune.report.sparkline import sparkline

# The samples at the top of a gallery are always visible. The others are in a closed block, so that
# a reader can pass over them.
VISIBLE = 24


class SampleViews:
    """Small pictures or short texts of the samples of a run.

    Args:
        show: Returns what ``view_of`` can show of a sample of the run, or says why it cannot.
        most_bytes: The size of all pictures and texts. The last one may go beyond it.
    """

    def __init__(self, show: Show | InputError, most_bytes: int) -> None:
        self._show = show
        self._left = most_bytes

    def view(self, sample: int) -> tuple[str | None, str | None]:
        """Return the picture of a sample as a data URI, or its text; neither if none is left."""
        if isinstance(self._show, InputError) or self._left < 0:
            return None, None
        picture, text = view_of(self._show(sample))
        self._left -= len(picture or "") + len(text or "")
        return picture, text

    @property
    def missing(self) -> str | None:
        """A sentence on what was not shown so far; None if everything was."""
        if isinstance(self._show, InputError):
            return f"The samples themselves are not shown: {str(self._show).rstrip('.')}."
        if self._left < 0:
            return "To keep this page small, the last samples are shown without pictures."
        return None


def make_gallery(
    samples: KnownSamples,
    chosen: Suspects,
    top: float,
    views: SampleViews,
    detailed: bool = False,
) -> Markup:
    """Return the cards of some samples, of which the first are visible at once.

    Args:
        samples: What is known about the samples of the run.
        chosen: The samples to show, in this order.
        top: The loss at the upper edge of the sparklines.
        views: Shows the samples themselves.
        detailed: Whether the visible cards have more details, such as the nearest neighbours.
    """
    near = np.empty((len(chosen), 0), np.int64)
    if detailed and samples.outputs is not None and samples.outputs.features is not None:
        near = neighbours(samples.outputs.features, chosen.index[:VISIBLE])
    cards = [
        _card(samples, chosen, place, near[place] if place < len(near) else (), top, views)
        for place in range(len(chosen))
    ]
    text = template("gallery.html.j2").render(
        visible=cards[:VISIBLE],
        closed=cards[VISIBLE:],
        detailed=detailed,
        epochs=len(samples.run.history.epochs),
        line_width=LINE_WIDTH,
        line_height=LINE_HEIGHT,
    )
    return Markup(text)


def _card(
    samples: KnownSamples,
    chosen: Suspects,
    place: int,
    near: Sequence[int] | npt.NDArray[np.int64],
    top: float,
    views: SampleViews,
) -> dict[str, Any]:
    """Return what the gallery shows of one sample. None stands for what is not known."""
    index = int(chosen.index[place])
    outputs, right = samples.outputs, samples.right_label
    suggestion = samples.name(int(chosen.suggestion[place]))
    picture, text = views.view(index)
    return {
        "number": int(samples.training_set.index[index]),
        "label": samples.label(index),
        "suggestion": suggestion,
        "agreement": None if suggestion is None else _percent(chosen.agreement[place]),
        "loss": f"{samples.loss[index]:.2f}",
        "prediction": None if outputs is None else samples.name(int(outputs.predictions[index])),
        "confidence": None if outputs is None else _percent(outputs.confidences[index]),
        "skipped": int(samples.times_skipped[index]),
        "line": sparkline(samples.run.history.losses[:, index], top),
        "wrong": samples.is_wrong(index),
        "right_label": None if right is None else samples.name(int(right[index])),
        "picture": picture,
        "text": text,
        "neighbours": [
            {
                "number": int(samples.training_set.index[other]),
                "label": samples.label(other),
                "picture": views.view(int(other))[0],
            }
            for other in near
        ],
    }


def _percent(value: np.floating) -> str:
    return f"{100 * value:.0f}\N{NO-BREAK SPACE}%"
