"""The page on which a person reviews suspected labels: one file that loads nothing from elsewhere.

It can be read without JavaScript. With it, the keyboard decides on each sample, and the page writes
the table that ``[data] labels`` of a recipe reads.
"""

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

import numpy as np
import numpy.typing as npt

# Nothing but what is in the file may be loaded or run.
POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'"
)

# The size of the curves of ``Card.line``, in their own units.
LINE_WIDTH, LINE_HEIGHT = 152, 20


@dataclass(frozen=True)
class Card:
    """A sample whose label is to be reviewed. None stands for what is not known.

    Attributes:
        index: Its index in the whole training set.
        key: What names it there, such as a path.
        label, suggestion: The numbers of the classes. The suggestion is -1 if there is none.
        agreement: How strongly the training agrees with the suggestion, 0 to 1.
        score: How suspicious it is.
        picture: A picture of it, as a data URI.
        text: A text that shows it.
        line: The path of its loss over the epochs, inside ``LINE_WIDTH`` times ``LINE_HEIGHT``.
        notes: Further lines on it.
    """

    index: int
    key: str | None
    label: int
    suggestion: int
    agreement: float
    score: float
    picture: str | None = None
    text: str | None = None
    line: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Review:
    """What a page lets a person review.

    Attributes:
        cards: The suspects, the most suspicious first.
        classes: The name of each class; a class without a name is shown by its number.
        labels: The label of each sample of the whole training set, -1 for one that is left out;
            int64, shape (M,).
        keys: What names each of these samples; None if they have only their indices.
        notes: Paragraphs above the cards.
    """

    cards: Sequence[Card]
    classes: Sequence[str]
    labels: npt.NDArray[np.int64]
    keys: Sequence[str] | None = None
    notes: Sequence[str] = ()


def review_document(review: Review) -> str:
    """Return the whole page as HTML."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{html.escape(POLICY)}">
<title>Labels to review</title>
<style>
{_resource("page.css")}</style>
</head>
<body>
<main>
<h1>Labels to review</h1>
{review_section(review)}
</main>
</body>
</html>
"""


def review_section(review: Review) -> str:
    """Return the part of a page that does the reviewing, with its style and its script."""
    notes = "\n".join(f"<p>{html.escape(note)}</p>" for note in review.notes)
    cards = "\n".join(_card(card, review.classes) for card in review.cards)
    return f"""<section id="review" class="review">
<style>
{_resource("review.css")}</style>
{notes}
<noscript><p>With JavaScript, this page also writes a table of corrected labels.</p></noscript>
{_BAR}
<ol class="suspects">
{cards}
</ol>
<script type="application/json" id="review-data">{_data(review)}</script>
<script>
{_resource("review.js")}</script>
</section>"""


def _card(card: Card, classes: Sequence[str]) -> str:
    parts = [
        f'<li class="card" data-index="{card.index}" data-label="{card.label}" '
        f'data-suggestion="{card.suggestion}" data-agreement="{card.agreement:.3f}">'
    ]
    if card.picture is not None:
        parts.append(f'<img src="{html.escape(card.picture)}" alt="" width="96" height="96">')
    if card.text is not None:
        parts.append(f'<p class="text">{html.escape(card.text)}</p>')
    suggested = ""
    if card.suggestion >= 0:
        name = html.escape(_name(card.suggestion, classes))
        suggested = f" → <b>{name}</b> <small>{100 * card.agreement:.0f}&nbsp;%</small>"
    parts.append(f"<p>{html.escape(_name(card.label, classes))}{suggested}</p>")
    where = f"{card.index}" if card.key is None else f"{card.key} ({card.index})"
    lines = [where, f"score {card.score:.2f}", *card.notes]
    parts += [f"<p><small>{html.escape(line)}</small></p>" for line in lines]
    if card.line:
        box = f"-2 -2 {LINE_WIDTH + 4} {LINE_HEIGHT + 4}"
        parts.append(
            f'<svg viewBox="{box}" preserveAspectRatio="xMinYMid" role="img" '
            f'aria-label="loss over the epochs">'
            f'<path d="{html.escape(card.line)}"/></svg>'
        )
    parts.append('<p class="state"></p></li>')
    return "".join(parts)


def _name(label: int, classes: Sequence[str]) -> str:
    return classes[label] if 0 <= label < len(classes) else str(label)


def _data(review: Review) -> str:
    """Return what the script needs, as JSON that can stand in HTML."""
    keys = None if review.keys is None else [str(key) for key in review.keys]
    table = json.dumps({"keys": keys, "labels": review.labels.tolist()}).encode()
    data = {
        # The same samples and labels give the same name, under which the browser keeps decisions,
        # also if other suspects are shown.
        "digest": hashlib.sha256(table).hexdigest()[:16],
        "classes": list(review.classes),
        "table": base64.b64encode(gzip.compress(table, mtime=0)).decode(),
    }
    return json.dumps(data).replace("<", "\\u003c")


def _resource(name: str) -> str:
    return files("fineprune.labels").joinpath(name).read_text(encoding="utf-8")


_BAR = """<div class="bar" hidden>
<button data-key="a"><kbd>a</kbd>ccept</button>
<button data-key="k"><kbd>k</kbd>eep</button>
<button data-key="d"><kbd>d</kbd>rop</button>
<button data-key="u"><kbd>u</kbd>ndo</button>
<button data-key="n"><kbd>n</kbd>ext</button>
<button data-key="p"><kbd>p</kbd>revious</button>
<select data-part="label" aria-label="label"><option value="">any label</option></select>
<select data-part="suggestion" aria-label="suggestion">
<option value="">any suggestion</option></select>
<select data-part="agreement" aria-label="agreement">
<option value="0">any agreement</option><option value="0.5">50 % or more</option>
<option value="0.7">70 % or more</option><option value="0.9">90 % or more</option></select>
<select data-part="state" aria-label="state"><option value="">all</option>
<option value="open">not reviewed</option><option value="done">reviewed</option></select>
<button data-part="download">download labels.csv</button>
<span data-part="count" role="status"></span>
</div>"""
