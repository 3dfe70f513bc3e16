"""ResNets (He et al. 2016) in their ImageNet form, with the names of torchvision's parameters.

The stem is a 7x7 convolution with stride 2 and a max-pooling. Four stages of widths 64, 128, 256
and 512 follow, then global average pooling and one linear layer, ``fc``. The names in the state
dict (``conv1``, ``bn1``, ``layer1.0.conv1``, ``layer1.0.downsample.0``, ``fc``) and the shapes
equal those of torchvision, so that its pretrained weights fit.

The weights of the convolutions are initialised as in He et al. 2015. Batch normalisation starts
with scale 1 and shift 0, also at the end of a block. The linear layer has torch's default, uniform
within 1 / sqrt(fan-in).
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

_WIDTHS = (64, 128, 256, 512)


class ImageNetResNet(nn.Module):
    """A stem, four stages of blocks, global average pooling and one linear layer.

    The input is float images of shape (B, channels, H, W), usually 224x224; a batch of one needs
    more than 32x32 while it trains. The output is logits of shape (B, classes).

    Args:
        block: The class of the blocks.
        blocks: The number of blocks in each of the four stages.
        classes: The number of classes.
        channels: The number of channels of the images.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        blocks: Sequence[int],
        classes: int = 1000,
        channels: int = 3,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, _WIDTHS[0], 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(_WIDTHS[0])
        in_channels = _WIDTHS[0]
        stages: list[nn.Module] = []
        for width, number, stride in zip(_WIDTHS, blocks, (1, 2, 2, 2), strict=True):
            stages.append(nn.Sequential(*residual_stage(block, in_channels, width, number, stride)))
            in_channels = width * block.expansion
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(in_channels, classes)
        init_convolutions(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of a batch of images."""
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        x = F.max_pool2d(x, 3, 2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: torch.Tensor = self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


def imagenet_resnet18(classes: int = 1000, channels: int = 3) -> ImageNetResNet:
    """Build ResNet-18: basic blocks 2-2-2-2."""
    return ImageNetResNet(BasicBlock, (2, 2, 2, 2), classes, channels)


def imagenet_resnet34(classes: int = 1000, channels: int = 3) -> ImageNetResNet:
    """Build ResNet-34: basic blocks 3-4-6-3."""
    return ImageNetResNet(BasicBlock, (3, 4, 6, 3), classes, channels)


def imagenet_resnet50(classes: int = 1000, channels: int = 3) -> ImageNetResNet:
    """Build ResNet-50: bottleneck blocks 3-4-6-3."""
    return ImageNetResNet(Bottleneck, (3, 4, 6, 3), classes, channels)


def imagenet_resnet101(classes: int = 1000, channels: int = 3) -> ImageNetResNet:
    """Build ResNet-101: bottleneck blocks 3-4-23-3."""
    return ImageNetResNet(Bottleneck, (3, 4, 23, 3), classes, channels)
