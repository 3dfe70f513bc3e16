"""LeNet-5 (LeCun et al. 1998) for small colour images, with ReLU and max-pooling."""

import torch
from torch import nn


class LeNet(nn.Module):
    """Two 5x5 convolutions (6 and 16 channels) and three linear layers (120, 84 and the classes).

    Images have 32x32 pixels. With 3 channels and 10 classes, there are 62,006 parameters.
    """

    def __init__(self, classes: int = 10, channels: int = 3) -> None:
        super().__init__()
        # ReLU comes after the pooling: the result is the same, and it has a quarter of the work.
        self.features = nn.Sequential(
            nn.Conv2d(channels, 6, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(6, 16, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(16 * 5 * 5, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, classes),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of a batch of images."""
        logits: torch.Tensor = self.classifier(self.features(x))
        return logits
