"""The engine on a tiny model: options, errors, endings, bookkeeping."""

import json
import shutil

import pluggy
import pytest
import torch

from deepinfer import LLM, SamplingParams
from deepinfer.engine import Composition
from deepinfer.errors import (
    CheckpointError,
    ConfigError,
    ContextLengthExceeded,
    InvalidRequest,
    NumericalError,
    StepFailed,
)
from deepinfer.types import FinishReason

PROMPT = list(range(5, 40))


@pytest.fixture(scope="module")
def llm(tiny_llama_folder) -> LLM:
    return LLM(str(tiny_llama_folder), max_rows=8, max_len=256, weights="float32", progress=False)


def greedy(**fields) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 16, "ignore_eos": True, **fields})


def is_empty(llm: LLM) -> bool:
    scheduler = llm.engine.scheduler
    scheduler.book.check()
    return not scheduler.num_running and not scheduler.num_waiting and not llm.engine.has_work


def test_bad_requests_get_typed_errors_and_the_others_go_on(llm) -> None:
    prompts = [PROMPT, [], [5, 10**6], [-1], [5] * 300, PROMPT]
    outputs = llm.generate(prompts, greedy())
    kinds = [type(o.error) for o in outputs]
    assert kinds == [type(None), InvalidRequest, InvalidRequest, InvalidRequest, ContextLengthExceeded, type(None)]
    assert outputs[0].token_ids == outputs[-1].token_ids
    assert "1000000" in str(outputs[2].error) and "position 1" in str(outputs[2].error)
    assert all(o.finished for o in outputs)
    assert is_empty(llm)


@pytest.mark.parametrize(
    "fields",
    [
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"max_tokens": 0},
        {"min_tokens": 9, "max_tokens": 8},
        {"min_p": 2.0},
        {"seed": -1},
        {"seed": 2**64},
        {"n": 0},
        {"stop": [""]},
        {"allowed_tokens": []},
        {"repetition_penalty": 0.0},
        {"logit_bias": {1: float("nan")}},
        {"forced_tokens": [1, 2], "max_tokens": 1},
        {"max_tokens": True},
        {"temperature": 1e-46},
        {"logit_bias": {5: 1e39}},
        {"logit_bias": {"x": 1.0}},
        {"stop": [5]},
        {"stop": b"bytes"},
        {"stop_token_ids": [1.5]},
        {"bad_words": 5},
        {"n": 200_000},
    ],
)
def test_bad_parameters_are_refused_when_made(fields) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**fields)
    words = ("integers", "text", next(iter(fields)))
    assert any(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    "fields",
    [
        {"salt": {}},
        {"salt": 5},
        {"extra_keys": 5},
        {"extra_keys": [5]},
        {"user": None},
        {"priority": "high"},
        {"deadline_s": "5"},
        {"deadline_s": 0},
        {"deadline_s": float("nan")},
        {"request_id": 7},
    ],
)
def test_bad_fields_of_a_request_cost_nobody_else_anything(llm, fields) -> None:
    with pytest.raises(InvalidRequest):
        llm.engine.add(PROMPT, greedy(), **fields)
    for prompt in ([1.7, 2.2], ["x"], None, b"bytes", 5, [float("nan")]):
        with pytest.raises(InvalidRequest):
            llm.engine.add(prompt, greedy())
    assert llm.generate(PROMPT, greedy())[0].error is None
    assert is_empty(llm)


def test_refusing_one_prompt_of_a_call_leaves_none_behind(llm) -> None:
    with pytest.raises(InvalidRequest):
        llm.engine.generate([PROMPT, []], greedy())
    while llm.engine.has_work:
        llm.engine.step()
    assert is_empty(llm)


def test_a_stop_string_in_the_last_allowed_token_is_the_reason(llm) -> None:
    texts = [llm.generate(PROMPT, greedy(max_tokens=count))[0].text for count in range(1, 9)]
    stop = texts[-1][-2:]
    count = next(i for i, text in enumerate(texts, start=1) if stop in text)
    output = llm.generate(PROMPT, greedy(max_tokens=count, stop=[stop]))[0]
    assert (output.completions[0].finish_reason, output.completions[0].stop_reason) == (FinishReason.STOP, stop)


def test_an_observer_that_raises_costs_nothing(tiny_llama_folder, caplog) -> None:
    class Broken:
        def request_added(self, *about):
            raise RuntimeError("observer broke")

        step_done = request_finished = request_added

    llm = LLM(str(tiny_llama_folder), weights="float32", observers=[Broken()], progress=False)
    assert llm.generate(PROMPT, greedy())[0].error is None
    assert "observer" in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 0},
        {"num_attention_heads": "4"},
        {"hidden_size": None},
        {"rms_norm_eps": "x"},
        {"rms_norm_eps": None},
        {"rope_parameters": "linear"},
        {"rope_parameters": {"rope_type": "linear", "factor": 0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": None}},
        {"max_position_embeddings": 10**12},
        {"eos_token_id": 10**6},
        {"model_type": None},
        {"model_type": "spiral"},
    ],
)
def test_a_configuration_that_makes_no_sense_is_a_typed_error(tiny_llama_folder, tmp_path, changes) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    with pytest.raises((CheckpointError, ConfigError)):
        Composition(model=str(folder), weights="float32").build()


def test_parameters_are_checked_against_the_vocabulary(llm) -> None:
    for fields in ({"logit_bias": {10**6: 1.0}}, {"allowed_tokens": [10**6]}, {"forced_tokens": [10**6]}):
        assert isinstance(llm.generate(PROMPT, greedy(**fields))[0].error, InvalidRequest)


def test_poisoned_weights_end_only_the_request_that_meets_them(tiny_llama_folder) -> None:
    llm = LLM(str(tiny_llama_folder), max_rows=8, weights="float32", progress=False)
    expected = llm.generate(PROMPT, greedy())[0]
    llm.engine.executor.model.embedding[77] = float("nan")
    with_nan, without = llm.generate([[77, *PROMPT], PROMPT], greedy())
    assert isinstance(with_nan.error, NumericalError)
    assert with_nan.completions[0].finish_reason is FinishReason.ERROR
    assert without.token_ids == expected.token_ids
    assert is_empty(llm)


def test_a_model_that_raises_ends_only_the_request_that_makes_it(tiny_llama_folder, monkeypatch) -> None:
    llm = LLM(str(tiny_llama_folder), max_rows=8, weights="float32", prefix_caching=False, progress=False)
    expected = [o.token_ids for o in llm.generate([PROMPT, PROMPT[3:]], greedy())]
    model, forward = llm.engine.executor.model, type(llm.engine.executor.model).forward

    def failing(self, batch, kv):
        if (batch.token_ids == 99).any():
            raise RuntimeError("no memory for this one")
        return forward(self, batch, kv)

    monkeypatch.setattr(type(model), "forward", failing)
    good, bad, other = llm.generate([PROMPT, [99, *PROMPT], PROMPT[3:]], greedy(logit_bias={99: -100.0}))
    assert isinstance(bad.error, StepFailed) and "no memory" in str(bad.error.__cause__ or bad.error)
    assert [good.error, other.error] == [None, None]
    assert [good.token_ids, other.token_ids] == expected
    assert is_empty(llm)


def test_endings(llm, tiny_llama_folder) -> None:
    free = llm.generate(PROMPT, greedy())[0].token_ids
    stopped = llm.generate(PROMPT, greedy(stop_token_ids=[free[4]]))[0]
    first = free.index(free[4])
    assert stopped.token_ids == free[: first + 1]
    assert (stopped.completions[0].finish_reason, stopped.completions[0].stop_reason) == (FinishReason.STOP, free[4])
    later = llm.generate(PROMPT, greedy(stop_token_ids=[free[4]], min_tokens=10))[0]
    assert len(later.token_ids) >= 10 and free[4] not in later.token_ids[:10]
    long = llm.generate(PROMPT, greedy(max_tokens=10**6))[0]
    assert len(long.token_ids) + len(PROMPT) == 256
    assert long.completions[0].finish_reason is FinishReason.LENGTH


def test_stop_strings_cut_text_and_never_leak_while_streamed(llm) -> None:
    full = llm.generate(PROMPT, greedy(max_tokens=40))[0]
    stop = full.text[12:17]
    for lag in (0, 1):
        llm.engine.loop.lag = lag
        request_id = llm.engine.add(PROMPT, greedy(max_tokens=40, stop=[stop]), stream=True)
        seen = ""
        while llm.engine.has_work:
            for output in llm.engine.step():
                assert output.request_id == request_id
                assert output.text.startswith(seen)
                assert stop not in output.text
                seen = output.text
        assert seen == full.text[: full.text.index(stop)]
        assert output.completions[0].stop_reason == stop
        assert is_empty(llm)
    llm.engine.loop.lag = 0


def test_forced_tokens_come_with_their_logprobs(llm) -> None:
    forced = [11, 12, 13]
    output = llm.generate(PROMPT, greedy(forced_tokens=forced, logprobs=2))[0]
    assert list(output.token_ids[:3]) == forced
    model_says = llm.generate([*PROMPT, *forced, 9], greedy(prompt_logprobs=2, max_tokens=1))[0].prompt_logprobs
    scored = [entry.raw for entry in model_says[len(PROMPT) - 1 :][:3]]
    assert [entry.raw for entry in output.completions[0].logprobs[:3]] == pytest.approx(scored, abs=1e-4)


def test_prompt_logprobs_equal_a_plain_softmax_over_chunks(tiny_llama_folder, llm) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama_folder, dtype=torch.float32)
    with torch.inference_mode():
        logprobs = theirs(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    chunked = LLM(str(tiny_llama_folder), weights="float32", max_tokens_per_step=7, max_rows=2, progress=False)
    for one in (llm, chunked, chunked):
        found = one.generate(PROMPT, greedy(prompt_logprobs=3, max_tokens=1))[0].prompt_logprobs
        assert [entry.token_id for entry in found] == PROMPT[1:]
        for i, entry in enumerate(found):
            assert entry.raw == pytest.approx(logprobs[i, PROMPT[i + 1]].item(), abs=1e-4)
            assert [t for t, _ in entry.top] == logprobs[i].topk(3).indices.tolist()


def test_cancel_and_deadline_in_any_state(tiny_llama_folder) -> None:
    now = [0.0]
    composition = Composition(model=str(tiny_llama_folder), max_rows=2, weights="float32")
    engine = composition.build()
    engine.loop._clock = engine._clock = lambda: now[0]
    ids = [engine.add(PROMPT, greedy(max_tokens=100), deadline_s=5.0 if i == 1 else None) for i in range(4)]
    outputs = {}

    def step() -> None:
        outputs.update({o.request_id: o for o in engine.step()})

    step()
    engine.cancel(ids[0])
    engine.cancel(ids[3])
    engine.cancel("never heard of")
    step()
    now[0] = 6.0
    while engine.has_work:
        step()
    reasons = [outputs[i].completions[0].finish_reason for i in ids]
    assert reasons == [FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.LENGTH, FinishReason.CANCELLED]
    assert len(outputs) == 4
    engine.scheduler.book.check()


def test_two_engines_interleave_in_one_process(tiny_llama_folders) -> None:
    folders = list(tiny_llama_folders.values())[:2]
    expected = [LLM(str(f), weights="float32", progress=False).generate(PROMPT, greedy())[0].token_ids for f in folders]
    engines = [Composition(model=str(f), weights="float32", lag=i).build() for i, f in enumerate(folders)]
    for engine in engines:
        engine.add(PROMPT, greedy())
    done = [None, None]
    while any(e.has_work for e in engines):
        for i, engine in enumerate(engines):
            for output in engine.step():
                done[i] = output.token_ids
    assert done == expected


def test_a_composition_goes_to_json_and_back(tiny_llama_folder, tmp_path) -> None:
    composition = Composition(
        model=str(tiny_llama_folder), policy="priority", weights="float32", want={"op.attention": "reference"}, seed=3
    )
    composition.save(tmp_path / "engine.json")
    loaded = Composition.load(tmp_path / "engine.json")
    assert loaded == composition
    engines = [c.build() for c in (composition, loaded)]
    params = SamplingParams(temperature=1.0, max_tokens=12)
    first, second = (e.generate([PROMPT], params)[0].token_ids for e in engines)
    assert first == second
    assert json.loads(json.dumps(engines[0].config())) == json.loads(json.dumps(engines[1].config()))
    with pytest.raises(ConfigError, match="no field colour"):
        Composition.from_dict({"model": "x", "colour": "red"})


def test_no_hook_is_called_while_stepping(tiny_llama_folder, monkeypatch) -> None:
    engine = Composition(model=str(tiny_llama_folder), weights="float32").build()
    calls = []
    original = pluggy.HookCaller.__call__
    monkeypatch.setattr(
        pluggy.HookCaller, "__call__", lambda self, **kw: (calls.append(self.name), original(self, **kw))[1]
    )
    engine.add(PROMPT, greedy(max_tokens=12))
    for _ in range(10):
        engine.step()
    assert calls == []


def test_unseeded_requests_differ_from_each_other(llm) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate([PROMPT] * 4, params)
    assert len({o.token_ids for o in outputs}) == 4


def test_metrics_count_what_happened(tiny_llama_folder) -> None:
    llm = LLM(str(tiny_llama_folder), weights="float32", progress=False)
    llm.generate([PROMPT, PROMPT, []], greedy())
    llm.generate(PROMPT, greedy())
    counters = llm.engine.metrics.counters
    assert counters["generation_tokens_total"] == 3 * 16
    assert counters["prompt_tokens_total"] == 3 * len(PROMPT)
    assert counters["prefix_cache_hits_total"] >= 32
    text = llm.engine.metrics.render()
    assert f'deepinfer_request_success_total{{model_name="{tiny_llama_folder}",finished_reason="length"}} 3' in text
    assert "deepinfer_time_to_first_token_seconds_bucket{" in text and 'le="+Inf"} 3' in text


def test_observers_see_every_request_and_step(tiny_llama_folder) -> None:
    seen = []

    class Watch:
        def request_added(self, request):
            seen.append(("added", request.request_id))

        def step_done(self, plan, result):
            seen.append(("step", plan.num_tokens))

        def request_finished(self, output):
            seen.append(("finished", output.request_id))

    llm = LLM(str(tiny_llama_folder), weights="float32", observers=[Watch()], progress=False)
    llm.generate(PROMPT, greedy(max_tokens=3))
    assert seen == [("added", "request-0"), ("step", len(PROMPT)), ("step", 1), ("step", 1), ("finished", "request-0")]
