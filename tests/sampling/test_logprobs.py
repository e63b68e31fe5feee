from __future__ import annotations

import pytest
import torch

from deepinfer.sampling import top_logprobs


@pytest.mark.parametrize("num_top", [0, 3, 50])
def test_prompt_scores_match_log_softmax(num_top):
    torch.manual_seed(0)
    logits, tokens = torch.randn(150, 40) * 4, torch.randint(0, 40, (150,))
    raw, top_ids, top_raw = top_logprobs(logits, tokens, num_top)
    want = torch.log_softmax(logits.double(), -1)
    torch.testing.assert_close(raw.double(), want.gather(1, tokens[:, None])[:, 0], atol=1e-5, rtol=0)
    best = want.topk(min(num_top, 40))
    torch.testing.assert_close(top_raw.double(), best.values, atol=1e-5, rtol=0)
    assert torch.equal(top_ids, best.indices)


def test_scores_do_not_depend_on_the_chunk():
    torch.manual_seed(1)
    logits, tokens = torch.randn(130, 5001), torch.randint(0, 5001, (130,))
    whole = top_logprobs(logits, tokens, 2)
    parts = [top_logprobs(logits[i : i + 13], tokens[i : i + 13], 2) for i in range(0, 130, 13)]
    for column, pieces in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(column, torch.cat(pieces))


def test_impossible_tokens_score_minus_infinity():
    logits = torch.tensor([[0.0, -float("inf")]])
    assert top_logprobs(logits, torch.tensor([1]), 1).raw.item() == -float("inf")
