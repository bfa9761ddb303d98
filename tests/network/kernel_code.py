"""Runs code that needs Triton in a process of its own: interpreted, or with a GPU's name and no GPU."""

import os
import subprocess
import sys

import pytest

# A GPU by name: kernels are traced and compiled for it, and never run.
NAMED_GPU = """
import torch, triton
from triton.backends.compiler import GPUTarget

class Driver:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_active_torch_device(self): return torch.device("cpu")

triton.runtime.driver.set_active(Driver())
"""

# written(work, *inputs): what the compiler takes for written by each kernel, forward and backward. No input may be
# among it: it would be copied before every call.
WRITTEN = (
    NAMED_GPU
    + """
from torch._functorch.aot_autograd import aot_export_joint_simple

def written(work, *inputs):
    given = [value.detach().requires_grad_() for value in inputs]
    graph = aot_export_joint_simple(lambda *given: (work(*given),), given, trace_joint=True).graph
    return [sorted(node.kwargs["tensors_to_clone"]) for node in graph.nodes if "triton" in str(node.target)]

r = torch.randn
"""
)


def run(code: str, *arguments: str, interpreted: bool) -> None:
    """Run the code where Triton is installed; it must end without an error."""
    pytest.importorskip("triton", reason="Triton comes with torch's GPU builds")
    environment = {**os.environ, "TRITON_INTERPRET": str(int(interpreted))}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
