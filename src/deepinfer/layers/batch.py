"""A plan on the device: what layers read."""

from __future__ import annotations

import attrs
import torch

__all__ = ["Batch", "RowSet"]


@attrs.frozen(eq=False)
class RowSet:
    """Ragged rows. R rows, T tokens; row r owns tokens `cu_q[r] : cu_q[r + 1]`.

    Tokens of a row have consecutive positions ending at `k_len[r] - 1`. Empty rows are legal.
    `max_q`, `max_k` and `host_q` are host values (upper bounds); everything else is on the device.
    """

    #: [R] i32 slot of each row: which line of the page table it reads.
    slot_ids: torch.Tensor
    #: [R + 1] i32 offsets of each row's tokens, first 0.
    cu_q: torch.Tensor
    #: [T] i32 absolute position of each token.
    pos: torch.Tensor
    #: [T] i32 row of each token.
    row_of: torch.Tensor
    #: [R] i32 keys of each row including this step's.
    k_len: torch.Tensor
    max_q: int
    max_k: int
    #: The first `num_decode` rows have one token each.
    num_decode: int = 0


@attrs.frozen(eq=False)
class Batch:
    """Inputs of one forward."""

    #: [T] i64
    token_ids: torch.Tensor
    #: [S, max pages] i32; line 0 and page 0 are padding.
    page_table: torch.Tensor
    rows: RowSet
    #: [N] i64 token numbers whose hidden state becomes logits.
    logit_rows: torch.Tensor
