"""The loop of a latent diffusion model: a UNet of the shape of Stable Diffusion, again and again.

    diffusion.py PAGE [--shape sdxl] [--batch 1] [--device cuda] [--seed 1] [--cooperate MOUNT]

The UNet is diffusers' UNet2DConditionModel written in torch, layer by layer, with random weights in bfloat16 (860
million parameters of SD-1.5, 2567 million of SDXL). A pass is one step, with guidance: the UNet over both halves of
a batch. An image is STEPS steps from the same noise, so each is to be the same to the bit; in the end the words wrong
are those of the last image that differ from the first, or are not finite. Text encoders and VAE, which run once an
image, are left out.

With --cooperate the program listens to its usermemfd in the tree at MOUNT (docs/semantics.md): asked for memory, it
gives back what torch's allocator keeps without using it, between two steps. Without, it knows nothing of ggroupfs.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from giver import giving
from page import PASSES, READY, UNKNOWN, WRONG, Page
from torch import nn

STEPS = 20
"""Steps of an image."""
GUIDANCE = 7.5
GROUPS = 32
SHAPES: dict[str, dict[str, Any]] = {
    # The published configs of the UNets of Stable Diffusion v1.5 and XL 1.0; `depth` is the number of transformer
    # blocks at each resolution, 0 for none.
    "sd-1.5": {
        "channels": (320, 640, 1280, 1280),
        "depth": (1, 1, 1, 0),
        "middle": 1,
        "heads": (8, 8, 8, 8),
        "context": 768,
        "linear": False,
        "side": 64,
    },
    "sdxl": {
        "channels": (320, 640, 1280),
        "depth": (0, 2, 10),
        "middle": 10,
        "heads": (5, 10, 20),
        "context": 2048,
        "linear": True,
        "added": 2816,
        "side": 128,
    },
    "small": {
        "channels": (32, 64),
        "depth": (1, 1),
        "middle": 1,
        "heads": (2, 4),
        "context": 32,
        "linear": True,
        "side": 16,
    },
}


class Residual(nn.Module):
    """ResnetBlock2D."""

    def __init__(self, into: int, out: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(GROUPS, into, 1e-5), nn.Conv2d(into, out, 3, padding=1)
        self.time = nn.Linear(time, out)
        self.norm2, self.conv2 = nn.GroupNorm(GROUPS, out, 1e-5), nn.Conv2d(out, out, 3, padding=1)
        self.shortcut = nn.Conv2d(into, out, 1) if into != out else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """Images of (batch, channels, height, width), and embedded times of (batch, width)."""
        found = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        shortcut: torch.Tensor = self.shortcut(x)
        return shortcut + self.conv2(F.silu(self.norm2(found)))


class Attention(nn.Module):
    """Attention of diffusers, to itself or to a context."""

    def __init__(self, width: int, context: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key, self.value = nn.Linear(context, width, bias=False), nn.Linear(context, width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Tokens of (batch, count, width)."""
        parts = (self.query(x), self.key(context), self.value(context))
        query, key, value = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in parts)
        found = F.scaled_dot_product_attention(query, key, value)
        out: torch.Tensor = self.out(found.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """BasicTransformerBlock, its feed-forward part a GEGLU."""

    def __init__(self, width: int, context: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.itself, self.cross = Attention(width, width, heads), Attention(width, context, heads)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Tokens of (batch, count, width)."""
        found = self.norms[0](x)
        x = x + self.itself(found, found)
        x = x + self.cross(self.norms[1](x), context)
        value, gate = self.up(self.norms[2](x)).chunk(2, dim=-1)
        return x + self.down(value * F.gelu(gate))


class Transformer(nn.Module):
    """Transformer2DModel."""

    def __init__(self, width: int, context: int, heads: int, depth: int, linear: bool) -> None:
        super().__init__()
        self.linear = linear
        self.norm = nn.GroupNorm(GROUPS, width, 1e-6)
        self.into = nn.Linear(width, width) if linear else nn.Conv2d(width, width, 1)
        self.blocks = nn.ModuleList(Block(width, context, heads) for _ in range(depth))
        self.out = nn.Linear(width, width) if linear else nn.Conv2d(width, width, 1)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Images of (batch, channels, height, width)."""
        height, found = x.shape[-2], self.norm(x)
        if not self.linear:
            found = self.into(found)
        tokens = found.flatten(2).transpose(1, 2)
        if self.linear:
            tokens = self.into(tokens)
        for block in self.blocks:
            tokens = block(tokens, context)
        if self.linear:
            tokens = self.out(tokens)
        found = tokens.transpose(1, 2).unflatten(2, (height, -1))
        return x + (found if self.linear else self.out(found))


class Stage(nn.Module):
    """One resolution of the way down or up: residual blocks, each with a transformer where there is one."""

    def __init__(self, pairs: Sequence[tuple[int, int]], time: int, attend: Any, move: nn.Module | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(into, out, time) for into, out in pairs)
        self.attends = nn.ModuleList(attend() for _ in pairs) if attend else None
        self.move = move

    def step(self, number: int, x: torch.Tensor, time: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """One residual block, and its transformer."""
        found: torch.Tensor = self.blocks[number](x, time)
        return found if self.attends is None else self.attends[number](found, context)


class UNet(nn.Module):
    """UNet2DConditionModel."""

    def __init__(self, shape: dict[str, Any]) -> None:
        super().__init__()
        widths, time = shape["channels"], 4 * shape["channels"][0]
        self.first = widths[0]
        self.time = nn.Sequential(nn.Linear(widths[0], time), nn.SiLU(), nn.Linear(time, time))
        added = shape.get("added", 0)
        self.added = nn.Sequential(nn.Linear(added, time), nn.SiLU(), nn.Linear(time, time)) if added else None
        self.into = nn.Conv2d(4, widths[0], 3, padding=1)

        def attend(level: int, depth: int) -> Any:
            more = (widths[level], shape["context"], shape["heads"][level], depth, shape["linear"])
            return (lambda: Transformer(*more)) if depth else None

        last, skips, down = len(widths) - 1, [widths[0]], []
        for level, out in enumerate(widths):
            into = widths[max(0, level - 1)]
            move = nn.Conv2d(out, out, 3, 2, 1) if level < last else None
            down.append(Stage([(into, out), (out, out)], time, attend(level, shape["depth"][level]), move))
            skips += [out, out, *([out] if level < last else [])]
        self.down = nn.ModuleList(down)
        top = widths[-1]
        self.middle = Stage([(top, top), (top, top)], time, None, None)
        self.attend = attend(last, shape["middle"])()
        up, before = [], top
        for level in reversed(range(len(widths))):
            out, pairs = widths[level], []
            for _ in range(3):
                pairs.append((before + skips.pop(), out))
                before = out
            move = nn.Conv2d(out, out, 3, padding=1) if level else None
            up.append(Stage(pairs, time, attend(level, shape["depth"][level]), move))
        self.up = nn.ModuleList(up)
        self.norm, self.out = nn.GroupNorm(GROUPS, widths[0], 1e-5), nn.Conv2d(widths[0], 4, 3, padding=1)

    def forward(
        self, x: torch.Tensor, at: torch.Tensor, context: torch.Tensor, added: torch.Tensor | None
    ) -> torch.Tensor:
        """The noise in latents of (batch, 4, side, side) at times of (batch,), by a context of (batch, 77, width)."""
        time = self.time(waves(at, self.first).to(x.dtype))
        if self.added is not None:
            time = time + self.added(added)
        x = self.into(x)
        skips = [x]
        for stage in self.down:
            for number in range(2):
                x = stage.step(number, x, time, context)
                skips.append(x)
            if stage.move is not None:
                x = stage.move(x)
                skips.append(x)
        x = self.attend(self.middle.step(0, x, time, context), context)
        x = self.middle.step(1, x, time, context)
        for stage in self.up:
            for number in range(3):
                x = stage.step(number, torch.cat([x, skips.pop()], dim=1), time, context)
            if stage.move is not None:
                x = stage.move(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        found: torch.Tensor = self.out(F.silu(self.norm(x)))
        return found


def waves(at: torch.Tensor, width: int) -> torch.Tensor:
    """Sines and cosines of a time, as diffusers embeds it."""
    half = width // 2
    rates = torch.exp(-math.log(10000) * torch.arange(half, device=at.device) / half)
    angles = at[:, None].float() * rates[None]
    return torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1)


class Loop:
    """Images, step by step."""

    def __init__(self, shape: dict[str, Any], batch: int, device: str, seed: int) -> None:
        torch.manual_seed(seed)
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(device):
            self.unet = UNet(shape).eval()
            side = shape["side"]
            self.noise = torch.randn(batch, 4, side, side)
            self.context = torch.randn(2 * batch, 77, shape["context"])
            self.added = torch.randn(2 * batch, shape["added"]) if "added" in shape else None
        torch.set_default_dtype(torch.float32)
        self.device, self.latents = device, self.noise
        self.first: torch.Tensor | None = None
        self.last: torch.Tensor | None = None

    @torch.inference_mode()
    def step(self, number: int) -> None:
        """One step of an image, the number'th of all."""
        part = number % STEPS
        if part == 0:
            self.latents = self.noise
        at = torch.full((len(self.context),), 999.0 - 999.0 * part / STEPS, device=self.device)
        both = self.unet(torch.cat([self.latents, self.latents]), at, self.context, self.added)
        plain, guided = both.chunk(2)
        noise = plain + GUIDANCE * (guided - plain)
        self.latents = self.latents - noise / STEPS
        if part == STEPS - 1:
            self.first, self.last = self.latents if self.first is None else self.first, self.latents

    def wrong(self) -> int:
        """Words of the last image that are not those of the first, or are not finite; 0 where there is none yet."""
        if self.first is None or self.last is None:
            return 0
        other = self.first.view(torch.int16) != self.last.view(torch.int16)
        return int((other | ~torch.isfinite(self.last)).sum().item())


def main() -> int:
    """Make images until told to stop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="sdxl")
    parser.add_argument("--batch", type=int, default=1, help="images at once")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cooperate", metavar="MOUNT", default="")
    options = parser.parse_args()
    page = Page(options.page)
    page.set64(WRONG, UNKNOWN)
    torch.backends.cudnn.deterministic = True
    loop, done = Loop(SHAPES[options.shape], options.batch, options.device, options.seed), 0
    asked = giving(options.cooperate)
    while not page.stop:
        loop.step(done)
        if options.device != "cpu":
            torch.cuda.synchronize()
        done += 1
        page.set64(PASSES, done)
        if asked.is_set():
            asked.clear()
            torch.cuda.empty_cache()
        page.set64(READY, 1)
    wrong = loop.wrong()
    page.set64(WRONG, wrong)
    return int(wrong != 0)


if __name__ == "__main__":
    sys.exit(main())
