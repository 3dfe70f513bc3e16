"""Pruning in a loop with Accelerate, with checkpoints. Takes seconds.

    python examples/accelerate_loop.py
    ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 examples/accelerate_loop.py

The second command needs no GPU. The first line that it prints is the number of processes that train
together, since ``accelerate launch --cpu --num_processes 2`` starts only one.

Accelerate divides the batches among the processes, which ``sharded_by_loader`` tells the pruner. A
checkpoint holds the pruner, and may be written after any step. It is for the same number of
processes: with another one, the scheduler would need another number of steps.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, default_collate

import fineprune as fp

EPOCHS, BATCH, ACCUMULATION = 8, 16, 2


def main(
    save_to: Path | None = None,
    save_at: int = 0,
    resume_from: Path | None = None,
    dropout: float = 0.0,
) -> tuple[torch.nn.Module, fp.Pruner, int]:
    """Train, and return the model, the pruner and the number of optimizer steps.

    Args:
        save_to: The folder to which a checkpoint is written; None for no checkpoint.
        save_at: The optimizer step after which it is written. The training ends there.
        resume_from: The folder of a checkpoint from which the training continues.
        dropout: The share of hidden values that are set to 0.
    """
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION)
    accelerator.print(f"processes that train together: {accelerator.num_processes}")
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    train_set = TensorDataset(x[:640], torch.tensor(digits.target)[:640])

    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Dropout(dropout), torch.nn.Linear(32, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    pruner = fp.Pruner(
        train_set,
        fp.Adaptive(EPOCHS, save=0.3),
        batch_size=BATCH,  # That of one process.
        accumulation=ACCUMULATION,
        sharded_by_loader=True,
    )
    loader = DataLoader(
        pruner.dataset,
        batch_size=BATCH,
        sampler=pruner.sampler,
        collate_fn=fp.IndexedCollate(default_collate),
        generator=torch.Generator(),  # For dropout that is the same after a resume.
    )
    steps = pruner.total_steps()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=steps)
    pruner.set_rates(scheduler, by="steps")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(pruner, scheduler)
    accelerator.register_save_state_pre_hook(lambda *_: pruner.synchronize())
    if resume_from is not None:  # This replaces all other code of the script for this.
        accelerator.load_state(str(resume_from))

    taken = 0
    for epoch in pruner.epochs():
        loader.set_epoch(epoch)  # After a resume, the loader would begin with epoch 0.
        for index, (inputs, targets) in loader:
            with accelerator.accumulate(model):
                logits = model(inputs)
                losses = F.cross_entropy(logits, targets, reduction="none")
                accelerator.backward(pruner.record(index, losses, logits, targets))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                scheduler.step()  # It is not prepared, or it would step once per process.
                taken += 1
                if save_to is not None and taken == save_at:
                    accelerator.save_state(str(save_to))
                    return accelerator.unwrap_model(model), pruner, taken
        accelerator.print(f"epoch {epoch + 1}: trained on {len(pruner.plan.kept)} of 640 samples")
    return accelerator.unwrap_model(model), pruner, taken


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    main(resume_from=folder)
