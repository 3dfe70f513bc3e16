"""Classes of which a rule says little: those that were not learned, and rare ones."""

from torch import Tensor

# A class with fewer samples than this part of the mean of all classes is rare.
_RARE = 0.5

# In a class that was not learned, the share of samples that look wrong is at least so many times
# that of the other classes, or nearly all look wrong. It has at least so many samples, since a few
# with wrong labels tell nothing of a class (docs/results/adaptive.md, "Small classes").
_BESIDE_OTHERS, _NEARLY_ALL, _FEWEST = 1.5, 0.95, 5


def rare_classes(sizes: Tensor) -> Tensor:
    """Return which classes have fewer than half as many samples as classes have on average.

    Classes without samples do not count for the average.
    """
    return sizes < _RARE * (sizes.sum() / (sizes > 0).sum())


def of_unlearned_classes(
    labels: Tensor, marked: Tensor, least: float, counted: Tensor | None = None
) -> Tensor:
    """Return which samples belong to classes that look wrong as a whole; bool, shape (N,).

    Args:
        labels: The labels; int64, shape (N,), -1 if unknown.
        marked: Which samples look wrong; bool, shape (N,).
        least: More than this share of such a class are marked.
        counted: Which samples count for the shares; bool, shape (N,). By default, all of them.
    """
    known = labels >= 0
    used = known if counted is None else known & counted
    classes = max(int(labels.max()) + 1, 1)
    sizes = labels[used].bincount(minlength=classes)
    numbers = labels[used & marked].bincount(minlength=classes)
    shares = numbers / sizes.clamp(min=1)
    others = (numbers.sum() - numbers) / (sizes.sum() - sizes).clamp(min=1)
    beside = (_BESIDE_OTHERS * others).clamp(max=_NEARLY_ALL)
    unlearned = (shares > least) & (shares > beside) & (sizes >= _FEWEST)
    return known & unlearned[labels]
