"""Pruning in the ``Trainer`` of Lightning. The added and changed lines are marked 1 to 4.

The policy finds the learning rates of the scheduler, and one line says so.

It takes seconds. Run it with ``--checkpoint FILE`` to continue from a checkpoint of Lightning.
"""

import argparse
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import fineprune as fp  # 1
from fineprune.integrations.lightning import DataPruning, record  # 2

EPOCHS = 12


class Classifier(pl.LightningModule):
    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        logits = self.network(x)
        losses = F.cross_entropy(logits, y, reduction="none")
        return record(self, losses, logits, y)  # 3

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        x, y = batch
        accuracy = (self.network(x).argmax(1) == y).float().mean()
        self.log("accuracy", accuracy, prog_bar=True)

    def configure_optimizers(self) -> tuple[list[Any], list[Any]]:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        steps = int(self.trainer.estimated_stepping_batches)  # The number with pruning.
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def main(checkpoint: str | None = None, progress_bar: bool = True) -> float:
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    train_loader = DataLoader(TensorDataset(x[:1280], y[:1280]), batch_size=32, shuffle=True)
    test_loader = DataLoader(TensorDataset(x[1280:], y[1280:]), batch_size=517)

    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        callbacks=[DataPruning(fp.Adaptive(EPOCHS, save=0.3))],  # 4
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=progress_bar,
    )
    network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    trainer.fit(Classifier(network), train_loader, test_loader, ckpt_path=checkpoint)

    full = EPOCHS * 1280 // 32
    print(f"{trainer.global_step} steps instead of {full}")
    accuracy = float(trainer.callback_metrics["accuracy"])
    print(f"test accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint")
    main(parser.parse_args().checkpoint)
