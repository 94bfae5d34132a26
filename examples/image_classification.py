"""Train an image classifier (ResNet-50 or ViT-B/16) as PyTorch's tutorials do: mixed precision, a DataLoader,
one GPU.

    python examples/image_classification.py                  # trains; on a GPU it prints the memory it took
    python examples/image_classification.py --predict        # what that run will take, on a machine without a
    GPU python examples/image_classification.py --tiny           # a toy size, for a CPU

Nothing here but the last lines of ``main`` knows of trainfit. Images are random: memory and speed do not ask
what is on them.
"""

import argparse
import functools
import json
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class RandomImages(Dataset):
    """``length`` images [3, size, size] and labels, the same each time."""

    def __init__(self, length: int, size: int, num_classes: int):
        self.length, self.size, self.num_classes = length, size, num_classes

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, self.size, self.size, generator=generator), index % self.num_classes


class Bottleneck(nn.Module):
    """He et al. 2015 (arXiv 1512.03385), figure 5: 1x1, 3x3, 1x1, and a shortcut."""

    def __init__(self, in_channels: int, width: int, stride: int = 1):
        super().__init__()
        out_channels = 4 * width
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += shortcut
        return self.relu(out)


class ResNet(nn.Module):
    """ResNet of bottlenecks; ``layers`` (3, 4, 6, 3) and ``width`` 64 is ResNet-50."""

    def __init__(self, layers: tuple[int, ...], width: int, num_classes: int):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        blocks: list[nn.Module] = []
        channels = width
        for stage, num_blocks in enumerate(layers):
            for block in range(num_blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(Bottleneck(channels, width << stage, stride))
                channels = 4 * (width << stage)
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.stem(x))
        return self.fc(torch.flatten(self.pool(x), 1))


class VisionTransformer(nn.Module):
    """Dosovitskiy et al. 2020 (arXiv 2010.11929); 12 layers, hidden 768, patch 16 is ViT-B/16."""

    def __init__(self, image_size: int, patch: int, hidden: int, depth: int, heads: int, num_classes: int):
        super().__init__()
        self.patches = nn.Conv2d(3, hidden, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, hidden))
        self.positions = nn.Parameter(torch.randn(1, (image_size // patch) ** 2 + 1, hidden) * 0.02)
        layer = nn.TransformerEncoderLayer(
            hidden, heads, 4 * hidden, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(
            layer, depth, norm=nn.LayerNorm(hidden), enable_nested_tensor=False
        )
        self.head = nn.Linear(hidden, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        return self.head(self.encoder(x)[:, 0])


def build_model(args: argparse.Namespace) -> nn.Module:
    if args.model == "vit":
        if args.tiny:
            return VisionTransformer(32, 8, 64, 2, 4, 10)
        return VisionTransformer(224, 16, 768, 12, 12, 1000)
    return ResNet((1, 1), 8, 10) if args.tiny else ResNet((3, 4, 6, 3), 64, 1000)


def train(args: argparse.Namespace) -> dict[str, float]:
    """Train for ``args.steps`` steps; the last loss and the seconds of a step."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    size, num_classes = (32, 10) if args.tiny else (224, 1000)
    loader = DataLoader(
        RandomImages(args.steps * args.batch_size, size, num_classes), batch_size=args.batch_size,
        shuffle=True,
        drop_last=True, num_workers=args.workers, pin_memory=device.type == "cuda",
    )  # fmt: skip
    model = build_model(args).to(device, memory_format=torch.channels_last)
    if args.compile:
        model = torch.compile(model)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    if args.model == "vit":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")

    model.train()
    loss_value, seconds = 0.0, 0.0
    for step, (images, labels) in enumerate(loader):
        start = time.perf_counter()
        images = images.to(device, memory_format=torch.channels_last, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=torch.float16, enabled=device.type == "cuda"):
            loss = criterion(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        loss_value = loss.item()
        seconds = time.perf_counter() - start
        print(f"step {step + 1}: loss {loss_value:.3f}, {seconds:.3f} s", file=sys.stderr)
    return {"loss": loss_value, "step_s": seconds}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("resnet50", "vit"), default="resnet50")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--compile", action="store_true", help="torch.compile the model")
    parser.add_argument("--tiny", action="store_true", help="a toy model and toy images")
    parser.add_argument("--predict", action="store_true", help="do not train: say what training will take")
    parser.add_argument("--gpu", default="h200", help="the GPU to predict for")
    args = parser.parse_args(arguments)
    if args.predict:
        import trainfit

        traced = trainfit.trace(functools.partial(train, args), gpu=args.gpu)
        print(traced, file=sys.stderr)
        print(json.dumps({"example": f"image_classification/{args.model}", "predicted": traced.model_dump()}))
        return 0
    report: dict[str, object] = {"example": f"image_classification/{args.model}", **train(args)}
    if torch.cuda.is_available():
        report["measured"] = {
            "gpu": torch.cuda.get_device_name(),
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
