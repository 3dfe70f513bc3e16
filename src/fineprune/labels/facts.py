"""What a ranking of the labels says, in plain words and without any judgement."""

from collections.abc import Sequence

from fineprune.labels.ranking import Ranking

# So many pairs of classes, and so many classes that were not learned, are named.
_PAIRS, _NAMED = 3, 10

# A network that predicts less than this share of the labels has hardly learned them.
_LEARNED = 0.5


def facts_of(ranking: Ranking, classes: Sequence[str]) -> list[str]:
    """Return sentences on how many labels contradict, and how much the network has learned.

    Args:
        ranking: The ranking of the labels. At least one sample was recorded.
        classes: The name of each class.
    """
    known = ranking.labels >= 0
    total, samples, suspects = len(known), int(known.sum()), ranking.num_suspects
    sizes = ranking.labels[known].bincount(minlength=len(classes))
    answered = float(ranking.answered.nan_to_num().mul(sizes).sum()) / samples
    sentences = []
    if answered < _LEARNED:
        sentences.append(
            "The network has hardly learned these labels, or most of them are wrong: train longer "
            "before you trust a suspect."
        )
    sentences += [
        f"{suspects:,} of {samples:,} labels ({suspects / samples:.1%}) are suspected: they "
        f"contradict what the network learned.",
        f"It predicts the given label for {answered:.0%} of the samples, over {ranking.visits:.0f} "
        f"visits each: the more of both, the more of the suspects have a wrong label, until a "
        f"network memorises wrong labels, and some are missed.",
    ]
    if samples < total:
        sentences.append(
            f"{total - samples:,} of {total:,} samples were never recorded with a label and a "
            f"finite loss, so nothing is known about their labels."
        )
    pairs = ranking.joint.cpu().fill_diagonal_(0)
    largest = pairs.flatten().topk(min(_PAIRS, pairs.numel()))
    named = [
        f"{classes[place // len(pairs)]} that may be {classes[place % len(pairs)]} ({number:,})"
        for number, place in zip(largest.values.tolist(), largest.indices.tolist(), strict=True)
        if number
    ]
    if named:
        sentences.append(f"The most frequent suspected mistakes: {', '.join(named)}.")
    below = (ranking.answered < _LEARNED).nonzero()[:, 0].tolist()
    unlearned = [classes[number] for number in below]
    if unlearned:
        some = unlearned if len(unlearned) <= _NAMED else [*unlearned[:_NAMED], "..."]
        sentences.append(
            f"It predicts the given label for less than half of the samples of some classes: "
            f"{', '.join(some)}. It has hardly learned these, or most of their labels are wrong."
        )
    return sentences
