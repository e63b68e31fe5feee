"""Seeded texts that tokenizers trip over."""

from __future__ import annotations

import random

FRAGMENTS = (
    "def f(x):\n    return x + 1\n",
    "for (int i = 0; i < n; ++i) {\n\ta[i] *= 2;\n}\n",
    "SELECT * FROM t WHERE a='b';",
    '<div class="x">&amp;</div>',
    "https://example.org/a?b=c#d",
    "0",
    "7",
    "42",
    "1234567890",
    "3.14159",
    "1,000,000",
    "12:30",
    "0xFF",
    "½",
    "Ⅷ",
    "²",
    "٣٤",
    "१२",
    "the quick brown fox",
    " jumps",
    "  over",
    "   three",
    "\t",
    "\n",
    "\n\n",
    "\r\n",
    " \n ",
    "\u00a0",
    "\u3000",
    "\u200b",
    "I'm",
    "you're",
    "THEY'LL",
    "it's",
    "don't've",
    "'s",
    "Hello, world!",
    "...",
    "?!",
    "--",
    "—",
    "“quoted”",
    "«à»",
    "naïve café",
    "e\u0301",
    "Straße",
    "ΑΒΓδ",
    "Привет, мир",
    "שלום",
    "مرحبا بالعالم",
    "हिन्दी में",
    "ไทย",
    "你好，世界。",
    "日本語のテキスト",
    "カタカナ",
    "한국어 문장",
    "🙂",
    "👩‍👩‍👧‍👦",
    "👍🏽",
    "🇩🇪🇫🇷",
    "❤️",
    "✓",
    "∑∫√",
    "→",
    "𝔘𝔫𝔦",
    "𐍈",
    "\ufeff",
    "\u0000",
    "\x07",
    "\x7f",
    "aaaaaaaaaaaaaaaaaaaa",
    "AbCdEf",
    "snake_case_name",
    "camelCaseName",
    "a.b.c",
    "#include <stdio.h>",
    "$x^2$",
    "@user",
    "50%",
    "\\n",
    "`code`",
    "|||",
    "~~~",
)


def mixed_texts(count: int, *, seed: int, control: tuple[str, ...] = ()) -> list[str]:
    """Every fragment alone, then random joins of fragments, control tokens and code points."""
    draw = random.Random(seed)
    texts = ["", *FRAGMENTS, *control]
    while len(texts) < count:
        parts = [_part(draw, control) for _ in range(draw.randint(1, 9))]
        texts.append(draw.choice(("", "", " ", "\n")).join(parts))
    return texts


def _part(draw: random.Random, control: tuple[str, ...]) -> str:
    kind = draw.random()
    if control and kind < 0.1:
        return draw.choice(control)
    if kind < 0.8:
        return draw.choice(FRAGMENTS)
    if kind < 0.9:
        return "".join(draw.choice("abcXYZ019 .,'\n") for _ in range(draw.randint(1, 12)))
    return "".join(chr(draw.choice((draw.randrange(32, 0x250), draw.randrange(0x370, 0xD800)))) for _ in range(4))
