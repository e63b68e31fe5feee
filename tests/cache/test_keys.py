"""Keys that leave the process: golden bytes, chain rules, no collisions between fields."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.cache import KeyChain, Tag, encode_fields
from deepinfer.errors import CacheError

TOKENS = np.arange(100, 112, dtype=np.int32)


def by_hand(seed, page_tokens, root_fields, pages):
    """The published layout, written out with hashlib and struct only."""
    key = hashlib.sha256(
        b"deepinfer.page.v1" + bytes([len(seed)]) + seed + struct.pack("<I", page_tokens) + root_fields
    ).digest()
    keys = []
    for tokens, fields in pages:
        key = hashlib.sha256(key + struct.pack(f"<{len(tokens)}i", *tokens) + fields).digest()
        keys.append(key)
    return keys


def test_layout_by_hand():
    fields = [(Tag.SALT, "acme"), (Tag.MODEL, b"\x01\x02")]
    chain = KeyChain(page_tokens=4, fields=fields, seed=b"s")
    root_fields = b"\x02\x00" + b"\x01\x02\x00\x00\x00\x01\x02" + b"\x05\x04\x00\x00\x00acme"
    floor = b"\x01\x00" + b"\x06\x08\x00\x00\x00" + struct.pack("<q", 128)
    expected = by_hand(
        b"s",
        4,
        root_fields,
        [(range(100, 104), b"\0\0"), (range(104, 108), floor), (range(108, 112), b"\0\0")],
    )
    keys = chain.keys(TOKENS, page_fields={1: [(Tag.FLOOR, 128)]})
    assert [row.tobytes() for row in keys] == expected


GOLDEN = [
    "58ef1c609dde281f708178cebb6d29a27dc65a1d670b892bdc8edf4c1f8b17c2",
    "50d3e437d9df187f48ea9016eb09faec844b7e3c454699f1ae25fe06b689f865",
    "7af26bf11c3996be40959fb474426eb0e794da8ad4bd1f1466c6590f13ee0a73",
]


def test_golden_vectors():
    plain = KeyChain(page_tokens=4).keys(TOKENS[:8])
    tenant = KeyChain(page_tokens=4, fields=[(Tag.MODEL, "tiny"), (Tag.SALT, "acme")]).keys(TOKENS[:4])
    assert [row.tobytes().hex() for row in (*plain, *tenant)] == GOLDEN


def test_partial_pages_have_no_key():
    chain = KeyChain(page_tokens=4)
    assert chain.keys(TOKENS[:3]).shape == (0, 32)
    assert chain.keys(TOKENS[:11]).shape == (2, 32)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40), st.integers(1, 6), st.data())
def test_a_chain_can_be_continued(tokens, page_tokens, data):
    chain = KeyChain(page_tokens=page_tokens)
    ids = np.array(tokens, np.int32)
    whole = chain.keys(ids)
    cut = data.draw(st.integers(0, len(whole)))
    head = chain.keys(ids[: cut * page_tokens])
    tail = chain.keys(ids[cut * page_tokens :], parent=head[-1].tobytes() if cut else None)
    assert np.array_equal(np.concatenate([head, tail]), whole)
    assert np.array_equal(chain.keys(ids.astype(np.int64)), whole)


def test_a_key_depends_on_every_page_before_it():
    chain = KeyChain(page_tokens=4)
    changed = TOKENS.copy()
    changed[0] += 1
    assert not (chain.keys(TOKENS) == chain.keys(changed)).all(axis=1).any()


@pytest.mark.parametrize(
    "other",
    [
        KeyChain(page_tokens=4, seed=b"x"),
        KeyChain(page_tokens=4, fields=[(Tag.SALT, "")]),
        KeyChain(page_tokens=4, fields=[(Tag.ADAPTER, "a")]),
        KeyChain(page_tokens=4, fields=[(Tag.USER, "a")]),
        KeyChain(page_tokens=8),
    ],
)
def test_namespaces_share_no_key(other):
    assert KeyChain(page_tokens=4).keys(TOKENS)[0].tobytes() != other.keys(TOKENS)[0].tobytes()


VALUES = st.one_of(st.binary(max_size=12), st.text(max_size=6), st.integers(-(2**63), 2**63 - 1))
FIELDS = st.lists(st.tuples(st.sampled_from(list(Tag)), VALUES), max_size=4)


def meaning(fields):
    """What a list of fields says: tag, then bytes, in an order that only equal tags keep."""
    plain = []
    for tag, value in sorted(fields, key=lambda f: f[0]):
        if isinstance(value, int):
            value = struct.pack("<q", value)
        plain.append((tag, value.encode() if isinstance(value, str) else value))
    return plain


@settings(max_examples=300)
@given(FIELDS, FIELDS)
def test_different_fields_never_give_the_same_bytes(left, right):
    assert (encode_fields(left) == encode_fields(right)) == (meaning(left) == meaning(right))


@settings(max_examples=300)
@given(FIELDS, st.binary(max_size=20), FIELDS, st.binary(max_size=20))
def test_encoded_fields_are_prefix_free(left, left_rest, right, right_rest):
    if encode_fields(left) + left_rest == encode_fields(right) + right_rest:
        assert meaning(left) == meaning(right)


@given(st.binary(max_size=30), st.integers(0, 30), st.sampled_from(list(Tag)), st.sampled_from(list(Tag)))
def test_moving_bytes_between_neighbours_changes_the_key(content, cut, first, second):
    cut = min(cut, len(content))
    whole = encode_fields([(first, content), (second, b"")])
    parts = encode_fields([(first, content[:cut]), (second, content[cut:])])
    swapped = encode_fields([(second, content[:cut]), (first, content[cut:])])
    assert (whole == parts) == (cut == len(content))
    if first != second and content[:cut] != content[cut:]:
        assert parts != swapped


def test_an_adapter_named_like_a_salt_does_not_collide():
    assert encode_fields([(Tag.ADAPTER, "x")]) != encode_fields([(Tag.SALT, "x")])


@pytest.mark.parametrize("value", [2**63, 1.5, None, True])
def test_bad_values(value):
    with pytest.raises(CacheError, match="SALT"):
        encode_fields([(Tag.SALT, value)])


def test_bad_arguments():
    with pytest.raises(CacheError):
        KeyChain(page_tokens=0)
    with pytest.raises(CacheError):
        KeyChain(page_tokens=4, seed=bytes(256))
    chain = KeyChain(page_tokens=4)
    with pytest.raises(CacheError, match="3 bytes"):
        chain.keys(TOKENS, parent=b"abc")
    with pytest.raises(CacheError, match="float64"):
        chain.keys(np.zeros(8))
    with pytest.raises(CacheError, match="int64"):
        chain.keys(np.full(8, 2**31))
