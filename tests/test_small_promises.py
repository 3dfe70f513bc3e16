"""Small promises of ``Pruner`` that the larger tests would not notice if they were broken."""

import re

import pytest
import torch

import fineprune as fp
from fineprune.errors import InputError

N, EPOCHS = 24, 4


class Rescoring(fp.FullData):
    """Keeps half of the samples and asks for the even ones of the others."""

    name = "rescoring"
    rescores = True

    def num_kept(self, epoch):
        return N // 2

    def select(self, epoch, num_kept, rng):
        return fp.EpochPlan(epoch, torch.arange(num_kept))

    def to_rescore(self, plan, skipped):
        assert plan.kept.tolist() == list(range(N // 2))
        assert skipped.dtype == torch.int64
        return skipped[skipped % 2 == 0]


def recorded(policy):
    """A pruner that has recorded its first epoch, but has not ended it."""
    pruner = fp.Pruner(N, policy)
    order = torch.tensor(list(pruner.sampler))
    pruner.record(order, torch.ones(len(order)))
    return pruner


def test_what_was_rescored_in_parts_is_known_to_be_complete():
    pruner = recorded(Rescoring(EPOCHS))
    wanted = pruner.to_rescore()
    for index in wanted.split(4):
        pruner.rescore(index, torch.ones(len(index)))
    resumed = fp.Pruner(N, Rescoring(EPOCHS))
    resumed.load_state_dict(pruner.state_dict())
    assert next(iter(resumed.epochs())) == 1


def test_what_was_rescored_in_part_is_not():
    pruner = recorded(Rescoring(EPOCHS))
    pruner.to_rescore()
    pruner.rescore(torch.arange(12, 20, 2), torch.ones(4))
    resumed = fp.Pruner(N, Rescoring(EPOCHS))
    resumed.load_state_dict(pruner.state_dict())
    assert next(iter(resumed.epochs())) == 0


def test_nothing_is_rescored_without_a_later_epoch_or_a_policy_that_needs_it():
    assert recorded(Rescoring(1)).to_rescore() is None
    every_epoch = fp.Schedule(epochs=EPOCHS, window=EPOCHS, start=0)
    assert recorded(fp.RandomPruning(every_epoch, 0.5)).to_rescore() is None


@pytest.mark.parametrize(
    ("call", "method"),
    [
        (lambda pruner: pruner.rescore([1], torch.ones(1)), "rescore"),
        (lambda pruner: pruner.open_window(), "open_window"),
    ],
)
def test_what_must_precede_the_end_of_an_epoch_names_itself_and_the_epoch(call, method):
    pruner = recorded(Rescoring(EPOCHS))
    pruner.end_epoch()
    message = f"expected an epoch in progress, but epoch 0 has ended: call {method}() before end_"
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        call(pruner)


TOO_LATE = (
    "expected set_rates() before the training, got it after losses were recorded: call it before "
    "the first epoch and before load_state_dict()"
)


def test_rates_come_before_losses_and_before_states():
    ended = recorded(fp.Adaptive(EPOCHS, save=0.2, rates=[1.0] * EPOCHS))
    ended.end_epoch()
    resumed = fp.Pruner(N, fp.Adaptive(EPOCHS, save=0.2, rates=[1.0] * EPOCHS))
    resumed.load_state_dict(ended.state_dict())
    for pruner in (ended, resumed, recorded(fp.Adaptive(EPOCHS, save=0.2, rates=[1.0] * EPOCHS))):
        with pytest.raises(InputError, match=f"^{re.escape(TOO_LATE)}$"):
            pruner.set_rates([1.0, 0.1, 0.1, 0.1])


def test_an_index_may_be_a_list_wherever_losses_are_recorded():
    pruner = fp.Pruner(N, Rescoring(EPOCHS))
    pruner.observe(list(range(12)), torch.ones(12))
    pruner.rescore(list(range(12, 24, 2)), torch.ones(6))
    assert pruner.summary()["record_calls"] == 1


def test_a_new_pruner_has_recorded_nothing_and_says_so():
    pruner = fp.Pruner(N, fp.FullData(EPOCHS))
    assert pruner.summary()["record_calls"] == 0
    assert pruner.nonfinite == 0
    assert pruner.sampler.state_dict() == {"epoch": 0, "yielded": 0}
    assert "24 samples, policy" in pruner._repr_html_()


def test_a_batch_of_one_sample_per_rank_is_a_batch():
    pruner = fp.Pruner(N, fp.FullData(EPOCHS), batch_size=1, sharded_by_loader=True)
    assert pruner.batches(0) == N


def test_the_state_of_a_loader_names_the_epoch_only_if_the_user_has_not():
    one = fp.Pruner(N, fp.FullData(EPOCHS))
    one.sampler.load_state_dict({"epoch": 2, "yielded": 5})
    assert one.sampler.epoch == 2
    other = fp.Pruner(N, fp.FullData(EPOCHS))
    other.sampler.set_epoch(1)
    other.sampler.load_state_dict({"epoch": 2, "yielded": 5})
    assert other.sampler.epoch == 1
    assert len(list(other.sampler)) == N


def test_an_epoch_that_no_later_one_depends_on_needs_no_rescoring():
    pruner = recorded(Rescoring(1))
    assert pruner.to_rescore() is None
    resumed = fp.Pruner(N, Rescoring(1))
    resumed.load_state_dict(pruner.state_dict())
    assert list(resumed.epochs()) == []


def test_losses_of_rescored_samples_do_not_wait_for_the_end_of_a_long_epoch(monkeypatch):
    monkeypatch.setattr("fineprune.pruning.recorder._FLUSH_AT", 6)
    told = []

    class Telling(Rescoring):
        def observe_rescored(self, epoch, index, losses):
            told.append((epoch, index.tolist(), losses.tolist()))

    pruner = recorded(Telling(EPOCHS))
    pruner.rescore(pruner.to_rescore(), torch.arange(6) * 1.0)
    assert told == [(0, list(range(12, 24, 2)), [0, 1, 2, 3, 4, 5])]


def test_a_state_is_refused_inside_the_loop_with_the_number_of_the_epoch():
    pruner = fp.Pruner(N, fp.FullData(EPOCHS))
    state = pruner.state_dict()
    for epoch in pruner.epochs():
        pruner.record(torch.arange(N), torch.ones(N))
        if epoch == 2:
            with pytest.raises(InputError, match="got it inside of epoch 2: load the state first"):
                pruner.load_state_dict(state)


def test_a_resumed_epoch_may_have_another_number_of_batches():
    half = fp.Pruner(N, fp.FullData(EPOCHS), batch_size=4)
    for _ in half.epochs():
        for index in torch.tensor(list(half.sampler)).split(4)[:3]:
            half.record(index, torch.ones(4))
        break
    resumed = fp.Pruner(N, fp.FullData(EPOCHS), batch_size=6)
    resumed.load_state_dict(half.state_dict())
    epochs = []
    for epoch in resumed.epochs():  # A warning would be an error here.
        epochs.append(epoch)
        for index in torch.tensor(list(resumed.sampler)).split(6):
            resumed.record(index, torch.ones(len(index)))
    assert epochs == list(range(EPOCHS))


def test_a_state_holds_what_it_must_agree_with():
    state = fp.Pruner(N, fp.FullData(EPOCHS), seed=7).state_dict()
    assert (state["num_samples"], state["seed"]) == (N, 7)
    assert state["settings"] == {"policy": "full"}
    annealed = fp.Pruner(N, fp.FullData(EPOCHS, anneal=0.5)).state_dict()
    assert state["options"] is None
    assert annealed["options"]["anneal"] == 0.5


def test_batches_that_a_framework_divides_need_their_size():
    message = "expected batch_size, that of one rank, with sharded_by_loader, got None"
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        fp.Pruner(N, fp.FullData(EPOCHS), sharded_by_loader=True)


@pytest.mark.parametrize("start", [-1, EPOCHS])
def test_the_first_epoch_to_train_is_inside_the_training(start):
    pruner = fp.Pruner(N, fp.FullData(EPOCHS))
    with pytest.raises(InputError, match=rf"^expected start in 0\.\.3, got {start}$"):
        next(pruner.epochs(start))


def test_a_loop_that_is_left_late_does_not_take_the_epoch_from_another_loop():
    pruner = fp.Pruner(N, fp.FullData(EPOCHS))
    first, second = pruner.epochs(), pruner.epochs()
    next(first)
    assert next(second) == 0
    del first
    with pytest.raises(InputError, match="epoch 0"):
        pruner.set_epoch(2)


@pytest.mark.parametrize("last", [False, True])
def test_an_incomplete_last_batch_is_trained_after_a_resume_unless_it_is_dropped(last):
    def new():
        return fp.Pruner(N, fp.FullData(EPOCHS), batch_size=10, drop_last=not last)

    stopped = new()
    for index in torch.tensor(list(stopped.sampler)).split(10)[:2]:
        stopped.record(index, torch.ones(10))
    assert stopped.steps_left == EPOCHS * (3 if last else 2) - 2
    resumed = new()
    resumed.load_state_dict(stopped.state_dict())
    assert next(iter(resumed.epochs())) == (0 if last else 1)


def test_losses_that_are_not_finite_are_counted_over_the_whole_epoch(monkeypatch):
    monkeypatch.setattr("fineprune.pruning.recorder._FLUSH_AT", 8)
    policy = fp.FinePruning(fp.Schedule(epochs=EPOCHS, window=EPOCHS, start=2), prune=8)
    pruner = fp.Pruner(N, policy, batch_size=8)
    for index in torch.tensor(list(pruner.sampler)).split(8):
        losses = torch.ones(8)
        losses[0] = torch.inf
        pruner.record(index, losses)
    with pytest.warns(RuntimeWarning, match="^3 losses of epoch 0 were NaN or infinite"):
        pruner.end_epoch()
    assert pruner.nonfinite == 3


def test_an_epoch_that_is_read_and_not_recorded_counts_with_its_planned_steps():
    pruner = fp.Pruner(N, fp.FullData(EPOCHS), batch_size=8)
    for _ in pruner.epochs():
        assert len(list(pruner.sampler)) == N
    assert pruner.steps_done == EPOCHS * 3


def test_logits_come_with_their_labels():
    pruner = fp.Pruner(N, fp.FullData(EPOCHS))
    message = (
        "expected logits and labels together, got one of them only: give record both, so that the "
        "labels are watched, or none"
    )
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        pruner.record(torch.arange(4), torch.ones(4), torch.ones(4, 2))


def test_an_epoch_takes_the_padding_of_its_last_batch_and_no_sample_more():
    padded = fp.Pruner(N, fp.FullData(EPOCHS), batch_size=10)
    for first in range(0, N, 10):
        padded.record(torch.arange(first, first + 10) % N, torch.ones(10))
    with pytest.raises(InputError, match="expected at most 24 samples in epoch 0") as caught:
        padded.record(torch.arange(1), torch.ones(1))
    assert str(caught.value).endswith("record every training batch once and no other batches")
    exact = fp.Pruner(N, fp.FullData(EPOCHS), batch_size=8)
    for first in range(0, N, 8):
        exact.record(torch.arange(first, first + 8), torch.ones(8))
    with pytest.raises(InputError, match="expected at most 24 samples in epoch 0"):
        exact.record(torch.arange(1), torch.ones(1))


def test_the_seed_is_zero_unless_it_is_given_and_no_negative_number():
    assert fp.Pruner(N, fp.FullData(EPOCHS)).state_dict()["seed"] == 0
    with pytest.raises(InputError, match=r"^expected seed "):
        fp.Pruner(N, fp.FullData(EPOCHS), seed=-1)


def test_a_seed_chooses_the_same_samples_in_every_release():
    schedule = fp.Schedule(epochs=EPOCHS, window=EPOCHS, start=1)
    plain = fp.Pruner(12, fp.RandomPruning(schedule, 0.5), seed=3)
    plain.set_epoch(2)
    assert plain.plan.kept.tolist() == [0, 1, 3, 4, 10, 11]
    assert list(plain.sampler) == [11, 0, 1, 4, 10, 3]
    policy = fp.RandomPruning(schedule, 0.5, keep_per_class=0.5)
    quotas = fp.Pruner(12, policy, seed=3, labels=[sample % 3 for sample in range(12)])
    quotas.set_epoch(2)
    assert quotas.plan.kept.tolist() == [0, 1, 2, 3, 4, 11]


def test_pruners_of_one_policy_do_not_learn_from_each_other():
    policy = fp.FinePruning(fp.Schedule(epochs=EPOCHS, window=EPOCHS, start=2), prune=8)
    one, other = fp.Pruner(N, policy, batch_size=8), fp.Pruner(N, policy, batch_size=8)
    for index in torch.tensor(list(one.sampler)).split(8):
        one.record(index, torch.arange(8.0))
    one.end_epoch()
    assert one.policy.counts.sum() > 0
    assert other.policy.counts.sum() == 0


class Weighting(Rescoring):
    """Gives each kept sample the weight two."""

    name = "weighting"
    rescores = False

    def select(self, epoch, num_kept, rng):
        return fp.EpochPlan(epoch, torch.arange(num_kept), torch.full((N,), 2.0))


def test_a_weighted_mean_must_be_backpropagated_before_the_first_step_has_passed():
    pruner = fp.Pruner(N, Weighting(EPOCHS), batch_size=2, accumulation=2)
    parts = torch.tensor(list(pruner.sampler)).split(2)
    losses = torch.ones(2, requires_grad=True)
    for index in parts[:3]:  # One of the first step may still be to come.
        assert pruner.record(index, losses).item() == 2
    with pytest.raises(RuntimeError, match="to be backpropagated"):
        pruner.record(parts[3], losses)


def test_losses_of_an_earlier_epoch_end_the_one_that_a_state_was_taken_in():
    stopped = fp.Pruner(N, fp.FullData(EPOCHS), batch_size=8)
    for epoch in stopped.epochs():
        batches = torch.tensor(list(stopped.sampler)).split(8)
        for index in batches[: 1 if epoch == 2 else 3]:
            stopped.record(index, torch.ones(8))
        if epoch == 2:
            break
    resumed = fp.Pruner(N, fp.FullData(EPOCHS), batch_size=8)
    resumed.load_state_dict(stopped.state_dict())
    resumed.set_epoch(1)
    assert resumed.position.epoch == 2  # It is set aside, and waits for its turn.
    resumed.record(torch.arange(8), torch.ones(8))
    assert (resumed.position.epoch, resumed.position.batches) == (1, 1)
    assert resumed.steps_done == 2 * 3 + 1 + 1
