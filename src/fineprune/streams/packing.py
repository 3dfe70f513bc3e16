"""How samples come from loader processes: as bytes.

Torch sends each tensor of a process to another one in a file of its own. For batches, this is fast.
For single samples it is slow, and a thousand of them exceed the usual limit of open files.
"""

import io
import pickle
from typing import Any

import torch


class _Pickler(pickle.Pickler):
    """Pickles the usual tensors as NumPy arrays, since that of torch takes much longer."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.device.type != "cpu" or value.requires_grad:
            return NotImplemented
        try:
            return torch.from_numpy, (value.numpy(),)
        except (TypeError, RuntimeError):  # NumPy has no bfloat16 and no sparse arrays.
            return NotImplemented


def packed(sample: Any) -> bytes:
    """Return a sample as bytes: anything that can be pickled."""
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(sample)
    return file.getvalue()


def unpacked(data: bytes) -> Any:
    """Return the sample that ``packed`` was given."""
    return pickle.loads(data)
