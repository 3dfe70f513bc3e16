"""Streams: numbers of samples, the kept ones in every kind of loader, ranks, and resumption."""

import io
import itertools
import pickle
import re
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gloo_group import gloo_group
from hypothesis import given, settings
from hypothesis import strategies as st
from made_streams import SIZES, Rows, keys, read, text_of
from resuming import whole_losses as losses_of
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import fineprune as fp
from fineprune.errors import InputError
from fineprune.pruning.indexed import IndexedItem
from fineprune.streams import KeyIndex, PrunedStream
from fineprune.streams.pruned_stream import shuffled
from fineprune.streams.shard_assignment import Coverage, assignment, coverage, deal, taken
from fineprune.streams.stream_loader import packed

BATCH = 8
# Epochs 2, 3, 6 and 7 prune.
SCHEDULE = fp.Schedule(epochs=8, window=4, start=3, attenuation=1.0)
INDEX = KeyIndex.scan(list(SIZES), keys)
RAW = [raw for shard in SIZES for _, raw in read(shard)]


def made(index=INDEX, policy=None, **options):
    policy = policy or fp.FinePruning(SCHEDULE, prune=32)
    return fp.Pruner(len(index), policy, **{"seed": 3, "batch_size": BATCH, **options})


def train(pruner, loader, upto=None):
    """Train until a number of batches in all, and return (epoch, numbers) of each of them."""
    seen: list[tuple[int, list[int]]] = []
    for epoch in pruner.epochs():
        for index, raw in loader:
            assert raw == [RAW[number] for number in index]
            pruner.record(index, losses_of(epoch, index))
            seen.append((epoch, index.tolist()))
            if len(seen) == upto:
                return seen
    return seen


def record_all(pruner, loader, epochs=None):
    for epoch in itertools.islice(pruner.epochs(), epochs):
        for index, _ in loader:
            pruner.record(index, losses_of(epoch, index))


def of_epoch(seen, epoch):
    return [index for number, batch in seen if number == epoch for index in batch]


def stop(iterator):
    """Stop the processes of a loader that failed: torch takes five seconds to notice by itself."""
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()


# --- the index -------------------------------------------------------------------------------


def test_a_samples_number_is_the_first_of_its_shard_plus_its_place():
    stored: dict[str, list[str | int]] = {"x": ["p", "q", 7], "y": ["q", "7"]}
    index = KeyIndex.scan(list(stored), stored.__getitem__)
    assert len(index) == 5
    assert index.firsts.tolist() == [0, 3, 5]
    assert index.expected(1) == [index.found(1, "q"), index.found(1, "7")]
    assert index.found(0, 7) != index.found(0, "7")


@pytest.mark.parametrize("index", [INDEX, KeyIndex.of_ids(["x", "y"], [2, 3])], ids=["keys", "ids"])
def test_an_index_is_saved_and_loaded_without_pickle(index, tmp_path):
    for _ in range(2):  # The second time, it replaces the file.
        index.save(tmp_path / "samples.index")
    loaded = KeyIndex.load(tmp_path / "samples.index")
    assert loaded.shards == index.shards
    assert loaded.firsts.tolist() == index.firsts.tolist()
    assert (loaded.checksums is None) == (index.checksums is None)
    assert loaded.numbering() == index.numbering()
    assert [path.name for path in tmp_path.iterdir()] == ["samples.index"]
    (tmp_path / "plain").touch()
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1  # Others may read it, as any file that is written here.


def test_different_indices_have_different_numberings():
    swapped = KeyIndex.scan(list(reversed(SIZES)), keys)
    renamed = KeyIndex.scan(list(SIZES), lambda shard: [key + "!" for key in keys(shard)])
    assert len({index.numbering() for index in (INDEX, swapped, renamed)}) == 3


@pytest.mark.parametrize(
    ("shards", "found", "message"),
    [
        ({"x", "y"}, ["a"], r"in a fixed order, .* got a set.*sorted\("),
        (["x"], ["a", "b", "a"], "unique within a shard, got 'a' twice in shard 'x'"),
        (["x"], [1.5], "text or integers, got 1.5 in shard 'x'"),
        (["x"], [True], "text or integers, got True"),
        (["x"], [], "at least one sample in 1 shards, got none"),
        ([], [], "at least one shard, got none"),
        (["x", "y", "x"], ["a"], "each shard once, got 'x' at least twice"),
        ("xy", ["a"], "a list of shard names, got one text 'xy'"),
        ([Path("x")], ["a"], r"names of shards as text, got .*Path\('x'\): use str"),
    ],
)
def test_a_scan_refuses_what_does_not_name_each_sample(shards, found, message):
    with pytest.raises(InputError, match=message) as error:
        KeyIndex.scan(shards, lambda _: found)
    assert "\n" not in str(error.value)


def test_sizes_must_fit_the_shards():
    with pytest.raises(InputError, match="one size for each of 2 shards, got 1"):
        KeyIndex.of_ids(["x", "y"], [3])
    with pytest.raises(InputError, match="samples of shard 'y' to be a whole number"):
        KeyIndex.of_ids(["x", "y"], [3, -1])
    with pytest.raises(InputError, match=r"fewer than 2\*\*63 samples"):
        KeyIndex.of_ids(["x"], [10**30])


@pytest.mark.parametrize("content", [None, b"", b"nonsense", "other", "version"])
def test_a_file_that_is_no_index_is_refused(content, tmp_path):
    path = tmp_path / "index"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content:
        arrays = {"version": np.array(9)} if content == "version" else {"other": np.zeros(3)}
        with path.open("wb") as file:
            np.savez(file, **arrays)
    with pytest.raises(InputError, match=r"KeyIndex\.scan"):
        KeyIndex.load(path)


# --- who reads what ---------------------------------------------------------------------------


@settings(max_examples=100, derandomize=True)
@given(lengths=st.lists(st.integers(0, 12), min_size=1, max_size=5), data=st.data())
def test_samples_are_taken_in_turn_as_a_loader_takes_them(lengths, data):
    number = data.draw(st.integers(0, sum(lengths)))
    order = []
    for turn in range(max(lengths)):
        order += [worker for worker, length in enumerate(lengths) if length > turn]
    counts, turn = taken(lengths, number)
    assert counts == [order[:number].count(worker) for worker in range(len(lengths))]
    left = [length - count for length, count in zip(lengths, counts, strict=True)]
    if any(left):
        following = [(turn + one) % len(lengths) for one in range(len(lengths))]
        assert next(worker for worker in following if left[worker]) == order[number]


@settings(max_examples=100, derandomize=True)
@given(
    kept=st.lists(st.integers(0, 20), min_size=1, max_size=12),
    takers=st.integers(1, 4),
    seed=st.integers(0, 5),
)
def test_shards_are_dealt_once_and_evenly(kept, takers, seed):
    order = np.random.default_rng(seed).permutation(len(kept)).tolist()
    dealt = deal(kept, order, takers)
    assert sorted(itertools.chain(*dealt)) == [one for one, number in enumerate(kept) if number]
    for shards in dealt:
        assert shards == [one for one in order if one in shards]
    loads = [sum(kept[one] for one in shards) for shards in dealt]
    assert max(loads) - min(loads) <= max(kept)


def test_the_buffer_yields_each_item_once_in_an_order_that_depends_on_the_seed():
    def order(size, seed):
        return list(shuffled(range(5000), size, np.random.default_rng(seed)))

    assert order(0, 1) == list(range(5000))
    for size in (1, 7, 3000, 9000):
        assert sorted(order(size, 1)) == list(range(5000))
        assert order(size, 1) == order(size, 1)
        assert (order(size, 1) == order(size, 2)) == (size == 1)


# --- the epoch --------------------------------------------------------------------------------


def loader_of(pruner, workers=0, buffer=0, read=read, **options):
    stream = PrunedStream(pruner, INDEX, read, shuffle_buffer=buffer)
    return stream.loader(num_workers=workers, collate_fn=list, **options)


@pytest.fixture(scope="module")
def undisturbed():
    """The batches and the counts of a whole training, for each kind of loader."""
    results: dict[tuple[int, int], Any] = {}

    def result(workers, buffer):
        if (workers, buffer) not in results:
            pruner = made()
            seen = train(pruner, loader_of(pruner, workers, buffer))
            results[workers, buffer] = seen, pruner.counts.tolist()
        return results[workers, buffer]

    return result


KINDS = [(0, 0), (0, 10), (2, 0), (2, 10)]


@pytest.mark.parametrize(("workers", "buffer"), KINDS)
def test_each_epoch_trains_exactly_its_plan(workers, buffer, undisturbed):
    seen, counts = undisturbed(workers, buffer)
    pruner = made()  # It learns the same from the same batches.
    for epoch in pruner.epochs():
        batches = [batch for number, batch in seen if number == epoch]
        assert len(batches) == pruner.batches(epoch)
        assert sorted(itertools.chain(*batches)) == pruner.plan.kept.tolist()
        for batch in batches:
            index = torch.tensor(batch)
            pruner.record(index, losses_of(epoch, index))
    assert pruner.counts.tolist() == counts
    assert len(seen) == pruner.total_steps()
    orders = [of_epoch(seen, epoch) for epoch in (0, 1)]  # Both train everything.
    assert orders[0] != orders[1]


# The places of the kills: in full and pruned epochs, after odd numbers of samples, and after the
# last batch of an epoch. With two workers, 12 batches end in the turn of the second one.
@pytest.mark.parametrize(("workers", "buffer"), KINDS)
def test_a_killed_training_continues_as_if_undisturbed(workers, buffer, undisturbed):
    expected, counts = undisturbed(workers, buffer)
    killed = made()
    saved: dict[int, Any] = {}
    first = loader_of(killed, workers, buffer)
    for epoch in killed.epochs():
        for index, _ in first:
            killed.record(index, losses_of(epoch, index))
            done = len(saved) + 1
            saved[done] = killed.state_dict()
    per_epoch = Counter(epoch for epoch, _ in expected)
    in_epoch = [sum(per_epoch[epoch] for epoch in range(e)) for e in range(9)]
    for done in (1, in_epoch[2] + 4, in_epoch[3], in_epoch[6] + 7, in_epoch[8] - 1):
        pruner = made()
        pruner.load_state_dict(saved[done])
        loader = loader_of(pruner, workers, buffer)
        assert train(pruner, loader) == expected[done:]
        assert pruner.counts.tolist() == counts


def test_an_uneven_end_of_the_workers_is_resumed_exactly():
    """Batches of 7 from two workers with different numbers of samples: the turn changes."""

    def sevens():
        return made(policy=fp.FinePruning(SCHEDULE, prune=33), batch_size=7)

    whole = sevens()
    expected = train(whole, loader_of(whole, 2, 5))
    for done in (3, 10, 11, 12, 13):
        first, second = sevens(), sevens()
        assert train(first, loader_of(first, 2, 5), done) == expected[:done]
        second.load_state_dict(first.state_dict())
        assert train(second, loader_of(second, 2, 5), 14) == expected[done : done + 14]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_that_was_left_continues_with_the_same_loader(workers, undisturbed):
    expected, counts = undisturbed(workers, 10)
    pruner = made()
    loader = loader_of(pruner, workers, 10)
    seen: list[tuple[int, list[int]]] = []
    while len(seen) < len(expected):
        seen += train(pruner, loader, 20)
    assert (seen, pruner.counts.tolist()) == (expected, counts)


def test_workers_that_do_not_persist_and_spawned_ones_train_the_same(undisturbed, fast_spawn):
    for options in (
        {"persistent_workers": False},
        {"multiprocessing_context": "spawn", "prefetch_factor": 3},
    ):
        pruner = made()
        loader = loader_of(pruner, 2, 10, **options)
        assert train(pruner, loader, 40) == undisturbed(2, 10)[0][:40]
        del loader


def test_skipping_precedes_decoding_also_after_a_resume():
    pruner = made()
    decoded = []

    def decode(raw):
        decoded.append(raw)
        return len(raw)

    loader = PrunedStream(pruner, INDEX, read, decode=decode).loader()
    for epoch in pruner.epochs():
        decoded.clear()
        trained = 0
        for index, lengths in loader:
            assert lengths.tolist() == [4] * len(index)
            trained += len(index)
            pruner.record(index, losses_of(epoch, index))
            if (epoch, trained) == (6, 3 * BATCH):
                break
        assert len(decoded) == trained
        if epoch == 6:
            break
    resumed = made()
    resumed.load_state_dict(pruner.state_dict())
    decoded.clear()
    stream = PrunedStream(resumed, INDEX, read, decode=decode, shuffle_buffer=30)
    list(stream.loader(collate_fn=list))
    assert len(decoded) == resumed.step_counts.num_kept(6) - 3 * BATCH


def test_only_what_is_needed_is_read():
    """A policy that keeps a few shards only."""

    class Some(fp.FullData):
        def lengths(self):
            return [16]

        def select(self, epoch, number, rng):
            # The first samples of shard "b", and the last ones of "e".
            return fp.EpochPlan(epoch, torch.cat([torch.arange(9, 19), torch.arange(44, 50)]))

    read_keys = []
    closed = []

    def watched(shard):
        try:
            for key, raw in read(shard):
                read_keys.append((shard, key))
                yield key, raw
        finally:
            closed.append(shard)

    pruner = made(policy=Some(1))
    seen = train(pruner, loader_of(pruner, read=watched))
    assert sorted(of_epoch(seen, 0)) == [*range(9, 19), *range(44, 50)]
    assert Counter(shard for shard, _ in read_keys) == {"b": 10, "e": 21}
    assert sorted(closed) == ["b", "e"]
    # After the first shard was trained, a resumed epoch opens the other one only.
    first, second = made(policy=Some(1)), made(policy=Some(1))
    before = train(first, loader_of(first), 1)
    second.load_state_dict(first.state_dict())
    read_keys.clear()
    order = [index for index, _ in Counter(of_epoch(seen, 0)).items()]
    assert of_epoch(before + train(second, loader_of(second, read=watched)), 0) == order
    done = {"b"} if set(range(9, 19)) <= set(before[0][1]) else set()
    assert {shard for shard, _ in read_keys} == {"b", "e"} - done


def test_one_iteration_at_a_time():
    pruner = made()
    loader = loader_of(pruner)
    first = iter(loader)
    next(first)
    second = iter(loader)
    next(second)
    with pytest.raises(RuntimeError, match="one iteration over the stream at a time"):
        next(first)


@pytest.mark.parametrize("key", [None, "index"])
def test_batches_are_those_of_other_loaders(key):
    pruner = made()
    stream = PrunedStream(pruner, INDEX, read, decode=lambda raw: {"x": torch.ones(2), "y": raw})
    collate = None
    if key:
        collate = fp.IndexedCollate(lambda items: {"n": len(items)}, key)
    loader = stream.loader(collate_fn=collate)
    batch = next(iter(loader))
    assert len(loader) == 12
    if key:
        assert batch["n"] == len(batch["index"]) == BATCH
    else:
        index, items = batch
        assert items["x"].shape == (BATCH, 2)
        assert items["y"] == [RAW[number] for number in index]


def test_the_users_random_numbers_are_not_touched():
    pruner = made()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    list(loader_of(pruner, buffer=5))
    assert torch.equal(torch.get_rng_state(), before)


def test_samples_cross_processes_unchanged():
    sample = IndexedItem(
        (3, {"x": torch.arange(6.0)[::2], "half": torch.ones(2, dtype=torch.bfloat16), "t": "a"})
    )
    back = pickle.loads(packed(sample))
    assert type(back) is type(sample)
    assert torch.equal(back[1]["x"], sample[1]["x"])
    assert torch.equal(back[1]["half"], sample[1]["half"])
    back[1]["x"][0] = 9  # The samples are writable.
    small = torch.ones(3, requires_grad=True)
    assert pickle.loads(packed(small)).requires_grad
    assert len(packed(torch.ones(100))) < len(pickle.dumps(torch.ones(100)))


# --- ranks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_every_rank_gets_the_promised_batches_and_says_what_is_missed(workers, drop_last):
    ranks = 3
    seen: list[list[list[int]]] = []
    missed, repeated = [], []
    for rank in range(ranks):
        options = {"num_replicas": ranks, "rank": rank, "drop_last": drop_last, "batch_size": 4}
        pruner = made(policy=fp.RandomPruning(SCHEDULE, prune=36), **options)
        stream = PrunedStream(pruner, INDEX, read, shuffle_buffer=6)
        loader = stream.loader(num_workers=workers, collate_fn=list)
        batches: list[list[int]] = []
        for epoch in pruner.epochs():
            batches.append([])
            number = 0
            for index, _ in loader:
                number += 1
                batches[-1] += index.tolist()
                pruner.record(index, losses_of(epoch, index))
            assert number == pruner.batches(epoch)
            if rank == 0:
                plan = pruner.plan.kept.tolist()
                missed.append((stream.coverage(), plan))
        seen.append(batches)
    for epoch, (part, plan) in enumerate(missed):
        trained = Counter(index for rank in range(ranks) for index in seen[rank][epoch])
        assert set(trained) <= set(plan)
        left_out = len(plan) - len(trained)
        again = sum(trained.values()) - len(trained)
        repeated.append(again)
        dropped = len(plan) // ranks % 4 * ranks if drop_last else 0
        assert part.missed <= left_out <= part.missed + dropped
        assert part.repeated - dropped <= again <= part.repeated
    assert any(repeated)  # Else this test would not show much.


def test_a_rank_continues_within_an_epoch_also_where_it_repeats():
    policy = fp.RandomPruning(SCHEDULE, prune=32)
    options: Any = {"policy": policy, "num_replicas": 2, "rank": 1, "batch_size": 4}

    def run(upto=None, state=None):
        pruner = made(**options)
        if state is not None:
            pruner.load_state_dict(state)
        seen = train(pruner, loader_of(pruner, 2, 6), upto)
        pruner.synchronize()
        return seen, pruner.state_dict()

    expected, _ = run()
    for done in (5, 13, len(expected) - 1):
        seen, state = run(done)
        assert seen + run(state=state)[0] == expected


def ranks_of_a_stream(rank, folder):
    torch.set_num_threads(1)
    with gloo_group(rank, folder):
        whole = made(batch_size=4)
        expected = train(whole, loader_of(whole, buffer=5))
        first, second = made(batch_size=4), made(batch_size=4)
        before = train(first, loader_of(first, buffer=5), 50)
        first.synchronize()
        second.load_state_dict(first.state_dict())
        seen = before + train(second, loader_of(second, buffer=5))
        results = expected, seen, whole.counts.tolist(), second.counts.tolist()
        torch.save(results, f"{folder}/rank{rank}.pt")
        # Each rank lists the shards in an order of its own, as the nodes of a cluster may do.
        index = KeyIndex.scan(list(SIZES)[:: 1 - 2 * rank], keys)
        pruner = made(index, batch_size=4)
        loader = PrunedStream(pruner, index, read).loader(collate_fn=list)
        with pytest.raises(InputError, match="same KeyIndex on every rank, got different ones"):
            record_all(pruner, loader)
        assert pruner.position.epoch == 0


def test_two_ranks_count_the_same_and_continue_and_need_the_same_index(spawned):
    ranks = spawned(ranks_of_a_stream, 2)
    for expected, seen, counts, resumed_counts in ranks:
        assert seen == expected
        assert len(seen) == made(batch_size=4, num_replicas=2, rank=0).total_steps()
        assert counts == resumed_counts == ranks[0][2]
    both = [set(of_epoch(expected, 0)) for expected, *_ in ranks]
    assert not both[0] & both[1]


def test_a_rank_that_repeats_few_samples_says_what_is_left_out():
    sizes = [60, 1, 1, 1]
    index = KeyIndex.of_ids(list("abcd"), sizes)
    firsts = dict(zip("abcd", index.firsts.tolist(), strict=False))
    policy = fp.RandomPruning(SCHEDULE, prune=32)
    pruner = made(index, policy, num_replicas=2, rank=1, batch_size=4)
    stream = PrunedStream(
        pruner,
        index,
        lambda shard: ((firsts[shard] + k, k) for k in range(sizes["abcd".index(shard)])),
    )
    loader = stream.loader(collate_fn=list)
    with pytest.warns(RuntimeWarning) as caught:
        record_all(pruner, loader, 3)
    (said,) = caught
    assert re.match("no rank trains 28 of the 63 samples that epoch 0 keeps", str(said.message))


def test_repeats_begin_at_the_beginning():
    """A rank with 5 samples trains 12: its two workers yield their own samples again."""
    kept, order = [2, 3, 30], [2, 0, 1]
    for worker, (shards, number) in enumerate([([1], 3), ([0], 2)]):
        part = assignment(
            kept, order, rank=1, ranks=2, worker=worker, workers=2, each=12, trained=0
        )
        assert (part.shards, part.kept, part.begin) == (shards, number, 0)
        assert part.end == number + (4 if worker == 0 else 3)
    assert coverage(kept, order, 2, 17) == Coverage(missed=13, repeated=12)
    with pytest.raises(InputError, match="at least 4 shards, one for each rank, got them in 3"):
        assignment(kept, order, rank=3, ranks=4, worker=0, workers=1, each=9, trained=0)


# --- shards that have changed -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda k: ["new", *k[1:]], "at place 0 the key 'new', which is not listed"),
        (lambda k: k[1:], "at place 0 the key '001', which is listed at another place"),
        (lambda k: k[:-1], "expected 7 samples in shard 'c', got 6"),
        (lambda k: [*k, "more"], "expected 7 samples in shard 'c', got one more with key 'more'"),
        (lambda k: [k[1], k[0], *k[2:]], "at place 0 the key '001'"),
        (lambda k: [], "expected 7 samples in shard 'c', got 0"),
        (lambda k: [1.5, *k], "text or integers, got 1.5 in shard 'c'"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_shard_with_other_keys_is_an_error(change, message, workers):
    def changed(shard):
        found = keys(shard)
        return ((key, RAW[0]) for key in (change(found) if shard == "c" else found))

    loader = loader_of(made(), workers, read=changed)
    with pytest.raises(InputError, match=message):
        list(loader)
    stop(loader._samples._iterator)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_cannot_be_read_is_named(workers):
    def broken(shard):
        yield from itertools.islice(read(shard), 2)
        raise OSError("gone")

    def decode(raw):
        raise ValueError("no picture")

    def missing(shard):
        raise OSError("not there")

    loaders: dict[str, dict[str, Any]] = {
        "not there.*in shard '[a-z]+', after 0 samples": {"read": missing},
        "no picture.*in the sample at place [0-9]+ of shard '[a-z]+'": {"decode": decode},
        "gone.*in shard '[a-z]+', after 2 samples": {"read": broken},
    }
    for message, options in loaders.items():
        stream = PrunedStream(made(), INDEX, options.pop("read", read), **options)
        loader = stream.loader(num_workers=workers)
        with pytest.raises((OSError, ValueError)) as caught:
            list(loader)
        stop(loader._samples._iterator)
        said = " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
        assert re.search(message, said, re.DOTALL)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 1, 3, 2], "expected key 2 at place 2 of shard 'x', got 3"),
        ([0, 1], "expected 4 samples in shard 'x', got 2"),
        ([0, 1, 2, 3, 4], "got one more with key 4"),
        (["0", 1, 2, 3], "samples' numbers as the keys of shard 'x', got '0'"),
    ],
)
def test_stored_numbers_are_checked(ids, message):
    index = KeyIndex.of_ids(["x"], [4])
    pruner = made(index, fp.FullData(1), batch_size=2)
    right = PrunedStream(pruner, index, lambda _: ((i, i) for i in range(4)))
    assert [batch.tolist() for batch, _ in right.loader()] == [[0, 1], [2, 3]]
    wrong = PrunedStream(pruner, index, lambda _: ((i, i) for i in ids))
    with pytest.raises(InputError, match=message):
        list(wrong.loader())


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pruner", "index", "options", "message"),
    [
        ({}, None, {}, "expected a KeyIndex, got NoneType: .*hashes of keys collide"),
        ({}, KeyIndex.of_ids(["x"], [5]), {}, "pruner of the 5 samples in the index, got one of"),
        ({"batch_size": None}, INDEX, {}, r"make Pruner\(\.\.\., batch_size=\.\.\.\)"),
        ({}, INDEX, {"shuffle_buffer": -1}, "shuffle_buffer to be a whole number"),
    ],
)
def test_a_stream_needs_an_index_and_a_pruner_that_fits(pruner, index, options, message):
    with pytest.raises(InputError, match=message):
        PrunedStream(made(**pruner), index, read, **options)


def test_a_training_continues_although_its_shards_have_moved_but_in_no_other_order():
    first, moved, other = (
        KeyIndex.scan([f"{folder}/{shard}" for shard in order], lambda name: keys(name[-1]))
        for folder, order in (("x", SIZES), ("y", SIZES), ("x", reversed(SIZES)))
    )

    def trained(index, state=None):
        pruner = made(index)
        if state is not None:
            pruner.load_state_dict(state)
        stream = PrunedStream(pruner, index, lambda name: read(name[-1]))
        record_all(pruner, stream.loader(collate_fn=list), 1)
        return pruner.state_dict()

    state = trained(first)
    trained(moved, state)
    with pytest.raises(InputError, match=r"expected KeyIndex=.* load the index that was saved"):
        trained(other, state)


def test_a_rank_alone_leaves_out_only_what_is_dropped():
    pruner = made(policy=fp.FullData(2), batch_size=22, drop_last=True)
    assert len(INDEX) % 22 > 0.05 * len(INDEX)
    stream = PrunedStream(pruner, INDEX, read)
    record_all(pruner, stream.loader(collate_fn=list))  # A warning would be an error.
    assert stream.coverage() == Coverage(missed=0, repeated=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle": True}, "expected no shuffle, .* shuffle_buffer, got True: leave it out"),
        ({"sampler": range(3)}, "expected no sampler"),
        ({"batch_size": 16}, "expected no batch_size, since it is that of the pruner"),
        ({"drop_last": True}, "expected no drop_last"),
        ({"pin_memory": True}, "pin their tensors in collate_fn"),
        ({"in_order": False}, "expected in_order=True"),
        ({"num_workers": -1}, "num_workers to be a whole number"),
        ({"num_workers": 11}, r"at least 11 shards, .* \(1 x 11\), got 10: use fewer workers"),
    ],
)
def test_options_that_would_undo_the_pruning_are_refused(options, message):
    with pytest.raises(InputError, match=message) as error:
        PrunedStream(made(), INDEX, read).loader(**options)
    assert "\n" not in str(error.value)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 on torch 2.13
@pytest.mark.parametrize(
    ("kind", "workers"), [(DataLoader, 0), (DataLoader, 1), (StatefulDataLoader, 0)]
)
def test_loaders_that_do_not_know_the_position_are_refused(kind, workers):
    stream = PrunedStream(made(), INDEX, read)
    options = {"persistent_workers": True} if workers else {}
    loader = kind(stream, batch_size=None, num_workers=workers, **options)
    with pytest.raises(InputError, match=r"StatefulDataLoader would skip trained samples a second"):
        next(iter(loader))
    stop(getattr(loader, "_iterator", None))


def test_another_order_is_refused_within_an_epoch_only():
    first = made()
    loader = loader_of(first, 2, 4)
    record_all(first, loader, 1)
    between = first.state_dict()
    train(first, loader, 1)
    within = first.state_dict()
    for workers, buffer, message in (
        (1, 4, "expected num_workers=2, .* got 1: .* change all else between epochs only"),
        (2, 5, "expected shuffle_buffer=4, .* got 5"),
    ):
        for state in (between, within):
            pruner = made()
            pruner.load_state_dict(state)
            other = loader_of(pruner, workers, buffer)
            if state is between:
                train(pruner, other, 1)
                continue
            with pytest.raises(InputError, match=message):
                train(pruner, other, 1)


# --- memory -----------------------------------------------------------------------------------


def test_at_most_sixteen_bytes_per_known_sample():
    number = 100_000
    index = KeyIndex(["x", "y"], [number // 2] * 2, np.zeros(number, np.uint32))
    pruner = made(index, fp.FinePruning(SCHEDULE, prune=0.3), batch_size=100)
    stream = PrunedStream(pruner, index, read)
    assert index.checksums is not None
    held = {
        "index": index.checksums.nbytes,
        "mask": stream.shared_plan.mask.nbytes,
        "kept": pruner.plan.kept.nbytes,
        "counts": pruner.counts.nbytes,
        "marks": number,  # Within an epoch.
    }
    assert sum(held.values()) == 15 * number
    # A loader process that is spawned receives the index; it shares the mask, and has no pruner.
    sent = stream.__getstate__()
    assert sent.pop("_pruner") is None
    shared = sent.pop("shared_plan")
    assert shared._mask.is_shared()
    assert len(pickle.dumps({name: sent[name] for name in sent if name != "_read"})) < 5 * number


# --- other packages ---------------------------------------------------------------------------


def write_tar(path, names):
    with tarfile.open(path, "w") as tar:
        for name in names:
            for ending, data in (("txt", f"{path.stem} {name}".encode()), ("cls", b"1")):
                member = tarfile.TarInfo(f"{name}.{ending}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


# It leaves the files open.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_shards_of_webdataset(tmp_path, workers):
    wds = pytest.importorskip("webdataset")
    for shard in range(4):
        write_tar(tmp_path / f"{shard}.tar", range(5 + shard))
    shards = [str(tmp_path / f"{shard}.tar") for shard in range(4)]

    def read(shard):
        dataset = wds.WebDataset(
            [shard], shardshuffle=False, nodesplitter=None, workersplitter=None, empty_check=False
        )
        for sample in dataset:
            yield sample["__key__"], sample

    decode = wds.autodecode.Decoder([wds.autodecode.basichandlers])
    index = KeyIndex.scan(shards, lambda shard: (key for key, _ in read(shard)))
    pruner = made(index, fp.FinePruning(SCHEDULE, prune=12), batch_size=2)
    stream = PrunedStream(pruner, index, read, decode=decode)
    loader = stream.loader(num_workers=workers, collate_fn=list)
    texts = [f"{shard} {name}" for shard in range(4) for name in range(5 + shard)]
    for epoch in pruner.epochs():
        seen = []
        for index_, samples in loader:
            assert [sample["txt"] for sample in samples] == [texts[one] for one in index_]
            assert [sample["cls"] for sample in samples] == [1] * len(samples)
            pruner.record(index_, losses_of(epoch, index_))
            seen += index_.tolist()
        assert sorted(seen) == pruner.plan.kept.tolist()


def test_hugging_face_streams_with_a_column_of_ids(tmp_path, fast_spawn):
    datasets = pytest.importorskip("datasets")
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    files = [str(tmp_path / f"{shard}.parquet") for shard in range(3)]
    for file, ids in zip(files, np.split(np.arange(21), [5, 14]), strict=True):
        pq.write_table(pa.table({"id": ids, "text": [f"text {one}" for one in ids]}), file)
    rows = datasets.load_dataset(
        "parquet", data_files=files, split="train", streaming=True, cache_dir=str(tmp_path)
    )
    sizes = [pq.read_metadata(file).num_rows for file in files]
    index = KeyIndex.of_ids([str(shard) for shard in range(rows.num_shards)], sizes)
    pruner = made(index, fp.FinePruning(SCHEDULE, prune=6), batch_size=3)
    stream = PrunedStream(pruner, index, Rows(rows), decode=text_of)
    # Arrow uses threads, which do not survive a fork.
    workers = stream.loader(num_workers=2, collate_fn=list, multiprocessing_context="spawn")
    for epoch in pruner.epochs():
        seen = []
        for number, texts in stream.loader(collate_fn=list) if epoch % 2 else workers:
            assert texts == [f"text {one}" for one in number]
            pruner.record(number, losses_of(epoch, number))
            seen += number.tolist()
        assert sorted(seen) == pruner.plan.kept.tolist()
