"""bf16 on CPUs that announce AMX but crash when it is used.

No such CPU is needed: a stand-in (`sitecustomize` on a child's path) announces AMX and dies with a real SIGILL at the
first bf16 product, unless oneDNN is capped by then. On a machine that really is like that, the same tests meet it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vitrail.system import processor

pytestmark = pytest.mark.slow  # each starts a Python of its own

STAND_IN = f"""
import os, pathlib, signal
import torch
import torch.nn.functional as F

plain_read = pathlib.Path.read_text
def read_text(self, *args, **kwargs):
    if str(self) == "/proc/cpuinfo":
        return "flags : fpu amx_bf16 amx_tile amx_int8"
    return plain_read(self, *args, **kwargs)
pathlib.Path.read_text = read_text

def deadly(function):
    def product(a, *args, **kwargs):
        if a.dtype == torch.bfloat16 or torch.is_autocast_enabled("cpu"):
            if os.environ.get("{processor.ISA_VARIABLE}") != "{processor.SAFE_ISA}":
                os.kill(os.getpid(), signal.SIGILL)
        return function(a, *args, **kwargs)
    return product

F.linear = deadly(F.linear)
torch.Tensor.__matmul__ = deadly(torch.Tensor.__matmul__)
"""

BF16_FORWARD = """
import vitrail, torch
model = vitrail.create_model("Ti/16", depth=1, image_size=32)
with torch.autocast("cpu", torch.bfloat16):
    print(tuple(model(torch.zeros(1, 3, 32, 32)).shape))
"""


@pytest.fixture
def broken_cpu(tmp_path, monkeypatch):
    """The environment of a child process on a machine like that, with nothing set by the user."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(STAND_IN)
    environment = {k: v for k, v in os.environ.items() if k != processor.ISA_VARIABLE}
    source = str(Path(processor.__file__).parents[2])
    environment.update(
        PYTHONPATH=os.pathsep.join([str(tmp_path / "site"), source]), XDG_CACHE_HOME=str(tmp_path / "cache")
    )
    return environment


def run(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=120)


def test_the_stand_in_really_kills(broken_cpu):
    raw = "import torch; x = torch.ones(4, 4, dtype=torch.bfloat16); x @ x"
    assert run("-c", raw, env=broken_cpu).returncode == -signal.SIGILL


def test_a_bf16_forward_does_not_die_with_nothing_set(broken_cpu):
    child = run("-c", BF16_FORWARD, env=broken_cpu)
    assert (child.returncode, child.stdout) == (0, "(1, 1000)\n"), child.stderr
    remembered = json.loads(Path(broken_cpu["XDG_CACHE_HOME"], "vitrail", "bf16.json").read_text())
    assert remembered["works"] is False


def test_the_doctor_does_not_die_and_says_what_is_wrong(broken_cpu):
    child = run("-m", "vitrail", "doctor", env=broken_cpu)
    assert child.returncode == 0, child.stderr
    assert "products\tdo not work by themselves: the process was killed by SIGILL" in child.stdout
    assert f"products with {processor.ISA_VARIABLE}={processor.SAFE_ISA}\twork" in child.stdout


def test_the_verdict_is_found_once_for_each_boot(broken_cpu):
    use = (
        "import os, vitrail.system.processor as p\n"
        "plain = p.probe_bf16\n"
        "p.probe_bf16 = lambda cap: print('probed') or plain(cap)\n"
        "p.prevent_amx_crash()\n"
        "print(os.environ.get(p.ISA_VARIABLE))"
    )
    assert run("-c", use, env=broken_cpu).stdout.split() == ["probed", processor.SAFE_ISA]
    assert run("-c", use, env=broken_cpu).stdout.split() == [processor.SAFE_ISA]
    later = "import vitrail.system.processor as p, pathlib\np.BOOT_ID = pathlib.Path('/dev/null')\n" + use
    assert run("-c", later, env=broken_cpu).stdout.split() == ["probed", processor.SAFE_ISA]


def test_a_cap_set_by_the_user_is_left_alone(broken_cpu):
    use = "import vitrail.model, os; print(os.environ['ONEDNN_MAX_CPU_ISA'])"
    assert run("-c", use, env={**broken_cpu, processor.ISA_VARIABLE: "AVX2"}).stdout == "AVX2\n"


@pytest.mark.parametrize("rubbish", ["", "{", "[]", '{"key": 1}', '{"key": "other boot", "works": true}'])
def test_rubbish_in_the_cache_means_another_probe(tmp_path, monkeypatch, rubbish):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(processor.ISA_VARIABLE, raising=False)
    monkeypatch.setattr(processor, "announces_amx", lambda: True)
    monkeypatch.setattr(processor, "probe_bf16", lambda cap: processor.ProbeResult(works=True, detail=""))
    (tmp_path / "vitrail").mkdir()
    (tmp_path / "vitrail" / "bf16.json").write_text(rubbish)
    processor.prevent_amx_crash()
    assert processor.ISA_VARIABLE not in os.environ
    assert processor._read_verdict() is True


def test_a_probe_that_cannot_run_caps_and_is_not_read_verdict(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(processor.ISA_VARIABLE, "to be removed again at the end")
    monkeypatch.delenv(processor.ISA_VARIABLE)
    monkeypatch.setattr(processor, "announces_amx", lambda: True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no such python"))
    processor.prevent_amx_crash()
    assert os.environ.pop(processor.ISA_VARIABLE) == processor.SAFE_ISA
    assert processor._read_verdict() is None


def test_without_amx_nothing_is_probed(monkeypatch):
    monkeypatch.setattr(processor, "announces_amx", lambda: False)
    monkeypatch.setattr(processor, "probe_bf16", lambda cap: pytest.fail("probed"))
    processor.prevent_amx_crash()


def test_onednn_obeys_a_cap_set_after_torch_was_imported():
    """The mechanism itself: oneDNN reports the instruction set it will use when it first runs."""
    code = (
        "import torch, os\n"
        f"os.environ['{processor.ISA_VARIABLE}'] = 'AVX2'\n"
        "torch.nn.functional.conv2d(torch.ones(8, 64, 56, 56), torch.ones(64, 64, 3, 3))\n"
    )
    environment = {**os.environ, "ONEDNN_VERBOSE": "1"}
    environment.pop(processor.ISA_VARIABLE, None)
    child = run("-c", code, env=environment)
    assert child.returncode == 0
    found = re.search(r"cpu,isa:(.*)", child.stdout)
    if found is None:
        pytest.skip("this build of torch does not use oneDNN")
    assert "AVX2" in found.group(1)
    assert "AVX-512" not in found.group(1)
