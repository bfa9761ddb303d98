"""How fast is the frozen encoder of stage 2, in float32 and in the engine's bf16? Random weights: speed is the same.

    python benchmarks/encoder_speed.py --batch 256

DINOv3-L at 256 pixels, blocks 12 to 24 by twos, as `imagenet256-ddt-xl` runs it on every batch (codec.cache none).
"""

import argparse
import statistics
import tempfile
from functools import partial

import torch

from mvm.bench import seconds_of
from mvm.distributed.processes import EngineConfig, autocast
from mvm.latent import EncoderConfig, load_latent_encoder

LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    from transformers import DINOv3ViTConfig, DINOv3ViTModel

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        DINOv3ViTModel(DINOv3ViTConfig(**LARGE, num_register_tokens=4)).save_pretrained(folder)
        encoder = load_latent_encoder(EncoderConfig(folder, "12,14,16,18,20,22,24", 256, True)).to(device)
    images = torch.randint(0, 256, (options.batch, 3, 256, 256), dtype=torch.uint8, device=device)
    latents = {}

    def encode(precision: str) -> None:
        with autocast(EngineConfig(precision=precision), device):
            latents[precision] = encoder(images)

    for precision in ("fp32", "bf16"):
        encode(precision)  # libraries, memory
        seconds = statistics.median(seconds_of(partial(encode, precision), device, options.times))
        print(f"{precision}: {options.batch / seconds:,.0f} images/s, {1000 * seconds:.1f} ms a batch", flush=True)
    gap = (latents["bf16"] - latents["fp32"]).norm() / latents["fp32"].norm()
    print(f"relative difference of the latents: {float(gap):.2g}")


if __name__ == "__main__":
    main()
