"""ClassShares: the mean probabilities of the classes of each sample, in little memory."""

import torch
from torch import Tensor

# With at most so many classes, all of them are kept, in two bytes each.
KEEP_ALL = 64

# With more, only the label's own class and so many others are kept, in two bytes, and in four.
STRONGEST = 16


class ClassShares:
    """One probability distribution over the classes per sample.

    The numbers are stored in half precision, whose relative error is at most 0.05 % down to
    probabilities of 0.00006. If there are more than ``KEEP_ALL`` classes, only the class of the
    label and the strongest other classes are stored; the rest of the probability is spread evenly
    over the classes that are not stored.

    Args:
        num_samples: Number of samples N.
        num_classes: Number of classes C.
        strongest: The number of other classes that are stored; None for all of them.
        device: Where the numbers are stored.
    """

    def __init__(
        self, num_samples: int, num_classes: int, strongest: int | None, device: torch.device
    ) -> None:
        self.num_classes = num_classes
        # Without others, column k is class k. Else, column 0 is the label's own class.
        columns = num_classes if strongest is None else strongest + 1
        self.shares = torch.zeros(num_samples, columns, dtype=torch.float16, device=device)
        self.others: Tensor | None = None
        if strongest is not None:
            number = torch.int16 if num_classes < 1 << 15 else torch.int32
            # The classes of a row must differ, because ``read`` writes each to a column of its own.
            self.others = torch.arange(strongest, dtype=number, device=device).repeat(
                num_samples, 1
            )

    def read(self, index: Tensor, labels: Tensor) -> Tensor:
        """Return the distributions of some samples; float32, shape (n, C).

        Args:
            index: The samples; int64, shape (n,).
            labels: The labels that they were written with; int64, shape (n,).
        """
        stored = self.shares.index_select(0, index).float()
        if self.others is None:
            return stored
        rest = (1 - stored.sum(1)).clamp_(min=0) / (self.num_classes - stored.shape[1])
        rows = rest[:, None].repeat(1, self.num_classes)
        rows.scatter_(1, self.others.index_select(0, index).long(), stored[:, 1:])
        return rows.scatter_(1, labels[:, None], stored[:, :1])

    def write(self, index: Tensor, labels: Tensor, rows: Tensor) -> None:
        """Replace the distributions of some samples.

        Args:
            index: The samples; int64, shape (n,). A sample that occurs several times must have the
                same row each time.
            labels: Their labels; int64, shape (n,).
            rows: Their distributions; float32, shape (n, C). They may be changed.
        """
        if self.others is None:
            self.shares[index] = rows.half()
            return
        own = rows.gather(1, labels[:, None])
        rows.scatter_(1, labels[:, None], -1.0)
        shares, others = rows.topk(self.others.shape[1], dim=1)
        self.shares[index] = torch.cat([own, shares], 1).half()
        self.others[index] = others.to(self.others.dtype)

    def to(self, device: torch.device) -> None:
        """Move the numbers to another device."""
        self.shares = self.shares.to(device)
        if self.others is not None:
            self.others = self.others.to(device)
