"""The default composition: model, cache, scheduler, sampler and executor joined into an engine.

This is the file to copy when composing an engine of one's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..accelerator import Accelerator
from ..cache import PagedBook
from ..errors import CheckpointError, ConfigError
from ..layers.kv import KVPool
from ..models import Checkpoint, LoadOptions, find_demo_model, load_model, open_checkpoint
from ..protocols import ChatFormat, LogitsTransform, Observer, Tokenizer
from ..registry import Registry, default_registry
from ..sampling import Sampler
from ..schedulers import Scheduler
from .admission import Limits
from .composition import Composition
from .engine import Engine
from .executor import ModelExecutor

__all__ = ["compose"]


def compose(
    composition: Composition,
    *,
    registry: Registry | None = None,
    observers: Iterable[Observer] = (),
    transforms: Sequence[LogitsTransform] = (),
    progress: bool = False,
) -> Engine:
    """Build the engine a composition describes. `transforms` change the logits of every step, in order.

    Raises:
        CheckpointError: the model cannot be read.
        RegistryError: a named part is not there or not usable here.
        ConfigError: the numbers do not fit together.
    """
    registry = default_registry() if registry is None else registry
    accelerator: Accelerator = registry.resolve("accelerator", name=composition.accelerator)
    path = find_demo_model() if composition.model == "smollm2" else composition.model
    checkpoint = open_checkpoint(path, progress=progress, registry=registry)
    options = _options(composition, accelerator)
    model = load_model(checkpoint, options, registry=registry, progress=progress)
    max_len = min(composition.max_len or model.context_len, model.context_len)
    num_pages = _num_pages(composition, model.cache_spec.bytes_per_token(options.torch_cache_dtype), max_len)
    kv = KVPool(
        model.cache_spec,
        num_pages=num_pages,
        page_tokens=composition.page_tokens,
        dtype=options.torch_cache_dtype,
        device=model.device,
    )
    book = PagedBook(num_pages, page_tokens=composition.page_tokens, prefix_caching=composition.prefix_caching)
    scheduler = Scheduler(
        book,
        policy=registry.resolve("scheduler.policy", name=composition.policy, **composition.policy_options),
        max_rows=composition.max_rows,
        max_tokens_per_step=composition.max_tokens_per_step,
        max_len=max_len,
    )
    tokenizer: Tokenizer = registry.resolve("tokenizer", checkpoint=checkpoint)
    eos_ids = _eos_ids(checkpoint, tokenizer, model.vocab_size)
    sampler = Sampler(model.ops.sample, vocab_size=model.vocab_size, transforms=transforms)
    executor = ModelExecutor(model, kv, sampler, max_rows=composition.max_rows, max_len=max_len, eos_ids=eos_ids)
    return Engine(
        scheduler,
        executor,
        limits=Limits(model.vocab_size, max_len, eos_ids),
        tokenizer=tokenizer,
        chat_format=_chat_format(checkpoint, registry),
        lag=composition.lag,
        seed=composition.seed,
        observers=observers,
        model_name=composition.model,
        composition=composition,
    )


def _eos_ids(checkpoint: Checkpoint, tokenizer: Tokenizer, vocab_size: int) -> tuple[int, ...]:
    """Ids that end a completion, as configurations and tokenizer name them."""
    ids = tuple(dict.fromkeys([*checkpoint.eos_ids, *tokenizer.eos_ids]))
    outside = [i for i in ids if not 0 <= i < vocab_size]
    if outside:
        raise CheckpointError(
            f"{checkpoint.path}: end-of-sequence id {outside[0]} is outside the vocabulary of {vocab_size}"
        )
    return ids


def _chat_format(checkpoint: Checkpoint, registry: Registry) -> ChatFormat | None:
    """None for a base model, which brings no template."""
    record = registry.explain("chat_format", {"checkpoint": checkpoint}).picked
    return None if record is None else registry.create(record, checkpoint=checkpoint)


def _options(composition: Composition, accelerator: Accelerator) -> LoadOptions:
    return LoadOptions(
        device=accelerator.device,
        dtype=composition.dtype or accelerator.dtype,
        weights=composition.weights,
        cache_dtype=composition.cache_dtype,
        invariant=composition.invariant,
        page_tokens=composition.page_tokens,
        context_len=composition.max_len,
        want=composition.want,
    )


def _num_pages(composition: Composition, token_bytes: int, max_len: int) -> int:
    """Pages of the pool, page 0 included."""
    page_bytes = token_bytes * composition.page_tokens
    if composition.cache_tokens is not None:
        wanted = -(-composition.cache_tokens // composition.page_tokens)
    else:
        each = -(-max_len // composition.page_tokens)
        wanted = min(composition.max_rows * each, composition.cache_bytes // page_bytes)
    if wanted < 1:
        raise ConfigError(
            f"cache_bytes {composition.cache_bytes} is less than one page of {page_bytes} bytes; give more"
        )
    return wanted + 1
