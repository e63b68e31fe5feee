"""Writes golden_noise.json with Python integers and numpy float32 scalars, apart from the library's code."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

F = np.float32
C = [
    float.fromhex(text)
    for text in (
        "0x1.5555a4p-2",
        "-0x1.00004ap-2",
        "0x1.99699ep-3",
        "-0x1.54ed96p-3",
        "0x1.28807ap-3",
        "-0x1.0d98f2p-3",
        "0x1.acf4bap-4",
        "-0x1.71e354p-5",
    )
]
LN2_HI, LN2_LO = F(355 / 512), F(float.fromhex("-0x1.bd0106p-13"))
CASES: tuple[tuple[int, int, int, int, int], ...] = (
    (0, 0, 0, 0, 0),
    (1, 0, 1, 0, 0),
    (2**64 - 1, 7, 2**31 - 1, 3, 5),
    (0x0123456789ABCDEF, 2, 4095, 1, 0),
    (0xFEDCBA9876543210, 65535, 131071, 2, 2**24 - 1),
    (42, 0, 17, 0, 0),
)
TOKEN_IDS = [0, 1, 2, 3, 4, 5, 6, 7, 255, 1000, 49151, 49152, 129279, 2**20 + 1, 2**31 - 1]
LOG_INPUTS = [
    1.0,
    0.75,
    0.7499999403953552,
    1.5,
    1.4999998807907104,
    2.0,
    0.1,
    22.18,
    1.1641532182693481e-10,
    3.0,
    1e-30,
]


def philox_words(counter: list[int], key: list[int]) -> list[int]:
    c, k = list(counter), list(key)
    for step in range(10):
        if step:
            k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 % 2**32, (p0 >> 32) ^ c[3] ^ k[1], p0 % 2**32]
    return c


def log1p_2k(f: F, k: F) -> F:
    z = f * f
    y = F(C[7])
    for c in C[6::-1]:
        y = y * f
        y = y + F(c)
    y = y * f
    y = y * z
    y = y + k * LN2_LO
    y = y - F(0.5) * z
    y = f + y
    return y + k * LN2_HI


def split(x: F) -> tuple[F, F]:
    bits = int(x.view(np.int32))
    k = (bits - 0x3F400000) >> 23
    m = np.int32(bits - (k << 23)).view(F)
    return m - F(1), F(k)


def exponential(r: int) -> F:
    if r < 2**30:
        return -log1p_2k(-((F(r) + F(0.5)) * F(2**-32)), F(0))
    return -log1p_2k(*split((F(2**32 - 1 - r) + F(0.5)) * F(2**-32)))


def log(x: F) -> F:
    return log1p_2k(*split(x))


def bits(x: F) -> str:
    return f"{int(x.view(np.uint32)):08x}"


def golden() -> dict[str, Any]:
    draws = []
    for seed, sample_index, pos, purpose, round_index in CASES:
        words, noise = [], []
        for token in TOKEN_IDS:
            counter = [token >> 2, pos, sample_index, purpose | round_index << 8]
            r = philox_words(counter, [seed % 2**32, seed >> 32])[token & 3]
            words.append(r)
            noise.append(bits(-log(exponential(r))))
        keys = {"seed": seed, "sample_index": sample_index, "pos": pos, "purpose": purpose, "round": round_index}
        draws.append({**keys, "words": words, "gumbel": noise})
    edge = [0, 1, 2**23, 2**24 + 1, 2**30 - 1, 2**30, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]
    return {
        "about": "float32 values are the hexadecimal digits of their bits",
        "token_ids": TOKEN_IDS,
        "draws": draws,
        "exponential": [[r, bits(exponential(r))] for r in edge],
        "log": [[bits(F(x)), bits(log(F(x)))] for x in LOG_INPUTS],
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(golden(), indent=1) + "\n")
