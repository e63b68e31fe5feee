"""Stop strings: whatever way the text is cut, nothing at or behind the stop gets out."""

from hypothesis import given
from hypothesis import strategies as st

from deepinfer.engine import StopMatcher


def feed(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops)
    shown = [matcher.push(piece) for piece in pieces]
    return [*shown, matcher.flush()], matcher.hit


@given(
    st.text("ab", max_size=24),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    st.lists(st.integers(1, 4), max_size=24),
)
def test_text_is_cut_at_the_earliest_stop_however_it_arrives(text: str, stops: list[str], cuts: list[int]) -> None:
    pieces, at = [], 0
    for cut in cuts:
        pieces.append(text[at : at + cut])
        at += cut
    pieces.append(text[at:])
    shown, hit = feed(stops, pieces)
    if hit is None:
        assert "".join(shown) == text
        assert not any(s in text for s in stops)
    else:
        assert text.startswith("".join(shown) + hit)
        assert not any(s in "".join(shown) for s in stops)


def test_nothing_that_may_become_a_stop_is_shown_early() -> None:
    shown, hit = feed(["</end>"], ["a<", "/", "end", "x<", "/end", ">tail"])
    assert shown == ["a", "", "", "</endx", "", "", ""]
    assert hit == "</end>"


def test_held_text_comes_out_when_the_completion_ends_otherwise() -> None:
    shown, hit = feed(["STOP"], ["it is ST"])
    assert shown == ["it is ", "ST"]
    assert hit is None


def test_earliest_stop_wins_and_first_listed_at_one_place() -> None:
    assert feed(["cd", "b"], ["abcd"]) == (["a", ""], "b")
    assert feed(["bc", "b"], ["abcd"])[1] == "bc"
