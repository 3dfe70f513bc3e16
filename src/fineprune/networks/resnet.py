"""ResNets (He et al. 2016) in the thin form for 32x32 images: three stages of widths 16, 32 and 64.

ResNet-18/34/50 of the fine-pruning paper have the block counts of the first three stages of the
ImageNet networks with these names, and no fourth stage. The stem is one 3x3 convolution. The
weights are initialised as in He et al. 2015, and batch normalisation starts with scale 1 and
shift 0.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from fineprune.networks.residual_blocks import (
    BasicBlock,
    Bottleneck,
    init_convolutions,
    residual_stage,
)

_WIDTHS = (16, 32, 64)


class ResNet(nn.Module):
    """A stem, three stages of blocks, global average pooling and one linear layer.

    The input is float images of shape (B, channels, H, W), with H and W at least 4. The output is
    logits of shape (B, classes).

    Args:
        block: The class of the blocks.
        blocks: The number of blocks in each of the three stages.
        classes: The number of classes.
        channels: The number of channels of the images.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        blocks: Sequence[int],
        classes: int = 10,
        channels: int = 3,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, _WIDTHS[0], 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(_WIDTHS[0])
        stages: list[nn.Module] = []
        in_channels = _WIDTHS[0]
        for width, number, stride in zip(_WIDTHS, blocks, (1, 2, 2), strict=True):
            stages += residual_stage(block, in_channels, width, number, stride)
            in_channels = width * block.expansion
        self.stages = nn.Sequential(*stages)
        self.linear = nn.Linear(in_channels, classes)
        init_convolutions(self)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of a batch of images."""
        x = self.stages(F.relu(self.norm(self.conv(x)), inplace=True))
        logits: torch.Tensor = self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


def resnet18(classes: int = 10, channels: int = 3) -> ResNet:
    """Build the thin ResNet-18: basic blocks 2-2-2."""
    return ResNet(BasicBlock, (2, 2, 2), classes, channels)


def resnet34(classes: int = 10, channels: int = 3) -> ResNet:
    """Build the thin ResNet-34: basic blocks 3-4-6."""
    return ResNet(BasicBlock, (3, 4, 6), classes, channels)


def resnet50(classes: int = 10, channels: int = 3) -> ResNet:
    """Build the thin ResNet-50: bottleneck blocks 3-4-6."""
    return ResNet(Bottleneck, (3, 4, 6), classes, channels)
