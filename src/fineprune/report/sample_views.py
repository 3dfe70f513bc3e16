"""SampleViews: what a page shows of samples, until its bytes are used up."""

from fineprune.errors import InputError
from fineprune.inspection.shown_samples import Show
from fineprune.labels.sample_view import view_of

View = tuple[str | None, str | None]


class SampleViews:
    """Small pictures or short texts of the samples of a run.

    Args:
        show: Returns what ``view_of`` can show of a sample of the run, or says why it cannot.
        most_bytes: The size of all pictures and texts. The last one may go beyond it.
    """

    def __init__(self, show: Show | InputError, most_bytes: int) -> None:
        self._show = show
        self._left = most_bytes

    def view(self, sample: int) -> View:
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
