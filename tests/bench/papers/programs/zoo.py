"""One of the models of Salus' table 3, in training or inference, with random weights. It knows nothing of ggroupfs.

    zoo.py PAGE MODEL MODE [--batch N] [--iterations N] [--rate R --orders DIR] [--device cuda] [--seed 1]

MODE is train or infer. Passes are iterations, and with --iterations the program ends by itself after so many. With
--rate, inferences come so often a second, at times given by the seed, whether or not the one before is done, and
DIR/latencies.json has the seconds of each from its time on when the program is told to stop.

The convolutional networks are torchvision's (inception4: timm's, where it is installed). Salus' own vae, superres,
speech and seq2seq are not published: these are such as its text tells of (ggroupfs/replay/workloads.py), after the
examples of PyTorch and DeepSpeech 2. Inference is bit for bit the same each time; words wrong are those that
are not. Of training they count an infinite loss.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matrix products
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from page import PASSES, READY, UNKNOWN, WRONG, Page, whole
from torch import nn

SIDES = {"inception_v3": 299, "inception_v4": 299}
"""Pixels of a side of the images, where those are no 224."""
NAMES = {"inception3": "inception_v3", "inception4": "inception_v4"}
"""Salus' names that are others in torchvision and timm."""
SENTENCE, WORDS = 50, 10000
"""Words of a sentence, and of the vocabulary, of seq2seq."""
FRAMES, TONES = 200, 161
"""Of the spectrogram that is a sample of speech."""
PATCH = 85
"""Pixels of a side of a patch of superres."""


class Vae(nn.Module):
    """The auto-encoder of PyTorch's examples, for digits of 28 x 28."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 40))
        self.decode = nn.Sequential(nn.Linear(20, 400), nn.ReLU(), nn.Linear(400, 784))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of what is decoded from the mean."""
        found: torch.Tensor = self.decode(self.encode(x)[:, :20])
        return found


class Speech(nn.Module):
    """Two convolutions and bidirectional layers, as DeepSpeech 2."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Sequential(nn.Conv2d(1, 32, (41, 11), (2, 2), (20, 5)), nn.ReLU())
        self.recur = nn.LSTM(32 * ((TONES + 1) // 2), 400, 3, batch_first=True, bidirectional=True)
        self.out = nn.Linear(800, 29)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Letters at each frame, of spectrograms of (batch, 1, TONES, FRAMES)."""
        found = self.convolve(x).flatten(1, 2).transpose(1, 2)
        out: torch.Tensor = self.out(self.recur(found)[0])
        return out


class Seq2Seq(nn.Module):
    """An LSTM that reads, and one that writes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.read, self.write = (nn.LSTM(width, width, 2, batch_first=True) for _ in range(2))
        self.out = nn.Linear(width, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Words, of sentences of (batch, SENTENCE)."""
        words = self.words(x)
        out: torch.Tensor = self.out(self.write(words, self.read(words)[1])[0])
        return out


def superres() -> nn.Module:
    """The super-resolution network of PyTorch's examples, three times as fine."""
    sizes = ((1, 64, 5), (64, 64, 3), (64, 32, 3), (32, 9, 3))
    layers: list[nn.Module] = []
    for into, out, size in sizes:
        layers += [nn.Conv2d(into, out, size, padding=size // 2), nn.ReLU()]
    return nn.Sequential(*layers[:-1], nn.PixelShuffle(3))


def network(name: str) -> nn.Module:
    """A convolutional network by its name in torchvision or timm. SystemExit for one that neither has."""
    import torchvision

    if (make := getattr(torchvision.models, name, None)) is not None:
        more = {"init_weights": True} if name in ("googlenet", "inception_v3") else {}
        if name in ("googlenet", "inception_v3"):
            more["aux_logits"] = False
        found: nn.Module = make(weights=None, **more)
        return found
    try:
        import timm
    except ImportError:
        raise SystemExit(f"{name}: neither torchvision has it nor is there timm") from None
    other: nn.Module = timm.create_model(name, pretrained=False)
    return other


def model_of(name: str, batch: int, device: str) -> tuple[nn.Module, torch.Tensor]:
    """A model and a batch for it, the same for a seed that was set."""
    own: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
        "vae": (Vae, lambda: torch.rand(batch, 784)),
        "superres": (superres, lambda: torch.rand(batch, 1, PATCH, PATCH)),
        "speech": (Speech, lambda: torch.randn(batch, 1, TONES, FRAMES)),
        "seq2seq": (lambda: Seq2Seq(512), lambda: torch.randint(WORDS, (batch, SENTENCE))),
    }
    if name in own:
        make, data = own[name]
        return make().to(device), data().to(device)
    name = NAMES.get(name, name)
    side = SIDES.get(name, 224)
    return network(name).to(device), torch.randn(batch, 3, side, side, device=device)


def trainer(model: nn.Module, data: torch.Tensor) -> Callable[[], torch.Tensor]:
    """What makes one step of training, by SGD with momentum, to no end: the loss is the mean square of the output."""
    optimizer = torch.optim.SGD(model.train().parameters(), lr=1e-4, momentum=0.9)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = model(data).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def inferrer(model: nn.Module, data: torch.Tensor) -> Callable[[], torch.Tensor]:
    """What makes one inference."""
    model.eval()

    def step() -> torch.Tensor:
        with torch.inference_mode():
            found: torch.Tensor = model(data)
            return found

    return step


def due(rate: float, seed: int) -> Any:
    """Times of inferences, without an end: a Poisson process."""
    chance, at = random.Random(seed), 0.0
    while True:
        at += chance.expovariate(rate)
        yield at


def main() -> int:
    """Work until told to stop, or through all iterations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page")
    parser.add_argument("model")
    parser.add_argument("mode", choices=("train", "infer"))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=0, help="0: until it is told to stop")
    parser.add_argument("--rate", type=float, default=0.0, help="inferences a second; 0: one after the other")
    parser.add_argument("--orders", type=Path, metavar="DIR")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    page = Page(options.page)
    page.set64(WRONG, UNKNOWN)
    torch.backends.cudnn.deterministic = options.mode == "infer"
    torch.manual_seed(options.seed)
    model, data = model_of(options.model, options.batch, options.device)
    step = trainer(model, data) if options.mode == "train" else inferrer(model, data)

    def once() -> torch.Tensor:
        found = step()
        if options.device != "cpu":
            torch.cuda.synchronize()
        return found

    first = last = once().clone()
    times, start, latencies, done = due(options.rate, options.seed) if options.rate else None, 0.0, [], 0
    page.set64(READY, 1)
    start = time.monotonic()
    while not page.stop and (not options.iterations or done < options.iterations):
        at = next(times) if times is not None else 0.0
        while times is not None and (early := start + at - time.monotonic()) > 0 and not page.stop:
            time.sleep(min(early, 0.05))
        if page.stop:
            break
        last = once()
        if times is not None:
            latencies.append(round(time.monotonic() - start - at, 6))
        done += 1
        page.set64(PASSES, done)
    if options.orders is not None:
        whole(options.orders / "latencies.json", json.dumps(latencies))
    wrong = int((last != first).sum().item()) if options.mode == "infer" else int(not torch.isfinite(last).item())
    page.set64(WRONG, wrong)
    return int(wrong != 0)


if __name__ == "__main__":
    sys.exit(main())
