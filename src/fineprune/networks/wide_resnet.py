"""Wide residual networks (Zagoruyko & Komodakis 2016): pre-activation, widen factor 10.

The weights are initialised as in the paper, after He et al. 2015: normal with variance 2 / fan-out.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import nn

from fineprune.networks.resnet import init_convolutions, stages_of

_WIDEN = 10
_DROPOUT = 0.3
_WIDTHS = (16 * _WIDEN, 32 * _WIDEN, 64 * _WIDEN)


class WideBlock(nn.Module):
    """Two 3x3 convolutions, each after a normalisation and a ReLU, with dropout between them."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, width, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.dropout = nn.Dropout(_DROPOUT)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        same = in_channels == width and stride == 1
        self.shortcut = None if same else nn.Conv2d(in_channels, width, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return features of shape (B, width, height / stride, width / stride)."""
        y = F.relu(self.norm1(x), inplace=True)
        # The input of a projection is the activated one, as in the paper's own code.
        shortcut = x if self.shortcut is None else self.shortcut(y)
        y = self.conv1(y)
        y = self.conv2(self.dropout(F.relu(self.norm2(y), inplace=True)))
        total: torch.Tensor = y + shortcut
        return total


class WideResNet(nn.Module):
    """WRN-depth-10: a stem of 16, three stages of (depth - 4) / 6 blocks, one linear layer.

    H and W are at least 4.
    """

    def __init__(self, depth: int, classes: int = 10, channels: int = 3) -> None:
        super().__init__()
        blocks = (depth - 4) // 6
        self.conv = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        stages = stages_of(WideBlock, _WIDTHS, (blocks,) * len(_WIDTHS), 16)
        self.stages = nn.Sequential(*itertools.chain(*stages))
        self.norm = nn.BatchNorm2d(_WIDTHS[-1])
        self.linear = nn.Linear(_WIDTHS[-1], classes)
        init_convolutions(self)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of a batch of images."""
        x = F.relu(self.norm(self.stages(self.conv(x))), inplace=True)
        logits: torch.Tensor = self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits
