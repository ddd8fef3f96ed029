"""Triton's own cache in a pack: its lists of files hold absolute paths, which differ on another node."""

import os
import subprocess
import sys
from pathlib import Path

from fastdiff.models.compile_cache import pack
from fastdiff_bench.measure.warm_start import note_calls

COMPILE = """
import sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def double(x_ptr, block: tl.constexpr):
    at = x_ptr + tl.arange(0, block)
    tl.store(at, tl.load(at) * 2)

source = ASTSource(double, signature={"x_ptr": "*fp32", "block": "constexpr"}, constexprs={"block": 128})
kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32))
sys.stdout.write(str(len(kernel.asm["cubin"])))
"""


def test_triton_compiles_nothing_on_another_node(tmp_path: Path) -> None:
    """For a GPU that need not be there. Its ptxas is a script that notes its calls; asking for its version is none."""
    (tmp_path / "kernel.py").write_text(COMPILE)
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    find = "from triton import knobs; print(knobs.nvidia.ptxas.path)"
    real = subprocess.run([sys.executable, "-c", find], env=variables, check=True, capture_output=True, text=True)
    ptxas, calls = tmp_path / "ptxas", tmp_path / "calls"
    note_calls(ptxas, real.stdout.strip(), calls)

    def compile_in(folder: Path) -> tuple[str, int]:
        calls.write_text("")
        env = variables | {"TRITON_CACHE_DIR": str(folder / "triton"), "TRITON_PTXAS_PATH": str(ptxas)}
        command = [sys.executable, str(tmp_path / "kernel.py")]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout, sum("--version" not in call for call in calls.read_text().splitlines())

    cold, compiled = compile_in(tmp_path / "node-a")
    assert compiled == 1
    names = pack.members(tmp_path / "node-a")
    pack.write(tmp_path / "key.zip", tmp_path / "node-a", names, {})
    (tmp_path / "node-a").rename(tmp_path / "gone")
    pack.unpack(tmp_path / "key.zip", tmp_path / "node-b", {})
    assert compile_in(tmp_path / "node-b") == (cold, 0)
