"""How well a ranking finds the wrong labels, if it is known which labels are wrong."""

import numpy as np
import numpy.typing as npt

from fineprune.runs.summary import Detection


def detection(
    scores: npt.NDArray[np.floating], suspects: int, wrong: npt.NDArray[np.bool_]
) -> Detection:
    """Return how well a ranking finds the wrong labels.

    Args:
        scores: The score of each sample, the larger the more suspicious, NaN the least; shape (N,).
        suspects: The number of samples that are called suspicious.
        wrong: Which labels are wrong; bool, shape (N,).
    """
    order = np.argsort(-np.where(np.isnan(scores), -np.inf, scores), kind="stable")
    hits = wrong[order]
    number, right = int(hits.sum()), int((~hits).sum())
    # The pairs of a wrong and a right label in which the wrong one is the more suspicious (the
    # statistic of Mann and Whitney).
    ordered = int((right - np.cumsum(~hits))[hits].sum())
    found = int(hits[:suspects].sum())
    precisions = np.cumsum(hits) / np.arange(1, len(hits) + 1)
    return Detection(
        wrong=number,
        wrong_share=number / len(wrong),
        roc_area=ordered / (number * right) if number and right else None,
        average_precision=float((hits * precisions).sum()) / number if number else None,
        suspects=suspects,
        precision=found / suspects if suspects else None,
        # With no suspects, it is 0. If it were None, a mean over seeds would be too high.
        recall=found / number if number else None,
        r_precision=int(hits[:number].sum()) / number if number else None,
    )
