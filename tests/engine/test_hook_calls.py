"""Parts are looked up when an engine is composed; while it runs, no hook is called."""

from __future__ import annotations

from deepinfer import Composition, Registry, SamplingParams
from deepinfer.testing import counting_hook_calls


def test_ten_steps_call_no_hook(tiny_llama_folder):
    composition = Composition(model=str(tiny_llama_folder), max_rows=2, max_len=64)
    with counting_hook_calls() as composing:
        engine = composition.build(registry=Registry(plugins=()))
    assert composing.names == ["deepinfer_records"]
    params = SamplingParams(max_tokens=12, ignore_eos=True, seed=1)
    with counting_hook_calls() as running:
        for prompt_ids in ([3, 4, 5], [7, 8]):
            engine.add(prompt_ids, params)
        for _ in range(10):
            engine.step()
        assert engine.has_work
    assert len(running) == 0
