"""Trains a causal language model on texts, some of which are corrupted, with and without pruning.

    python benchmarks/language_model.py train --out language_model.jsonl
    python benchmarks/language_model.py table language_model.jsonl

The texts are docstrings of installed packages, as bytes. Half of the corrupted ones are replaced by
random bytes, as after a wrong decoding, and half have their bytes in random order. Whole source
files, without corruption, are held out. A result is one JSON line. Trainings that have a line are
skipped, and one that was interrupted is trained again from its beginning.
"""

import argparse
import ast
import dataclasses
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from table import markdown
from torch import nn

import fineprune as fp
from fineprune.pruning.policies.matched import Matched
from fineprune.training.hardware import describe

PACKAGES = ["torch", "scipy", "numpy", "sklearn"]
LENGTH, PADDING, BEGIN = 128, 256, 257
WIDTH, LAYERS, HEADS = 256, 4, 4
EPOCHS, MILESTONES, SAVE = 10, (5, 8), 0.3
FEWER = {"fewer-epochs": (7, (3, 6)), "fewer-epochs-late": (7, (5, 6))}
SEED_STEP = 1_000_003
CLEAN, RANDOM_BYTES, REORDERED = range(3)


def texts(packages: list[str]) -> tuple[list[bytes], list[bytes]]:
    """Return the training texts and the held-out texts: parts of docstrings, without repeats."""
    training: dict[bytes, None] = {}
    held_out: dict[bytes, None] = {}
    for package in packages:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        root = Path(spec.origin).parent
        for file in sorted(root.rglob("*.py")):
            name = f"{package}/{file.relative_to(root)}"
            part = held_out if hashlib.sha256(name.encode()).digest()[0] < 26 else training
            for text in docstrings(file):
                data = text.encode()
                for begin in range(0, len(data) - LENGTH // 2, LENGTH - 1):
                    part[data[begin : begin + LENGTH - 1]] = None
    return list(training), [text for text in held_out if text not in training]


def docstrings(file: Path) -> list[str]:
    """Return the docstrings in a source file, none if it cannot be parsed."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return []
    described = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, described)]
    return [inspect.cleandoc(text) for text in found if text]


def chosen(candidates: list[bytes], number: int) -> list[bytes]:
    """Return ``number`` of the texts, the same ones in every call."""
    order = np.random.default_rng(0).permutation(len(candidates))[:number]
    return [candidates[place] for place in order]


def corrupted(
    clean: list[bytes], share: float, seed: int
) -> tuple[list[bytes], np.ndarray[Any, Any]]:
    """Return the texts, of which a share is corrupted, and what was done to each of them."""
    chance = np.random.default_rng([seed, 3])
    kinds = np.full(len(clean), CLEAN)
    places = chance.permutation(len(clean))[: round(share * len(clean))]
    kinds[places[::2]] = RANDOM_BYTES
    kinds[places[1::2]] = REORDERED
    made = list(clean)
    for place in places:
        data = np.frombuffer(clean[place], dtype=np.uint8)
        if kinds[place] == RANDOM_BYTES:
            made[place] = chance.integers(0, 256, len(data), dtype=np.uint8).tobytes()
        else:
            made[place] = chance.permutation(data).tobytes()
    return made, kinds


def tokens(rows: list[bytes]) -> torch.Tensor:
    """Return the texts as int64 tokens, shape (N, LENGTH), with a begin and padding."""
    made = torch.full((len(rows), LENGTH), PADDING)
    made[:, 0] = BEGIN
    for place, row in enumerate(rows):
        made[place, 1 : len(row) + 1] = torch.frombuffer(bytearray(row), dtype=torch.uint8).long()
    return made


class Block(nn.Module):
    """One layer of a transformer, with normalization before attention and before the MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.to_heads = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.from_heads = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.to_heads(self.norms[0](x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.from_heads(attended.transpose(1, 2).flatten(2))
        x = x + self.mlp(self.norms[1](x))
        return x


class LanguageModel(nn.Module):
    """Predicts each token from the ones before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BEGIN + 1, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return logits of shape (B, length, tokens) for inputs of shape (B, length)."""
        x = self.embedding(inputs) + self.position[: inputs.shape[1]]
        logits: torch.Tensor = self.norm(self.blocks(x)) @ self.embedding.weight.T
        return logits


def text_losses(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Return the mean loss over the tokens of each text, float32, shape (B,)."""
    targets = rows[:, 1:]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(rows[:, :-1])
    losses = F.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none")
    return fp.reduce_tokens(losses, targets != PADDING)


def rate(epoch: float, milestones: tuple[int, ...]) -> float:
    """Return the learning rate, which is multiplied by 0.2 at each milestone."""
    return 1e-3 * 0.2 ** sum(milestone <= epoch for milestone in milestones)


def chance_of_frequencies(rows: torch.Tensor) -> float:
    """Return the loss of a model that knows how frequent each byte is, and nothing else."""
    numbers = torch.bincount(rows[:, 1:][rows[:, 1:] != PADDING])
    shares = numbers[numbers > 0] / numbers.sum()
    return float(-(shares * shares.log()).sum())


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to train: the policy and the milestones of the learning rate."""

    policy: fp.Policy
    milestones: tuple[int, ...] = MILESTONES


def arms(rows: torch.Tensor, batch: int) -> dict[str, Callable[[], Arm]]:
    """Return what makes each arm."""
    rates = [rate(epoch, MILESTONES) for epoch in range(EPOCHS)]

    def matched() -> Arm:
        pruner = fp.Pruner(len(rows), fp.Adaptive(EPOCHS, SAVE, rates), batch_size=batch)
        numbers = pruner.policy.planned_numbers()
        assert numbers is not None
        return Arm(Matched(EPOCHS, numbers))

    made: dict[str, Callable[[], Arm]] = {
        "full": lambda: Arm(fp.FullData(EPOCHS)),
        "adaptive": lambda: Arm(fp.Adaptive(EPOCHS, SAVE, rates)),
        "fine-pruning": lambda: Arm(fp.FinePruning.for_saving(EPOCHS, SAVE, MILESTONES)),
        "matched": matched,
    }
    for name, (epochs, milestones) in FEWER.items():
        made[name] = lambda epochs=epochs, milestones=milestones: Arm(  # type: ignore[misc]
            fp.FullData(epochs), milestones
        )
    made["adaptive, chance of byte frequencies"] = lambda: Arm(fp.Adaptive(EPOCHS, SAVE, rates))
    return made


def train(
    arm: Arm,
    rows: torch.Tensor,
    kinds: np.ndarray[Any, Any],
    held_out: torch.Tensor,
    *,
    batch: int,
    seed: int,
) -> dict[str, Any]:
    """Train with one arm, and return what came of it."""
    torch.manual_seed(seed)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    pruner = fp.Pruner(len(rows), arm.policy, seed=seed, batch_size=batch)
    lengths = (rows[:, 1:] != PADDING).sum(1)
    trained = num_tokens = steps = 0
    skipped = np.zeros(3)
    began = time.perf_counter()
    losses = []
    for epoch in pruner.epochs():
        model.train()
        for group in optimizer.param_groups:
            group["lr"] = rate(epoch, arm.milestones)
        for index in torch.tensor(list(pruner.sampler)).split(batch):
            pruner.record(index, text_losses(model, rows[index])).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            trained += len(index)
            num_tokens += int(lengths[index].sum())
            steps += 1
        left = np.ones(len(rows), dtype=bool)
        left[pruner.plan.kept.numpy()] = False
        skipped += [left[kinds == kind].sum() for kind in range(3)]
        losses.append(held_out_loss(model, held_out))
    seconds = time.perf_counter() - began
    most = np.maximum(EPOCHS * np.bincount(kinds, minlength=3), 1)
    return {
        "loss": losses[-1],
        "losses": losses,
        "share_trained": trained / (EPOCHS * len(rows)),
        "steps": steps,
        "tokens_per_second": num_tokens / seconds,
        "seconds": seconds,
        "skipped": dict(
            zip(("clean", "random bytes", "reordered"), (skipped / most).tolist(), strict=True)
        ),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


@torch.inference_mode()
def held_out_loss(model: nn.Module, rows: torch.Tensor) -> float:
    """Return the mean loss over the held-out texts."""
    model.eval()
    return float(torch.cat([text_losses(model, part) for part in rows.split(250)]).mean())


def run(options: argparse.Namespace) -> None:
    """Train all arms that have no result yet."""
    torch.set_num_threads(1)
    training, holding = texts(options.packages)
    held_out = tokens(chosen(holding, options.held_out))
    clean = chosen(training, options.texts)
    for seed in range(options.seeds):
        data, kinds = corrupted(clean, options.corrupted, seed)
        rows = tokens(data)
        for name, make in arms(rows, options.batch).items():
            if options.only and name not in options.only:
                continue
            # Several processes can share the work.
            claim = options.out.with_name(f".{options.out.name}.{name}.{seed}.lock").open("w")
            try:
                fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            if (name, seed) in {(line["arm"], line["seed"]) for line in results(options.out)}:
                continue
            print(f"{name}, seed {seed}", flush=True)
            result = train(
                make(), rows, kinds, held_out, batch=options.batch, seed=seed * SEED_STEP
            )
            line = {
                "arm": name,
                "seed": seed,
                **result,
                "texts": len(rows),
                "held_out": len(held_out),
                "corrupted": options.corrupted,
                "texts_digest": hashlib.sha256(rows.numpy().tobytes()).hexdigest()[:16],
                "packages": versions(options.packages),
                "machine": vars(describe("cpu", 1)),
            }
            with options.out.open("a") as file:
                file.write(json.dumps(line) + "\n")


def versions(packages: list[str]) -> dict[str, str]:
    """Return the version of each package."""
    distributions = importlib.metadata.packages_distributions()
    return {name: importlib.metadata.version(distributions[name][0]) for name in packages}


def results(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of results; none if there is no such file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def table(lines: list[dict[str, Any]]) -> str:
    """Return a table of the arms, in the order of their first lines."""
    kinds = list(lines[0]["skipped"])
    head = ["arm", "n", "saved, %", "loss on held-out text", "to full"]
    head += [f"skipped: {kind}, %" for kind in kinds]
    rows = []
    full = {line["seed"]: line["loss"] for line in lines if line["arm"] == "full"}
    for name in dict.fromkeys(line["arm"] for line in lines):
        own = [line for line in lines if line["arm"] == name]
        losses = [line["loss"] for line in own]
        spread = f" ±{statistics.stdev(losses):.3f}" if len(losses) > 1 else ""
        differences = [line["loss"] - full[line["seed"]] for line in own if line["seed"] in full]
        compared = name != "full" and differences
        saved = 1 - statistics.fmean(line["share_trained"] for line in own)
        rows.append(
            [
                name,
                str(len(own)),
                f"{100 * saved:.1f}",
                f"{statistics.fmean(losses):.3f}{spread}",
                f"{statistics.fmean(differences):+.3f}" if compared else "-",
                *(
                    f"{100 * statistics.fmean(line['skipped'][kind] for line in own):.0f}"
                    for kind in kinds
                ),
            ]
        )
    return markdown(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    actions = parser.add_subparsers(required=True)
    training = actions.add_parser("train", help="train all arms that have no result yet")
    training.add_argument("--out", type=Path, required=True, help="file of the results, JSON lines")
    training.add_argument("--seeds", type=int, default=1)
    training.add_argument("--texts", type=int, default=2_400, help="number of training texts")
    training.add_argument("--held-out", type=int, default=300, help="number of held-out texts")
    training.add_argument("--corrupted", type=float, default=0.2, help="share of corrupted texts")
    training.add_argument("--batch", type=int, default=32)
    training.add_argument("--packages", nargs="*", default=PACKAGES, help="where texts come from")
    training.add_argument("--only", nargs="*", help="names of the arms to train")
    training.set_defaults(action=run)
    tabulating = actions.add_parser("table", help="print the table of a file of results")
    tabulating.add_argument("file", type=Path)
    tabulating.set_defaults(action=lambda options: print(table(results(options.file))))
    options = parser.parse_args()
    options.action(options)


if __name__ == "__main__":
    main()
