"""The network without what makes it fast."""

import subprocess
import sys

CODE = """
import sys, torch
sys.modules["mvm.network.fast"] = None  # whoever imports it fails
from mvm.network import DDTConfig, DiTConfig, build_network, multiply_adds, parameters

CONFIGS = (
    DiTConfig(size="tiny", inner_block=2, skip=True, local=True, dropout=0.1),
    DiTConfig(size="tiny", design="classic", modulation="shared"),
    DDTConfig(size="tiny", patch=2, inner_block=1),
    DDTConfig(size="tiny", patch=2, conditioning="in-context"),
)
for config in CONFIGS:
    assert parameters(config, (1, 8, 8), 5) and multiply_adds(config, (1, 8, 8), 5)
    network = build_network(config, (1, 8, 8), 5)
    network.blocks.recompute = 1
    given = torch.randn(2, 1, 8, 8), torch.rand(2), torch.arange(2)
    network(*given, taps=(1,)).prediction.sum().backward()
    with torch.no_grad():
        assert network(*given).prediction.shape == (2, 1, 8, 8)
"""


def test_it_is_built_trained_and_sampled_without_the_package_of_speed():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
