"""Digits and a network for them, with which the trainings of several frameworks are compared."""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset


def digits():
    """The first 640 digits, as rows of numbers."""
    data = load_digits()
    x = torch.tensor(data.data[:640], dtype=torch.float32) / 16
    return TensorDataset(x, torch.tensor(data.target[:640]))


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))


def weights(model):
    """All weights of a model in one row, those of a sharded one as a whole."""
    parts = (
        part.full_tensor() if hasattr(part, "full_tensor") else part for part in model.parameters()
    )
    return torch.cat([part.detach().flatten() for part in parts])
