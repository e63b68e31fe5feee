"""The seams: what a part must offer to be used by the others. No inheritance needed.

Shape letters (docs/shapes.md): T tokens of a batch, R rows, N logit rows, H query heads, G key/value
heads, D head width, M model width, F feed-forward width, V vocabulary, P pages, Z tokens a page, S slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from .kernels.ops import Ops
    from .layers.batch import Batch, RowSet
    from .layers.decoder import DecoderLayer
    from .layers.kv import CacheSpec, KVPool
    from .plan import Plan, StepResult
    from .types import Request, RequestOutput

__all__ = [
    "Accelerator",
    "AttentionOp",
    "CacheWriteOp",
    "ChatFormat",
    "DecoderLayerCall",
    "Executor",
    "FusedDecoderLayerOp",
    "KVBook",
    "LinearOp",
    "LogitsTransform",
    "Model",
    "Observer",
    "Policy",
    "PrefixHit",
    "RmsNormOp",
    "RopeOp",
    "SampleOp",
    "SiluMulOp",
    "TextStream",
    "Tokenizer",
    "WaitingView",
]


# --- scheduling ---------------------------------------------------------------------------------


class WaitingView(Protocol):
    """What a policy may look at."""

    @property
    def request(self) -> Request: ...
    @property
    def prompt_len(self) -> int: ...
    @property
    def arrival_s(self) -> float: ...
    @property
    def arrival_index(self) -> int:
        """0, 1, 2, ... in the order of submission."""
        ...


@runtime_checkable
class Policy(Protocol):
    """Order of admission. The smallest key is admitted first and preempted last."""

    def key(self, entry: WaitingView) -> Any:
        """Sort key, asked once when the entry is submitted; any ordered value."""
        ...

    def admitted(self, entry: WaitingView) -> None:
        """Called when the entry gets a slot (a fair policy moves its clock here)."""
        ...

    def config(self) -> Mapping[str, Any]: ...


class PrefixHit(Protocol):
    """Pages of a cached prefix, already retained for the caller."""

    @property
    def page_ids(self) -> NDArray[np.int32]: ...
    @property
    def num_tokens(self) -> int: ...


class KVBook(Protocol):
    """Page bookkeeping as a scheduler sees it. Page 0 is padding and never handed out."""

    page_tokens: int
    num_pages: int

    @property
    def num_free(self) -> int:
        """Pages that `allocate` could give now, evicting cached ones."""
        ...

    def match(self, token_ids: NDArray[np.int32], *, salt: str = "", extra_keys: Sequence[str] = ()) -> PrefixHit:
        """Longest cached whole-page prefix, capped so that at least one token stays to be computed."""
        ...

    def allocate(self, count: int) -> NDArray[np.int32] | None:
        """`count` fresh pages with one reference each, or None if there are not enough."""
        ...

    def release(self, page_ids: NDArray[np.int32], *, after: int | None = None) -> None:
        """Give up one reference each; `after`: usable again only once that step is retired."""
        ...

    def retain(self, page_ids: NDArray[np.int32]) -> None: ...

    def publish(
        self,
        token_ids: NDArray[np.int32],
        page_ids: NDArray[np.int32],
        *,
        salt: str = "",
        extra_keys: Sequence[str] = (),
    ) -> None:
        """Offer the whole pages of `token_ids` (settled, never written again) to later requests."""
        ...

    def retire(self, step: int) -> None:
        """Every step up to `step` has ended: pages released `after` it are free."""
        ...


@runtime_checkable
class Executor(Protocol):
    """Runs plans. `launch` and `finish` do not wait for the device; `settle` is the only wait."""

    def launch(self, plan: Plan) -> Any:
        """Start the forward; returns a pending step."""
        ...

    def finish(self, pending: Any, masks: Any | None) -> None:
        """Logits, masks and sampling of that step."""
        ...

    def settle(self, pending: Any) -> StepResult: ...


# --- ops: tensors first, the rest keyword-only; out[i] depends on row i and its cached rows only --


class RmsNormOp(Protocol):
    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, *, eps: float, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, M], weight [M] -> (normed [T, M], x + residual [T, M])."""
        ...


class RopeOp(Protocol):
    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, pos: torch.Tensor, *, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q [T, H, D], k [T, G, D], pos i32 [T] -> rotated q, k.

        cos_sin f32 [context, D]: line p holds D/2 cosines, then D/2 sines of position p. Half-split
        pairing: element i turns with element i + D/2. q and k may be strided views of one tensor.
        """
        ...


class SiluMulOp(Protocol):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, 2F] (gate, up) -> silu(gate) * up [T, F]."""
        ...


class CacheWriteOp(Protocol):
    def __call__(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        page_table: torch.Tensor,
        rows: RowSet,
    ) -> None:
        """k, v [T, G, D] into pools [P, Z, G, D] at each token's page and offset."""
        ...


class AttentionOp(Protocol):
    def __call__(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        page_table: torch.Tensor,
        rows: RowSet,
        *,
        scale: float,
    ) -> torch.Tensor:
        """q [T, H, D] over the pages of each row, causal by absolute position -> [T, H, D]."""
        ...


class LinearOp(Protocol):
    """A weight is packed once, at load, into whatever the op reads fastest."""

    def pack(self, weight: Any, bias: torch.Tensor | None = None) -> Any:
        """weight: float tensor [N, K] or `kernels.quant.QuantTensor` of that shape."""
        ...

    def __call__(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        """x [T, K] -> [T, N]."""
        ...


class SampleOp(Protocol):
    def __call__(
        self,
        logits: torch.Tensor,
        *,
        greedy: torch.Tensor,
        seed: torch.Tensor,
        sample_index: torch.Tensor,
        pos: torch.Tensor,
        purpose: int,
        token_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """logits f32 [N, V] (temperature applied) -> ids i64 [N]: argmax of logits + `kernels.noise.gumbel`.

        Ties go to the lower column; rows with `greedy` bool [N] get no noise; -inf is never sampled. seed i64 [N]
        holds the 64 bits; sample_index, pos i32 [N]. token_ids i64 [N, K], ascending in each row: logits are
        [N, K], column k of row n is the token `token_ids[n, k]`, and such a token is returned.
        """
        ...


class FusedDecoderLayerOp(Protocol):
    """A whole decoder layer at once, for layers whose ops are all of the same implementation."""

    def __call__(self, layer: DecoderLayer) -> DecoderLayerCall:
        """What runs in the place of `layer`, with the same bits."""
        ...


class DecoderLayerCall(Protocol):
    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: Batch, kv: KVPool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [T, M] -> the same pair after the layer."""
        ...


# --- models and text -----------------------------------------------------------------------------


class Accelerator(Protocol):
    """A device type that models are loaded on."""

    @property
    def name(self) -> str: ...
    @property
    def device(self) -> str:
        """torch device type, such as `cuda`."""
        ...

    @property
    def dtype(self) -> str:
        """Element type of activations where the user names none, such as `bfloat16`."""
        ...


class Model(Protocol):
    """A causal language model over paged keys and values, on one device."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def context_len(self) -> int:
        """Positions it was loaded for."""
        ...

    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> torch.dtype:
        """Of activations and of the keys and values it writes."""
        ...

    @property
    def ops(self) -> Ops:
        """The ops it was built from; an executor samples with the same."""
        ...

    @property
    def cache_spec(self) -> CacheSpec: ...

    def forward(self, batch: Batch, kv: Any) -> torch.Tensor:
        """Normed hidden states [N, M] of `batch.logit_rows`; all T tokens' keys and values go to `kv`."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, M] -> f32 [N, V]."""
        ...


class Tokenizer(Protocol):
    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...
    def detokenizer(self, *, prefix_ids: Sequence[int] = ()) -> TextStream:
        """A fresh incremental decoder for what follows `prefix_ids` (the end of a prompt)."""
        ...


class TextStream(Protocol):
    """Turns tokens into text that never has to be taken back. One per sequence."""

    def push(self, token_id: int) -> str:
        """Text that became certain with this token."""
        ...

    def flush(self) -> str:
        """What is left when no token follows."""
        ...


class ChatFormat(Protocol):
    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str: ...


class LogitsTransform(Protocol):
    """Changes logits of the rows it is asked about; returns the tensor to go on with."""

    def __call__(self, logits: torch.Tensor, rows: Sequence[Any]) -> torch.Tensor:
        """logits f32 [N, V]; rows: N `engine.RowView` (request id, prompt and output ids)."""
        ...


class Observer(Protocol):
    """Told about requests and steps; an engine without observers never calls one."""

    def request_added(self, request: Request) -> None: ...
    def step_done(self, plan: Plan, result: StepResult) -> None: ...
    def request_finished(self, output: RequestOutput) -> None: ...
