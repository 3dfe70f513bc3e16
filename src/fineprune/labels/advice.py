"""What the evidence on the labels of a training allows to say, in plain words.

The measurements that are quoted here are those of docs/results/labels.md and
docs/results/adaptive.md.
"""

import math
from collections.abc import Sequence

from fineprune.labels.evidence import Evidence
from fineprune.labels.ranking import joint_numbers, num_wrong

# Skipping was measured with correct labels and with 30 % wrong ones. This is halfway.
_NOISY = 0.15

# A sample counts as learned if its mean loss is below this share of the loss of chance.
_LEARNED = 0.1

# With a smaller share of learned samples, the network has learned little.
_TOO_FEW = 0.05

# Before so many visits of each sample, the estimate of the number of wrong labels is too high.
_EARLY, _ENOUGH = 10, 20

# So many pairs of classes are named.
_PAIRS = 3


def advice_of(evidence: Evidence, classes: Sequence[str]) -> list[str]:
    """Return sentences on how many labels contradict, and on whether skipping might pay off.

    Args:
        evidence: The evidence, which has been flushed and has records.
        classes: The name of each class.
    """
    recorded = evidence.visits > 0
    samples = int(recorded.sum())
    visits = float(evidence.visits[recorded].float().mean())
    joint = joint_numbers(evidence).cpu()
    wrong = num_wrong(joint)
    sentences = [
        f"About {round(wrong):,} of {samples:,} labels ({wrong / samples:.1%}) contradict what the "
        f"network learned."
    ]
    learned = evidence.loss[recorded] < _LEARNED * math.log(evidence.num_classes)
    part = float(learned.float().mean())
    trusted = visits >= _EARLY and part >= _TOO_FEW
    if part < _TOO_FEW:
        sentences.append(
            "The network has learned little, and then this number is far too high: a longer or "
            "better training says more."
        )
    elif visits < _EARLY:
        sentences.append(
            f"Each sample was trained {visits:.1f} times on average, which is early: where the "
            f"truth is known, the estimate was up to 2.3 times too high after ten epochs, and up "
            f"to 6 times after three. Watch a longer training."
        )
    elif visits < _ENOUGH:
        sentences.append(
            "Where the truth is known, the estimate was 1.1 to 2.3 times the true number after ten "
            "epochs: it is probably too high."
        )
    else:
        sentences.append(
            "Where the truth is known, the estimate was 0.72 to 1.20 times the true number after "
            "30 epochs: take it for an order of magnitude."
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
        sentences.append(f"The most frequent ones: {', '.join(named)}.")
    sentences.append(
        f"{part:.0%} of the samples were learned: their mean loss, in "
        f"which later visits count more, is below a tenth of that of chance."
    )
    if not trusted:
        return sentences
    if wrong / samples >= _NOISY:
        sentences.append(
            "fp.Adaptive may save steps here. With 30 % wrong labels, it saved 35 % of the steps "
            "of a thin ResNet-18 on CIFAR-10 (10,000 images, 30 epochs) at the accuracy of full "
            "training (-0.02 ±1.00 points), 0.54 ±0.33 above the best shorter training."
        )
    else:
        sentences.append(
            "fp.Adaptive was not seen to do better here than a shorter training. With correct "
            "labels, both saved a third of the steps of a thin ResNet-18 on CIFAR-10 (10,000 "
            "images, 30 epochs) and cost 0.6 points."
        )
    return sentences
