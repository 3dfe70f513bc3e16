"""ShardedPruner: three ranks over Gloo, each of which counts its own samples only."""

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gloo_group import gloo_group
from torch.multiprocessing.spawn import spawn
from torch.utils.data import TensorDataset

import fineprune as fp
from fineprune.pruning.dropping_count import keep_least_counted
from fineprune.pruning.replicas import Replicas
from fineprune.pruning.sharded import pruner as sharded_pruner
from fineprune.pruning.sharded import selection
from fineprune.pruning.sharded.selection import share_ties
from fineprune.pruning.sharded.share import owned_samples

N, BATCH, WORLD, EPOCHS = 201, 6, 3, 8
# Epochs 1, 2, 5 and 6 skip samples; 3 and 7 clear the counts.
POLICY = fp.FinePruning(fp.Schedule(EPOCHS, window=4, start=2), prune=75)
PRUNED = [epoch for epoch in range(EPOCHS) if POLICY.schedule.prunes(epoch)]
OPTIONS = {"seed": 3, "batch_size": BATCH}

# All of these samples tie in every epoch.
TIED_N, TIED_KEPT, TIED_EPOCHS = 120, 60, 60
TIED = fp.RandomPruning(fp.Schedule(TIED_EPOCHS, window=1, start=0), prune=TIED_N - TIED_KEPT)


def losses_of(epoch, indices):
    """Return losses that are whole numbers; those of the last rank's samples are large."""
    indices = torch.as_tensor(indices)
    return ((indices * 37 + epoch * epoch * 13) % 17 + (indices > 150) * 4).float()


def train(pruner, seen, stop=None):
    """Train with made-up losses up to ``stop`` (epoch, batch); add each batch to ``seen``."""
    for epoch in pruner.epochs():
        for number, (index, _) in enumerate(pruner.loader()):
            pruner.record(index, losses_of(epoch, index))
            seen.append((epoch, index.tolist()))
            if (epoch, number) == stop:
                return


def counts_after(pruner, seen):
    """Train, and also return the counts before each epoch."""
    counts = {}
    for epoch in pruner.epochs():
        counts[epoch] = pruner.counts
        for index, _ in pruner.loader():
            pruner.record(index, losses_of(epoch, index))
            seen.append((epoch, index.tolist()))
    counts[EPOCHS] = pruner.counts
    return counts


def refusal(call):
    """Return the message with which a call is refused; None if it is not."""
    try:
        call()
    except ValueError as error:
        return str(error)


def make(policy=POLICY, n=N, **changed):
    return fp.ShardedPruner(TensorDataset(torch.arange(n)), policy, **{**OPTIONS, **changed})


def reported(pruner):
    """Train, and return the summary and what was logged, without times."""
    logged: list[tuple[int, dict[str, float]]] = []
    pruner.log(lambda values, step: logged.append((step, values)))
    train(pruner, [])
    summary = pruner.summary()
    for values in (summary, *(values for _, values in logged)):
        for name in [name for name in values if "seconds" in name]:
            del values[name]
    return {"summary": summary, "logged": logged}


def resumed(stop):
    """Stop at a batch, resume from the state, and return what was trained and counted."""
    seen: list[tuple[int, list[int]]] = []
    stopped = make()
    train(stopped, seen, stop)
    unsynchronized = refusal(stopped.state_dict)
    stopped.synchronize()
    state = stopped.state_dict()
    pruner = make()
    pruner.load_state_dict(state)
    position = pruner.position
    train(pruner, seen)
    return {
        "seen": seen,
        "counts": pruner.counts,
        "unsynchronized": unsynchronized,
        "position": (position.epoch, position.batches, position.samples),
        "state": state,
    }


def wrong_input(rank, state):
    """Return the messages about settings that differ between the ranks, and wrong states."""
    other_policy = fp.FinePruning(POLICY.schedule, prune=75, tolerance=0.1)
    return {
        "sizes": refusal(lambda: make(n=N + rank)),
        "seeds": refusal(lambda: make(seed=rank)),
        "N": refusal(lambda: make(n=N + 18).load_state_dict(state)),
        "seed": refusal(lambda: make(seed=4).load_state_dict(state)),
        "settings": refusal(lambda: make(other_policy).load_state_dict(state)),
        "ranks": refusal(lambda: make().load_state_dict({**state, "num_replicas": 4})),
        "rank": refusal(lambda: make().load_state_dict({**state, "rank": (rank + 1) % WORLD})),
        "torn": refusal(lambda: make().load_state_dict({**state, "batches": 2 + (rank == 0)})),
        "batches": refusal(lambda: make(batch_size=4).load_state_dict(state)),
    }


def tied():
    """Return what this rank trains in many epochs in which all samples tie."""
    pruner = fp.ShardedPruner(TIED_N, TIED, seed=5, batch_size=4)
    chosen = []
    for epoch in range(TIED_EPOCHS):
        pruner.set_epoch(epoch)
        chosen.append(list(pruner.sampler))
    return chosen


def warned(rank, early):
    """Return the warnings of loops that do not train their share, and of nonfinite losses.

    Args:
        rank: The number of this rank.
        early: A pruner that was made before the process group.
    """

    def caught(loop, pruner=None):
        pruner = pruner or make()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            pruner.set_epoch(PRUNED[0])
            loop(pruner)
            pruner.end_epoch()
        messages = [str(warning.message) for warning in found]
        first = "the training begins with epoch"  # The first one that is pruned.
        return [text for text in messages if not text.startswith(first)], pruner.nonfinite

    def ignores(pruner):
        """Train samples of all ranks, in as many batches as there should be."""
        for epoch in PRUNED[:3]:
            pruner.set_epoch(epoch)
            for index in torch.arange(N)[rank::WORLD][: len(pruner.sampler)].split(BATCH):
                pruner.record(index, losses_of(0, index))

    def little(pruner):
        for number, (index, _) in enumerate(pruner.loader()):
            if number % 2:
                pruner.record(index, losses_of(0, index))

    def nothing(pruner):
        list(pruner.sampler)

    def infinite(pruner):
        for index, _ in pruner.loader():
            losses = losses_of(0, index)
            losses[0] = torch.nan if rank == 1 else torch.inf
            pruner.record(index, losses)

    def everything(pruner):
        for index, _ in pruner.loader():
            pruner.record(index, losses_of(0, index))

    found = [caught(loop) for loop in (ignores, little, nothing, infinite)]
    return [*found, caught(everything, early)]


def ranks(rank, folder):
    early = make()
    with gloo_group(rank, folder, WORLD):
        seen: list[tuple[int, list[int]]] = []
        pruner = make()
        counts = counts_after(pruner, seen)
        inside = resumed((2, 1))
        sharded_pruner._FLUSH_AT = 2 * BATCH  # The buffer is flushed inside epochs too.
        after_the_last = resumed((2, 6))
        plain = fp.Pruner(TensorDataset(torch.arange(N)), POLICY, seed=3, batch_size=BATCH)
        full: list[tuple[int, list[int]]] = []
        train(make(fp.FullData(1), n=N - 1, drop_last=True), full)
        torch.save(
            {
                "seen": seen,
                "counts": counts,
                "owned": (pruner.owned.start, pruner.owned.stop),
                "batches": [pruner.batches(epoch) for epoch in range(EPOCHS)],
                "total_steps": pruner.total_steps(),
                "inside": inside,
                "after_the_last": after_the_last,
                "refused": wrong_input(rank, inside["state"]),
                "tied": tied(),
                "warned": warned(rank, early),
                "full": full,
                "reported": reported(make()),
                "reported by Pruner": reported(plain),
            },
            f"{folder}/rank{rank}.pt",
        )


@pytest.fixture(scope="module")
def three_ranks(fast_spawn, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    spawn(ranks, args=(str(folder),), nprocs=WORLD)
    return [torch.load(folder / f"rank{r}.pt", weights_only=True) for r in range(WORLD)]


def batches_of(rank, epoch):
    return [indices for number, indices in rank["seen"] if number == epoch]


def joined_counts(three_ranks, epoch):
    return torch.cat([rank["counts"][epoch] for rank in three_ranks])


def test_each_epoch_trains_the_kept_samples_once_in_equally_many_batches(three_ranks):
    assert [(rank["owned"]) for rank in three_ranks] == [(0, 67), (67, 134), (134, 201)]
    plain = fp.Pruner(N, POLICY, seed=3, batch_size=BATCH, num_replicas=WORLD, rank=0)
    assert plain.total_steps() == three_ranks[0]["total_steps"]
    foreign = 0
    for epoch in range(EPOCHS):
        kept = plain.num_kept(epoch)
        trained = []
        for rank in three_ranks:
            batches = batches_of(rank, epoch)
            assert len(batches) == rank["batches"][epoch] == plain.batches(epoch)
            if epoch in PRUNED:
                assert {len(batch) for batch in batches} == {BATCH}
            samples = [index for batch in batches for index in batch]
            foreign += sum(index not in range(*rank["owned"]) for index in samples)
            trained += samples
        assert sorted(trained) == sorted(set(trained))
        assert len(trained) == kept
    assert foreign > 0


def test_the_kept_samples_have_the_same_counts_as_those_of_the_plain_pruner(three_ranks):
    for epoch in PRUNED:
        counts = joined_counts(three_ranks, epoch)
        plain = fp.Pruner(N, POLICY, seed=3, batch_size=BATCH, num_replicas=WORLD, rank=0)
        state = plain.state_dict()
        plain.load_state_dict({**state, "learned": {**state["learned"], "counts": counts}})
        plain.set_epoch(epoch)
        trained = [i for rank in three_ranks for batch in batches_of(rank, epoch) for i in batch]
        assert counts.max() > 0
        assert len(trained) == len(plain.plan.kept) < N
        assert torch.equal(counts[trained].sort().values, counts[plain.plan.kept].sort().values)


def test_counts_are_those_of_a_loop_that_knows_all_losses(three_ranks):
    counts = np.zeros(N, dtype=np.int64)
    for epoch in range(EPOCHS):
        assert np.array_equal(joined_counts(three_ranks, epoch).numpy(), counts), epoch
        marked = set()
        for parts in zip(*(batches_of(rank, epoch) for rank in three_ranks), strict=True):
            batch = [index for part in parts for index in part]
            losses = losses_of(epoch, batch)
            marked |= {i for i, loss in zip(batch, losses, strict=True) if loss > losses.mean()}
        if POLICY.schedule.clears(epoch):
            counts[:] = 0
        counts[list(marked)] += 1
    assert np.array_equal(joined_counts(three_ranks, EPOCHS).numpy(), counts)
    assert counts.max() > 0


@pytest.mark.parametrize("stop", ["inside", "after_the_last"])
def test_a_resumed_run_equals_the_undisturbed_one(three_ranks, stop):
    for number, rank in enumerate(three_ranks):
        run = rank[stop]
        assert run["seen"] == rank["seen"]
        assert torch.equal(run["counts"], rank["counts"][EPOCHS])
        assert run["state"]["learned"]["counts"].shape == (67,)
        assert run["state"]["rank"] == number
    assert [rank["inside"]["position"] for rank in three_ranks] == 3 * [(2, 2, 2 * BATCH)]
    assert [rank["after_the_last"]["position"] for rank in three_ranks] == 3 * [(2, 7, 42)]
    assert all("synchronize" in rank["inside"]["unsynchronized"] for rank in three_ranks)


def test_settings_that_differ_and_states_of_other_runs_are_refused(three_ranks):
    for number, rank in enumerate(three_ranks):
        refused = rank["refused"]
        assert "on every rank" in refused["sizes"]
        assert "on every rank" in refused["seeds"]
        assert f"num_samples={N + 18}, got {N}" in refused["N"]
        assert "seed=4, got 3" in refused["seed"]
        assert "settings" in refused["settings"]
        assert "num_replicas=3, got 4" in refused["ranks"]
        assert f"rank={number}, got {(number + 1) % WORLD}" in refused["rank"]
        assert "the same batch, after which states are saved, on every rank" in refused["torn"]
        assert "same batch_size" in refused["batches"]
        assert all("\n" not in message for message in refused.values())


def test_ties_are_broken_uniformly_over_all_ranks(three_ranks):
    times_kept = np.zeros(TIED_N)
    of_each_owner = []
    for parts in zip(*(rank["tied"] for rank in three_ranks), strict=True):
        assert [len(part) for part in parts] == 3 * [TIED_KEPT // 3]
        kept = np.concatenate(parts)
        assert len(set(kept)) == TIED_KEPT
        times_kept[kept] += 1
        of_each_owner.append(np.bincount(kept * WORLD // TIED_N, minlength=WORLD))
    assert len(of_each_owner) == TIED_EPOCHS
    # Each sample is kept with the same probability, and in each epoch anew.
    share = TIED_KEPT / TIED_N
    squares = (times_kept - TIED_EPOCHS * share) ** 2 / (TIED_EPOCHS * share * (1 - share))
    assert abs(squares.sum() - TIED_N) < 5 * (2 * TIED_N) ** 0.5
    # How many samples of each rank are kept is hypergeometric: neither fixed nor independent.
    variance = TIED_KEPT * (1 / 3) * (2 / 3) * (TIED_N - TIED_KEPT) / (TIED_N - 1)
    ratio = np.mean((np.array(of_each_owner) - TIED_KEPT / 3) ** 2) / variance
    assert 0.5 < ratio < 1.6


def test_loops_that_do_not_train_their_share_are_noticed(three_ranks):
    for rank in three_ranks:
        assert [len(messages) for messages, _ in rank["warned"]] == 5 * [1]
        (ignored, _), (little, _), (silent, _), (infinite, nonfinite), (early, _) = rank["warned"]
        assert "made before the process group of 3 ranks" in early[0]
        assert "sampler=pruner.sampler" in ignored[0]
        assert "record every batch" in little[0]
        assert "recorded no losses" in silent[0]
        assert nonfinite == WORLD * rank["batches"][PRUNED[0]]
        assert f"{nonfinite} losses" in infinite[0]


def test_summary_and_log_are_those_of_the_plain_pruner_without_suspects(three_ranks):
    for number, rank in enumerate(three_ranks):
        ours, plain = rank["reported"], rank["reported by Pruner"]
        assert ours["summary"].pop("suspects") == []
        assert len(plain["summary"].pop("suspects")) == 10
        assert ours["summary"] == plain["summary"]
        assert [values.pop("fineprune/suspects") for _, values in plain["logged"]] == (
            [75] * EPOCHS if number == 0 else []
        )
        assert ours["logged"] == plain["logged"]


def test_full_epochs_leave_out_what_does_not_divide_if_asked(three_ranks):
    """200 samples: each rank trains 66 of its 66 or 67 samples, in whole batches of 6."""
    for number, rank in enumerate(three_ranks):
        samples = [index for _, batch in rank["full"] for index in batch]
        assert len(samples) == len(set(samples)) == 66
        assert set(samples) <= set(owned_samples(N - 1, WORLD, number))


# --- one rank ---------------------------------------------------------------------------------


def test_one_rank_keeps_what_the_rule_allows_and_its_sampler_has_a_new_order_per_epoch():
    pruner = make()
    seen: list[tuple[int, list[int]]] = []
    counts = counts_after(pruner, seen)
    orders = {}
    for epoch in range(EPOCHS):
        trained = [i for number, batch in seen if number == epoch for i in batch]
        assert len(set(trained)) == len(trained) == pruner.num_kept(epoch)
        least = keep_least_counted(
            counts[epoch].numpy(), len(trained), np.random.default_rng(epoch)
        )
        assert torch.equal(counts[epoch][trained].sort().values, counts[epoch][least].sort().values)
        orders[epoch] = tuple(trained)
    assert sum(a == b for a, b in zip(orders[0], orders[1], strict=False)) < 10
    assert make(seed=3).state_dict()["num_replicas"] == 1


def test_full_epochs_repeat_a_sample_where_they_do_not_divide():
    first = Replicas()
    first.size = 3
    share = selection.full_share(0, 8, first, seed=0, drop_last=False)
    assert share.owned == range(0, 2)
    samples = share.indices(0, share.number).tolist()
    assert sorted(set(samples)) == [0, 1]
    assert len(samples) == 3


@pytest.mark.filterwarnings("ignore:the samples of epoch")
def test_a_loader_with_its_own_state_continues_where_it_was():
    pruner = make()
    pruner.set_epoch(PRUNED[0])
    whole = list(pruner.sampler)
    reading = iter(pruner.sampler)
    first = [next(reading) for _ in range(50)]
    state = pruner.sampler.state_dict()
    assert state == {"epoch": PRUNED[0], "yielded": 50}
    pruner.sampler.load_state_dict(state)
    assert first + list(pruner.sampler) == whole
    assert len(pruner.sampler) == len(whole)


@pytest.mark.parametrize("limit", [selection.MOST_TIES, 100])
def test_draws_among_more_ties_than_numpy_takes_have_the_same_distribution(limit, monkeypatch):
    monkeypatch.setattr(selection, "MOST_TIES", limit)
    rng = np.random.default_rng(0)
    tied = np.array([300, 0, 500, 200])
    taken = np.array([share_ties(tied, 400, rng) for _ in range(4000)])
    assert (taken.sum(axis=1) == 400).all()
    assert (taken <= tied).all()
    share = tied / 1000
    deviation = np.sqrt(400 * share * (1 - share) * 600 / 999)
    assert np.abs(taken.mean(axis=0) - 400 * share).max() < 5 * deviation.max() / 4000**0.5
    assert np.abs(taken.std(axis=0) - deviation).max() < 0.06 * deviation.max()


def test_draws_among_billions_of_ties_are_possible():
    tied = np.array([3 * 10**9, 10**9])
    taken = share_ties(tied, 2 * 10**9, np.random.default_rng(0))
    assert taken.sum() == 2 * 10**9
    assert abs(taken[0] - 1.5e9) < 1e5


OTHERS = {
    "Adaptive": fp.Adaptive(4, save=0.3),
    "InfoBatch": fp.InfoBatch(4),
    "anneal=0.5": fp.FinePruning(POLICY.schedule, 0.3, anneal=0.5),
    "max_skips=2": fp.RandomPruning(POLICY.schedule, 0.3, max_skips=2),
    "keep_per_class=0.1": fp.FinePruning(POLICY.schedule, 0.3, keep_per_class=0.1),
    "rescale=True": fp.FullData(4, rescale=True),
}


@pytest.mark.parametrize("named", OTHERS)
def test_other_policies_and_options_are_refused_with_the_reason(named):
    message = refusal(lambda: make(OTHERS[named]))
    assert named in message
    assert "Pruner" in message
    assert "\n" not in message


def test_wrong_values_are_refused():
    with pytest.raises(TypeError, match="expected a policy"):
        make("fine-pruning")
    for changed in ({"batch_size": 0}, {"batch_size": None}, {"accumulation": 0}, {"seed": -1}):
        assert refusal(lambda changed=changed: make(**changed)).startswith("expected ")
    assert "at least 1" in refusal(lambda: fp.ShardedPruner(0, POLICY, batch_size=1))
    assert "smaller batch_size" in refusal(lambda: make(batch_size=101))
    assert "more ranks" in refusal(lambda: fp.ShardedPruner(10**9, POLICY, batch_size=1))
    assert "give ShardedPruner the data set" in refusal(
        fp.ShardedPruner(9, fp.FullData(1), batch_size=1).loader
    )


def test_epochs_neither_repeat_nor_overlap():
    pruner = make()
    for epoch in pruner.epochs():
        index = torch.tensor(list(pruner.sampler))
        pruner.record(index, losses_of(epoch, index))
        assert "epoch is in progress" in refusal(lambda: pruner.set_epoch(1))
        break
    pruner.end_epoch()
    pruner.end_epoch()
    assert pruner.position == fp.Position(1, 0, 0)
    assert "has ended" in refusal(lambda: pruner.record(index, losses_of(0, index)))
    assert "at least 1" in refusal(lambda: pruner.set_epoch(0))
    assert "make the schedule as long" in refusal(lambda: pruner.set_epoch(EPOCHS))
    pruner.set_epoch(1)
    assert "indices in 0..200" in refusal(
        lambda: pruner.record([N], torch.ones(1)) and pruner.end_epoch()
    )


def test_a_window_can_be_opened_and_is_part_of_the_state():
    pruner, again = make(), make()
    for epoch in pruner.epochs():
        if epoch == 1:
            pruner.open_window()
        for index, _ in pruner.loader():
            pruner.record(index, losses_of(epoch, index))
        if epoch == 2:
            break
    assert pruner.num_kept(2) == N  # The new window begins with full epochs.
    again.load_state_dict(pruner.state_dict())
    assert [again.num_kept(e) for e in range(EPOCHS)] == [pruner.num_kept(e) for e in range(EPOCHS)]
    assert again.position == pruner.position
    assert "which has none" in refusal(make(fp.FullData(2)).open_window)


def test_the_code_of_the_page_trains_and_resumes(tmp_path, monkeypatch):
    """The code is run as shown, by one rank, with data and a network of two classes."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    x = torch.randn(2000, 4)
    model = torch.nn.Linear(4, 2)
    names: dict[str, Any] = {
        "train_set": TensorDataset(x, (x.sum(1) > 0).long()),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "rank": 0,
    }
    page = Path(__file__).parents[1] / "docs/sizes.md"
    code = re.findall(r"^```py\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    for block in code:
        exec(compile(block, "<page>", "exec"), names)
    assert len(code) == 2
    assert (model(x).argmax(1) == (x.sum(1) > 0)).float().mean() > 0.9
    assert names["pruner"].position.epoch == 10
