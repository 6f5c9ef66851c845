import io

from stretto.launch.progress import Clock, Lines, Live, progress_on

STEP = {"loss": 2.5, "grad_norm": 0.81, "lr": 3e-3, "tokens_per_second": 12345.0, "peak_bytes": [310e6, 305e6], "committed": True}


class Ticking:
    """A clock that moves by hand."""

    def __init__(self):
        self.moment = 100.0

    def __call__(self):
        return self.moment


def test_a_line_says_step_loss_speed_memory_and_time_left_every_few_steps():
    stream, clock = io.StringIO(), Ticking()
    lines = Lines(stream, 10, Clock(clock))
    lines.expect(31)
    for step in range(1, 32):
        lines.step({"step": step, **STEP})
        clock.moment += 2.0
    said = stream.getvalue().splitlines()
    assert [line.split()[1] for line in said] == ["1/31", "10/31", "20/31", "30/31", "31/31"]
    assert said[1] == "step 10/31  loss 2.5000  grad norm 0.81  lr 0.003  12.3k tokens/s  310 MB a rank  0:42 left"


def test_the_first_step_does_not_spoil_the_time_left():
    clock = Ticking()
    left = Clock(clock)
    clock.moment += 60.0  # start-up and compilation
    assert left.left(1, 11) is None
    clock.moment += 1.0
    assert left.left(2, 11) == 9.0
    assert left.left(2, None) is None


def test_a_skipped_step_is_always_told_with_its_reason():
    stream = io.StringIO()
    lines = Lines(stream, 100)
    lines.step({"step": 7, **STEP, "committed": False, "why": "embed.weight on rank 1 is not finite"})
    assert "skipped: embed.weight on rank 1 is not finite" in stream.getvalue()


def test_a_value_that_a_step_does_not_have_is_left_out():
    stream = io.StringIO()
    Lines(stream, 1).step({"step": 1, "loss": None, "peak_bytes": None})
    assert stream.getvalue() == "step 1\n"


def test_a_terminal_gets_one_live_line_and_everything_else_plain_lines():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    live = progress_on(stream, 10)
    assert isinstance(live, Live) and isinstance(progress_on(io.StringIO(), 10), Lines)
    live.expect(100)
    live.note("run folder: [runs]/x")
    live.step({"step": 1, **STEP})
    live.step({"step": 50, **STEP})
    live.close()
    assert "run folder: [runs]/x" in stream.getvalue() and "step 50/100" in stream.getvalue() and "12.3k tokens/s" in stream.getvalue()
