"""A line on a terminal that says how far work is."""

import io

from metafop.progress import Line


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_what_is_done_and_the_line_is_gone_in_the_end():
    screen = Terminal()
    line = Line(screen, every=0.0)
    for done in range(1, 5):
        line("forward", done, 4)
    written = screen.getvalue().split("\r\x1b[K")
    assert written[1] == "[=====               ] 1 of 4, forward"
    assert written[-1] == ""


def test_a_line_is_not_written_more_often_than_is_asked():
    screen = Terminal()
    line = Line(screen, every=3600.0)
    for done in range(1, 100):
        line("forward", done, 100)
    assert screen.getvalue().count("\r") == 1


def test_a_file_gets_nothing():
    file = io.StringIO()
    Line(file)("forward", 1, 2)
    assert file.getvalue() == ""
