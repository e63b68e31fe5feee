"""`deepinfer bench`: measure this library on this machine."""

from __future__ import annotations

import argparse
import json
from typing import Any

__all__ = ["register"]


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("bench", help="measure latency, throughput, scheduler or cache", description=__doc__)
    kinds = parser.add_subparsers(dest="what", required=True)
    for name, text in (
        ("latency", "prefill and decode rates of the engine"),
        ("throughput", "many requests at once"),
        ("scheduler", "step time of the scheduler alone"),
        ("cache", "page and prefix-index operations"),
    ):
        one = kinds.add_parser(name, help=text, description=text)
        one.add_argument("--json", action="store_true", help="print one JSON object")
        if name in ("latency", "throughput"):
            _engine_options(one)
        one.set_defaults(run=run)


def _engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", help="HF folder, .gguf file or hub id (default: DEEPINFER_HF_MODEL_DIR, else smollm2)"
    )
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--cache-dtype", help="float32, float16 or bfloat16 keys and values")
    parser.add_argument("--accelerator")
    parser.add_argument("--invariant", action="store_true")
    parser.add_argument("--threads", type=int, help="CPU threads of torch")
    parser.add_argument("--lag", type=int, choices=(0, 1), default=0)
    parser.add_argument("--max-rows", type=int, default=32)


def run(args: argparse.Namespace) -> int:
    figures = _measure(args)
    if args.json:
        print(json.dumps(figures))
    else:
        width = max(map(len, figures))
        for name, value in figures.items():
            print(f"{name:<{width}}  {value:,.6g}" if isinstance(value, float) else f"{name:<{width}}  {value}")
    return 0


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    if args.what == "scheduler":
        from ..bench import scheduler

        return scheduler.measure()
    if args.what == "cache":
        from ..bench import cache

        return cache.measure()
    from ..bench import latency, throughput

    if args.threads:
        import torch

        torch.set_num_threads(args.threads)
    return (latency if args.what == "latency" else throughput).measure(_composition(args))


def _composition(args: argparse.Namespace):  # noqa: ANN202  (imported late)
    from ..engine import Composition
    from ..environment import load_environment

    settings = load_environment()
    return Composition(
        model=str(args.model or settings.hf_model_dir or "smollm2"),
        accelerator=args.accelerator or settings.accelerator,
        weights=args.weights,
        cache_dtype=args.cache_dtype,
        invariant=args.invariant,
        lag=args.lag,
        max_rows=args.max_rows,
        max_len=2048,
    )
