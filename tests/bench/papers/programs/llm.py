"""An LLM server: transformers' continuous batching over a model of random weights. It knows nothing of ggroupfs.

    llm.py PAGE ORDERS [--shape llama-3-8b] [--kv-mib 8192] [--device cuda] [--seed 1]

ORDERS is a folder. Round n is asked for by the page's `go`: its requests are in ORDERS/n.json, `{"limit_s": ...,
"requests": [{"at": seconds, "prompt": tokens, "output": tokens}, ...]}`. They are sent at their times whether or
not those before are answered (an open loop). When all are answered, or `limit_s` is over, ORDERS/n.result.json has
for each `at`, `prompt`, `output`, `ttft_s` (from `at` to its first token; null for none) and `itl_s` (seconds between
each two of its tokens, as far as it got). Passes are tokens.

Prompts are random, so that none is a prefix of another, and answers never end early: lengths are as asked for.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

import torch
from page import GO, OVER, PASSES, READY, UNKNOWN, WRONG, Page, whole
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation import ContinuousBatchingConfig

BLOCK = 256
"""Tokens of a block of the KV cache: transformers' own default."""
WARM = [{"at": 0.0, "prompt": prompt, "output": 8} for prompt in (16, 200, 16, 64)]
"""Requests that are served before the server is ready."""
WARM_S = 120.0
LOOK_S = 0.002
"""Seconds between two looks for an order."""

SHAPES: dict[str, dict[str, Any]] = {
    # The published configs of meta-llama/Meta-Llama-3-8B, Llama-3.2-3B and Llama-3.2-1B.
    "llama-3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
    },
    "llama-3.2-3b": {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "small": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
    },
}


def config_of(shape: str) -> LlamaConfig:
    """The config of a shape. KeyError for one that is not known."""
    return LlamaConfig(**SHAPES[shape])


def made(shape: str, device: str, seed: int) -> LlamaForCausalLM:
    """The model in bfloat16, its weights random and the same for a seed."""
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM._from_config(config_of(shape), attn_implementation="sdpa", dtype=torch.bfloat16)
    finally:
        torch.set_default_dtype(torch.float32)


def blocks(config: LlamaConfig, kv_mib: int) -> int:
    """Blocks of a KV cache of `kv_mib` MiB in bfloat16."""
    head = config.hidden_size // config.num_attention_heads
    token = int(2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head)
    return max(8, (kv_mib << 20) // (token * BLOCK))


class Server:
    """The manager of continuous batching, and what is asked of it."""

    def __init__(self, manager: Any, vocabulary: int, page: Page) -> None:
        self._manager, self._vocabulary, self._page = manager, vocabulary, page
        self._rounds = 0

    def round(self, requests: list[dict[str, float]], limit_s: float, seed: int) -> list[dict[str, Any]]:
        """Serve the requests of a round. RuntimeError where the server has failed."""
        self._rounds += 1
        chance = random.Random(seed)
        prompts = [[chance.randrange(3, self._vocabulary) for _ in range(int(one["prompt"]))] for one in requests]
        answers: list[dict[str, Any]] = [{**one, "ttft_s": None, "itl_s": []} for one in requests]
        start, sent, left = time.perf_counter(), 0, len(requests)
        while left and (now := time.perf_counter() - start) < limit_s:
            if sent < len(requests) and now >= requests[sent]["at"]:
                self._manager.add_request(
                    prompts[sent],
                    request_id=f"{self._rounds}-{sent}",
                    max_new_tokens=int(requests[sent]["output"]),
                    record_timestamps=True,
                    eos_token_id=-1,
                )
                sent += 1
                continue
            until = requests[sent]["at"] - now if sent < len(requests) else limit_s - now
            found = self._manager.get_result(timeout=max(1e-4, min(until, 0.5)))
            if found is None:
                if not self._manager.is_running():
                    raise RuntimeError("the generation thread has ended")
                continue
            left -= self._told(found, start, answers)
        for number in range(sent):
            if answers[number]["ttft_s"] is None:
                _note(answers[number], self._so_far(f"{self._rounds}-{number}"), start)
                self._manager.cancel_request(f"{self._rounds}-{number}")
        return answers

    def _so_far(self, request: str) -> list[float]:
        """Times of the tokens of a request that is not answered in full: transformers tells of whole ones alone, so its
        scheduler is looked into. Nothing where that is another."""
        scheduler = getattr(getattr(self._manager, "batch_processor", None), "scheduler", None)
        state = getattr(scheduler, "active_requests", {}).get(request)
        return list(getattr(state, "timestamps", None) or [])

    def _told(self, found: Any, start: float, answers: list[dict[str, Any]]) -> int:
        """Note an answer; 1 where it is one of this round."""
        begun, _, number = found.request_id.partition("-")
        if int(begun) != self._rounds or not found.is_finished():
            return 0
        if found.error is not None:
            raise RuntimeError(f"request {found.request_id}: {found.error}")
        _note(answers[int(number)], found.timestamps or [], start)
        self._page.set64(PASSES, self._page.u64(PASSES) + len(found.generated_tokens))
        return 1


def _note(answer: dict[str, Any], times: list[float], start: float) -> None:
    """Note the times of tokens in an answer; none for no token."""
    if times:
        answer["ttft_s"] = round(times[0] - start - answer["at"], 6)
        answer["itl_s"] = [round(later - one, 6) for one, later in itertools.pairwise(times)]


def main() -> int:
    """Serve rounds until told to stop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page")
    parser.add_argument("orders", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b")
    parser.add_argument("--kv-mib", type=int, default=8192)
    parser.add_argument("--batch-tokens", type=int, default=2048, help="of one step, at most")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    page = Page(options.page)
    page.set64(WRONG, UNKNOWN)
    model = made(options.shape, options.device, options.seed).eval()
    batching = ContinuousBatchingConfig(
        block_size=BLOCK,
        num_blocks=blocks(model.config, options.kv_mib),
        max_batch_tokens=options.batch_tokens,
        max_requests_per_batch=256,
        allow_block_sharing=False,
        seed=options.seed,
    )
    # "paged|sdpa" is named, so that transformers looks for no kernels of flash attention on the hub.
    model.set_attn_implementation("paged|sdpa")
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=16)
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching, timeout=30.0
    ) as manager:
        server, number = Server(manager, model.config.vocab_size, page), 0
        if any(one["ttft_s"] is None for one in server.round(WARM, WARM_S, options.seed)):
            raise RuntimeError(f"the first requests are not answered after {WARM_S:.0f} s")
        page.set64(READY, 1)
        while not page.stop:
            if page.u32(GO) == number:
                time.sleep(LOOK_S)
                continue
            number = page.u32(GO)
            order = json.loads((options.orders / f"{number}.json").read_text())
            answers = server.round(order["requests"], order["limit_s"], order.get("seed", options.seed))
            whole(options.orders / f"{number}.result.json", json.dumps(answers))
            page.set32(OVER, number)
    page.set64(WRONG, 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
