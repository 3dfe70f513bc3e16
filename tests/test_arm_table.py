"""Statistics of comparisons, compared with numbers that were computed by hand."""

import dataclasses
import operator
from pathlib import Path

import pytest
from made_runs import made_summary, make_compare, table_rows

from fineprune.experiments.arm_table import Difference, grouped, paired_difference, paired_runs
from fineprune.runs.run import Run, read_runs

# The 0.975 quantiles of Student's t distribution with 1 and 2 degrees of freedom.
STUDENT_1, STUDENT_2 = 12.706204736, 4.302652730


def make_run(arm, seed, accuracy, *, seconds=100.0, samples=1000, title="title", lr=0.1, **summary):
    values = {
        "arm": arm,
        "seed": seed,
        "samples_trained": samples,
        "skipped_share": 1 - samples / 1000,
        "steps": samples // 10,
        "seconds_train": seconds,
        "accuracy_last": accuracy,
        "accuracy_best3": accuracy + 0.01,
        **summary,
    }
    recipe = {"training": {"lr": lr}, "pruning": {"policy": arm}, "run": {"seed": seed}}
    line = {"samples": samples, "steps": values["steps"], "seconds": seconds, "pruned": False}
    metrics = [line] if arm == "full" else []
    return Run(Path(f"{arm}-{seed}"), made_summary(**values), metrics, recipe, title)


def pruned(seed, accuracy, **values):
    return make_run("fine-pruning", seed, accuracy, samples=880, pruned_epochs=4, **values)


def small_comparison():
    return [
        pruned(0, 0.895, seconds=90.0),
        pruned(7, 0.90, seconds=170.0),
        pruned(3, 0.92, seconds=380.0),
        make_run("full", 0, 0.90, seconds=100.0, seconds_bookkeeping=0.5),
        make_run("full", 3, 0.92, seconds=400.0, seconds_bookkeeping=0.0),
        make_run("full", 7, 0.91, seconds=200.0, seconds_bookkeeping=1.0),
    ]


def test_a_row_equals_the_numbers_computed_by_hand():
    full, row = table_rows(small_comparison())
    assert (full.arm, row.arm) == ("full", "fine-pruning")
    assert row.group.label == "lenet on digits"
    assert row.seeds == 3
    assert row.seconds_train == pytest.approx(640 / 3)
    # The seeds save 10 %, 15 % and 5 %. The sums of the seconds would give 8.6 %.
    assert row.time_saved.mean == pytest.approx(0.10)
    # Steps of 1, 4 and 2 s: 88 of them, and 1.5, 2 and 1 s of overhead, save 10.5, 11.5 and 11.5 %.
    assert row.predicted_saving == pytest.approx((0.105 + 0.115 + 0.115) / 3)
    assert row.overhead == pytest.approx((1.5 + 2 + 1) / 3)
    assert full.overhead is None
    assert (row.samples_trained, row.steps) == (880, 88)
    assert row.skipped == pytest.approx(0.12)
    assert row.accuracy_last == pytest.approx(0.905)
    # No arm is compared with itself.
    assert (full.skipped, full.time_saved) == (0, None)
    assert [row.difference, row.cost, row.time, row.verdict] == [None] * 4
    # The ratios of the times are 0.9, 0.85 and 0.95.
    assert [full.cost, full.time] == pytest.approx([0.88, 0.9])


def test_the_interval_is_students_interval_of_the_paired_differences():
    difference = table_rows(small_comparison())[0].difference
    # The differences -0.005, -0.010 and 0 have mean -0.005 and standard deviation 0.005.
    half = STUDENT_2 * 0.005 / 3**0.5
    assert difference.mean == pytest.approx(-0.005)
    assert difference.half_width == pytest.approx(half)
    assert difference.low == pytest.approx(-0.005 - half)
    assert difference.high == pytest.approx(-0.005 + half)
    assert difference.pairs == 3


def test_the_equivalence_test_agrees_with_the_90_percent_interval():
    difference = table_rows(small_comparison())[0].difference
    error = 0.005 / 3**0.5
    # The end of the 90 % interval, with the 0.95 quantile for 2 degrees of freedom.
    end = 0.005 + 2.919985580 * error
    assert difference.equivalence(end) == pytest.approx(0.05)
    wider, narrower = (difference.equivalence(factor * end) or 0 for factor in (1.01, 0.99))
    assert 0 < wider < 0.05 < narrower
    # With 2 degrees of freedom, the distribution function of t is 1/2 + t / (2 sqrt(2 + t^2)).
    t = (0.005 - 0.004) / error
    by_hand = 0.5 + t / (2 * (2 + t**2) ** 0.5)
    assert difference.equivalence(0.004) == pytest.approx(by_hand)
    opposite = Difference(-difference.mean, difference.half_width, 3)
    assert opposite.equivalence(0.004) == pytest.approx(by_hand)


def test_nothing_is_equivalent_without_variation_between_seeds():
    for difference in (Difference(0.0, None, 1), Difference(0.0, 0.0, 3)):
        assert difference.equivalence(0.004) is None
        assert difference.verdict(0.004) == "no claim"


@pytest.mark.parametrize(
    ("mean", "half_width", "verdict"),
    [
        (0.02, 0.01, "better"),
        (-0.02, 0.01, "worse"),
        (0.01, 0.02, "open"),
        (0.0, 0.0005, "equal"),
        (0.001, 0.0005, "equal"),  # The interval excludes zero, but is inside the margin.
    ],
)
def test_a_verdict_claims_what_the_interval_shows(mean, half_width, verdict):
    assert Difference(mean, half_width, 3).verdict(0.004) == verdict
    assert Difference(mean, None, 1).verdict(0.004) == "no claim"
    if verdict == "equal":
        assert Difference(mean, half_width, 3).verdict(0.00001) != verdict


def test_a_second_training_costs_the_first_one_too():
    runs = small_comparison()
    for seed, left, run_seconds in ((0, 700, 100.0), (3, 800, 400.0)):
        own = {"train_samples": left, "left_out_sha256": str(seed)}
        second = make_run("second", seed, 0.93, samples=left, seconds=80.0, **own)
        second.recipe["data"] = {"without": "watched"}
        runs += [second, make_run("watched", seed, 0.9, seconds=run_seconds)]
    runs = [dataclasses.replace(run, comparison=Path("c")) for run in runs]
    rows = table_rows(runs)
    (row,) = (row for row in rows if row.arm == "second")
    assert (row.samples_trained, row.seconds_train) == (750, 80)
    assert row.samples_of_both == 1750
    assert row.skipped == pytest.approx(0.25)
    assert all(other.samples_of_both is None for other in rows if other is not row)


def test_only_seeds_of_both_arms_are_paired():
    full, row = table_rows(
        [*small_comparison()[:3], make_run("full", 0, 0.80), make_run("full", 7, 0.80)]
    )
    assert (row.seeds, full.seeds, full.difference.pairs) == (3, 2, 2)
    assert full.difference.mean == pytest.approx(0.0975)
    # 0.095 and 0.100 have standard deviation 0.005 / sqrt(2) and standard error 0.0025.
    assert full.difference.half_width == pytest.approx(STUDENT_1 * 0.0025)


def test_one_seed_gives_a_difference_without_an_interval():
    row = table_rows([make_run("full", 0, 0.90), pruned(0, 0.89)])[0]
    assert row.difference == Difference(pytest.approx(-0.01), None, 1)  # type: ignore[arg-type]
    assert row.difference.low is row.difference.high is None
    assert row.verdict == "no claim"


def test_without_full_runs_of_the_same_seeds_nothing_is_compared():
    (row,) = table_rows([pruned(0, 0.89)])
    assert row.skipped == pytest.approx(0.12)  # From its own summary.
    full, other = table_rows([make_run("full", 1, 0.90), pruned(0, 0.89)])
    assert [full.difference, full.verdict, full.cost, other.skipped] == [None] * 4
    assert [row.time_saved, row.difference, other.time_saved] == [None] * 3


def test_the_skipped_share_of_fewer_epochs_is_relative_to_full():
    short = make_run("shorter", 0, 0.89, samples=900, skipped_share=0.0)
    row = table_rows([make_run("full", 0, 0.90), short])[1]
    assert row.skipped == pytest.approx(0.1)


def test_rows_are_in_the_given_order_with_full_training_first():
    arms = ["fine-pruning", "random", "full", "shorter"]
    runs = [make_run(arm, seed, 0.9) for seed in (1, 0) for arm in arms]
    (group,) = grouped(runs)
    assert group.arms == ["full", "fine-pruning", "random", "shorter"]
    assert [run.summary.seed for run in group.of("random")] == [0, 1]
    assert group.method == "fine-pruning"


def test_the_method_is_the_policy_of_the_comparisons_recipe(tmp_path):
    folder = make_compare(tmp_path / "c", arms=["full", "random", "fine-pruning"], seeds=[0])
    (folder / "recipe.toml").write_text('[pruning]\npolicy = "fine-pruning"\n')
    (group,) = grouped(read_runs([folder]))
    assert group.method == "fine-pruning"
    (folder / "recipe.toml").write_text('[pruning]\npolicy = "full"\n')
    assert group.method == "random"
    (folder / "recipe.toml").write_text("[pruning")
    assert group.method == "random"
    assert grouped(read_runs([folder / "full-0"]))[0].method is None


def test_any_two_arms_can_be_compared():
    accuracy = operator.attrgetter("accuracy_last")
    (group,) = grouped([make_run("random", 0, 0.88), pruned(0, 0.89)])
    difference = paired_difference(paired_runs(group, "fine-pruning", "random"), accuracy)
    assert difference.mean == pytest.approx(0.01)
    assert paired_difference(paired_runs(group, "fine-pruning", "full"), accuracy) is None


def test_runs_are_grouped_by_network():
    runs = [make_run("full", 0, 0.9), make_run("full", 0, 0.8, network="vgg13")]
    runs.append(make_run("random", 0, 0.9))
    groups = grouped(runs)
    assert [group.label for group in groups] == ["lenet on digits", "vgg13 on digits"]
    assert [group.arms for group in groups] == [["full", "random"], ["full"]]


def test_comparisons_are_grouped_by_title_or_folder():
    def of(title, folder):
        run = make_run("full", 0, 0.9, title=title)
        return dataclasses.replace(run, comparison=Path(folder))

    labels = [group.label for group in grouped([of("a", "x"), of("b", "y")])]
    assert labels == ["lenet on digits, a", "lenet on digits, b"]
    labels = [group.label for group in grouped([of("a", "x"), of("a", "y")])]
    assert labels == ["lenet on digits, a, x", "lenet on digits, a, y"]


def test_runs_that_cannot_be_compared_are_refused():
    with pytest.raises(ValueError, match="2 runs of arm full with seed 0"):
        table_rows([make_run("full", 0, 0.9), make_run("full", 0, 0.8)])
    with pytest.raises(ValueError, match=r"full-0 and full-1, in which training.lr is 0.1 and 0.2"):
        table_rows([make_run("full", 0, 0.9), make_run("full", 1, 0.8, lr=0.2)])
    with pytest.raises(ValueError, match=r"full-0 and fine-pruning-0, in which training.lr is"):
        table_rows([make_run("full", 0, 0.9), pruned(0, 0.8, lr=0.2)])


def test_arms_of_a_comparison_may_differ_in_any_setting_but_not_in_their_data():
    def of(arm, **values):
        return dataclasses.replace(make_run(arm, 0, 0.9, **values), comparison=Path("c"))

    assert len(grouped([of("full"), of("shorter-1.5", lr=0.15)])) == 1
    for other in ({"data_sha256": "of others"}, {"evaluated_on": "validation"}):
        with pytest.raises(ValueError, match="full-0 and other-0, in which"):
            grouped([of("full"), of("other", **other)])
    assert len(grouped([of("full"), of("second", left_out_sha256="some", train_samples=9)])) == 1


def test_an_interval_over_equal_differences_has_no_width():
    runs = [make_run("full", seed, 0.75) for seed in (0, 1)]
    runs += [pruned(seed, 0.5) for seed in (0, 1)]
    assert table_rows(runs)[0].difference == Difference(-0.25, 0.0, 2)
