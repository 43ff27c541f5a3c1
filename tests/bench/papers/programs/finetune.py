"""Fine-tuning of a language model of 1 to 3 billion parameters, all of them, by AdamW. It knows nothing of ggroupfs.

    finetune.py PAGE [--shape llama-3.2-3b] [--batch 4] [--tokens 1024] [--device cuda] [--seed 1] [--cooperate MOUNT]

Weights and data are random; weights, gradients and both moments of each are bfloat16. Passes are steps. In the end the
words wrong are the parameters of the final norm that are not finite, and 1 more where the last loss is not.
"""

from __future__ import annotations

import argparse
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

import torch
from giver import giving
from llm import SHAPES, made
from page import PASSES, READY, UNKNOWN, WRONG, Page

BATCHES = 8
"""Of data, which are used by turns."""


def main() -> int:
    """Train until told to stop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.2-3b")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cooperate", metavar="MOUNT", default="", help="as diffusion.py")
    options = parser.parse_args()
    page = Page(options.page)
    page.set64(WRONG, UNKNOWN)
    model = made(options.shape, options.device, options.seed).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    size = (BATCHES, options.batch, options.tokens)
    data = torch.randint(3, model.config.vocab_size, size, device=options.device)
    done, loss, asked = 0, torch.zeros(()), giving(options.cooperate)
    while not page.stop:
        tokens = data[done % BATCHES]
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        if options.device != "cpu":
            torch.cuda.synchronize()
        done += 1
        page.set64(PASSES, done)
        if asked.is_set():
            asked.clear()
            torch.cuda.empty_cache()
        page.set64(READY, 1)
    wrong = int((~torch.isfinite(model.model.norm.weight)).sum().item()) + int(not torch.isfinite(loss).item())
    page.set64(WRONG, wrong)
    return int(wrong != 0)


if __name__ == "__main__":
    sys.exit(main())
