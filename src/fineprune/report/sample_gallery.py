"""Galleries of training samples: pictures with labels, losses and predictions, in HTML."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from fineprune.inspection.known_samples import KnownSamples
from fineprune.inspection.pictures import neighbours
from fineprune.inspection.suspects import Suspects
from fineprune.report.page_template import template
from fineprune.report.picture_sheet import COLUMNS, Sheet, picture_sheets, shown_size
from fineprune.report.sparkline import HEIGHT, WIDTH, sparkline

Index = npt.NDArray[np.int64]

# The samples at the top of a gallery are always visible. The others are in closed blocks, so that a
# browser decodes their pictures only when a reader opens them.
VISIBLE = 24
_BLOCK = 200

_NEIGHBOURS = 5

# More than the pictures of all neighbours take, even if they are large and made of noise.
_NEIGHBOUR_BYTES = 1 << 21

# If there are pictures, the texts of the cards leave at least this share of the bytes to them.
_PICTURES_SHARE = 0.4

# A small picture is enlarged to about this width, in CSS pixels, by a whole factor.
_WIDTH, _LARGE_WIDTH = 64, 96


@dataclass(frozen=True)
class Neighbour:
    """A sample that is close to another one in the network's last features.

    Attributes:
        number: The number of the sample.
        label: The name of its label.
        column, row: Its place in the sheet of the neighbours.
    """

    number: int
    label: str
    column: int
    row: int


@dataclass(frozen=True)
class Card:
    """What a gallery shows of one sample. None stands for what is not known.

    Attributes:
        number: The number of the sample.
        label: The name of its label.
        suggestion: The name of the suggested label.
        agreement: In how many of the last epochs it was predicted, as a percentage.
        loss: The moving average of its loss.
        prediction: The class that the trained network predicts.
        confidence: The probability of this class, as a percentage.
        skipped: In how many epochs the sample was skipped.
        line: The path of its sparkline.
        wrong: Whether the label is wrong.
        right_label: The name of the dataset's label.
        column, row: The place of the picture in its sheet.
        neighbours: The nearest neighbours, the nearest first.
    """

    number: int
    label: str
    suggestion: str | None
    agreement: str | None
    loss: str
    prediction: str | None
    confidence: str | None
    skipped: int
    line: str
    wrong: bool | None
    right_label: str | None
    column: int
    row: int
    neighbours: Sequence[Neighbour]


@dataclass(frozen=True)
class Block:
    """A part of a gallery.

    Attributes:
        title: What it contains; None for the first block, which is always visible.
        html: Its cards.
    """

    title: str | None
    html: Markup


@dataclass(frozen=True)
class Gallery:
    """A gallery of samples.

    Attributes:
        blocks: Its parts.
        samples: The number of samples that it was made for.
        cards: The number of samples that it shows.
        pictures: The number of pictures that it shows.
        size: The number of bytes of its HTML.
    """

    blocks: list[Block]
    samples: int
    cards: int
    pictures: int
    size: int

    @property
    def left_out(self) -> str | None:
        """A sentence on what the gallery does not show; None if it shows everything."""
        if self.cards < self.samples:
            return (
                f"To keep this page small, it shows {self.cards:,} of the {self.samples:,} "
                f"samples, {self.pictures:,} of them with their pictures."
            )
        if 0 < self.pictures < self.cards:
            return (
                f"To keep this page small, it shows the pictures of the first {self.pictures:,} of "
                f"the {self.samples:,} samples."
            )
        return None


def make_gallery(
    samples: KnownSamples, chosen: Suspects, top: float, most_bytes: int, detailed: bool = False
) -> Gallery:
    """Return a gallery that has at most a given size, as far as its visible cards allow it.

    Args:
        samples: What is known about the samples of the run.
        chosen: The samples to show, in this order.
        top: The loss at the upper edge of the sparklines.
        most_bytes: The number of bytes of HTML that the gallery may take.
        detailed: Whether the visible cards have more details, such as the nearest neighbours.
    """
    count = len(chosen)
    ends = [*range(min(VISIBLE, count), count, _BLOCK), count]
    places = [np.arange(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    pictures = samples.pictures
    near, near_sheet = _neighbours(samples, chosen.index[places[0]], detailed)
    if near_sheet is not None:
        most_bytes -= len(near_sheet.uri)
    left = most_bytes if pictures is None else int((1 - _PICTURES_SHARE) * most_bytes)
    bodies: list[str] = []
    for place in places:
        body = _body(samples, chosen, place, top, None if bodies or not detailed else near)
        left -= len(body.encode())
        if bodies and left < 0:
            break
        bodies.append(body)
    places = places[: len(bodies)]
    size = sum(len(body.encode()) for body in bodies)
    sheets: list[Sheet] = []
    if pictures is not None:
        parts = [chosen.index[place] for place in places]
        sheets = picture_sheets(pictures, parts, most_bytes - size)
    blocks = []
    for number, (place, body) in enumerate(zip(places, bodies, strict=True)):
        first = number == 0
        html = _opened(
            samples,
            body,
            sheet=sheets[number] if number < len(sheets) else None,
            near=near_sheet if first else None,
            detailed=detailed and first,
        )
        blocks.append(Block(None if first else f"{place[0] + 1:,} to {place[-1] + 1:,}", html))
    return Gallery(
        blocks=blocks,
        samples=count,
        cards=sum(len(place) for place in places),
        pictures=sum(len(place) for place in places[: len(sheets)]),
        size=sum(len(block.html.encode()) for block in blocks),
    )


def _neighbours(samples: KnownSamples, index: Index, wanted: bool) -> tuple[Index, Sheet | None]:
    """Return the neighbours of some samples, shape (n, neighbours), and the sheet of them all."""
    outputs = samples.outputs
    if not wanted or outputs is None or outputs.features is None:
        return np.empty((len(index), 0), np.int64), None
    near = neighbours(outputs.features, index, _NEIGHBOURS)
    if samples.pictures is None or not near.size:
        return near, None
    return near, picture_sheets(samples.pictures, [near.ravel()], _NEIGHBOUR_BYTES)[0]


def _opened(
    samples: KnownSamples, body: str, *, sheet: Sheet | None, near: Sheet | None, detailed: bool
) -> Markup:
    """Return the cards of a block inside the element that defines their sheets and sizes."""
    width, height = (1, 1) if samples.pictures is None else shown_size(samples.pictures)
    factor = max(1, (_LARGE_WIDTH if detailed else _WIDTH) // width)
    text = template("inspection_block.html.j2").render(
        sheet=sheet,
        near=near,
        width=width * factor,
        height=height * factor,
        detailed=detailed,
        body=Markup(body),
    )
    return Markup(text)


def _body(
    samples: KnownSamples, chosen: Suspects, place: Index, top: float, near: Index | None
) -> str:
    """Return the cards of a block; with details if neighbours are given, shape (n, neighbours)."""
    cards = [
        _card(samples, chosen, int(position), number, None if near is None else near[number], top)
        for number, position in enumerate(place)
    ]
    return template("inspection_cards.html.j2").render(
        cards=cards,
        detailed=near is not None,
        epochs=len(samples.run.history.epochs),
        near=samples.pictures is not None,
        line_width=WIDTH,
        line_height=HEIGHT,
    )


def _card(
    samples: KnownSamples,
    chosen: Suspects,
    position: int,
    number: int,
    near: Index | None,
    top: float,
) -> Card:
    """Return the card of the sample at a position, whose picture has a number in its sheet."""
    index = int(chosen.index[position])
    outputs, right = samples.outputs, samples.right_label
    row, column = divmod(number, COLUMNS)
    suggestion = samples.name(int(chosen.suggestion[position]))
    return Card(
        number=int(samples.number[index]),
        label=samples.name(int(chosen.label[position])) or "",
        suggestion=suggestion,
        agreement=None if suggestion is None else _percent(chosen.agreement[position]),
        loss=f"{samples.loss[index]:.2f}",
        prediction=None if outputs is None else samples.name(int(outputs.predictions[index])),
        confidence=None if outputs is None else _percent(outputs.confidences[index]),
        skipped=int(samples.times_skipped[index]),
        line=sparkline(samples.run.history.losses[:, index], top),
        wrong=None if samples.wrong is None else bool(samples.wrong[index]),
        right_label=None if right is None else samples.name(int(right[index])),
        column=column,
        row=row,
        neighbours=[] if near is None else _near(samples, number, near),
    )


def _near(samples: KnownSamples, number: int, near: Index) -> list[Neighbour]:
    result = []
    for place, other in enumerate(near, start=number * len(near)):
        row, column = divmod(place, COLUMNS)
        label = samples.name(int(samples.run.labels[other])) or ""
        result.append(Neighbour(int(samples.number[other]), label, column, row))
    return result


def _percent(value: np.floating) -> str:
    return f"{100 * value:.0f}\N{NO-BREAK SPACE}%"
