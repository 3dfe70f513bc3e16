"""The loss of a sample in each kind of task: the functions, and the code of the page."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import fineprune as fp
from fineprune.errors import InputError

PAGE = (Path(__file__).parents[1] / "docs/adopt/tasks.md").read_text(encoding="utf-8")
SECTIONS = {
    section.splitlines()[0]: re.findall(r"^```py\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    for section in PAGE.split("\n## ")[1:]
}
SORTS = SECTIONS.pop("A collate function that sorts")
B, CLASSES, LENGTH, BOXES = 6, 4, 7, 3


# --- the functions ---------------------------------------------------------------------------


@settings(max_examples=60, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    padding=st.sampled_from([0.0, 7.0, math.inf, math.nan]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_the_loss_of_a_text_is_the_mean_of_its_tokens(lengths, padding, dtype):
    mask = torch.arange(5) < torch.tensor(lengths)[:, None]
    values = torch.arange(5 * len(lengths)).view(-1, 5).to(dtype)
    losses = values.masked_fill(~mask, padding).requires_grad_()
    reduced = fp.reduce_tokens(losses, mask)
    expected = [
        values[row, :length].double().mean().item() if length else 0.0
        for row, length in enumerate(lengths)
    ]
    assert reduced.tolist() == pytest.approx(expected, rel=1e-6)
    assert reduced.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    reduced.sum().backward()
    share = mask / torch.tensor(lengths).clamp(min=1)[:, None]
    torch.testing.assert_close(losses.grad, share.to(dtype))


def test_many_small_losses_in_half_precision_are_added_exactly_enough():
    losses = torch.full((1, 4096), 0.01, dtype=torch.bfloat16)
    reduced = fp.reduce_tokens(losses, torch.ones(1, 4096, dtype=torch.bool))
    assert reduced.item() == pytest.approx(losses[0, 0].item(), rel=1e-4)


def test_ignored_pixels_do_not_lower_the_loss_of_an_image():
    logits, target = torch.randn(3, CLASSES, 4, 5), torch.randint(0, CLASSES, (3, 4, 5))
    target[1, :2] = 255
    target[2] = 255
    losses = F.cross_entropy(logits, target, ignore_index=255, reduction="none")
    reduced = fp.reduce_pixels(losses, target, ignore_index=255)
    for image in range(2):
        alone = F.cross_entropy(logits[image, None], target[image, None], ignore_index=255)
        assert reduced[image].item() == pytest.approx(alone.item(), rel=1e-5)
    assert reduced[2] == 0
    assert reduced[1] > 1.5 * losses[1].mean()
    usual = fp.reduce_pixels(losses[:1], target[:1], -100)
    assert usual.item() == pytest.approx(reduced[0].item())


def test_no_class_of_a_mask_of_bytes_is_ignored_by_default():
    losses, target = torch.rand(2, 4, 5), torch.randint(0, 256, (2, 4, 5))
    target[0, 0] = 156  # -100 as a byte
    expected = fp.reduce_pixels(losses, target, -100)
    assert torch.equal(fp.reduce_pixels(losses, target.to(torch.uint8), -100), expected)


ONES = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fp.reduce_tokens(ONES, ONES), "mask as bool, got torch.float32"),
        (lambda: fp.reduce_tokens(ONES.flatten(), ONES.bool()), r"losses.view_as\(mask\)"),
        (lambda: fp.reduce_tokens(ONES[0], ONES[0].bool()), r"shape \(B, tokens\), got \(3,\)"),
        (lambda: fp.reduce_pixels(ONES, ONES[:1], -100), "losses and target"),
        (lambda: fp.reduce_pixels(ONES.mean(), ONES.mean(), -100), "use reduction='none'"),
    ],
)
def test_losses_of_a_wrong_shape_are_refused(call, message):
    with pytest.raises(InputError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


# --- the page --------------------------------------------------------------------------------


class Remembers(fp.FullData):
    """A policy that remembers the losses of each sample."""

    name = "remembers"
    needs_losses = True

    def learn(self, epoch, losses, above_mean, ranking):
        trained = {index: loss for index, loss in enumerate(losses.tolist()) if loss == loss}
        self.losses = getattr(self, "losses", {}) | trained


class Heads(torch.nn.Module):
    """A network with two outputs."""

    def __init__(self):
        super().__init__()
        self.heads = torch.nn.ModuleDict(
            {"class": torch.nn.Linear(5, CLASSES), "box": torch.nn.Linear(5, 4)}
        )

    def forward(self, x):
        return {name: head(x) for name, head in self.heads.items()}


class Detector(torch.nn.Module):
    """A detector that returns the losses of a batch, as most do."""

    def __init__(self):
        super().__init__()
        self.box = torch.nn.Linear(5, 4)

    def forward(self, images, targets):
        errors = [F.l1_loss(self.box(i), t) for i, t in zip(images, targets, strict=True)]
        return {"box": torch.stack(errors).mean(), "objectness": self.box.bias.square().sum()}


def names():
    """Return what the code of the page uses: the data and the networks of its reader."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 20, (B, LENGTH))
    classes = torch.randint(0, CLASSES, (B, 3, 3))
    classes[0, 0] = 255
    return {
        "fp": fp,
        "torch": torch,
        "F": F,
        "pruner": fp.Pruner(10 * B, Remembers(2)),
        "index": torch.arange(B) * 3,
        "x": torch.randn(B, 5),
        "y": torch.randint(0, CLASSES, (B,)),
        "z": torch.randn(B, 8),
        "boxes": torch.randn(B, 4),
        "tokens": tokens,
        "padding": torch.arange(LENGTH) >= torch.arange(B)[:, None],
        "images": torch.randn(B, 2, 3, 3),
        "classes": classes,
        "photos": list(torch.randn(B, 5)),
        "targets": [torch.randn(4) for _ in range(B)],
        "model": torch.nn.Linear(5, CLASSES),
        "language_model": torch.nn.Embedding(20, 20),
        "segmenter": torch.nn.Conv2d(2, CLASSES, 1),
        "detector": Detector(),
        "two_heads": Heads(),
        "image_tower": torch.nn.Linear(5, 4),
        "text_tower": torch.nn.Linear(8, 4),
        "normalized": F.normalize,
    }


def trained(section, number=0) -> dict[str, Any]:
    """Run a piece of code of the page, end the epoch, and return its names."""
    found: dict[str, Any] = names()
    exec(compile(SECTIONS[section][number], section, "exec"), found)
    found["loss"].backward()
    found["pruner"].end_epoch()
    found["counted"] = found["pruner"].policy.losses
    return found


@pytest.mark.parametrize("section", SECTIONS)
def test_the_code_of_the_page_records_a_loss_for_each_sample(section):
    assert SECTIONS[section]
    for number in range(len(SECTIONS[section])):
        found = trained(section, number)
        assert sorted(found["counted"]) == found["index"].tolist()
        assert all(math.isfinite(loss) for loss in found["counted"].values())
        assert math.isfinite(found["loss"].item())
        networks = [value for value in found.values() if isinstance(value, torch.nn.Module)]
        assert any(p.grad is not None for network in networks for p in network.parameters())


def test_sorted_pairs_keep_each_loss_with_its_sample():
    texts = ["a" * (1 + 7 * number % 13) for number in range(24)]
    pruner = fp.Pruner(texts, fp.FullData(1), batch_size=4)

    def collate_texts(items):
        return sorted(items, key=len, reverse=True)

    names: dict[str, Any] = {"fp": fp, "pruner": pruner, "collate_texts": collate_texts}
    names["DataLoader"] = torch.utils.data.DataLoader
    exec(compile(SORTS[0], "page", "exec"), names)
    seen = [
        pair
        for index, batch in names["loader"]
        for pair in zip(index.tolist(), batch, strict=False)
    ]
    assert sorted(seen) == list(enumerate(texts))


def test_a_language_model_backpropagates_the_mean_over_all_tokens():
    found = trained("Text and token losses")
    logits = found["language_model"](found["tokens"][:, :-1])
    usual = F.cross_entropy(logits.transpose(1, 2), found["labels"])
    assert found["loss"].item() == pytest.approx(usual.item(), rel=1e-6)
    assert found["counted"][0] == 0  # All its tokens are padding.


def test_an_image_has_the_loss_that_the_detector_returns_for_it_alone():
    found = trained("Detection")
    alone = found["detector"](found["photos"][2:3], found["targets"][2:3])
    assert found["counted"][6] == pytest.approx(sum(alone.values()).item())


def test_a_mixed_loss_is_counted_for_the_first_image_only():
    found = trained("Mixup and cutmix")
    share, partner, y = found["share"], found["partner"], found["y"]
    log = F.log_softmax(found["logits"], 1).detach()
    for place, sample in enumerate(found["index"].tolist()):
        mixed = -share * log[place, y[place]] - (1 - share) * log[place, y[partner[place]]]
        assert found["counted"][sample] == pytest.approx(mixed.item(), rel=1e-5)
    assert found["loss"].item() == pytest.approx(sum(found["counted"].values()) / B, rel=1e-5)


def test_the_smoothed_loss_is_counted_and_chance_stays_where_it_was():
    found = trained("Label smoothing")
    smoothed = F.cross_entropy(found["logits"], found["y"], label_smoothing=0.1, reduction="none")
    assert list(found["counted"].values()) == pytest.approx(smoothed.tolist(), rel=1e-6)


def test_the_loss_of_a_contrastive_pair_depends_on_the_batch():
    found = trained("Contrastive losses")
    similarity = found["similarity"].detach()
    first = [F.cross_entropy(rows[:1], torch.tensor([0])) for rows in (similarity, similarity.T)]
    assert found["counted"][0] == pytest.approx((sum(first) / 2).item(), rel=1e-5)


def test_a_batch_loss_alone_trains_with_a_policy_that_needs_no_losses():
    pruner = fp.Pruner(torch.randn(48, 5), fp.RS2(3, save=0.5), batch_size=4)
    towers = torch.nn.Linear(5, 3)
    for _ in pruner.epochs():
        for index, views in pruner.loader():
            # The loss of Barlow Twins: one number for the batch.
            one, two = (towers(views + 0.1 * torch.randn_like(views)) for _ in range(2))
            correlation = F.normalize(one, dim=0).T @ F.normalize(two, dim=0)
            loss = (correlation - torch.eye(3)).square().sum()
            loss.backward()
            pruner.record(index, loss.detach().expand(len(index)))  # For the resume.
    assert "3 of 3 epochs done" in repr(pruner)
