"""The suspects of another training are skipped, by Ranked and by Adaptive, in exact steps."""

import json
import re
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fineprune as fp
from fineprune.cli.main import app
from fineprune.errors import InputError
from fineprune.experiments.compare import plan_runs
from fineprune.experiments.controls import arm_recipe, default_arms
from fineprune.labels.dataset_attributes import labels_of
from fineprune.runs.history import read_history
from fineprune.runs.run import read_run, read_runs
from fineprune.runs.training_set import UNKNOWN
from fineprune.training.data import load_data
from fineprune.training.evidence_of_run import check_same_samples
from fineprune.training.forecast import predicted_cost
from fineprune.training.hardware import resolved
from fineprune.training.loop import train
from fineprune.training.recipe import make_recipe

pytestmark = pytest.mark.usefixtures("fast_spawn")

N, EPOCHS, BATCH = 320, 12, 16
RATES = [1.0] * 4 + [0.5] * 4 + [0.1] * 4
SCORES = np.random.default_rng(0).permutation(N).astype(np.float32)  # Sample i has rank SCORES[i].
SHORT: dict[str, Any] = {"save": 0.35, "rates": RATES, "suspects": 0.25, "returning": 0.2}


def pruner_of(**options):
    return fp.Pruner(N, fp.Ranked(EPOCHS, SCORES, **options), batch_size=BATCH, seed=3)


def plans(pruner):
    """Train nothing, and return the kept samples of each epoch."""
    return [pruner.plan.kept.tolist() for _ in pruner.epochs()]


@pytest.mark.parametrize("save", [0.0, 0.1, 0.35, 0.7])
def test_the_steps_are_exact_and_known_before_the_start(save):
    pruner = pruner_of(**{**SHORT, "save": save})
    kept = plans(pruner)
    steps = sum(-(-len(samples) // BATCH) for samples in kept)
    assert steps == pruner.total_steps() == round((1 - save) * EPOCHS * N / BATCH)
    assert pruner.policy.planned_numbers() == [len(samples) for samples in kept]


def test_suspects_are_skipped_from_the_first_epoch_on_and_return_in_turn():
    kept = plans(pruner_of(**SHORT))
    returned: list[int] = []
    for samples in kept:
        suspects = [sample for sample in samples if SCORES[sample] >= 240]
        # A fifth of the 80 suspects and all 240 others would be 256 samples.
        assert len(suspects) == round(min(len(samples) / 256, 1) * 16)
        returned += suspects
    assert len(set(returned[:80])) == 80
    assert min(map(len, kept)) < 128
    never = plans(pruner_of(**{**SHORT, "returning": 0}))
    assert max(SCORES[samples].max() for samples in never) < 240


def test_the_other_samples_are_chosen_at_random_without_repeats():
    chosen: list[int] = []
    for samples in plans(pruner_of(**{**SHORT, "returning": 0})):
        assert len(samples) <= 240
        if len(samples) < 240:
            chosen += samples
    times = np.bincount(chosen, minlength=N)[SCORES < 240]
    assert times.max() - times.min() == 1
    other = fp.Pruner(N, fp.Ranked(EPOCHS, SCORES, **SHORT), batch_size=BATCH, seed=4)
    assert plans(other) != plans(pruner_of(**SHORT))


def test_if_more_are_suspected_than_must_be_skipped_the_least_suspicious_are_trained():
    for samples in plans(pruner_of(save=0.1, suspects=0.5, returning=0, rates=[1] * EPOCHS)):
        assert sorted(SCORES[samples]) == list(range(288))


def test_a_state_of_other_scores_is_refused():
    state = pruner_of(**SHORT).state_dict()
    other = fp.Pruner(N, fp.Ranked(EPOCHS, -SCORES, **SHORT), batch_size=BATCH, seed=3)
    with pytest.raises(InputError, match="scores"):
        other.load_state_dict(state)


def earlier_watch(wrong=40, scale=6.0, passes=10, wavering=0):
    """Return the watch of a training in which the first labels were wrong.

    The first of these were answered as they are labelled in the first third of the passes.
    """
    labels = torch.arange(N) % 4
    logits = scale * torch.nn.functional.one_hot(labels, 4).float()
    labels[:wrong] = (labels[:wrong] + 1) % 4
    watch = fp.LabelWatch(N, 4)
    for number in range(passes):
        seen = logits.clone()
        if number < passes / 3:
            seen[:wavering] = scale * torch.nn.functional.one_hot(labels[:wavering], 4)
        watch.record(torch.arange(N), seen, labels)
    return watch


def test_a_watch_gives_the_scores_and_the_number_of_suspects():
    watch = earlier_watch()
    policy = fp.Ranked(EPOCHS, watch, rates=RATES)
    assert policy.num_suspects() == watch.num_suspects() == 40
    assert set(policy.suspects()[0][:40].tolist()) == set(range(40))


@pytest.mark.parametrize(
    "policy",
    [
        lambda watch: fp.Ranked(EPOCHS, watch, rates=RATES),
        lambda watch: fp.Ranked(EPOCHS, watch, rates=RATES, suspects=20),
        lambda watch: fp.Adaptive(EPOCHS, rates=RATES, earlier=watch),
    ],
)
@pytest.mark.parametrize(("every", "unlearned"), [(20, True), (6, True), (20, False)])
def test_suspects_of_a_class_that_was_not_learned_or_is_rare_are_trained(policy, every, unlearned):
    labels = torch.arange(N) % 3
    rare = torch.arange(N) % every == every - 1
    logits = 6.0 * torch.nn.functional.one_hot(labels, 4).float()
    labels[:20] = (labels[:20] + 1) % 3
    labels[rare] = 3
    if not unlearned:
        logits[rare & (torch.arange(N) >= N // 2)] = torch.tensor([0.0, 0.0, 0.0, 6.0])
    suspects = set(range(20)) | set(np.flatnonzero(rare & (logits[:, 3] == 0)).tolist())
    watch = fp.LabelWatch(N, 4)
    for _ in range(20):
        watch.record(torch.arange(N), logits, labels)
    ranking = watch.ranking()
    assert set(np.flatnonzero(ranking.scores > 0)) == suspects
    assert torch.equal(ranking.unlearned, rare & unlearned)
    pruner = fp.Pruner(N, policy(watch))
    for _ in pruner.epochs():
        skipped = set(range(N)) - set(pruner.plan.kept.tolist())
        assert skipped <= suspects - set(np.flatnonzero(rare))
        assert skipped or len(skipped) == pruner.policy.num_suspects()
        break
    said = "classes that the network has not learned (3)"
    assert (said in " ".join(watch.advice())) == unlearned


@pytest.mark.parametrize("moved", [0, 1])
def test_the_watch_of_other_data_is_said_if_the_labels_are_recorded(moved):
    labels = torch.arange(N) % 4
    logits = 6 * torch.nn.functional.one_hot(labels, 4).float()
    watch = fp.LabelWatch(N, 4)
    for _ in range(10):
        watch.record(torch.arange(N - 1), logits[:-1], labels[:-1])
    pruner = fp.Pruner(N, fp.Ranked(EPOCHS, watch, rates=RATES), batch_size=BATCH)
    index = next(iter(pruner.sampler.order().split(BATCH)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pruner.record(index, torch.ones(BATCH), logits[index], (labels[index] + moved) % 4)
    found = [
        "another label than in the earlier training" in str(warning.message) for warning in caught
    ]
    assert found == [True] * moved


class WithTargets(torch.utils.data.Dataset[Any]):
    def __init__(self, labels):
        self.targets = labels.tolist()

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        raise AssertionError("no sample is read")


class Transformed(WithTargets):
    """Targets in one tensor, of which the transform is given numbers, as in torchvision's MNIST."""

    def __init__(self, labels, target_transform):
        self.targets = labels
        self.target_transform = target_transform


@pytest.mark.parametrize(
    "made",
    [
        lambda labels: torch.utils.data.TensorDataset(torch.zeros(N, 2), labels),
        WithTargets,
        lambda labels: fp.Indexed(WithTargets(labels)),
        lambda labels: torch.utils.data.Subset(WithTargets(labels.repeat(2)), range(N)),
        lambda labels: Transformed(labels, {label: label for label in range(4)}.__getitem__),
    ],
)
@pytest.mark.parametrize("policy", [fp.Ranked, fp.Adaptive])
def test_the_watch_of_other_data_is_said_at_the_start_if_the_data_set_has_its_labels(made, policy):
    labels, evidence = earlier_watch().labels(), earlier_watch()
    given = {"scores": evidence} if policy is fp.Ranked else {"earlier": evidence}
    for own, times in ((labels, 0), ((labels + 1) % 4, 1)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pruner = fp.Pruner(made(own), policy(EPOCHS, rates=RATES, **given), batch_size=BATCH)
            index = pruner.sampler.order()[:BATCH]
            pruner.record(index, torch.ones(BATCH), torch.zeros(BATCH, 4), own[index])
        found = [str(warning.message) for warning in caught if warning.filename == __file__]
        assert len(found) == times
        assert all(message.startswith(f"{N} of {N} samples have another") for message in found)


def fails(_):
    raise KeyError("cat")


def class_names(_):
    data = WithTargets(torch.zeros(10))
    data.targets = list("abcdefghij")
    return torch.utils.data.Subset(data, range(5, 10))


@pytest.mark.parametrize(
    "made",
    [
        class_names,
        lambda labels: Transformed(labels, fails),
        lambda labels: torch.utils.data.TensorDataset(torch.zeros(N, 2), labels, torch.arange(N)),
    ],
)
def test_what_a_data_set_has_in_place_of_labels_is_not_compared(made):
    data = made(earlier_watch().labels())
    assert labels_of(data) is None
    if len(data) == N:
        fp.Pruner(data, begun(earlier_watch()), batch_size=BATCH)


@pytest.mark.parametrize("equal", [0, 3])
def test_scores_in_the_order_of_the_suspects_are_said(equal):
    ordered = np.sort(np.maximum(SCORES, equal))[::-1]
    with pytest.warns(RuntimeWarning, match=r"give watch.scores\(\)"):
        fp.Ranked(EPOCHS, [*ordered, -np.inf, -np.inf], suspects=0.2)


def test_a_few_scores_in_order_are_believed():
    fp.Ranked(EPOCHS, np.repeat([2.0, 1.0, 0.0], 100), suspects=0.2)


def test_a_state_with_earlier_evidence_says_so_if_it_is_not_given_again():
    state = fp.Pruner(N, begun(earlier_watch()), batch_size=BATCH).state_dict()
    again = fp.Pruner(N, fp.Adaptive(EPOCHS, 0.35, RATES), batch_size=BATCH)
    with pytest.raises(InputError, match=r"a pruner state with earlier=None, got [0-9a-f]"):
        again.load_state_dict(state)


GIVEN: dict[str, Any] = {"epochs": 3, "scores": SCORES, "suspects": 0.2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scores": SCORES[None]}, r"scores of shape \(N,\), got shape \(1, 320\)"),
        ({"scores": ["a"]}, "scores as numbers"),
        ({"scores": fp.LabelWatch(N, 4).state_dict()}, "not .dict.: give a LabelWatch"),
        ({"scores": [0.0, np.nan]}, "scores without NaN, got 1"),
        ({"scores": SCORES[:9]}, "for each of 320 samples, got 9: .*-inf for new ones"),
        ({"suspects": None}, r"expected suspects, .* the samples \(watch.scores\(\)\)"),
        ({"suspects": 1.5}, "expected suspects as a share"),
        ({"suspects": N}, "expected suspects to leave at least one of 320"),
        ({"save": 1.0}, "expected save as a share"),
        ({"returning": 2}, "expected returning as a share"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, message):
    with pytest.raises(InputError, match=message) as caught:
        fp.Pruner(N, fp.Ranked(**{**GIVEN, **arguments}))
    assert "\n" not in str(caught.value)


# -- Adaptive with earlier evidence --------------------------------------------------------------


def begun(watch, **options):
    return fp.Adaptive(EPOCHS, 0.35, RATES, earlier=watch, **options)


def watch_alone(watch):
    return fp.Ranked(EPOCHS, watch, rates=RATES)


def adaptive_plans(pruner, losses=None, epochs=EPOCHS):
    kept = []
    for _ in pruner.epochs():
        order = torch.tensor(list(pruner.sampler))
        kept.append(pruner.plan.kept.tolist())
        for batch in order.split(BATCH):
            pruner.record(batch, torch.ones(len(batch)) if losses is None else losses[batch])
        if len(kept) == epochs:
            pruner.end_epoch()
            break
    return kept


@pytest.mark.parametrize("patience", [0, 5])
def test_adaptive_skips_earlier_suspects_from_the_first_epoch_on(patience):
    pruner = fp.Pruner(N, begun(earlier_watch(), patience=patience), batch_size=BATCH)
    assert pruner.policy.num_suspects() == 40
    kept = adaptive_plans(pruner)
    back = [[sample for sample in samples if sample < 40] for samples in kept]
    # A tenth of 40 returns, and 4 fill the last batch of the 280 others and these.
    assert len(kept[0]) == 288
    assert len(back[0]) == 8
    # Each suspect returns before any returns again, so there is evidence on all in the end.
    assert set().union(*back) == set(range(40))
    assert sum(-(-len(samples) // BATCH) for samples in kept) == pruner.total_steps() == 156


@pytest.mark.parametrize(("before", "added"), [(0, 0), (11, 0), (12, 12)])
def test_adaptive_adds_what_it_finds_to_earlier_suspects(before, added):
    losses = torch.ones(N)
    losses[: before + 12] = 3.0  # 7.5 % of all samples are 24, and those found before count.
    watch = earlier_watch(before, passes=20)
    pruner = fp.Pruner(N, begun(watch, chance=2.0), batch_size=BATCH)
    assert pruner.policy.num_suspects() == before
    adaptive_plans(pruner, losses, epochs=8)
    assert pruner.policy.num_suspects() == before + added


@pytest.mark.parametrize("make", [begun, watch_alone])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"wrong": 30, "wavering": 15}, "30 suspects of the earlier training are fewer than 5%"),
        ({"passes": 9}, "may be hard samples: it trained each one only 9 times"),
        ({"scale": 0.01, "wrong": 160}, "hard samples: it answers only 50% as they are labelled"),
    ],
)
def test_suspects_that_are_not_clear_are_not_skipped_which_is_said(make, options, said):
    watch = earlier_watch(**options)
    with pytest.warns(RuntimeWarning, match=said + ".*so none is skipped: .* fp.Ranked .* susp"):
        policy = make(watch)
    pruner = fp.Pruner(N, policy, batch_size=BATCH)
    assert pruner.policy.num_suspects() == 0
    number = watch.num_suspects()
    assert fp.Ranked(EPOCHS, watch, rates=RATES, suspects=number).num_suspects() == number


def test_adaptive_finds_samples_by_itself_if_the_earlier_training_is_in_doubt():
    losses = torch.ones(N)
    losses[:24] = 3.0  # 7.5 % of all samples
    with pytest.warns(RuntimeWarning, match="so none is skipped"):
        policy = begun(earlier_watch(wrong=160, scale=0.01, passes=20), chance=2.0)
    pruner = fp.Pruner(N, policy, batch_size=BATCH)
    adaptive_plans(pruner, losses, epochs=8)
    assert pruner.policy.num_suspects() == 24


@pytest.mark.parametrize("make", [begun, watch_alone])
@pytest.mark.parametrize(("passes", "skipped"), [(19, 20), (20, 40)])
def test_samples_that_were_often_answered_as_labelled_are_no_clear_suspects(make, passes, skipped):
    pruner = fp.Pruner(N, make(earlier_watch(passes=passes, wavering=20)), batch_size=BATCH)
    assert pruner.policy.num_suspects() == skipped


# The labels have 0.45 or 0.53 of the evidence, and this training makes 40 * 0.65 = 26 passes.
@pytest.mark.parametrize(("scale", "passes", "added"), [(0.9, 26, 0), (1.2, 26, 24), (0.9, 22, 24)])
def test_adaptive_adds_to_the_suspects_of_a_network_that_learned_the_others_or_trained_shorter(
    scale, passes, added
):
    watch = earlier_watch(12, scale, passes)
    assert watch.passes == passes
    assert watch.ranking().learned == (scale > 1)
    policy = fp.Adaptive(40, 0.35, [1.0] * 40, earlier=watch, chance=2.0)
    pruner = fp.Pruner(N, policy, batch_size=BATCH)
    losses = torch.ones(N)
    losses[12:36] = 3.0
    adaptive_plans(pruner, losses, epochs=8)
    assert pruner.policy.num_suspects() == 12 + added


def test_adaptive_adds_no_hard_samples_where_earlier_mistakes_are_in_few_pairs_of_classes():
    truth = torch.arange(N) % 4
    given = torch.where((truth == 3) & (torch.arange(N) < 160), 2, truth)
    watch = fp.LabelWatch(N, 4)
    # Different logits, because equal scores are not called confused.
    noise = torch.rand(N, 4, generator=torch.Generator().manual_seed(0))
    for _ in range(10):
        watch.record(torch.arange(N), 6 * torch.nn.functional.one_hot(truth, 4) + noise, given)
    assert watch.ranking().confused.any()
    assert watch.num_suspects() == 40
    pruner = fp.Pruner(N, begun(watch, chance=2.0), batch_size=BATCH)
    adaptive_plans(pruner, torch.where(truth == 1, 3.0, 1.0), epochs=8)
    assert pruner.policy.num_suspects() == 40


def test_adaptive_continues_with_the_same_earlier_suspects_only():
    whole = fp.Pruner(N, begun(earlier_watch()), batch_size=BATCH, seed=3)
    kept = adaptive_plans(whole)
    first = fp.Pruner(N, begun(earlier_watch()), batch_size=BATCH, seed=3)
    half = adaptive_plans(first, epochs=5)
    second = fp.Pruner(N, begun(earlier_watch()), batch_size=BATCH, seed=3)
    second.load_state_dict(first.state_dict())
    assert half + adaptive_plans(second) == kept
    for other in (None, earlier_watch(wrong=41)):
        with pytest.raises(InputError, match="earlier"):
            fp.Pruner(N, begun(other), batch_size=BATCH, seed=3).load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("earlier", "message"),
    [
        (SCORES, "expected earlier as the LabelWatch of another training, got ndarray"),
        (fp.LabelWatch(N, 4), "expected a recorded training"),
    ],
)
def test_earlier_evidence_must_be_a_watch_that_recorded(earlier, message):
    with pytest.raises(InputError, match=message) as caught:
        begun(earlier)
    assert "\n" not in str(caught.value)


def test_earlier_evidence_on_other_samples_is_refused():
    with pytest.raises(InputError, match=r"the same 321 samples, got one on 320: .*fp.Ranked"):
        fp.Pruner(N + 1, begun(earlier_watch()), batch_size=BATCH)


# -- in recipes ------------------------------------------------------------------------------------

DIGITS = {
    "data": {"name": "digits", "train_size": 512, "label_noise": 0.3},
    "training": {
        "epochs": 12,
        "batch_size": 32,
        "lr": 0.05,
        "milestones": [8],
        "momentum": 0.9,
        "evaluate_every": 12,
        "evaluate_last": 1,
    },
    "run": {"device": "cpu", "threads": 1, "precision": "float32", "compile": "off"},
}


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranked") / "watched"
    train(make_recipe(DIGITS, ["training.epochs=10"]), folder)
    return folder


def ranked_by(run, *changes):
    settings = ["pruning.policy=ranked", f"pruning.scores={run}", "pruning.save=0.25"]
    return make_recipe(DIGITS, [*settings, "training.epochs=8", *changes])


def test_a_run_skips_mostly_the_wrong_labels_that_another_run_found(watched, tmp_path):
    ranked = tmp_path / "ranked"
    train(ranked_by(watched), ranked)
    wrong = load_data(resolved(ranked_by(watched))).wrong
    assert wrong is not None
    skipped = ~read_history(ranked, 512).trained
    assert skipped[:, wrong].mean() > 0.75
    assert skipped[:, ~wrong].mean() < 0.1
    cost = predicted_cost(ranked_by(watched), 512)
    assert read_run(ranked).summary.steps == cost.steps == round(0.75 * 8 * 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.train_size=480", "which trained 512 samples instead of 480"),
        ("data.label_noise_seed=1", "whose labels differ"),
        ("data.label_noise=none", "whose labels differ"),
    ],
)
def test_a_run_on_other_samples_or_labels_is_refused_at_the_start(
    watched, tmp_path, change, message
):
    with pytest.raises(InputError, match=message) as caught:
        train(ranked_by(watched, change), tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_labels_that_the_data_hide_are_not_compared(watched):
    data = load_data(resolved(ranked_by(watched)))
    shown = data.training_set()
    hidden = replace(shown, labels=np.full_like(shown.labels, UNKNOWN))
    check_same_samples("scores", watched, replace(data, training_set=lambda: hidden))
    moved = replace(shown, index=shown.index + 1)
    with pytest.raises(InputError, match="whose samples differ"):
        check_same_samples("scores", watched, replace(data, training_set=lambda: moved))


def test_plan_shows_the_numbers_of_samples(watched, tmp_path):
    (tmp_path / "recipe.toml").write_text(ranked_by(watched).to_toml())
    shown = CliRunner().invoke(app, ["plan", str(tmp_path / "recipe.toml"), "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["steps"] == round(0.75 * 8 * 16)


def test_a_recipe_needs_a_run_that_has_kept_its_evidence(watched, tmp_path):
    with pytest.raises(InputError, match=r"expected pruning.scores, the folder"):
        make_recipe(DIGITS, ["pruning.policy=ranked"])
    with pytest.raises(InputError, match="expected a finished run"):
        train(ranked_by(tmp_path / "none"), tmp_path / "run")
    train(make_recipe(DIGITS, ["training.epochs=8", "run.history=false"]), tmp_path / "bare")
    with pytest.raises(InputError, match="expected a run with evidence"):
        train(ranked_by(tmp_path / "bare"), tmp_path / "run")


@pytest.mark.long
def test_compare_trains_it_beside_its_controls(watched, tmp_path):
    recipe = ranked_by(watched, "training.epochs=3", "training.milestones=[2]")
    assert default_arms(recipe) == ("full", "ranked", "matched", "shorter")
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    command = ["compare", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "compared")]
    result = CliRunner().invoke(app, [*command, "--arms", "full,ranked,matched"])
    assert result.exit_code == 0, result.output
    runs = {run.summary.arm: run.summary for run in read_runs([tmp_path / "compared"])}
    assert list(runs) == ["full", "ranked", "matched"]
    assert runs["ranked"].samples_trained == runs["matched"].samples_trained
    assert runs["ranked"].steps == round(0.75 * runs["full"].steps)


def test_it_is_an_arm_beside_another_policy_if_the_recipe_names_a_run(watched):
    recipe = ranked_by(watched, "pruning.policy=adaptive")
    arm = arm_recipe(recipe, "ranked", 512)
    assert predicted_cost(arm, 512).steps == predicted_cost(recipe, 512).steps
    with pytest.raises(InputError, match=r"expected pruning.scores"):
        arm_recipe(recipe.replaced("pruning", scores=None), "ranked", 512)
    other = ranked_by(watched, "data.label_noise_seed=1")
    with pytest.raises(InputError, match="labels differ"):
        plan_runs(other, watched.parent / "compared", 1, ["full", "ranked"])


def adaptive_after(run, *changes):
    settings = ["pruning.policy=adaptive", f"pruning.earlier={run}", "pruning.save=0.35"]
    return make_recipe(DIGITS, [*settings, "training.epochs=8", *changes])


def test_a_recipe_of_adaptive_begins_with_the_suspects_of_a_run(watched, tmp_path):
    train(adaptive_after(watched), tmp_path / "run")
    wrong = load_data(resolved(adaptive_after(watched))).wrong
    assert wrong is not None
    skipped = ~read_history(tmp_path / "run", 512).trained
    assert skipped[:, wrong].mean() > 0.75
    assert skipped[:, ~wrong].mean() < 0.2
    (tmp_path / "recipe.toml").write_text(adaptive_after(watched).to_toml())
    shown = CliRunner().invoke(app, ["plan", str(tmp_path / "recipe.toml")])
    assert re.search(r"already without the 1\d\d suspects of the earlier training", shown.stdout)
    with pytest.raises(InputError, match=r"expected for pruning.earlier a run .* labels differ"):
        train(adaptive_after(watched, "data.label_noise_seed=1"), tmp_path / "other")
    with pytest.raises(InputError, match=r"pruning.earlier with pruning.policy = .adaptive. only"):
        make_recipe(DIGITS, ["pruning.policy=random", "pruning.earlier=run"])
