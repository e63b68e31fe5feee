"""`LLM`: prompts in, texts out, one call. For servers see `AsyncEngine`; for parts see `compose`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from ..errors import ConfigError, RequestError
from ..protocols import Observer
from ..registry import Registry
from ..types import Completion, FinishReason, RequestOutput, SamplingParams
from .composition import Composition
from .engine import Engine

__all__ = ["LLM"]

Prompt = str | Sequence[int]
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model and the default engine around it. Not thread-safe; several may live in one process.

    Args:
        model: HF folder, .gguf file, hub id, "smollm2" for the demo model, or a `Composition`.
        registry: where parts are looked up; default is the process's own.
        observers: told about requests and steps.
        progress: show loading progress.
        **fields: fields of `Composition`.

    >>> llm = LLM("smollm2")                                          # doctest: +SKIP
    >>> llm.generate("The capital of France is", SamplingParams(temperature=0))[0].text   # doctest: +SKIP
    """

    def __init__(
        self,
        model: str | Composition,
        *,
        registry: Registry | None = None,
        observers: Iterable[Observer] = (),
        progress: bool = True,
        **fields: Any,
    ) -> None:
        if isinstance(model, Composition):
            self.composition = attrs.evolve(model, **fields)
        else:
            self.composition = Composition.from_dict({"model": str(model), **fields})
        self.engine: Engine = self.composition.build(registry=registry, observers=observers, progress=progress)

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params = None, *, use_tqdm: bool = False
    ) -> list[RequestOutput]:
        """One output per prompt, in order. A prompt that cannot be served has its error in its output.

        prompts: a text, a list of token ids, or a list of either. params: one for all, or one each.
        """
        batch = _as_batch(prompts)
        each = _one_each(params, len(batch))
        outputs: dict[int, RequestOutput] = {}
        waiting: dict[str, int] = {}
        for i, (prompt, one) in enumerate(zip(batch, each, strict=True)):
            try:
                waiting[self.engine.add(prompt, one)] = i
            except RequestError as error:
                outputs[i] = _refused(i, prompt, error)
        self._run(waiting, outputs, use_tqdm)
        return [outputs[i] for i in range(len(batch))]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: Params = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Render conversations with the model's chat template and answer them.

        messages: one conversation ({"role", "content"} mappings) or a list of them.

        Raises:
            ChatTemplateError: the template fails on a conversation.
        """
        if messages and isinstance(messages[0], Mapping):
            messages = [messages]  # type: ignore[list-item]
        prompts = [self.engine.render_chat(one, tools=tools) for one in messages]  # type: ignore[arg-type]
        return self.generate(prompts, params, use_tqdm=use_tqdm)

    def _run(self, waiting: dict[str, int], outputs: dict[int, RequestOutput], use_tqdm: bool) -> None:
        bar = _progress(len(waiting)) if use_tqdm else None
        started, num_tokens = time.perf_counter(), 0
        while waiting:
            for output in self.engine.step():
                index = waiting.pop(output.request_id, None)
                if index is None:
                    continue
                outputs[index] = output
                num_tokens += sum(len(c.token_ids) for c in output.completions)
                if bar is not None:
                    bar.set_postfix_str(f"{num_tokens / (time.perf_counter() - started):.1f} tok/s")
                    bar.update()
        if bar is not None:
            bar.close()


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if len(prompts) and all(isinstance(p, int) for p in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _one_each(params: Params, count: int) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise ConfigError(f"{len(params)} params for {count} prompts; give one for all or one each")
    return list(params)


def _refused(index: int, prompt: Prompt, error: RequestError) -> RequestOutput:
    """The output of a prompt that was never submitted."""
    failed = Completion(index=0, token_ids=(), text="", finish_reason=FinishReason.ERROR, error=error)
    ids = () if isinstance(prompt, str) else tuple(prompt)
    return RequestOutput(request_id=f"refused-{index}", prompt_ids=ids, completions=(failed,))


def _progress(total: int) -> Any:
    from tqdm.auto import tqdm

    return tqdm(total=total, desc="prompts", dynamic_ncols=True)
