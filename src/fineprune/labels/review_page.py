"""The part of a page on which a person reviews suspected labels, and a page of that part alone.

``LabelWatch.page``, ``fineprune inspect`` and the report on a comparison show suspects by it. It
needs no template engine, as the library depends on torch and NumPy alone.
"""

import base64
import gzip
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fineprune.errors import InputError
from fineprune.labels.evidence import Evidence
from fineprune.labels.facts import facts_of
from fineprune.labels.ranking import Ranking
from fineprune.labels.sample_view import view_of
from fineprune.writing import make_folder, replacing

# Returns what ``view_of`` can show of a watched sample, 0..N - 1.
Show = Callable[[int], Any]

# A page lists at most so many suspects, unless its caller names a number.
MOST = 500

# The size of all pictures and texts of a page, in bytes. The last one may go beyond it.
_MOST_BYTES = 4_000_000


@dataclass(frozen=True, eq=False)
class Samples:
    """What a page knows of the samples of a watch besides the evidence.

    Attributes:
        classes: The name of each class.
        labels: The label of each sample of the whole training set, or -1 for one that is left out;
            int64, shape (M,). None if some are not known, so that no table can be written.
        keys: What names each of these samples; None if only their indices do.
        index: The index of each watched sample in the whole training set; int64, shape (N,).
        show: Shows the samples; None to show none.
    """

    classes: Sequence[str]
    labels: npt.NDArray[np.int64] | None
    keys: Sequence[str] | None
    index: npt.NDArray[np.int64]
    show: Show | None = None


def review_document(section: str, title: str = "Labels to review") -> str:
    """Return a whole page with a section from ``review_section``, as HTML."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{escape(policy())}">
<title>{escape(title)}</title>
<style>
{resource("page.css")}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
{section}
</main>
</body>
</html>
"""


def write_page(path: Path, page: str) -> None:
    """Write a page with its folder. An existing file is replaced, and is never half written."""
    try:
        make_folder(path.parent)
        with replacing(path) as file:
            # Keys may be paths with bytes that are no UTF-8.
            file.write(page.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise InputError(f"expected a file to write the page to, {error}") from error


def policy() -> str:
    """Return the policy of a page: nothing is loaded, and no script runs but that of the review."""
    digest = base64.b64encode(hashlib.sha256(_script().encode()).digest()).decode()
    return (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )


def review_section(
    evidence: Evidence,
    ranking: Ranking,
    samples: Samples,
    most: int | None = None,
    notes: Sequence[str] = (),
) -> str:
    """Return the part of a page that does the reviewing, with its style and its script, as HTML.

    Args:
        evidence: The evidence, which has been flushed.
        ranking: Its ranking.
        samples: What else is known of the samples.
        most: The largest number of samples to list; None for all suspects up to 500.
        notes: Further sentences above the cards.
    """
    recorded = int((ranking.labels >= 0).sum())
    number = min(ranking.num_suspects, MOST) if most is None else min(most, recorded)
    cards, complete = _cards(evidence, ranking, samples, number)
    notes = [*facts_of(ranking, samples.classes), *notes]
    if number != ranking.num_suspects:
        notes.append(f"The {number:,} most suspicious samples are listed.")
    if not complete:
        notes.append("To keep this page small, the last samples are shown without pictures.")
    paragraphs = "\n".join(f"<p>{escape(part)}</p>" for part in (" ".join(notes), _EXPLANATION))
    items = "\n".join(cards)
    return f"""<section id="review" class="review" aria-label="suspected labels">
<style>
{resource("review.css")}</style>
{paragraphs}
<noscript><p>With JavaScript, this page also writes a table of corrected labels.</p></noscript>
{resource("review_bar.html")}
<ol class="suspects">
{items}
</ol>
<script type="application/json" id="review-data">{_data(samples)}</script>
<script>{_script()}</script>
</section>"""


_EXPLANATION = (
    "A suspect is not always wrong: a sample can also be rare or difficult. The percentage is the "
    "confidence that the suggestion, rather than the label, is right: 1 / (1 + exp(-score))."
)


def _cards(
    evidence: Evidence, ranking: Ranking, samples: Samples, number: int
) -> tuple[list[str], bool]:
    """Return the cards of the most suspicious samples, and whether each shows its sample."""
    order, scores, suggestions = (part[:number] for part in ranking.suspects())
    index = order.to(evidence.labels.device)
    labels, visits = evidence.labels[index].long(), evidence.visits[index]
    own = evidence.shares_of(index, labels).gather(1, labels[:, None])[:, 0]
    loss = evidence.loss[index] / visits.clamp(min=1)
    columns = (order, labels, suggestions, scores, torch.sigmoid(scores), own, loss, visits)
    left, cards, complete = _MOST_BYTES, [], True
    for sample, label, suggestion, score, confidence, share, mean_loss, times in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        picture, text = None, None
        if samples.show is not None and left > 0:
            picture, text = view_of(samples.show(sample))
            left -= len(picture or text or "")
        elif samples.show is not None:
            complete = False
        where = int(samples.index[sample])
        key = str(where) if samples.keys is None else f"{samples.keys[where]} ({where})"
        picture = "" if picture is None else f'<img src="{picture}" alt="sample {where}">'
        text = "" if text is None else f'<p class="text">{escape(text)}</p>'
        cards.append(
            f'<li class="card" tabindex="-1" data-index="{where}" data-label="{label}" '
            f'data-suggestion="{suggestion}">{picture}{text}'
            f"<p>{escape(samples.classes[label])} → <b>{escape(samples.classes[suggestion])}</b> "
            f"<small>{100 * confidence:.0f}&nbsp;%</small></p>"
            f"<p><small>{escape(key)}</small></p>"
            f"<p><small>score {score:.2f}, probability of the label {share:.2f}, "
            f"loss {mean_loss:.2f}, {times} visits</small></p>"
            f'<p class="state"></p></li>'
        )
    return cards, complete


def _data(samples: Samples) -> str:
    """Return what the script needs, as JSON that can stand in HTML."""
    known = samples.labels is not None
    labels = None if samples.labels is None else samples.labels.tolist()
    table = json.dumps({"keys": samples.keys, "labels": labels}).encode()
    data = {
        # The same samples and labels give the same name, under which the browser keeps decisions,
        # also if other suspects are shown.
        "digest": hashlib.sha256(table).hexdigest()[:16],
        "classes": samples.classes,
        "table": base64.b64encode(gzip.compress(table, mtime=0)).decode() if known else None,
    }
    return json.dumps(data).replace("<", "\\u003c")


def _script() -> str:
    return f"\n{resource('review.js')}"


def resource(name: str) -> str:
    """Return the text of a file of this package."""
    return files("fineprune.labels").joinpath(name).read_text(encoding="utf-8")
