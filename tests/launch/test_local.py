import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import stretto.launch
from stretto.errors import CheckFailed, JobError, PeerLost, RunError
from stretto.launch.failure import RankFailed
from stretto.launch.local import launch, run_local


def mine():
    return int(os.environ["RANK"])


def alive(process):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def gone_within(seconds, processes):
    limit = time.monotonic() + seconds
    while any(alive(process) for process in processes) and time.monotonic() < limit:
        time.sleep(0.02)
    return not any(alive(process) for process in processes)


def wait_for(condition, seconds=20):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not come"
        time.sleep(0.02)


def test_results_come_in_rank_order_and_the_package_itself_can_be_called():
    assert stretto.launch(lambda x: (mine(), x * 2), 3, (21,)) == [(0, 42), (1, 42), (2, 42)]


def test_a_rank_finds_the_variables_of_torchrun(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
    found = launch(lambda: ({name: os.environ.get(name) for name in names}, os.environ.get("STRETTO_LISTEN_FD")), 2)
    for rank, (variables, listener) in enumerate(found):
        assert [variables[name] for name in names[:5]] == [str(rank), str(rank), "2", "2", "127.0.0.1"]
        assert int(variables["OMP_NUM_THREADS"]) >= 1 and None not in variables.values()
        assert (listener is not None) == (rank == 0)
    assert found[0][0]["MASTER_PORT"] == found[1][0]["MASTER_PORT"]


def test_rank_0_holds_the_port_before_anybody_can_ask_for_it():
    def meet():
        import socket

        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        if mine():
            with socket.create_connection(address, timeout=10) as line:
                return line.recv(5).decode()
        with socket.socket(fileno=int(os.environ["STRETTO_LISTEN_FD"])) as listener:
            line, _ = listener.accept()
            line.sendall(b"hello")
            return "host"

    assert launch(meet, 2) == ["host", "hello"]


def test_the_users_own_number_of_threads_is_kept(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert launch(lambda: os.environ["OMP_NUM_THREADS"], 1) == ["7"]


def test_what_ranks_print_comes_out_behind_their_number(capfd):
    launch(lambda: print("hello", mine()), 2)
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] hello 0", "[1] hello 1"]


def test_a_raising_rank_is_reported_once_with_its_traceback_and_the_others_are_stopped(tmp_path, capfd):
    def fail(folder):
        (folder / str(mine())).write_text(str(os.getpid()))
        if mine() == 1:
            while len(list(folder.iterdir())) < 3:
                time.sleep(0.01)
            raise ValueError("the batch is green")
        time.sleep(60)

    start = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        launch(fail, 3, (tmp_path,))
    assert time.monotonic() - start < 8
    assert not any(alive(int(file.read_text())) for file in tmp_path.iterdir())
    report = str(caught.value)
    assert report.count("ValueError: the batch is green") == 2  # the headline, and the last line of the traceback
    assert "rank 1 failed in" in report and 'raise ValueError("the batch is green")' in report
    assert "launch/worker.py" not in report and "green" not in "".join(capfd.readouterr())


def test_a_killed_rank_is_named_with_the_signal_and_where_it_was():
    def step_and_die(here):
        for step in range(1, 10):
            here.emit({"kind": "at", "step": step, "action": "0F0"})
            if here.rank == 1 and step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    with pytest.raises(RankFailed) as caught:
        run_local(step_and_die, 2)
    assert "rank 1 failed at step 3, action 0F0: killed by signal 9 (SIGKILL), perhaps out of memory" in str(caught.value)


def test_the_cause_is_reported_and_not_the_echo_that_came_first():
    def fail():
        if mine() == 0:
            raise PeerLost("rank 1 does not answer")
        time.sleep(0.5)
        raise ValueError("the cause")

    with pytest.raises(RankFailed, match=r"rank 1 failed.*the cause"):
        launch(fail, 2)


def test_where_ranks_only_miss_another_it_is_named_with_where_it_is():
    def fail():
        if mine() == 0:
            raise PeerLost("rank 1 does not answer")
        time.sleep(60)

    with pytest.raises(
        RankFailed, match=r"rank 1 failed in fail: it stood still, and rank 0 waited for it in vain \(rank 1 does not"
    ) as caught:
        launch(fail, 2)
    assert "in fail" in str(caught.value).partition("Stack")[2]


def test_where_several_stand_still_the_echo_is_told():
    def fail():
        if mine() == 0:
            raise PeerLost("rank 1 does not answer")
        time.sleep(60)

    with pytest.raises(RankFailed, match=r"rank 0 failed.*does not answer"):
        launch(fail, 3)


@pytest.mark.parametrize("error", [JobError, CheckFailed])
def test_a_wrong_request_found_in_a_rank_is_raised_as_such(error):
    def refuse():
        raise error("model=hf:nowhere does not exist")

    with pytest.raises(error) as caught:
        launch(refuse, 2)
    assert str(caught.value) == "model=hf:nowhere does not exist"


@pytest.mark.parametrize("code", [0, 3])
def test_a_rank_that_leaves_without_a_word_is_reported(code):
    with pytest.raises(RankFailed, match=f"rank 0 failed.*exit code {code}"):
        launch(lambda: os._exit(code) if mine() == 0 else time.sleep(60), 2)


def test_the_last_words_of_native_code_are_in_the_report():
    def crash():
        os.write(2, b"terminate called after throwing\n")
        os.abort()

    with pytest.raises(RankFailed, match=r"(?s)SIGABRT.*terminate called after throwing"):
        launch(crash, 1)


def test_a_failing_rank_leaves_no_process_that_it_had_started(tmp_path):
    def start_and_fail(file):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        file.write_text(str(child.pid))
        raise ValueError("no")

    with pytest.raises(RankFailed):
        launch(start_and_fail, 1, (tmp_path / "pid",))
    assert gone_within(2, [int((tmp_path / "pid").read_text())])


def test_a_run_leaves_no_open_file_and_no_temporary_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    launch(lambda: None, 1)
    before = sorted(os.listdir("/proc/self/fd"))
    launch(mine, 2)
    with pytest.raises(RankFailed):
        launch(lambda: 1 / 0, 2)
    assert sorted(os.listdir("/proc/self/fd")) == before and not list(tmp_path.iterdir())


def test_events_of_rank_0_arrive_in_order_and_those_of_other_ranks_do_not():
    def tell(here):
        for step in range(100):
            here.emit({"kind": "step", "step": step, "rank": here.rank, "loss": float("nan")})

    heard = []
    run_local(tell, 2, on_event=heard.append)
    assert [(event["step"], event["rank"]) for event in heard] == [(step, 0) for step in range(100)]


def test_output_goes_to_a_log_for_each_rank_where_a_folder_is_given(tmp_path, capfd):
    def talk():
        print("I am", mine())
        raise ValueError(f"error of {mine()}")

    with pytest.raises(RankFailed) as caught:
        run_local(lambda here: talk(), 2, logs=tmp_path)
    for rank in range(2):
        text = (tmp_path / f"rank-{rank:05d}.log").read_text()
        assert f"I am {rank}" in text and f"ValueError: error of {rank}" in text
    assert f"rank-{caught.value.failure.rank:05d}.log" in str(caught.value) and capfd.readouterr().out == ""


def test_ranks_that_do_not_end_in_time_are_stopped_and_placed():
    with pytest.raises(RunError, match=r"did not end in time.*rank 1: in"):
        launch(lambda: time.sleep(60) if mine() else None, 2, timeout=1.5)


def test_what_cannot_travel_is_refused_in_words():
    import threading

    lock = threading.Lock()
    with pytest.raises(JobError, match="cannot be sent to the ranks"):
        launch(lambda: lock, 1)
    with pytest.raises(RankFailed, match="cannot be sent to the parent"):
        launch(threading.Lock, 1)
    with pytest.raises(JobError, match="ranks=0"):
        launch(mine, 0)


SCRIPT = """
import os, sys, time
from pathlib import Path
from stretto.launch.local import run_local

def work(here, folder):
    (folder / f"pid{here.rank}").write_text(str(os.getpid()))
    for step in range(1, 1000):
        here.emit({"kind": "at", "step": step, "action": "0F0"})
        here.emit({"kind": "step", "step": step})
        time.sleep(0.05)
        if here.stop() and "deaf" not in sys.argv:
            return step

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "args").write_text(" ".join(sys.argv))
    deaf = "deaf" in sys.argv

    def deaf_work(here, folder):
        (folder / f"pid{here.rank}").write_text(str(os.getpid()))
        time.sleep(60)

    heard = []
    steps = run_local(deaf_work if deaf else work, 2, (folder,), on_event=heard.append, stoppable=True)
    print("ended", [event for event in heard if event["kind"] == "stop"], steps, flush=True)
"""


@pytest.fixture
def script(tmp_path):
    started = []

    def start(*words):
        (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
        command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path), *words]
        environment = {**os.environ, "PYTHONPATH": str(Path(stretto.launch.__file__).parents[2])}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        started.append(process)
        wait_for(lambda: all((tmp_path / f"pid{rank}").exists() and (tmp_path / f"pid{rank}").read_text() for rank in range(2)))
        return process, [int((tmp_path / f"pid{rank}").read_text()) for rank in range(2)]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_parent_lets_every_rank_finish_its_step(script, number):
    process, ranks = script()
    process.send_signal(number)
    output, _ = process.communicate(timeout=10)
    assert process.returncode == 0 and f"'signal': '{number.name}'" in output, output
    assert gone_within(2, ranks)


def test_a_second_ctrl_c_ends_ranks_that_do_not_listen(script):
    process, ranks = script("deaf")
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert all(alive(rank) for rank in ranks)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=10)
    assert process.returncode != 0 and "KeyboardInterrupt" in output
    assert gone_within(2, ranks)


def test_ranks_do_not_outlive_a_parent_that_is_killed(script):
    process, ranks = script("deaf")
    process.kill()
    assert gone_within(5, ranks)


def test_a_signal_to_one_rank_is_heard_by_that_rank(script):
    process, ranks = script()
    os.kill(ranks[1], signal.SIGTERM)
    assert gone_within(5, ranks[1:]) and alive(ranks[0])  # a real loop agrees on it; this one has no messages
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=10)
    assert process.returncode == 0, output
