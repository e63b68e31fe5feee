"""SmolLM2-135M on this CPU: this library beside its peers, same work, one run.

    python benchmarks/inference.py [--threads 2] [--json] [--only NAME ...]

Every row runs in a process of its own, one after the other. A peer that is not installed is left out with the
reason. Ratios are to the best peer of each column and, for float32, to the bare torch loop.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

COLUMNS = ("prefill", "b1", "b8", "b32")
PEERS = Path(__file__).parent / "peers"
LIMIT_S = 600


def commands(gguf: str, folder: str, cache: Path, threads: int) -> dict[str, list[list[str]]]:
    """Row name to the processes whose figures make that row."""
    t = str(threads)
    ours = str(PEERS / "ours.py")
    return {
        "transformers float32": [[str(PEERS / "transformers_f32.py"), folder, t]],
        "bare torch float32": [[str(PEERS / "bare_torch.py"), folder, t]],
        "llama.cpp Q4_1": [[str(PEERS / "llama_cpp.py"), gguf, t, str(slots)] for slots in (1, 8, 32)],
        "ctranslate2 int8": [[str(PEERS / "ctranslate2_int8.py"), folder, str(cache / "smollm2-ct2"), t]],
        "deepinfer float32": [[ours, folder, t, "float32", "float32", "0"]],
        "deepinfer float32 invariant": [[ours, folder, t, "float32", "float32", "1"]],
        "deepinfer bf16 weights": [[ours, folder, t, "bfloat16", "float16", "1"]],
        "deepinfer int8 (q8_0)": [[ours, gguf, t, "q8_0", "float16", "1"]],
        "deepinfer 4-bit (Q4_1 file)": [[ours, gguf, t, "auto", "float16", "1"]],
    }


def run_row(processes: list[list[str]], threads: int) -> dict[str, float] | str:
    """Figures of one row, or the reason why there are none."""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    found: dict[str, float] = {}
    for command in processes:
        try:
            done = subprocess.run(
                [sys.executable, *command], capture_output=True, text=True, env=env, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return {**found, "note": f"ran past {LIMIT_S} s"} if found else f"ran past {LIMIT_S} s"
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no message"]
            return lines[-1]
        figures = json.loads(done.stdout.strip().splitlines()[-1])
        peak = max(found.get("peak_rss_bytes", 0), figures["peak_rss_bytes"])
        found.update(figures, peak_rss_bytes=peak)
    return found


def table(rows: dict[str, dict[str, float] | str]) -> str:
    best = {
        c: max((r.get(c, 0) for n, r in rows.items() if is_peer(n) and not isinstance(r, str)), default=0)
        for c in COLUMNS
    }
    lines = [f"{'tok/s (x best peer)':<30}" + "".join(f"{c:>18}" for c in COLUMNS) + f"{'peak MiB':>10}"]
    for name, row in rows.items():
        if isinstance(row, str):
            lines.append(f"{name:<30} left out: {row}")
            continue
        cells = "".join(
            f"{row.get(c, 0):>10.1f} ({row.get(c, 0) / best[c]:4.2f})" if best[c] else f"{row[c]:>18.1f}"
            for c in COLUMNS
        )
        lines.append(f"{name:<30}{cells}{row['peak_rss_bytes'] / 2**20:>10.0f}")
    bare, ours = rows.get("bare torch float32"), rows.get("deepinfer float32")
    if isinstance(bare, dict) and isinstance(ours, dict):
        lines.append("float32 / bare torch loop     " + "".join(f"{ours[c] / bare[c]:>18.2f}" for c in COLUMNS))
    return "\n".join(lines)


def is_peer(name: str) -> bool:
    return not name.startswith("deepinfer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="*", help="row names that contain one of these words")
    args = parser.parse_args()
    from deepinfer.models import find_demo_model

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.models.smollm2 import cache_dir, smollm2_folder

    gguf = find_demo_model()
    folder = str(smollm2_folder(gguf))
    rows = {
        name: run_row(processes, args.threads)
        for name, processes in commands(str(gguf), folder, cache_dir(), args.threads).items()
        if not args.only or any(word in name for word in args.only)
    }
    print(json.dumps(rows) if args.json else table(rows))


if __name__ == "__main__":
    main()
