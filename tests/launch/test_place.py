import importlib.util
import sys

import pytest

from stretto.launch.place import devices, seat

SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "77"}
CASES = [
    ({}, None),
    ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 2, 1)),
    ({"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}, (9, 16, 1)),
    ({"RANK": "1"}, None),
    (SLURM, (3, 4, 1)),
    ({**SLURM, "SLURM_NTASKS": "1"}, None),
    ({name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}, None),  # a batch script, not a step
    ({**SLURM, "RANK": "0", "WORLD_SIZE": "2"}, (0, 2, 0)),  # torchrun inside of a step
]


@pytest.mark.parametrize(("environment", "expected"), CASES)
def test_a_process_knows_whether_somebody_started_it_as_a_rank(environment, expected):
    assert seat(environment) == expected


@pytest.mark.parametrize(("environment", "expected"), CASES)
def test_the_launcher_and_the_world_read_the_environment_alike(environment, expected):
    from stretto.comm.transport import environment_rank

    assert environment_rank(environment) == seat(environment)


def test_the_devices_are_those_that_torch_sees():
    import torch

    count = torch.cuda.device_count()
    assert devices() == ("cuda" if count else "cpu", count)


def test_without_torch_there_are_no_gpus(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert devices() == ("cpu", 0)


@pytest.mark.parametrize(
    ("line", "built"), [("cuda: Optional[str] = None", False), ("cuda: Optional[str] = '12.8'", True), ("cuda = '12.8'", True), ("", False)]
)
def test_a_torch_built_for_cuda_is_known_by_its_version_file(line, built, tmp_path, monkeypatch):
    from stretto.launch import place

    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.13.0'\n{line}\nhip: Optional[str] = None\n")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert place._torch_has_cuda() is built
