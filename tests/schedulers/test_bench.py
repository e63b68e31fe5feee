"""The benchmark of the scheduler runs and its figures are times of whole steps."""

from __future__ import annotations

import pytest

from deepinfer.bench import scheduler
from deepinfer.cache import PagedBook
from deepinfer.cli.main import main


def test_figures_by_book_and_rows() -> None:
    figures = scheduler.measure(rows=(3, 8), steps=20)
    assert len(figures) == 2 * 2 * 5
    assert all(value > 0 for value in figures.values()), figures
    for case in ("null_3", "paged_3", "null_8", "paged_8"):
        assert figures[f"{case}_step_p10_ms"] <= figures[f"{case}_step_ms"] <= figures[f"{case}_step_p95_ms"]


def test_pool_is_as_large_as_the_steps_need() -> None:
    book = PagedBook(scheduler.pages_for(5, steps=100), page_tokens=scheduler.PAGE_TOKENS)
    assert len(scheduler.time_steps(book, 5, steps=100)) == 100
    assert book.num_free < 5 * 2


def test_command_prints_one_json_object(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "measure", lambda: {"paged_3_step_ms": 0.5})
    assert main(["bench", "scheduler", "--json"]) == 0
    assert capsys.readouterr().out == '{"paged_3_step_ms": 0.5}\n'
