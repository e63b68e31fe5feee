"""Attention over pages: one kernel for decode rows and prompt chunks. Specification: `reference.py::attention`.

A program serves `BLOCK_M` (token, head) pairs of one key/value head, so keys are read once for the whole
group. Keys are taken in tiles of `BLOCK_N` counted from key 0 (online softmax, base 2). Splits of a row's keys
(flash-decoding) let a few rows fill the device; `splits.py` merges them.

In invariant mode splits have a fixed number of keys, tiles a fixed shape for decode and prompts alike, and
prompt programs merge their splits in the order, and with the operations, that the second pass uses for decode
rows: a token's result is the same bits in whichever batch and phase it is computed. Tiles or splits that a
token does not see change nothing: their weights are exactly 0, the rescaling factor exactly 1.

Cost: 2 * G * D elements read a key and row; 4 * H * D operations a visible key and token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch
import triton
import triton.language as tl

from .splits import add_split, merge_splits

if TYPE_CHECKING:
    from ...layers.batch import RowSet

__all__ = ["PagedAttention", "TileShape"]

LOG2_E = 1.4426950408889634


@triton.jit
def _load_tile(
    pool_ptr: tl.tensor,
    line_ptr: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    stride_page: tl.tensor,
    stride_line: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Keys or values `start` ... `start + BLOCK_N` of one head [BLOCK_N, BLOCK_D], zeros from `end` on."""
    n = start + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    if MASKED:
        pages = tl.load(line_ptr + n // PAGE, mask=n < end, other=0).to(tl.int64)
    else:
        pages = tl.load(line_ptr + n // PAGE).to(tl.int64)
    place = pool_ptr + (pages * stride_page + (n % PAGE) * stride_line)[:, None] + d[None, :]
    if MASKED:
        tile = tl.load(place, mask=(n < end)[:, None] & (d < WIDTH)[None, :], other=0.0)
    elif BLOCK_D == WIDTH:
        tile = tl.load(place)
    else:
        tile = tl.load(place, mask=(d < WIDTH)[None, :], other=0.0)
    return tile


@triton.jit
def _tile(
    q: tl.tensor,
    high: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    line_ptr: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    pos: tl.tensor,
    scale: tl.tensor,
    stride_k_page: tl.tensor,
    stride_k_line: tl.tensor,
    stride_v_page: tl.tensor,
    stride_v_line: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """One step of the online softmax."""
    k = _load_tile(k_ptr, line_ptr, start, end, stride_k_page, stride_k_line, WIDTH, BLOCK_D, BLOCK_N, PAGE, MASKED)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        n = start + tl.arange(0, BLOCK_N)
        scores = tl.where(n[None, :] <= pos[:, None], scores, float("-inf"))
    best = tl.maximum(high, tl.max(scores, axis=1) * scale)
    level = best
    if MASKED:
        level = tl.where(best == float("-inf"), 0.0, best)
    weights = tl.exp2(scores * scale - level[:, None])
    shrink = tl.exp2(high - level)
    total = total * shrink + tl.sum(weights, axis=1)
    v = _load_tile(v_ptr, line_ptr, start, end, stride_v_page, stride_v_line, WIDTH, BLOCK_D, BLOCK_N, PAGE, MASKED)
    mixed = tl.dot(weights.to(v.dtype), v, mixed * shrink[:, None], input_precision="ieee")
    return best, total, mixed


@triton.jit
def _span(
    q: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    line_ptr: tl.tensor,
    first: tl.tensor,
    seen_by_all: tl.tensor,
    end: tl.tensor,
    pos: tl.tensor,
    scale: tl.tensor,
    stride_k_page: tl.tensor,
    stride_k_line: tl.tensor,
    stride_v_page: tl.tensor,
    stride_v_line: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Maximum, sum of weights and weighted values over keys `first` ... `end`; no mask before `seen_by_all`."""
    high = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    mixed = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    plain = tl.maximum(first, tl.minimum(end, seen_by_all // BLOCK_N * BLOCK_N))
    for start in range(first, plain, BLOCK_N):
        high, total, mixed = _tile(
            q, high, total, mixed, k_ptr, v_ptr, line_ptr, start, end, pos, scale, stride_k_page, stride_k_line,
            stride_v_page, stride_v_line, WIDTH, BLOCK_D, BLOCK_N, PAGE, False,
        )  # fmt: skip
    for start in range(plain, end, BLOCK_N):
        high, total, mixed = _tile(
            q, high, total, mixed, k_ptr, v_ptr, line_ptr, start, end, pos, scale, stride_k_page, stride_k_line,
            stride_v_page, stride_v_line, WIDTH, BLOCK_D, BLOCK_N, PAGE, True,
        )  # fmt: skip
    return high, total, mixed


@triton.jit
def _attend(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    part_ptr: tl.tensor,
    stat_ptr: tl.tensor,
    table_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    cu_q_ptr: tl.tensor,
    k_len_ptr: tl.tensor,
    scale: tl.tensor,
    first_row: tl.tensor,
    num_kv_heads: tl.tensor,
    split_keys: tl.tensor,
    stride_q: tl.tensor,
    stride_q_head: tl.tensor,
    stride_k_page: tl.tensor,
    stride_k_line: tl.tensor,
    stride_k_head: tl.tensor,
    stride_v_page: tl.tensor,
    stride_v_line: tl.tensor,
    stride_v_head: tl.tensor,
    stride_table: tl.tensor,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    PARTIAL: tl.constexpr,
    IN_ORDER: tl.constexpr,
) -> None:
    # The blocks with the most keys go first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    row, kv_head = first_row + tl.program_id(1) // num_kv_heads, tl.program_id(1) % num_kv_heads
    first_token = tl.load(cu_q_ptr + row)
    num_tokens = tl.load(cu_q_ptr + row + 1) - first_token
    k_len = tl.load(k_len_ptr + row)
    if block * BLOCK_M >= num_tokens * GROUP:
        return
    pair = block * BLOCK_M + tl.arange(0, BLOCK_M)
    step, head = pair // GROUP, kv_head * GROUP + pair % GROUP
    valid = step < num_tokens
    pos = k_len - num_tokens + step
    seen_by_all = k_len - num_tokens + block * BLOCK_M // GROUP + 1
    end = k_len - num_tokens + tl.minimum((block * BLOCK_M + BLOCK_M - 1) // GROUP + 1, num_tokens)
    first, last = 0, end
    if PARTIAL:
        first = tl.program_id(2) * split_keys
        last = tl.minimum(end, first + split_keys)
    if first >= end:
        return
    d = tl.arange(0, BLOCK_D)
    inside = valid[:, None] & (d < WIDTH)[None, :]
    token = (first_token + step).to(tl.int64)
    place = q_ptr + (token * stride_q + head * stride_q_head)[:, None] + d[None, :]
    q = tl.load(place, mask=inside, other=0.0)
    k_ptr += kv_head * stride_k_head
    v_ptr += kv_head * stride_v_head
    line_ptr = table_ptr + tl.load(slots_ptr + row).to(tl.int64) * stride_table
    if IN_ORDER:
        high = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        mixed = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for begin in range(0, end, split_keys):
            part_high, part_total, part_mixed = _span(
                q, k_ptr, v_ptr, line_ptr, begin, seen_by_all, tl.minimum(end, begin + split_keys), pos, scale,
                stride_k_page, stride_k_line, stride_v_page, stride_v_line, WIDTH, BLOCK_M, BLOCK_D, BLOCK_N, PAGE,
            )  # fmt: skip
            high, total, mixed = add_split(high, total, mixed, part_high, part_total, part_mixed)
    else:
        high, total, mixed = _span(
            q, k_ptr, v_ptr, line_ptr, first, seen_by_all, last, pos, scale, stride_k_page, stride_k_line,
            stride_v_page, stride_v_line, WIDTH, BLOCK_M, BLOCK_D, BLOCK_N, PAGE,
        )  # fmt: skip
    slot = token * (num_kv_heads * GROUP) + head
    if PARTIAL:
        slot = slot * tl.num_programs(2) + tl.program_id(2)
        tl.store(stat_ptr + slot * 2, high, mask=valid)
        tl.store(stat_ptr + slot * 2 + 1, total, mask=valid)
        tl.store(part_ptr + slot[:, None] * WIDTH + d[None, :], mixed, mask=inside)
    else:
        out = (mixed / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + slot[:, None] * WIDTH + d[None, :], out, mask=inside)


@attrs.frozen
class TileShape:
    """How one launch is cut: pairs and keys of a tile, warps of a program, tiles in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


class PagedAttention:
    """Attention op. Stateless; see the module for what `invariant` fixes."""

    #: Keys of a split in invariant mode.
    SPLIT_KEYS = 512

    def __init__(self, *, device: str, invariant: bool = False) -> None:
        self._invariant = invariant
        on_gpu = torch.device(device).type == "cuda"
        self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 2
        self._hopper = on_gpu and torch.cuda.get_device_capability(device) == (9, 0)

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
        """q [T, H, D] over pools [P, Z, G, D] (elements of a head adjacent) -> [T, H, D]; scale > 0."""
        q = q if q.stride(2) == 1 else q.contiguous()
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if not q.shape[0]:
            return out
        inputs = (q, k_pool, v_pool, page_table, rows)
        num_rows, group = rows.slot_ids.shape[0], q.shape[1] // k_pool.shape[2]
        few = self._few(q, rows.num_decode * k_pool.shape[2])
        # Rows so short that one block holds each are split like decode rows, else they would leave most SMs idle.
        split_rows = num_rows if rows.max_q * group <= few.block_m else rows.num_decode
        if split_rows:
            max_q = rows.max_q if split_rows == num_rows else 1
            split_keys = self._split_keys(rows.max_k, split_rows * k_pool.shape[2], few.block_n)
            self._launch(out, inputs, few, scale, span=(0, split_rows), max_q=max_q, split_keys=split_keys, two=True)
        if split_rows < num_rows:
            span, many = (split_rows, num_rows), self._many(q, k_pool.shape[1])
            self._launch(out, inputs, many, scale, span=span, max_q=rows.max_q, split_keys=self.SPLIT_KEYS, two=False)
        return out

    def _launch(
        self,
        out: torch.Tensor,
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, RowSet],
        shape: TileShape,
        scale: float,
        *,
        span: tuple[int, int],
        max_q: int,
        split_keys: int,
        two: bool,
    ) -> None:
        """Rows `span`; `two`: one program a split, then a pass that merges them."""
        q, k_pool, v_pool, page_table, rows = inputs
        _, num_heads, width = q.shape
        num_kv_heads, group = k_pool.shape[2], num_heads // k_pool.shape[2]
        num_splits = triton.cdiv(rows.max_k, split_keys)
        partial, in_order = two and num_splits > 1, not two and num_splits > 1 and self._invariant
        num_tokens = span[1] if max_q == 1 else q.shape[0]
        size = num_tokens * num_heads * num_splits if partial else 0
        part = torch.empty(size * width, dtype=torch.float32, device=q.device)
        stat = torch.empty(size * 2, dtype=torch.float32, device=q.device)
        num_blocks = triton.cdiv(max_q * group, shape.block_m)
        options: dict[str, Any] = {"num_warps": shape.num_warps, "num_stages": shape.num_stages}
        _attend[(num_blocks, (span[1] - span[0]) * num_kv_heads, num_splits if partial else 1)](
            q, k_pool, v_pool, out, part, stat, page_table, rows.slot_ids, rows.cu_q, rows.k_len, scale * LOG2_E,
            span[0], num_kv_heads, split_keys, *q.stride()[:2], *k_pool.stride()[:3], *v_pool.stride()[:3],
            page_table.stride(0), GROUP=group, WIDTH=width, BLOCK_D=triton.next_power_of_2(width),
            BLOCK_M=shape.block_m, BLOCK_N=shape.block_n, PAGE=k_pool.shape[1], PARTIAL=partial, IN_ORDER=in_order,
            **options,
        )  # fmt: skip
        if partial:
            merge_splits(part, stat, out, rows.pos, num_tokens=num_tokens, num_splits=num_splits, split_keys=split_keys)

    def _split_keys(self, max_k: int, num_programs: int, block_n: int) -> int:
        if self._invariant:
            return self.SPLIT_KEYS
        # Two programs a multiprocessor keep its loads in flight; under 128 keys a split costs more than it gives.
        wanted = max(1, 2 * self._num_sms // num_programs)
        return max(128, triton.cdiv(triton.cdiv(max_k, wanted), block_n) * block_n)

    def _few(self, q: torch.Tensor, num_programs: int) -> TileShape:
        """Tiles for decode rows."""
        wide = q.shape[2] > 128
        if q.dtype == torch.float32:
            return TileShape(16 if wide else 32, 32, 4, 1)
        if not self._invariant:
            return TileShape(16, 64, 4, 3 if wide else 5)
        if self._hopper and not wide and num_programs >= self._num_sms:
            # One warp holds whole rows of a tile, as a warp of the wider shape does: the same sums in the same order
            # (`tests/kernels/test_triton.py` compares them), with a quarter of the work.
            return TileShape(16, 64, 1, 3)
        return self._many(q, 1)

    def _many(self, q: torch.Tensor, page_tokens: int) -> TileShape:
        """Tiles for prompts; in invariant mode a function of head width and dtype alone."""
        wide = q.shape[2] > 128
        if q.dtype == torch.float32:
            return TileShape(16 if wide else 32, 32, 4, 1)
        if self._invariant:
            # 64 pairs is one step of Hopper's matrix unit.
            return TileShape(64, 64, 8 if wide else 4, 2)
        if wide:
            return TileShape(64, 64, 8, 2)
        # Four warps just hold two 64-row steps in registers (386 against 314 TFLOP/s on an H200); with a whole tile
        # in one page the compiler spills (250).
        return TileShape(128, 64, 4, 3) if page_tokens < 64 else TileShape(128, 64, 8, 3)
