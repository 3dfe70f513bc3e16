"""What all policies promise whose epochs have a known share of the samples, and their settings."""

from functools import partial
from typing import Any

import pytest
from resuming import falling_losses, stopped_and_resumed, train_pruner

import fineprune as fp
from fineprune.errors import InputError

N, EPOCHS = 120, 8
falling = falling_losses(N)

POLICIES: dict[str, Any] = {
    "infobatch": lambda save, **options: fp.InfoBatch(EPOCHS, save=save, **options),
    "repb": partial(fp.RePB, EPOCHS),
    "align-prune": partial(fp.AlignPrune, EPOCHS, trajectory=3),
    "align-prune with clean samples": partial(
        fp.AlignPrune, EPOCHS, trajectory=3, reference=[3, 40, 77, 111]
    ),
}
each_policy = pytest.mark.parametrize("name", POLICIES)


@each_policy
@pytest.mark.parametrize("save", [0.1, 0.35, 0.5])
@pytest.mark.parametrize("batch", [None, 5, 7])
def test_the_whole_training_saves_the_share_and_the_steps_are_known(name, save, batch):
    policy = POLICIES[name](save, anneal=0.125)
    pruner = fp.Pruner(N, policy, batch_size=batch)
    expected = [pruner.step_counts.num_kept(epoch) for epoch in range(EPOCHS)]
    numbers = [len(kept) for kept, _ in train_pruner(pruner, falling)[0]]
    assert numbers == expected
    assert numbers[-1] == N  # It is annealed.
    assert abs(sum(numbers) - (1 - save) * N * EPOCHS) <= (batch or 1) / 2
    if batch is not None:
        assert pruner.total_steps() == sum(-(-number // batch) for number in numbers)
        assert fp.predict_savings(policy, N, batch).samples == sum(numbers)


@each_policy
def test_without_rescaling_there_are_no_weights_and_the_same_samples(name):
    plain, weighted = (
        train_pruner(fp.Pruner(N, POLICIES[name](0.3, rescale=on)), falling)[0]
        for on in (False, True)
    )
    assert all(weights is None for _, weights in plain)
    assert [kept for kept, _ in plain] == [kept for kept, _ in weighted]
    assert any(weights is not None for _, weights in weighted)


@each_policy
@pytest.mark.parametrize("stop", [(1, 0), (4, 0), (5, 3)])
def test_a_stopped_training_continues_exactly(name, stop, tmp_path):
    made = partial(fp.Pruner, N, POLICIES[name](0.3), batch_size=10, seed=2)
    train = partial(train_pruner, losses_of=falling)
    whole, _ = train(made())
    assert stopped_and_resumed(made, train, stop, tmp_path) == whole


INDICES = "indices of at least 0, got "


@pytest.mark.parametrize(
    ("policy", "arguments", "message"),
    [
        *(
            (policy, {"epochs": 0}, "expected epochs to be a whole number of at least 1, got 0")
            for policy in (fp.Adaptive, fp.InfoBatch, fp.RePB, fp.AlignPrune, fp.RS2)
        ),
        *(
            (policy, {"save": save}, rf"expected save as a share in \(0, 1\), got {save!r}")
            for policy in (fp.InfoBatch, fp.RePB, fp.AlignPrune, fp.RS2)
            for save in (0.0, 1.0, ".3")
        ),
        (fp.Adaptive, {"save": 1.0}, r"expected save as a share in \[0, 1\), got 1.0"),
        (fp.Adaptive, {"save": ".3"}, r"expected save as a share in \[0, 1\), got '.3'"),
        (fp.Adaptive, {"threshold": -1}, "threshold as a score of at least 0, got -1"),
        (fp.Adaptive, {"threshold": ".3"}, "threshold as a score of at least 0, got '.3'"),
        (fp.Adaptive, {"threshold": float("nan")}, "expected threshold as a score"),
        (fp.Adaptive, {"first_epoch": 0}, "expected first_epoch"),
        (fp.Adaptive, {"returning": 1.5}, "expected returning"),
        (fp.InfoBatch, {"prune": 1.0}, r"expected prune as a share in \[0, 1\), got 1.0"),
        (fp.InfoBatch, {"prune": ".3"}, r"expected prune as a share in \[0, 1\), got '.3'"),
        (fp.InfoBatch, {"prune": 0.5, "save": 0.3}, "expected either prune or save"),
        (fp.InfoBatch, {"save": 0.9}, "expected save below 0.875, the share of the epochs"),
        (fp.InfoBatch, {"anneal": 1.5}, "expected anneal as a share"),
        (fp.RePB, {"save": 0.9}, r"expected save below 0\.875, .* got 0\.9: save less, or let"),
        (fp.RePB, {"save": 0.8, "anneal": 0.125}, r"expected save below 0\.75"),
        (fp.RePB, {"epochs": 1}, "expected epochs that may skip samples, got none of 1: train"),
        (fp.RePB, {"rescale": 2}, "expected rescale as True or False, got 2"),
        (fp.RS2, {"replacement": "yes"}, "expected replacement as True or False, got 'yes'"),
        (fp.AlignPrune, {"epochs": 20, "save": 0.9}, r"expected save below 0\.85, the share of"),
        (fp.AlignPrune, {"epochs": 16, "anneal": 1.0}, "got none of 16: train more epochs"),
        (fp.AlignPrune, {"trajectory": 1}, "trajectory to be a whole number of at least 2, got 1"),
        (
            fp.AlignPrune,
            {"epochs": 20, "trajectory": 17},
            "expected trajectory below 17, .* got 17: set a smaller trajectory",
        ),
        (fp.AlignPrune, {"reference": []}, rf"one or more different {INDICES}\[\]: give"),
        (fp.AlignPrune, {"reference": [1, 1]}, rf"different {INDICES}\[1, 1\]: give"),
        (fp.AlignPrune, {"reference": [-1, 3]}, rf"{INDICES}\[-1, 3\]"),
        (fp.AlignPrune, {"reference": [0.5]}, rf"{INDICES}\[0\.5\]"),
        (fp.AlignPrune, {"reference": [True, False]}, rf"{INDICES}\[True, False\]"),
        (fp.AlignPrune, {"reference": [[1], [2, 3]]}, "expected reference as whole numbers: "),
        (fp.AlignPrune, {"reference": 3}, f"{INDICES}3: give the indices of clean samples"),
    ],
)
def test_wrong_settings_are_refused(policy, arguments, message):
    given: dict[str, Any] = {"epochs": 8, **arguments}
    if policy is fp.AlignPrune and given["epochs"] == 8:
        given = {"trajectory": 3, **given}
    with pytest.raises(InputError, match=message) as raised:
        policy(**given)
    assert "\n" not in str(raised.value)
