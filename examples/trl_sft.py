"""Supervised fine-tuning with TRL. The added and changed lines are marked 1 to 3.

    python examples/trl_sft.py

It takes less than a minute on a processor. A small network learns to add: the prompts are sums, and
the completions are their results. A network of your own would come from ``from_pretrained``.
"""

import itertools
import string
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import fineprune as fp
from fineprune.integrations.transformers import PruningMixin  # 1

EPOCHS = 3


class PruningSFTTrainer(PruningMixin, SFTTrainer):  # 2
    """Supervised fine-tuning with pruning. A text's loss is the mean over its labelled tokens."""


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are single characters."""
    tokens = ["<pad>", "<eos>", *string.digits, *" +="]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocabulary, [])),
        pad_token="<pad>",
        eos_token="<eos>",
    )


def sums(number: int) -> Dataset:
    """Return prompts such as "17 + 25 = " and completions such as "42"."""
    pairs = itertools.islice(itertools.product(range(40), range(40)), number)
    return Dataset.from_list(
        [{"prompt": f"{one} + {other} = ", "completion": f"{one + other}"} for one, other in pairs]
    )


def network(tokens: PreTrainedTokenizerFast, size: int = 64) -> LlamaForCausalLM:
    """Return a small language model with random weights."""
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=size,
        intermediate_size=2 * size,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        pad_token_id=tokens.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokens.eos_token_id,
    )
    return LlamaForCausalLM(config)


def main(number: int = 640, output_dir: str | None = None) -> PruningSFTTrainer:
    output_dir = output_dir or tempfile.mkdtemp()
    torch.manual_seed(0)
    tokens = tokenizer()
    model, train_set = network(tokens), sums(number)
    args = SFTConfig(
        output_dir=output_dir,
        num_train_epochs=EPOCHS,  # As many as the policy has.
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        lr_scheduler_type="linear",
        logging_strategy="epoch",
        save_strategy="no",
        report_to=[],
        bf16=False,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    trainer = PruningSFTTrainer(
        model=model,
        args=args,
        train_dataset=train_set,
        processing_class=tokens,
        pruning=fp.Adaptive(EPOCHS, save=0.3),  # 3
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    trained = main()
    print(f"{trained.state.global_step} steps, of {trained.pruner.total_steps()} planned")
