"""What the evidence on the labels says, in plain words.

It says how many labels contradict what the network learned, and which way of saving steps fits
best. The measurements that are quoted here are those of labels.md, adaptive.md and resnet9.md in
docs/results.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fineprune.labels.evidence import Evidence
from fineprune.labels.ranking import EARLY, ENOUGH, FEW_WRONG, Ranking, num_wrong

# Saving was measured with correct labels and with 30 % wrong ones. From half of these on, labels
# count as wrong; below ``FEW_WRONG``, they count as correct. Between them, nothing was measured.
_NOISY = 0.15

# Suspects that do not count are named if they are more than this share of the samples.
_WORTH_SAYING = 0.01

# The share to save with which all means were measured.
_SAVE = 0.35

# So many pairs of classes, and so many classes that were not learned, are named.
_PAIRS, _NAMED = 3, 10

# The means of saving, and the accuracy minus that of full training in points, with half the 95 %
# interval, with correct labels and with 30 % wrong ones. The first one trains whole epochs.
_MEANS = (
    ("fp.shorter(rates, save=0.35)", "-0.58 ±0.89", "-0.56 ±0.80"),
    ("fp.Adaptive(epochs, save=0.35)", "-0.56 ±0.65", "+0.18 ±0.63"),
    ("fp.InfoBatch(epochs, save=0.35), which skips what is learned", "-4.29 ±1.65", "-7.22 ±1.75"),
)

_UNLEARNED = (
    " But a class that is not learned has large losses, too, and looks wrong: compare the recall "
    "of each class with that of full training before you rely on this."
)

_NO_CLASSES = (
    "This applies to classifiers only. In a regression, or with several labels per sample, large "
    "targets, events and rare labels have large losses, too, and a network that is trained without "
    "them underestimates them: use fp.Adaptive(epochs, evidence=1) there, which skips no sample "
    "for its loss."
)

_TOO_EARLY = "It is too early to say which way of saving steps fits best."

_AGAIN = (
    "Or train the network again without the suspects: on "
    "torch.utils.data.Subset(train_set, watch.without_suspects()), or with data.without, the "
    "folder of this run."
)


@dataclass(frozen=True)
class FullCost:
    """What the training costs on all data.

    Attributes:
        epochs: Number of epochs.
        steps: Number of optimizer steps; None if it is not known.
        seconds: The wall-clock time of the training; None if it is not known.
    """

    epochs: int
    steps: int | None = None
    seconds: float | None = None


def advice_of(
    evidence: Evidence, ranking: Ranking, classes: Sequence[str], cost: FullCost | None = None
) -> list[str]:
    """Return sentences on how many labels contradict, and on which way of saving steps fits best.

    Args:
        evidence: The evidence, which has been flushed and has records.
        ranking: Its ranking.
        classes: The name of each class.
        cost: The cost of the training, with which that of each means is named; None to name shares.
    """
    samples = int((ranking.labels >= 0).sum())
    visits, answered = ranking.visits, ranking.answered
    joint = ranking.joint.cpu()
    wrong = num_wrong(joint)
    sentences = [
        f"About {round(wrong):,} of {samples:,} labels ({wrong / samples:.1%}) contradict what the "
        f"network learned."
        if round(wrong)
        else f"Of {samples:,} labels, none is estimated to contradict what the network learned."
    ]
    if samples < evidence.num_samples:
        sentences.append(
            f"{evidence.num_samples - samples:,} of {evidence.num_samples:,} samples were never "
            f"recorded with a label and a finite loss, so nothing is known about their labels."
        )
    if ranking.learned_little:
        sentences.append(
            f"The network has learned little: hardly any sample has a loss near zero, and for only "
            f"{answered:.0%} of the samples, it predicts the given label. The estimate is probably "
            f"far too high: a longer or better training says more."
        )
    elif visits < EARLY:
        sentences.append(
            f"Each sample was trained only {visits} times on average: where the true labels are "
            f"known, the estimate was up to 2.4 times too high after ten epochs, and up to 6 times "
            f"after three. Watch a longer training."
        )
    elif ranking.by_heart:
        sentences.append(
            f"The network predicts the given label for {answered:.0%} of the samples. If labels "
            f"are wrong, it has memorised them. The estimate then counts the labels that were "
            f"learned clearly later than most, which may be too few: look at the first suspects, "
            f"or watch fewer epochs."
        )
    elif visits < ENOUGH:
        sentences.append(
            f"Each sample was trained {visits} times on average. Where the true labels are known, "
            f"the estimate was 1.1 to 2.4 times the true number after ten epochs of a small "
            f"network, and nearly right after 30. It is too low if the network memorised labels."
        )
    else:
        sentences.append(
            "Where the true labels are known, the estimate was 0.86 to 1.22 times the true number "
            "after 30 epochs of a network that hardly memorises labels, and 0.14 to 0.97 times, or "
            "less, with networks that do. With both, most suspects had wrong labels: look at the "
            "first ones."
        )
    pairs = joint.clone().fill_diagonal_(0)
    largest = pairs.flatten().topk(min(_PAIRS, pairs.numel()))
    named = [
        f"{classes[place // len(pairs)]} that may be {classes[place % len(pairs)]} "
        f"({round(number):,})"
        for number, place in zip(largest.values.tolist(), largest.indices.tolist(), strict=True)
        if number >= 1
    ]
    if named:
        sentences.append(f"The most frequent suspected mistakes: {', '.join(named)}.")
    unlearned = ranking.unlearned
    if unlearned.any():
        names = [classes[number] for number in ranking.labels[unlearned].unique().tolist()]
        some = names if len(names) <= _NAMED else [*names[:_NAMED], "..."]
        number = int((ranking.scores[unlearned] > 0).sum())
        sentences.append(
            f"{number:,} suspects are in classes that the network has not learned "
            f"({', '.join(some)}). Most samples of these classes are suspects, which says little "
            f"about their labels. A training that skips this one's suspects does not skip them."
        )
    sentences.append(
        f"{ranking.near_zero:.0%} of the samples were learned: their mean loss is below a tenth of "
        f"the loss at chance level."
    )
    if ranking.too_early:
        return [*sentences, _TOO_EARLY]
    clear = int(ranking.to_skip_again.sum())  # Other suspects say little.
    unclear = int(ranking.to_skip.sum()) - clear
    if unclear > _WORTH_SAYING * samples:
        sentences.append(
            f"{unclear:,} of the suspects are not clear, and do not count in what follows: the "
            f"network wavers between their labels and other classes, or too few other suspects are "
            f"left. Watch a training in which each sample is trained {ENOUGH} times."
        )
    share = clear / samples
    best, *others = _means(share, cost)
    again = [_AGAIN] if share >= _NOISY else []
    return [*sentences, best, *again, *others]


def doubt_of(ranking: Ranking) -> str | None:
    """Return why a second training skips no suspects of this one, and what to do.

    None if it does, if there are none, and if they are only in classes whose suspects stay.
    """
    number, usable = ranking.num_suspects, int(ranking.to_skip.sum())
    if not number or ranking.to_skip_again.any() or not (usable or ranking.too_early):
        return None
    longer = f"watch a training that trains each sample {ENOUGH} times"
    reason = f"are fewer than {FEW_WRONG:.0%} of the samples without those that it wavers over"
    if ranking.learned_little:
        reason = f"may be hard samples: it answers only {ranking.answered:.0%} as they are labelled"
        longer = "watch a longer or better training"
    elif ranking.too_early:
        reason = f"may be hard samples: it trained each one only {ranking.visits} times"
    return f"the {number} suspects of the earlier training {reason}, so none is skipped: {longer}"


def advice_of_losses(
    contradicting: int,
    samples: int,
    patience: int,
    cost: FullCost | None = None,
    *,
    has_classes: bool = False,
) -> list[str]:
    """Return sentences on which way of saving steps fits best, from losses alone.

    Args:
        contradicting: The number of samples that ``Adaptive`` skips because they contradict the
            others; 0 if they are too few to be skipped.
        samples: The number of samples.
        patience: The number of epochs in a row for which the loss of such a sample was above
            chance.
        cost: As for ``advice_of``.
        has_classes: Whether each sample is known to have a class.
    """
    best, *others = _means(_NOISY if contradicting else 0.0, cost)
    when = f"in each of their last {patience} epochs or, once most samples were learned, on average"
    found = f"Too few samples to skip had losses above chance {when}"
    if contradicting:
        some = f"{contradicting:,} of {samples:,} samples ({contradicting / samples:.1%})"
        found = f"The losses of {some} stayed above chance {when}"
    return [
        f"{found}. In the measurement below, these were 10.5 % of the samples after five "
        f"epochs with 30 % wrong labels, and 2.3 % with correct ones (one training each).",
        *([_NO_CLASSES] if contradicting and not has_classes else []),
        "If losses are weighted by class, correct labels look wrong: record losses without "
        "weights. For a classifier, logits and labels say more than losses: give them to record, "
        "too.",
        best + (_UNLEARNED if contradicting else ""),
        *others,
    ]


def _means(wrong: float, cost: FullCost | None) -> list[str]:
    """Return sentences on the means of saving: the one that fits best, and what each costs.

    Args:
        wrong: The share of the labels that are estimated to be wrong.
        cost: The cost of the training, if it is known.
    """
    if wrong >= _NOISY:
        best = (
            "Best here, judging by our measurements: skip the samples that contradict the others "
            "(fp.Adaptive), or correct the labels first. With 30 % wrong labels, fp.Adaptive was "
            "0.74 ±0.31 points more accurate than the best shorter training with a thin ResNet-18, "
            "and 3.69 ±1.26 with a ResNet-9 that had memorised labels. Before you skip samples, "
            "look at the first suspects: if several labels are right for them, a network that is "
            "trained without them is overconfident."
        )
    else:
        best = (
            "Best here, judging by our measurements: the shorter schedule (fp.shorter). With "
            "correct labels, fp.Adaptive was as accurate (0.02 ±0.54 points above it with a thin "
            "ResNet-18, and 0.05 ±0.21 with a ResNet-9)."
        )
        if wrong >= FEW_WRONG:
            best = (
                "Such a share of wrong labels was not measured, only 0 and 30 %: review the "
                "suspects, and use the shorter schedule (fp.shorter), which is the simplest way."
            )
        best += (
            " If most of the first suspects have wrong labels, skip the samples that contradict the"
            " others (fp.Adaptive): the estimate is too low if the network memorises labels."
        )
    return [
        best,
        *(
            f"{name}: {_cost(cost, whole_epochs=not place)}. Accuracy relative to full training: "
            f"{correct} points with correct labels, {noisy} with 30 % wrong ones."
            for place, (name, correct, noisy) in enumerate(_MEANS)
        ),
        "These three were measured with a thin ResNet-18 on 10,000 images of CIFAR-10 (30 epochs, "
        "a learning rate that falls in steps). All figures are means over at least three seeds. "
        "Measure your own training with fineprune compare.",
    ]


def _cost(cost: FullCost | None, *, whole_epochs: bool) -> str:
    """Return what a means costs.

    Args:
        cost: The cost of the training on all data, if it is known.
        whole_epochs: Whether it trains whole epochs, and fewer of them.
    """
    share, epochs = 1 - _SAVE, ""
    if cost is None:
        return f"{share:.0%} of the steps"
    if whole_epochs:
        number = max(1, round(share * cost.epochs))
        share, epochs = number / cost.epochs, f"{number} of {cost.epochs} epochs, "
    steps = "" if cost.steps is None else f" ({round(share * cost.steps):,} of {cost.steps:,})"
    time = ""
    if cost.seconds is not None:
        time = f", at best {share * cost.seconds:,.0f} of {cost.seconds:,.0f} s"
    return f"{epochs}{share:.0%} of the steps{steps}{time}"
