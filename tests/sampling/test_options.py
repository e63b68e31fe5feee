from __future__ import annotations

import pytest

from deepinfer.errors import InvalidRequest, UnsupportedOption
from deepinfer.sampling import check_params, tokenize_bad_words
from deepinfer.types import SamplingParams

from .support import Rig, admission


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_token_ids": (10,)},
        {"forced_tokens": (1, -1)},
        {"allowed_tokens": (10,)},
        {"logit_bias": {10: 1.0}},
        {"logit_bias": {-1: 1.0}},
        {"bad_words": ((1, 10),)},
    ],
)
def test_ids_outside_the_vocabulary_are_refused(fields):
    (name,) = fields
    with pytest.raises(InvalidRequest, match=rf"{name} holds token id (10|-1); expected an id in \[0, 10\)"):
        check_params(SamplingParams(**fields), 10)
    with pytest.raises(InvalidRequest):
        Rig(10).table.admit(admission(1, SamplingParams(**fields)))


def test_what_cannot_be_honoured_is_refused():
    with pytest.raises(InvalidRequest, match="allowed_tokens"):
        check_params(SamplingParams(logit_bias={1: float("inf")}), 10)
    with pytest.raises(UnsupportedOption, match="tokenize_bad_words"):
        check_params(SamplingParams(bad_words=("no",)), 10)
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(UnsupportedOption, match=name):
            check_params(SamplingParams(**{name: 11}), 10)


def test_ids_inside_are_accepted():
    params = SamplingParams(
        stop_token_ids=(0, 9),
        forced_tokens=(9,),
        allowed_tokens=(0,),
        logit_bias={9: -float("inf")},
        bad_words=((9, 0),),
    )
    check_params(params, 10)


def test_bad_word_texts_become_both_of_their_token_sequences():
    codes = {"a": (1,), " a": (2, 1), "b c": (3, 4), " b c": (5,)}
    params = SamplingParams(bad_words=("a", (7, 8), "b c", " a"))
    assert tokenize_bad_words(params, codes.__getitem__).bad_words == ((1,), (2, 1), (7, 8), (3, 4), (5,))
    same = SamplingParams(bad_words=((7,),))
    assert tokenize_bad_words(same, codes.__getitem__) is same
