"""KnownSamples: what is known about the training samples of one run, and what is not."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fineprune.errors import InputError
from fineprune.inspection.inspected import Inspected
from fineprune.inspection.pictures import Outputs, outputs_of, pictures_of
from fineprune.inspection.suspects import smoothed_losses
from fineprune.labels.class_shares import KEEP_ALL
from fineprune.runs.training_set import TrainingSet

_NO_PREDICTIONS = (
    f"No labels are suggested: the run has kept no predictions, because workers of parameter "
    f"servers send them only up to {KEEP_ALL} classes."
)


@dataclass(frozen=True, eq=False)
class KnownSamples:
    """The training samples of one run.

    Attributes:
        run: The run.
        training_set: Its training set, by whose indices and keys the samples are shown.
        loss: The moving average of the loss of each sample; float32, shape (N,). NaN for a sample
            without a finite loss.
        times_skipped: In how many epochs each sample was skipped; int64, shape (N,).
        names: The name of each class, or its number if the names are not known.
        pictures: The pictures; uint8, shape (N, channels, height, width). None if they are not in
            memory.
        right_label: The labels of the dataset, from which wrong ones differ; int64, shape (N,).
            None if it is not known which labels are wrong.
        outputs: What the trained network computes for the pictures. None if this is not known.
        missing: One sentence for everything that the page cannot show.
    """

    run: Inspected
    training_set: TrainingSet
    loss: npt.NDArray[np.float32]
    times_skipped: npt.NDArray[np.int64]
    names: tuple[str, ...]
    pictures: npt.NDArray[np.uint8] | None
    right_label: npt.NDArray[np.int64] | None
    outputs: Outputs | None
    missing: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.loss)

    def name(self, label: int) -> str | None:
        """Return the name of a class; None for the label -1, which stands for no class."""
        return None if label < 0 else self.training_set.name(label)

    def label(self, sample: int) -> str:
        """Return the name of the label of a sample."""
        return self.training_set.name(int(self.run.labels[sample]))

    def is_wrong(self, sample: int) -> bool | None:
        """Return whether the label of a sample is wrong; None if this is not known."""
        right = self.right_label
        return None if right is None else bool(right[sample] != self.run.labels[sample])


def known_samples(run: Inspected, network: bool, *, own_code: bool = False) -> KnownSamples:
    """Collect what is known about the samples of a run.

    Args:
        run: The run.
        network: Whether to pass the pictures through the trained network.
        own_code: Whether the code of a user-defined network may be run for this.
    """
    missing = []
    # Epochs keep the predictions of all samples or of none, so a part of the samples is enough.
    some = np.arange(min(len(run.labels), 1000))
    if not (run.history.predicted(some) >= 0).any():
        missing.append(_NO_PREDICTIONS)
    training_set = run.training_set()
    labels = [run.labels] if run.evaluated is None else [run.labels, run.evaluated]
    classes = max(len(training_set.classes), *(1 + int(part.max(initial=0)) for part in labels))
    pictures = right_label = outputs = None
    try:
        loaded = pictures_of(run.run)
        if loaded.labels is None or not np.array_equal(loaded.labels, run.labels):
            raise InputError("the data or their labels have changed since the training")
        pictures = loaded.train.images.images.numpy()  # type: ignore[attr-defined]
        if loaded.weak.wrong is not None:
            right_label = np.asarray(loaded.whole.labels, np.int64)[loaded.weak.index]
        if network:
            outputs = outputs_of(run.run, loaded, own_code=own_code)
    except InputError as error:
        missing.append(f"The final predictions are not shown: {str(error).rstrip('.')}.")
    if right_label is None and (known := run.run.summary.suspicion) is not None and known.wrong:
        missing.append(
            f"It is not shown which labels are wrong ({known.wrong:,} in all). The summary of the "
            f"run says how many of them are among the suspects."
        )
    return KnownSamples(
        run=run,
        training_set=training_set,
        loss=smoothed_losses(run.history),
        times_skipped=run.times_skipped(),
        names=tuple(training_set.name(label) for label in range(classes)),
        pictures=pictures,
        right_label=right_label,
        outputs=outputs,
        missing=tuple(missing),
    )
