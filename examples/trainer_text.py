"""A causal language model with the ``Trainer`` of ``transformers``. Two lines are for the pruning.

    python examples/trainer_text.py

It takes less than a minute on a processor. The texts are the docstrings of PyTorch, as bytes. The
loss of a text is the mean over its tokens, without padding.
"""

import inspect
import tempfile
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import fineprune as fp
from fineprune.integrations.transformers import PruningTrainer  # 1

EPOCHS, LENGTH, PADDING, BEGIN = 6, 64, 256, 257


def texts() -> list[bytes]:
    """Return the beginnings of docstrings."""
    found = (inspect.getdoc(getattr(torch, name, None)) for name in sorted(dir(torch)))
    return sorted({text.encode()[: LENGTH - 1] for text in found if text and len(text) > 20})


def collate(items: list[dict[str, bytes]]) -> dict[str, torch.Tensor]:
    """Pad texts to the same length; padding has no loss."""
    tokens = [[BEGIN, *item["text"]] for item in items]
    longest = max(map(len, tokens))
    padded = [row + [PADDING] * (longest - len(row)) for row in tokens]
    input_ids = torch.tensor(padded)
    mask = input_ids != PADDING
    return {
        "input_ids": input_ids,
        "attention_mask": mask.long(),
        "labels": input_ids.masked_fill(~mask, -100),
    }


def main(number: int = 640, output_dir: str | None = None) -> PruningTrainer:
    data: list[Any] = [{"text": text} for text in texts()[:number]]
    output_dir = output_dir or tempfile.mkdtemp()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        bos_token_id=BEGIN,
        eos_token_id=PADDING,
        pad_token_id=PADDING,
    )
    args = TrainingArguments(
        output_dir=output_dir,
        num_train_epochs=EPOCHS,  # As many as the policy has.
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="linear",
        logging_strategy="epoch",
        save_strategy="no",
        report_to=[],
        remove_unused_columns=False,  # The collate function makes the columns of the model.
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    trainer = PruningTrainer(
        model=LlamaForCausalLM(config),
        args=args,
        train_dataset=data,
        data_collator=collate,
        pruning=fp.Adaptive(EPOCHS, save=0.3),  # 2
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    trained = main()
    print(f"{trained.state.global_step} steps, of {trained.pruner.total_steps()} planned")
