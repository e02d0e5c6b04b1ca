"""Facts of a run: a table on a terminal, aligned lines in a file."""

from __future__ import annotations

from hezar_train.terminal import print_facts
from hezar_train.terminal.display import info_table
from tests.terminal.streams import CountingStream, Terminal, without_colours


def test_facts_are_aligned_lines_in_a_file_and_a_table_on_a_terminal():
    facts = {"Steps": "300", "Batch size": "[8]"}
    stream = CountingStream()
    print_facts(facts, stream)
    assert stream.getvalue() == "Steps       300\nBatch size  [8]\n"
    terminal = Terminal()
    print_facts(facts, terminal.stream)
    lines = without_colours(terminal.text()).split("\r\n")
    assert lines[1:3] == ["│ Steps      │ 300 │", "│ Batch size │ [8] │"]
    assert info_table(facts).row_count == 2


def test_a_path_that_is_too_long_for_the_table_goes_on_after_a_slash():
    terminal = Terminal(columns=50)
    print_facts({"Output folder": "/data/experiments/of/2026/may/plates"}, terminal.stream)
    lines = without_colours(terminal.text()).split("\r\n")
    assert lines[1] == "│ Output folder │ /data/experiments/of/2026/may/ │"
    assert lines[2] == "│               │   plates                       │"
