"""A plan on the device: what layers read."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from ..errors import ConfigError

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

    @classmethod
    def ragged(
        cls,
        slots: Sequence[int],
        q_len: Sequence[int],
        k_len: Sequence[int],
        *,
        num_decode: int = 0,
        device: str = "cpu",
    ) -> RowSet:
        """Rows from host lists: row r is slot `slots[r]` with `q_len[r]` tokens that end at `k_len[r] - 1`.

        Raises:
            ConfigError: the lists differ in length, or a row has more tokens than keys.
        """
        if not len(slots) == len(q_len) == len(k_len) or any(q > k for q, k in zip(q_len, k_len, strict=True)):
            raise ConfigError(f"q_len {list(q_len)} and k_len {list(k_len)}; expected one q_len <= k_len for each slot")
        offsets = torch.tensor([0, *q_len]).cumsum(0)
        positions = [torch.arange(k - q, k) for q, k in zip(q_len, k_len, strict=True)]
        row_of = torch.repeat_interleave(torch.arange(len(slots)), torch.tensor(list(q_len), dtype=torch.int64))

        def int32(values: torch.Tensor | Sequence[int]) -> torch.Tensor:
            return torch.as_tensor(values).to(device, torch.int32)

        return cls(
            slot_ids=int32(list(slots)),
            cu_q=int32(offsets),
            pos=int32(torch.cat(positions) if positions else torch.zeros(0)),
            row_of=int32(row_of),
            k_len=int32(list(k_len)),
            max_q=max(q_len, default=0),
            max_k=max(k_len, default=0),
            num_decode=num_decode,
        )


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
