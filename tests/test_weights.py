"""Pretrained weights: the forms of their files, other heads, and runs that begin with them."""

import hashlib
import sys

import pytest
import torch
from resuming import outcome, small_recipe, train_through

from fineprune.networks.registry import build_network
from fineprune.networks.weights import load_weights
from fineprune.training.checkpoint import load_checkpoint
from fineprune.training.recipe import read_recipe
from fineprune.training.trainer import train


def recipe(*changes):
    data = {"name": "digits", "train_size": 128, "validation": 32}
    settings = ["training.epochs=2", "training.batch_size=32", "training.lr=0.05"]
    settings += ["training.evaluate_every=1", "pruning.policy=full"]
    return small_recipe(*settings, *changes, data=data, network={"name": "resnet18"})


def network(seed, classes=10, name="resnet18"):
    """A network with the weights of a seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build_network(name, classes, 3)


def equal(state, other):
    return state.keys() == other.keys() and all(
        torch.equal(value, other[name]) for name, value in state.items()
    )


FORMS = {
    "plain": lambda state: state,
    "state_dict": lambda state: {"epoch": 3, "state_dict": state},
    "model": lambda state: {"model": state, "optimizer": {"state": {}}},
    "model_state_dict": lambda state: {"model_state_dict": state},
    "replicated": lambda state: {f"module.{name}": value for name, value in state.items()},
    "both": lambda state: {"state_dict": {f"module.{name}": v for name, v in state.items()}},
    "halves": lambda state: {
        name: value.half() if value.is_floating_point() else value for name, value in state.items()
    },
    "without counters": lambda state: {
        name: value for name, value in state.items() if not name.endswith("num_batches_tracked")
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_file_is_loaded(form, tmp_path):
    given, path = network(1).state_dict(), tmp_path / "weights.pth"
    torch.save(FORMS[form](given), path)
    made = network(2)
    loaded = load_weights(made, path, classes=10)
    assert loaded == (hashlib.sha256(path.read_bytes()).hexdigest(), None, None)
    if form == "halves":
        assert all(p.dtype == torch.float32 for p in made.parameters())
        given = FORMS[form](given)
    assert equal(made.state_dict(), {name: value.float() for name, value in given.items()})


HEADS = {
    "lenet": "classifier.5",
    "vgg13": "linear",
    "resnet18": "linear",
    "wrn10": "linear",
    "imagenet-resnet18": "fc",
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_for_other_classes_is_left_as_initialised(name, tmp_path):
    given, made = network(1, 7, name), network(2, 10, name)
    torch.save(given.state_dict(), tmp_path / "weights.pt")
    before = {key: value.clone() for key, value in made.state_dict().items()}
    loaded = load_weights(made, tmp_path / "weights.pt", classes=10)
    assert (loaded.new_head, loaded.classes) == (HEADS[name], 7)
    head = {f"{HEADS[name]}.weight", f"{HEADS[name]}.bias"}
    for key, value in made.state_dict().items():
        assert torch.equal(value, before[key] if key in head else given.state_dict()[key])


def test_safetensors_are_loaded(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    given, made = network(1).state_dict(), network(2)
    safetensors.save_file(given, tmp_path / "weights.safetensors")
    load_weights(made, tmp_path / "weights.safetensors", classes=10)
    assert equal(made.state_dict(), given)


def test_a_missing_package_is_said_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    (tmp_path / "weights.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"pip install 'fineprune\[safetensors\]'") as raised:
        load_weights(network(1), tmp_path / "weights.safetensors", classes=10)
    assert "\n" not in str(raised.value)


class Harmful:
    ran = False

    def __reduce__(self):
        return setattr, (Harmful, "ran", True)


def changed(**values):
    """The state dict of the network with some entries replaced; None removes an entry."""
    state = dict(network(1).state_dict())
    for name, value in values.items():
        if value is None:
            del state[name.replace("__", ".")]
        else:
            state[name.replace("__", ".")] = value
    return state


WRONG = {
    "another network": (network(1, name="lenet").state_dict(), "no conv.weight, no norm.weight"),
    "missing": (changed(norm__bias=None), "got no norm.bias: set network.name"),
    "no head": (changed(linear__bias=None), "got no linear.bias"),
    "unknown": (changed(extra=torch.ones(1)), "got unknown extra"),
    "shape": (
        changed(conv__weight=torch.ones(16, 1, 3, 3)),
        "conv.weight of shape (16, 1, 3, 3) instead of (16, 3, 3, 3)",
    ),
    "more classes and features": (
        changed(linear__weight=torch.ones(7, 128)),
        "linear.weight of shape (7, 128) instead of (10, 64)",
    ),
    "a list": ([torch.ones(1)], "weights.pth, got list"),
    "empty": ({}, "weights.pth, got an empty one"),
    "numbers": ({"epoch": 3, "accuracy": 0.5}, "got 'epoch' with a value of type int"),
    "code": (Harmful(), "cannot read them: it is damaged, or holds more than tensors"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_that_does_not_fit_is_refused_in_one_line(case, tmp_path):
    content, told = WRONG[case]
    torch.save(content, tmp_path / "weights.pth")
    made = network(2)
    with pytest.raises(ValueError, match="expected") as raised:
        load_weights(made, tmp_path / "weights.pth", classes=10)
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)
    assert equal(made.state_dict(), network(2).state_dict())
    assert not Harmful.ran


def test_the_suffix_is_checked_before_anything_is_built():
    with pytest.raises(ValueError, match=r"\.pth, \.pt or \.safetensors, got 'weights\.h5'"):
        recipe("network.weights=weights.h5")


def loaded_by_hand(classes, channels):
    """A network of one's own, which loads its weights itself."""
    made = build_network("resnet18", classes, channels)
    made.load_state_dict(torch.load("weights.pth", weights_only=True))
    return made


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """A file of weights in the working directory."""
    monkeypatch.chdir(tmp_path)
    torch.save(network(5).state_dict(), "weights.pth")
    return tmp_path / "weights.pth"


def test_a_run_begins_with_the_weights_and_its_resume_does_not_read_them(weights, tmp_path):
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    begun = recipe("network.weights=weights.pth")
    summary = train(begun, tmp_path / "run")
    assert summary.weights_sha256 == digest
    train(recipe(f"network.name={__name__}:loaded_by_hand"), tmp_path / "hand")
    other = train(recipe(), tmp_path / "other")
    assert other.weights_sha256 is None
    run, hand, scratch = (outcome(tmp_path / name) for name in ("run", "hand", "other"))
    assert run == hand
    assert run[1] != scratch[1]

    train_through(0, begun, tmp_path / "stopped")
    weights.unlink()
    moved = recipe("network.weights=moved.pth")
    summary = train(moved, tmp_path / "stopped", resume=True)
    assert summary.weights_sha256 == digest
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "run")


def test_a_checkpoint_of_a_run_is_a_file_of_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(recipe("training.epochs=1"), tmp_path / "first")
    made = network(9)
    load_weights(made, tmp_path / "first/checkpoint.pt", classes=10)
    assert equal(made.state_dict(), load_checkpoint(tmp_path / "first/checkpoint.pt")["model"])


def test_a_new_head_is_told_and_a_wrong_file_leaves_no_run(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    torch.save(network(5, classes=7).state_dict(), "seven.pth")
    train(recipe("network.weights=seven.pth", "training.epochs=1"), tmp_path / "run")
    (record,) = caplog.records
    assert record.getMessage() == (
        "seven.pth has 7 classes, the network has 10: its last layer, linear, starts as initialised"
    )
    assert read_recipe(tmp_path / "run/recipe.toml").network.weights == "seven.pth"
    with pytest.raises(ValueError, match=r"expected weights in none\.pth, cannot read them: No su"):
        train(recipe("network.weights=none.pth"), tmp_path / "none")
    assert not (tmp_path / "none/recipe.toml").exists()
