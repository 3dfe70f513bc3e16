"""IndexedBatches: shows a mixin the index, the inputs and the outputs of each training batch."""

from typing import TYPE_CHECKING, Any

import torch

from fineprune.errors import InputError
from fineprune.pruning.indexed import Indexed, IndexedCollate

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object

# The key of the indices in a batch, which no column of a data set has.
INDEX = "fineprune_index"


class IndexedBatches(_Base):
    """The part of a mixin that removes the indices before the model receives a training batch."""

    train_dataset: Any
    data_collator: Any
    _index: torch.Tensor | None = None  # That of the batch that is trained; None in an evaluation.

    def get_train_dataloader(self) -> Any:
        """Return the loader of the trainer, whose batches then contain the indices."""
        items, collator = self.train_dataset, self.data_collator
        if hasattr(items, "remove_columns"):  # So that unused columns are not even decoded.
            self.train_dataset = self._remove_unused_columns(items, description="Training")
        used = self._get_collator_with_removed_columns(collator, description="Training")
        self.train_dataset = Indexed(self.train_dataset)
        self.data_collator = IndexedCollate(used, INDEX)
        try:
            return super().get_train_dataloader()
        finally:
            self.train_dataset, self.data_collator = items, collator

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        items = self.train_dataset if train_dataset is None else train_dataset
        return super()._get_train_sampler(items.dataset if isinstance(items, Indexed) else items)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Train a batch, after removing its indices from the inputs of the model."""
        self._index = inputs.pop(INDEX, None)
        if self._index is not None:
            loss = super().training_step(model, inputs, num_items_in_batch)
            if self._index is None:
                return loss
        raise InputError(
            f"expected the training loader and the loss of the mixin, got those of a "
            f"{type(self).__name__} that replaces them: derive the class in the order (mixin, "
            f"{type(self).__name__}), and let get_train_dataloader use self.train_dataset and "
            f"self.data_collator"
        )

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Compute the loss as the trainer does and, while training, record the batch."""
        index, self._index = self._index, None
        arguments = {"return_outputs": return_outputs, "num_items_in_batch": num_items_in_batch}
        if index is None:  # This is an evaluation.
            return super().compute_loss(model, inputs, **arguments)
        given, passes = dict(inputs), []  # The trainer may remove the labels.

        def note(model: Any, inputs: Any, outputs: Any) -> None:
            if torch.is_grad_enabled():
                passes.append(outputs)

        # To ask for the outputs would cost TRL another forward pass.
        hook = model.register_forward_hook(note)
        try:
            result = super().compute_loss(model, inputs, **arguments)
        finally:
            hook.remove()
        if not passes:
            raise InputError(
                "expected compute_loss to call the model that it is given, got one that does not: "
                "call model(**inputs)"
            )
        loss = result[0] if return_outputs else result
        loss = self._record(index, loss, passes[-1], given, num_items_in_batch)
        return (loss, result[1]) if return_outputs else loss

    def _record(
        self, index: torch.Tensor, loss: Any, outputs: Any, inputs: dict[str, Any], num_items: Any
    ) -> Any:
        """Record a batch (indices, loss, outputs, inputs); return the loss to backpropagate.

        ``num_items`` is the number of labels of the whole step on all processes; None if unknown.
        """
        raise NotImplementedError

    def _labels(self, inputs: dict[str, Any]) -> Any:
        return inputs.get((self.label_names or ["labels"])[0])
