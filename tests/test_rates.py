"""Learning rates as users have them: numbers, functions and schedulers, by epochs and by steps."""

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as schedulers

import fineprune as fp
from fineprune.errors import InputError
from fineprune.pruning.policies.step_budget import rates_along_steps
from fineprune.pruning.rates import rates_of

EPOCHS, N, BATCH = 10, 400, 10


def optimizer():
    layer = torch.nn.Linear(3, 2)
    groups: list[dict[str, Any]] = [
        {"params": [layer.weight]},
        {"params": [layer.bias], "lr": 0.01},
    ]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def warmed_up(optimizer):
    warmup = schedulers.LinearLR(optimizer, 0.1, 1.0, 3)
    return schedulers.SequentialLR(
        optimizer, [warmup, schedulers.CosineAnnealingLR(optimizer, 7)], [3]
    )


SCHEDULERS = {
    "steps": lambda optimizer: schedulers.MultiStepLR(optimizer, [3, 6], gamma=0.2),
    "cosine": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, EPOCHS),
    "one-cycle": lambda optimizer: schedulers.OneCycleLR(optimizer, 0.3, total_steps=EPOCHS),
    "function": lambda optimizer: schedulers.LambdaLR(optimizer, lambda epoch: 1 / (epoch + 1)),
    "warm-up": warmed_up,
    "chained": lambda optimizer: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(optimizer), schedulers.ExponentialLR(optimizer, 0.9)]
    ),
    "restarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, 4),
}


def stepped(scheduler, optimizer, number):
    """Step a scheduler as a training does, and return the rate of the first group before each."""
    rates = []
    for _ in range(number):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SequentialLR itself uses what torch has deprecated.
            try:
                scheduler.step()
            except ValueError:
                assert len(rates) == number
    return rates


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_is_stepped_on_a_copy(name):
    own = optimizer()
    scheduler = SCHEDULERS[name](own)
    before = [dict(group, params=None) for group in own.param_groups]
    rates = rates_of(scheduler, EPOCHS)
    assert [dict(group, params=None) for group in own.param_groups] == before
    assert rates == pytest.approx(stepped(scheduler, own, EPOCHS))


@pytest.mark.parametrize("name", ["cosine", "chained", "warm-up"])
def test_the_scheduler_of_an_own_loop_may_be_given_before_the_training_only(name):
    own = optimizer()
    scheduler = SCHEDULERS[name](own)
    stepped(scheduler, own, 2)
    with pytest.raises(InputError, match=r"a scheduler that was not stepped.*after 2 steps"):
        rates_of(scheduler, EPOCHS)
    with pytest.raises(InputError, match="ReduceLROnPlateau"):
        rates_of(schedulers.ReduceLROnPlateau(own), EPOCHS)
    one_cycle = schedulers.OneCycleLR(optimizer(), 0.3, total_steps=5)
    with pytest.raises(InputError, match=r"for 10 steps, got one that ends before.*total_steps"):
        rates_of(one_cycle, EPOCHS)


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ([1, 2], "one learning rate for each of 10 epochs, got 2"),
        ([0.0] * EPOCHS, "at least 0, one of them above 0"),
        ([1.0] * 9 + [-1.0], "at least 0, one of them above 0"),
        ([1.0] * 9 + [math.nan], "at least 0, one of them above 0"),
        (lambda progress: math.inf, "at least 0, one of them above 0"),
        ("cosine", "a torch learning-rate scheduler, got str"),
        (0.1, "a torch learning-rate scheduler, got float"),
        (
            lambda epoch: [1, 0.1][epoch],
            r"function of the progress, .*list indices.*: give a list",
        ),
    ],
)
def test_wrong_rates_are_refused(rates, message):
    with pytest.raises(InputError, match=message):
        fp.Adaptive(EPOCHS, rates=rates)


def test_arrays_and_functions_are_rates_too():
    expected = [math.cos((epoch + 0.5) / 10) for epoch in range(EPOCHS)]
    assert rates_of(lambda progress: math.cos(progress / 10), EPOCHS) == expected
    for given in (np.array(expected), torch.tensor(expected, dtype=torch.float64)):
        assert rates_of(given, EPOCHS) == expected
    assert rates_of([3.0, 2.0, 1.0], 2, "steps") == [3.0, 2.0]
    assert rates_of(lambda step: step + 1.0, 3, "steps") == [1.0, 2.0, 3.0]
    with pytest.raises(InputError, match=r"each of 4 steps, got 3.*pruner\.total_steps"):
        rates_of([3.0, 2.0, 1.0], 4, "steps")


def made(**options):
    return fp.Pruner(N, fp.Adaptive(EPOCHS, save=0.35, **options), batch_size=BATCH)


def numbers(pruner, step=lambda: None):
    """Train with equal losses, and return the number of steps of each epoch.

    Args:
        pruner: The pruner.
        step: What is called after each batch.
    """
    found = []
    for _ in pruner.epochs():
        found.append(pruner.batches(pruner.plan.epoch))
        for index in pruner.sampler.order().split(BATCH):
            pruner.record(index, torch.zeros(len(index)))
            step()
    return found


def test_rates_may_be_given_after_the_pruner_was_made():
    rates = [1.0] * 6 + [0.1] * 4
    late = made()
    assert late.policy.without_rates
    late.set_rates(rates)
    assert not late.policy.without_rates
    assert numbers(late) == numbers(made(rates=rates))


def test_a_scheduler_by_steps_gives_each_epoch_the_steps_of_its_rates():
    """An epoch is the shorter, the smaller its rates; and its rates are those of its steps."""
    pruner = made()
    total = pruner.total_steps()
    own = optimizer()
    scheduler = schedulers.LambdaLR(own, lambda step: 1 - step / total)
    own.step()  # Schedulers warn if the optimizer took no steps.
    pruner.set_rates(scheduler, by="steps")
    found = numbers(pruner, scheduler.step)
    assert sum(found) == total
    assert found == sorted(found, reverse=True)
    done = 0
    wanted = []
    for steps in found:
        wanted.append(1 - (done + steps / 2) / total)
        done += steps
    shares = [min(1.0, rate * found[6] / wanted[6] / (N / BATCH)) for rate in wanted]
    assert found == pytest.approx([share * N / BATCH for share in shares], abs=1.5)


def test_rates_along_steps_are_constant_if_they_are():
    assert rates_along_steps([2.0] * 30, 5, 10) == [2.0] * 5


@pytest.mark.parametrize("when", ["recorded", "ended", "loaded"])
def test_rates_come_before_the_training(when):
    pruner = made(rates=[1] * EPOCHS)
    pruner.record(pruner.sampler.order()[:BATCH], torch.rand(BATCH))
    if when == "ended":
        pruner.end_epoch()
    if when == "loaded":
        again = made(rates=[1] * EPOCHS)
        again.load_state_dict(pruner.state_dict())
        pruner = again
    with pytest.raises(InputError, match=r"set_rates\(\) before the training"):
        pruner.set_rates([1.0] * EPOCHS)


def test_only_policies_that_use_rates_take_them():
    with pytest.raises(InputError, match="a policy that uses learning rates, got 'full'"):
        fp.Pruner(N, fp.FullData(3)).set_rates([1, 1, 1])
    with pytest.raises(InputError, match="expected by to be one of epochs, steps, got 'batches'"):
        made().set_rates([1] * EPOCHS, by="batches")


def test_a_state_fits_the_rates_that_were_set():
    first, second, third = made(), made(), made()
    for pruner in (first, second):
        pruner.set_rates([1.0] * 5 + [0.1] * 5)
    second.load_state_dict(first.state_dict())
    with pytest.raises(InputError, match="settings"):
        third.load_state_dict(first.state_dict())


def test_a_state_with_the_rates_of_steps_fits_another_number_of_ranks():
    """Which has another number of steps, and so other rates."""

    def made(**shape):
        pruner = fp.Pruner(N, fp.Adaptive(EPOCHS, save=0.3), batch_size=BATCH, **shape)
        cycle = schedulers.OneCycleLR(optimizer(), 0.1, total_steps=pruner.total_steps())
        pruner.set_rates(cycle, by="steps")
        return pruner

    state = made().state_dict()
    made(num_replicas=2, rank=0).load_state_dict(state)
    by_epochs = fp.Pruner(N, fp.Adaptive(EPOCHS, save=0.3), batch_size=BATCH)
    with pytest.raises(InputError, match=r"expected a pruner state with rates=.*got of steps"):
        by_epochs.load_state_dict(state)


def test_without_rates_the_policy_says_once_what_it_assumes():
    pruner = made()
    with pytest.warns(UserWarning, match=r"no learning rates.*pruner\.set_rates") as caught:
        numbers(pruner)
    (said,) = (one for one in caught if "no learning rates" in str(one.message))
    assert said.filename == __file__
    numbers(fp.Pruner(N, fp.Adaptive(EPOCHS, save=0), batch_size=BATCH))  # Nothing is shortened.


def test_rates_that_are_no_numbers_and_a_scheduler_of_steps_are_refused():
    with pytest.raises(InputError, match="expected learning rates as numbers, got None"):
        fp.Adaptive(4, rates=lambda _: None)  # type: ignore[arg-type]
    by_step = schedulers.OneCycleLR(optimizer(), 0.1, total_steps=40)
    with pytest.raises(InputError, match=r"OneCycleLR for 4 epochs, got one for 40 .*set_rates"):
        fp.Adaptive(4, rates=by_step)
    by_epoch = schedulers.OneCycleLR(optimizer(), 0.1, total_steps=4)
    assert len(fp.Adaptive(4, rates=by_epoch).rates) == 4


@pytest.mark.parametrize("by", ["epochs", "steps"])
def test_a_rate_that_is_a_tensor_stays_as_it_is(by):
    """Torch steps such a rate in place."""
    weights = torch.nn.Linear(2, 2).parameters()
    optimizer = torch.optim.Adam(weights, lr=torch.tensor(0.1))
    pruner = fp.Pruner(N, fp.Adaptive(EPOCHS), batch_size=BATCH)
    total = EPOCHS if by == "epochs" else pruner.total_steps()
    pruner.set_rates(schedulers.CosineAnnealingLR(optimizer, total), by=by)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.1)


@pytest.mark.parametrize("name", ["steps", "cosine", "function"])
def test_a_state_is_continued_with_another_base_rate(name):
    """As by population-based training: the schedule is the same, and its ratios are rounded."""

    def parts(rate):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
        scheduler = SCHEDULERS[name](optimizer)
        return made(rates=scheduler), optimizer, scheduler

    def train(parts, epochs):
        pruner, optimizer, scheduler = parts
        for epoch in pruner.epochs():
            for index in pruner.sampler.order().split(BATCH):
                pruner.record(index, torch.rand(len(index)) + 1)
            optimizer.step()
            scheduler.step()
            if epoch == epochs - 1:
                return

    donor = parts(0.1)
    train(donor, 2)
    for rate in (0.01, 0.05, 0.5):
        copied = parts(rate)
        for part, other in zip(copied, donor, strict=True):
            part.load_state_dict(other.state_dict())
        train(copied, EPOCHS)
        assert copied[0].total_steps() == donor[0].total_steps()
    with pytest.raises(InputError, match=r"expected a pruner state with rates="):
        made(rates=[1] * 9 + [0.5]).load_state_dict(donor[0].state_dict())
