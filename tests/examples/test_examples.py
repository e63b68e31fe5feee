"""Each example runs, and what it says it does not import is not in `sys.modules`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run(code: str, *args: str) -> str:
    """Output of a fresh interpreter that runs `code`."""
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, cwd=EXAMPLES, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def packages_after(code: str, *args: str) -> tuple[str, set[str]]:
    """Output, and the packages of deepinfer that were imported when it ended."""
    ending = (
        "\nimport sys, json; print('\\n' + json.dumps(sorted(n for n in sys.modules if n.startswith('deepinfer.'))))"
    )
    output, _, modules = run(code + ending, *args).rstrip().rpartition("\n")
    return output, {name.split(".")[1] for name in json.loads(modules)}


def test_offline_inference_prints_one_line_a_prompt(tiny_llama_folder) -> None:
    output = run(
        "import sys, offline_inference; offline_inference.main(*sys.argv[1:])", str(tiny_llama_folder), "a b", "c"
    )
    assert [line.split(" -> ")[0] for line in output.splitlines()] == ["'a b'", "'c'"]


def test_sampler_in_transformers_generate(tiny_llama_folder) -> None:
    code = "import sys, transformers_sampler; transformers_sampler.main(*sys.argv[1:])"
    output, packages = packages_after(code, str(tiny_llama_folder), "the ring")
    assert len(output.strip().splitlines()) == 3
    assert {"sampling", "kernels"} <= packages
    assert not packages & {"cache", "schedulers", "models", "engine", "cli"}


SERVER = """
import asyncio, json, sys
import torch
from transformers import AutoModelForCausalLM
from transformers_server import Server

async def ask(port, prompt, n):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(json.dumps({"prompt_ids": prompt, "max_tokens": n}).encode() + b"\\n")
    lines = []
    while not lines or not ("finish_reason" in lines[-1] or "error" in lines[-1]):
        lines.append(json.loads(await reader.readline()))
    writer.close()
    return [l["token"] for l in lines[:-1]], lines[-1]

async def main(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.config.eos_token_id = -1
    server = Server(model, num_pages=40, page_tokens=4, max_rows=3)
    stepping = asyncio.create_task(server.run())
    listener = await asyncio.start_server(server.connection, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21], list(range(30, 60)), [5, 6, 7, 8, 9, 10, 11, 12, 99]]
    answers = await asyncio.gather(*(ask(port, p, 12) for p in prompts))
    again = await ask(port, prompts[0], 12)
    bad = await ask(port, [], 3)
    for prompt, (tokens, _) in zip(prompts, answers):
        ids = torch.tensor([prompt])
        ones = torch.ones_like(ids)
        expected = model.generate(ids, attention_mask=ones, do_sample=False, max_new_tokens=12, pad_token_id=0)
        assert tokens == expected[0, len(prompt):].tolist(), prompt
    assert again[0] == answers[0][0] and again[1]["cached_tokens"] == 8, again
    assert "InvalidRequest" in bad[1]["error"], bad
    server.book.check()
    stepping.cancel()
    print("served", len(answers) + 1)

asyncio.run(main(sys.argv[1]))
"""


def test_schedulers_and_cache_around_a_transformers_model(tiny_llama_folder) -> None:
    output, packages = packages_after(SERVER, str(tiny_llama_folder))
    assert "served 5" in output
    assert {"cache", "schedulers"} <= packages
    assert not packages & {"kernels", "layers", "models", "sampling", "engine", "cli"}


def test_attention_notebook_runs_and_imports_only_what_it_needs() -> None:
    notebook = json.loads((EXAMPLES / "attention_op.ipynb").read_text())
    code = "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    output, packages = packages_after(code)
    assert "equal to torch" in output
    assert not packages & {"cache", "schedulers", "models", "sampling", "engine", "cli"}


@pytest.mark.slow
def test_notebooks_execute_in_a_kernel() -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    for path in EXAMPLES.glob("*.ipynb"):
        nbclient.NotebookClient(nbformat.read(path, as_version=4), timeout=240).execute()


def test_readme_code_runs(smollm2_gguf) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(blocks) == 2
    outputs = [run(block) for block in blocks]
    assert "Paris" in outputs[0]
    assert outputs[1].count("FinishReason") + outputs[1].count("length") + outputs[1].count("stop") >= 2
    engine = blocks[1].split("class ShortestFirst")[1]
    assert engine.count("\n") <= 40
