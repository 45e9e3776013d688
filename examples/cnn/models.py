"""AlexNet, VGG16, MobileNet, Plain20, ResNet-18 and SqueezeNet, for CIFAR's images and ImageNet's.

The layers and channels are those of the papers. ImageNet's form takes images of 224 pixels and
CIFAR's of 32, where the first layers keep more of the resolution, as is usual.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

#: Pixels of a side.
SIDES = {"cifar": 32, "imagenet": 224}
#: The first has outputs that are half zeros, the others have dense ones.
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": partial(nn.ReLU, inplace=True),
    "leaky_relu": partial(nn.LeakyReLU, inplace=True),
    "elu": partial(nn.ELU, inplace=True),
    "tanh": nn.Tanh,
    "prelu": nn.PReLU,
}
DROPOUT = 0.5


#: What layers are called, as in the paper's figures: relu4 is the fourth of its kind in a sequence.
NAMES: dict[type[nn.Module], str] = {
    nn.Conv2d: "conv",
    nn.BatchNorm2d: "norm",
    nn.MaxPool2d: "max",
    nn.AdaptiveAvgPool2d: "mean",
}


def sequence(*layers: nn.Module) -> nn.Sequential:
    """Return layers one after the other, named by their kind and counted from 1."""
    counts: Counter[str] = Counter()
    named = OrderedDict()
    for layer in layers:
        name = NAMES.get(type(layer), type(layer).__name__.lower())
        counts[name] += 1
        named[f"{name}{counts[name]}"] = layer
    return nn.Sequential(named)


@dataclass(frozen=True)
class Design:
    """What all models are made by.

    Parameters
    ----------
    small : bool
        CIFAR's form, for images of 32 pixels; else ImageNet's.
    classes : int
        Outputs.
    activation : callable
        Makes the module behind each convolution and linear layer.
    width : float
        Channels as a share of the published ones.
    """

    small: bool
    classes: int
    activation: Callable[[], nn.Module]
    width: float = 1.0

    def channels(self, published: int) -> int:
        """Return how many channels there are in the place of the published number."""
        return max(4, round(published * self.width))

    def conv(
        self,
        n_in: int,
        n_out: int,
        kernel: int = 3,
        *,
        stride: int = 1,
        padding: int | None = None,
        groups: int = 1,
        norm: bool = False,
        activation: bool = True,
    ) -> list[nn.Module]:
        """Return a convolution with batch norm and activation, where they are wanted."""
        padding = kernel // 2 if padding is None else padding
        layers: list[nn.Module] = [
            nn.Conv2d(n_in, n_out, kernel, stride, padding, groups=groups, bias=not norm)
        ]
        if norm:
            layers.append(nn.BatchNorm2d(n_out))
        if activation:
            layers.append(self.activation())
        return layers


def make_model(
    name: str, shape: str, classes: int, activation: str = "relu", width: float = 1.0
) -> nn.Module:
    """Return a model of MODELS with weights drawn by torch's generator.

    Parameters
    ----------
    name : str
        One of MODELS.
    shape : {"cifar", "imagenet"}
        Which images it takes, float ``[B, 3, side, side]``.
    classes : int
        It returns scores, float ``[B, classes]``.
    activation : str
        One of ACTIVATIONS.
    width : float
        Channels as a share of the published ones.
    """
    model = MODELS[name](Design(shape == "cifar", classes, ACTIVATIONS[activation], width))
    layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    for layer in layers:
        # He et al. 2015: deep ones without batch norm do not train from torch's own.
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    # All classes are alike at first.
    nn.init.normal_(layers[-1].weight, std=0.01)
    return model


def alexnet(design: Design) -> nn.Module:
    """Krizhevsky 2014 (arXiv 1404.5997), one tower."""
    a, b, c, d = map(design.channels, (64, 192, 384, 256))
    hidden = design.channels(4096)
    if design.small:
        stem, pool, side = design.conv(3, a, 3, stride=2), partial(nn.MaxPool2d, 2), 2
        second = design.conv(a, b, 3)
    else:
        stem = design.conv(3, a, 11, stride=4, padding=2)
        pool, side = partial(nn.MaxPool2d, 3, 2), 6
        second = design.conv(a, b, 5)
    return sequence(
        *(*stem, pool(), *second, pool()),
        *(*design.conv(b, c), *design.conv(c, d), *design.conv(d, d), pool()),
        *_perceptron(design, d * side * side, hidden),
    )


def _perceptron(design: Design, n_in: int, hidden: int) -> list[nn.Module]:
    """Return the three linear layers of AlexNet, and of VGG with another place of dropout."""
    return [
        nn.Flatten(),
        *(nn.Dropout(DROPOUT), nn.Linear(n_in, hidden), design.activation()),
        *(nn.Dropout(DROPOUT), nn.Linear(hidden, hidden), design.activation()),
        nn.Linear(hidden, design.classes),
    ]


def vgg16(design: Design, norm: bool = False) -> nn.Module:
    """Simonyan and Zisserman 2014 (arXiv 1409.1556), configuration D."""
    layers: list[nn.Module] = []
    n_in = 3
    for repeats, published in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        n_out = design.channels(published)
        for _ in range(repeats):
            layers += design.conv(n_in, n_out, norm=norm)
            n_in = n_out
        layers.append(nn.MaxPool2d(2))
    if design.small:
        return sequence(*layers, nn.Flatten(), nn.Linear(n_in, design.classes))
    hidden = design.channels(4096)
    return sequence(
        *(*layers, nn.Flatten()),
        *(nn.Linear(n_in * 7 * 7, hidden), design.activation(), nn.Dropout(DROPOUT)),
        *(nn.Linear(hidden, hidden), design.activation(), nn.Dropout(DROPOUT)),
        nn.Linear(hidden, design.classes),
    )


def mobilenet(design: Design) -> nn.Module:
    """Howard et al. 2017 (arXiv 1704.04861)."""
    n_in = design.channels(32)
    layers = design.conv(3, n_in, stride=1 if design.small else 2, norm=True)
    for published, stride in (
        *((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2)),
        *([(512, 1)] * 5),
        *((1024, 2), (1024, 1)),
    ):
        n_out = design.channels(published)
        layers += design.conv(n_in, n_in, stride=stride, groups=n_in, norm=True)
        layers += design.conv(n_in, n_out, 1, norm=True)
        n_in = n_out
    return sequence(*layers, *_mean(), nn.Linear(n_in, design.classes))


def _mean() -> list[nn.Module]:
    """Return the mean over pixels."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten()]


def plain20(design: Design) -> nn.Module:
    """He et al. 2015 (arXiv 1512.03385), table 6 with n = 3 and without shortcuts.

    It is a network for CIFAR; with ImageNet's images the layers are the same, the maps are larger.
    """
    n_in = design.channels(16)
    layers = design.conv(3, n_in, norm=True)
    for stage, published in enumerate((16, 32, 64)):
        n_out = design.channels(published)
        for i in range(6):
            layers += design.conv(n_in, n_out, stride=2 if stage and not i else 1, norm=True)
            n_in = n_out
    return sequence(*layers, *_mean(), nn.Linear(n_in, design.classes))


class Residual(nn.Module):
    """Two convolutions and a shortcut around them."""

    def __init__(self, design: Design, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.branch = sequence(
            *design.conv(n_in, n_out, stride=stride, norm=True),
            *design.conv(n_out, n_out, norm=True, activation=False),
        )
        changes = stride > 1 or n_in != n_out
        self.shortcut = sequence(
            *(design.conv(n_in, n_out, 1, stride=stride, norm=True, activation=False))
            if changes
            else ()
        )
        self.activation = design.activation()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.branch(x)
        out += self.shortcut(x)
        activated: torch.Tensor = self.activation(out)
        return activated


def resnet(design: Design) -> nn.Module:
    """He et al. 2015 (arXiv 1512.03385), table 1: 18 layers."""
    n_in = design.channels(64)
    if design.small:
        layers = design.conv(3, n_in, norm=True)
    else:
        layers = [*design.conv(3, n_in, 7, stride=2, norm=True), nn.MaxPool2d(3, 2, 1)]
    for stage, published in enumerate((64, 128, 256, 512)):
        n_out = design.channels(published)
        for i in range(2):
            layers.append(Residual(design, n_in, n_out, 2 if stage and not i else 1))
            n_in = n_out
    return sequence(*layers, *_mean(), nn.Linear(n_in, design.classes))


class Fire(nn.Module):
    """A squeeze to few channels, then 1 x 1 and 3 x 3 convolutions side by side."""

    def __init__(self, design: Design, n_in: int, squeezed: int, n_out: int) -> None:
        super().__init__()
        self.squeeze = sequence(*design.conv(n_in, squeezed, 1))
        self.expand_1 = sequence(*design.conv(squeezed, n_out, 1))
        self.expand_3 = sequence(*design.conv(squeezed, n_out, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.squeeze(x)
        return torch.cat([self.expand_1(x), self.expand_3(x)], 1)


def squeezenet(design: Design) -> nn.Module:
    """Iandola et al. 2016 (arXiv 1602.07360), version 1.1 of the authors' code."""
    n_in = design.channels(64)
    pool = partial(nn.MaxPool2d, 3, 2, ceil_mode=True)
    layers = [
        *design.conv(3, n_in, stride=1 if design.small else 2, padding=1 if design.small else 0),
        pool(),
    ]
    for published, pooled in (
        *((64, False), (64, True), (128, False), (128, True)),
        *((192, False), (192, False), (256, False), (256, False)),
    ):
        n_out = design.channels(published)
        layers.append(Fire(design, n_in, design.channels(published // 4), n_out))
        n_in = 2 * n_out
        if pooled:
            layers.append(pool())
    return sequence(
        *(*layers, nn.Dropout(DROPOUT)),
        *(*design.conv(n_in, design.classes, 1), *_mean()),
    )


MODELS: dict[str, Callable[[Design], nn.Module]] = {
    "alexnet": alexnet,
    "vgg16": vgg16,
    "vgg16_bn": partial(vgg16, norm=True),
    "mobilenet": mobilenet,
    "plain20": plain20,
    "resnet": resnet,
    "squeezenet": squeezenet,
}
