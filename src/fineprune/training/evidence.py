"""What a finished run keeps for ``fineprune inspect``: its labels, and the evidence on them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fineprune.labels.label_watch import LabelWatch
from fineprune.runs.files import write_array
from fineprune.runs.history import EVALUATED, EVIDENCE, pack_classes
from fineprune.runs.training_set import TRAINING_SET, UNKNOWN, write_training_set
from fineprune.training.data import Data
from fineprune.training.evaluate import Evaluation
from fineprune.writing import replacing


def write_evidence(
    folder: Path, data: Data, watch: LabelWatch | None, evaluation: Evaluation
) -> None:
    """Write what is known after the last epoch, beside the history of the epochs.

    Args:
        folder: The folder of the history, which exists.
        data: The data of the run.
        watch: The evidence on the labels; None if no logits were recorded.
        evaluation: The last evaluation.
    """
    if watch is not None:  # Before anything reads the evidence, which rounds it.
        with replacing(folder / EVIDENCE) as file:
            torch.save(watch.state_dict(), file)
    training_set = data.training_set()
    labels = training_set.trained_labels
    if (labels == UNKNOWN).any():
        labels = np.full_like(labels, UNKNOWN)
    if watch is not None:
        # What was recorded is what was trained, whatever the data set says.
        seen = watch.evidence().labels.long().cpu().numpy()
        labels = np.where(seen >= 0, seen, labels)
    if not (labels == UNKNOWN).any():
        whole = training_set.labels.copy()
        whole[training_set.index] = labels
        write_training_set(folder / TRAINING_SET, replace(training_set, labels=whole))
    both = np.stack([evaluation.labels.numpy(), evaluation.predictions.numpy()])
    write_array(folder / EVALUATED, pack_classes(both, data.classes))
