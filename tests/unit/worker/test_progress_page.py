import pytest

from gpu_worker.engine.progress import ProgressPage


@pytest.fixture
def pages():
    """The service process's page and the engine's, over the same memory."""
    ours = ProgressPage.create()
    with open(ours.fileno(), "r+b", buffering=0, closefd=False) as file:
        theirs = ProgressPage(file)
        yield ours, theirs
        theirs.close()
    ours.close()


def test_nothing_is_known_of_an_engine_that_has_not_begun(pages):
    assert pages[0].read_untried() is None


@pytest.mark.parametrize("names", [(), ("one",), ("one/1@session", "two/3@session")])
def test_what_the_writer_was_at_is_read_after_it_and_forgotten_once_it_got_through(pages, names):
    ours, theirs = pages
    theirs.note_untried(["of", "the", "step", "before"])
    theirs.note_untried(names)
    assert ours.read_untried() == names
    theirs.forget_untried()
    assert ours.read_untried() is None


def test_more_than_the_page_holds_is_not_known_rather_than_known_in_part(pages):
    ours, theirs = pages
    theirs.note_untried(["one"])
    theirs.note_untried(f"sequence {number:080}" for number in range(1000))
    assert ours.read_untried() is None


def test_counters_and_names_do_not_touch_each_other(pages):
    ours, theirs = pages
    theirs.note_untried(["one"])
    theirs.turn()
    theirs.step_took(0.5)
    assert (ours.read(), ours.read_untried()) == ((1, 0.5), ("one",))
