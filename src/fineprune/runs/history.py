"""The history of a run: the loss and the prediction of each training sample in each epoch.

``history/epoch-0001.npy`` holds one record per sample: ``loss`` (float16, NaN if the epoch did not
train the sample, infinity if the loss was not finite) and ``prediction`` (the predicted class,
uint8, or uint16 with more than 255 classes; the largest value if it is not known). So an epoch
takes three or four bytes per sample.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from fineprune.errors import InputError

HISTORY = "history"

Records = npt.NDArray[np.void]


def pack_epoch(
    losses: npt.NDArray[np.float16], predictions: npt.NDArray[np.integer], classes: int
) -> Records:
    """Return the records of an epoch, shape (N,).

    Args:
        losses: The loss of each sample, shape (N,); -inf for a sample that was not trained.
        predictions: The predicted class of each sample, shape (N,); negative if it is not known.
        classes: The number of classes.
    """
    kind: type[np.unsignedinteger] = np.uint8 if classes <= np.iinfo(np.uint8).max else np.uint16
    records = np.empty(len(losses), dtype=[("loss", "<f2"), ("prediction", np.dtype(kind))])
    records["loss"] = np.where(np.isneginf(losses), np.float16(np.nan), losses)
    records["prediction"] = np.where(predictions < 0, np.iinfo(kind).max, predictions)
    return records


class History:
    """The history of one run, read from its folder.

    Attributes:
        epochs: The epochs that were recorded, counted from 0.
        losses: The loss of each sample in each of these epochs, float16, shape (epochs, N); NaN if
            the epoch did not train the sample, infinity if the loss was not finite.
        predictions: The predicted class, int32, shape (epochs, N); -1 if it is not known.
    """

    def __init__(self, epochs: list[int], records: list[Records]) -> None:
        self.epochs = epochs
        self.losses: npt.NDArray[np.float16] = np.stack([part["loss"] for part in records])
        unknown = np.iinfo(records[0]["prediction"].dtype).max
        predictions = np.stack([part["prediction"] for part in records]).astype(np.int32)
        predictions[predictions == unknown] = -1
        self.predictions: npt.NDArray[np.int32] = predictions

    @property
    def trained(self) -> npt.NDArray[np.bool_]:
        """Whether each epoch trained each sample; bool, shape (epochs, N)."""
        return ~np.isnan(self.losses)


def read_history(folder: Path, num_samples: int) -> History | None:
    """Read the history of a run; None if the run kept none.

    Args:
        folder: The folder of the run.
        num_samples: The number of training samples of the run.

    Raises:
        InputError: A file is damaged, or belongs to another run.
    """
    files = sorted((folder / HISTORY).glob("epoch-*.npy"))
    if not files:
        return None
    epochs = [int(file.stem.removeprefix("epoch-")) - 1 for file in files]
    return History(epochs, [_read(file, num_samples) for file in files])


def _read(file: Path, num_samples: int) -> Records:
    try:
        records: Records = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"expected a history in {file}, cannot read it: {error}") from error
    if records.dtype.names != ("loss", "prediction") or records.shape != (num_samples,):
        raise InputError(
            f"expected {num_samples} records of loss and prediction in {file}, got "
            f"{records.dtype} of shape {records.shape}: restore the file, or train again"
        )
    return records
