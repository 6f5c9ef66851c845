import importlib.util
import sys

import pytest

from stretto.launch.devices import devices


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
    from stretto.launch import devices as module

    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.13.0'\n{line}\nhip: Optional[str] = None\n")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert module._torch_has_cuda() is built
