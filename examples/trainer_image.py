"""Image classification with the ``Trainer`` of ``transformers``. Two lines are for the pruning.

    python examples/trainer_image.py
    torchrun --nproc-per-node 2 examples/trainer_image.py

It takes less than a minute on a processor. The images are the digits of scikit-learn.
"""

import tempfile

import torch
from sklearn.datasets import load_digits
from transformers import TrainingArguments, ViTConfig, ViTForImageClassification

import fineprune as fp
from fineprune.integrations.transformers import PruningTrainer  # 1

EPOCHS = 8


def main(samples: int = 1200, output_dir: str | None = None) -> PruningTrainer:
    digits = load_digits()
    pixels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    data = [
        {"pixel_values": image, "labels": int(label)}
        for image, label in zip(pixels, digits.target, strict=True)
    ]
    train_set, test_set = data[:samples], data[1400:]

    output_dir = output_dir or tempfile.mkdtemp()
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        num_labels=10,
    )
    model = ViTForImageClassification(config)
    args = TrainingArguments(
        output_dir=output_dir,
        num_train_epochs=EPOCHS,  # As many as the policy has.
        per_device_train_batch_size=32,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        logging_strategy="epoch",
        eval_strategy="epoch",
        save_strategy="no",
        report_to=[],
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    trainer = PruningTrainer(
        model=model,
        args=args,
        train_dataset=train_set,
        eval_dataset=test_set,
        compute_metrics=lambda given: {
            "accuracy": float((given.predictions.argmax(1) == given.label_ids).mean())
        },
        pruning=fp.Adaptive(EPOCHS, save=0.3),  # 2
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    trained = main()
    print(f"{trained.state.global_step} steps, of {trained.pruner.total_steps()} planned")
