"""`deepinfer generate`: continue a prompt, or answer it as a chat turn, and say how fast."""

from __future__ import annotations

import argparse
import json
import sys
import time

__all__ = ["register"]


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser("generate", help="write text with a model", description=__doc__)
    parser.add_argument("prompt", help="text to continue; - reads it from standard input")
    parser.add_argument(
        "--model", help="HF folder, .gguf file or hub id (default: DEEPINFER_HF_MODEL_DIR, else smollm2)"
    )
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stop", action="append", default=[], help="text that ends the answer (repeatable)")
    parser.add_argument("--chat", action="store_true", help="wrap the prompt in the model's chat template")
    parser.add_argument("--weights", default="auto", help="auto, float32, bfloat16, q4_1, q8_0, int8, ...")
    parser.add_argument("--cache-dtype", help="float32, float16 or bfloat16 keys and values (default: of activations)")
    parser.add_argument("--accelerator", help="cpu, nvidia, ascend or a plugin's (default: DEEPINFER_ACCELERATOR)")
    parser.add_argument("--invariant", action="store_true", help="bitwise batch invariance")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..engine import Composition
    from ..environment import load_environment
    from ..types import SamplingParams

    settings = load_environment()
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        stop=tuple(args.stop),
    )
    composition = Composition(
        model=str(args.model or settings.hf_model_dir or "smollm2"),
        accelerator=args.accelerator or settings.accelerator,
        weights=args.weights,
        cache_dtype=args.cache_dtype,
        invariant=args.invariant,
        max_rows=1,
    )
    engine = composition.build(progress=sys.stderr.isatty())
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    prompt = engine.render_chat([{"role": "user", "content": text}]) if args.chat else text
    return _generate(engine, prompt, params, as_json=args.json)


def _generate(engine, prompt, params, *, as_json: bool) -> int:  # noqa: ANN001  (imported late)
    started = time.perf_counter()
    request_id = engine.add(prompt, params, stream=True)
    first_s, shown, output = None, 0, None
    while engine.has_work:
        for output in engine.step():
            assert output.request_id == request_id
            first_s = time.perf_counter() if first_s is None else first_s
            if not as_json:
                print(output.text[shown:], end="", flush=True)
                shown = len(output.text)
    assert output is not None and first_s is not None
    figures = _figures(output, started, first_s, time.perf_counter())
    if as_json:
        finish = str(output.completions[0].finish_reason)
        print(json.dumps({"text": output.text, "token_ids": output.token_ids, "finish_reason": finish, **figures}))
    else:
        print()
        print(
            f"{figures['prompt_tokens']} prompt tokens at {figures['prefill_tokens_per_s']:.0f} tok/s, "
            f"{figures['output_tokens']} new ones at {figures['decode_tokens_per_s']:.1f} tok/s",
            file=sys.stderr,
        )
    if output.error is not None:
        raise output.error
    return 0


def _figures(output, started: float, first: float, ended: float) -> dict[str, float]:  # noqa: ANN001
    num_prompt, num_out = len(output.prompt_ids), len(output.token_ids)
    return {
        "prompt_tokens": num_prompt,
        "output_tokens": num_out,
        "time_to_first_token_s": first - started,
        "prefill_tokens_per_s": num_prompt / (first - started),
        "decode_tokens_per_s": (num_out - 1) / (ended - first) if num_out > 1 else 0.0,
    }
