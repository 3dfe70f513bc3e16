"""Two ranks over Gloo: they count as one process with the doubled batch, and exchange states."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import fineprune as fp

N, BATCH, WORLD, EPOCHS = 80, 8, 2, 7
POLICY = fp.FinePruning(fp.Schedule(EPOCHS, window=3, start=1, block=2, count=1), prune=32)


def losses_of(epoch, indices):
    """Return losses that are whole numbers, so that their sums are exact in any order."""
    return ((indices * 37 + epoch * 11) % 17).float()


def train(pruner, upto=EPOCHS, stop_after=None):
    """Train with made-up losses, and return (epoch, indices) of each batch of this rank."""
    seen = []
    for epoch in pruner.epochs():
        for number, indices in enumerate(pruner.sampler.order().split(BATCH)):
            if (epoch, number) == (upto, stop_after):
                return seen
            pruner.record(indices, losses_of(epoch, indices))
            seen.append((epoch, indices.tolist()))
    return seen


def ranks(rank, folder):
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    try:
        pruner = fp.Pruner(N, POLICY, seed=1, batch_size=BATCH)
        seen = train(pruner)
        whole = {"seen": seen, "counts": pruner.counts}

        stopped = fp.Pruner(N, POLICY, seed=1, batch_size=BATCH)
        before = train(stopped, upto=4, stop_after=2)
        careless = stopped.state_dict()
        stopped.synchronize()
        resumed = fp.Pruner(N, POLICY, seed=1, batch_size=BATCH)
        resumed.load_state_dict(stopped.state_dict())
        after = train(resumed)
        torch.save(
            {
                **whole,
                "careless": careless,
                "state": stopped.state_dict(),
                "resumed_seen": before + after,
                "resumed_counts": resumed.counts,
            },
            f"{folder}/rank{rank}.pt",
        )
    finally:
        dist.destroy_process_group()


def test_two_ranks_count_as_one_process_with_the_doubled_batch(tmp_path):
    mp.spawn(ranks, args=(str(tmp_path),), nprocs=WORLD)
    first, second = (torch.load(tmp_path / f"rank{r}.pt", weights_only=True) for r in range(WORLD))

    one = fp.Pruner(N, POLICY, seed=1, batch_size=BATCH * WORLD)
    expected = []
    for epoch in one.epochs():
        for indices in one.sampler.order().split(BATCH * WORLD):
            one.record(indices, losses_of(epoch, indices))
            expected.append((epoch, sorted(indices.tolist())))

    assert torch.equal(first["counts"], second["counts"])
    assert torch.equal(first["counts"], one.counts)
    joined = [
        (epoch, sorted(mine + theirs))
        for (epoch, mine), (_, theirs) in zip(first["seen"], second["seen"], strict=True)
    ]
    assert joined == expected

    # Both ranks stopped in the middle of a pruning epoch after synchronize(), and were resumed.
    assert POLICY.schedule.prunes(4) or POLICY.schedule.prunes(3)
    for rank in (first, second):
        assert rank["resumed_seen"] == rank["seen"]
        assert torch.equal(rank["resumed_counts"], one.counts)

    # The same state resumes in one process, which trains the rest of the epoch.
    alone = fp.Pruner(N, POLICY, seed=1, batch_size=BATCH * WORLD)
    alone.load_state_dict(first["state"])
    for epoch in alone.epochs():
        for indices in alone.sampler.order().split(BATCH * WORLD):
            alone.record(indices, losses_of(epoch, indices))
    assert torch.equal(alone.counts, one.counts)

    # A state that was taken without synchronize() is refused.
    with pytest.raises(ValueError, match="synchronize"):
        alone.load_state_dict(first["careless"])


def test_a_launcher_without_a_process_group_is_an_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="init_process_group"):
        fp.Pruner(N, POLICY)
