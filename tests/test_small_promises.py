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
